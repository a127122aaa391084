"""ClosedLoop: policy, reward model and critic in one LightningModule, trained by manual optimization."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from rla_lightning.checkpoints import require_continues
from rla_lightning.compatibility import require_compatible, require_reader
from rla_lightning.distributed import failing_together, from_first, rank, share, unshare
from rla_lightning.environments.base import Environment
from rla_lightning.evaluation import evaluate
from rla_lightning.feedback import decide, feedback_on, is_trained_on
from rla_lightning.measure import GroupValues, iteration_metrics, learning_signal
from rla_lightning.models.language_model import local_seed, trainable_state
from rla_lightning.models.specs import LanguageModelSpec, ValueModelSpec, on_policy_base
from rla_lightning.optimization import averages, update_language_model, update_value_model
from rla_lightning.rollout.collect import require_played
from rla_lightning.rollout.formats import (
    CompactCriticFormat,
    CompactJudgeFormat,
    CompactPolicyFormat,
    CriticFormat,
    JudgeFormat,
    PolicyFormat,
)
from rla_lightning.rollout.formats_code import UnitTestFormat
from rla_lightning.rollout.players import Formats, Progress, load_players, no_progress
from rla_lightning.rollout.sampler import SamplerBackend
from rla_lightning.rollout.scorer import Scorer
from rla_lightning.rollout.trained import trained_models
from rla_lightning.settings import (
    AcceptanceSettings,
    ClippedUpdateSettings,
    CritiqueSettings,
    RewardSettings,
    RolloutSettings,
    UpdateSettings,
)
from rla_lightning.types import EvaluationSet, IterationResult, Purpose, RolloutGroup, Task, TaskBatch, TaskFeedback
from rla_lightning.updates import (
    GroupCredit,
    TaskSample,
    assign_credit,
    iteration_result,
    judge_samples,
    pieces,
    policy_samples,
    value_pieces,
    value_samples,
)

MODELS = ("policy", "reward_model", "critic")


class ClosedLoop(L.LightningModule):
    """Policy, reward model and critic that improve each other (RLAnything, arXiv 2602.02488).

    Args:
        environment: plays the tasks; the one that the data makes them with.
        policy: acts.
        reward_model: judges every step of the policy.
        critic: predicts how likely success is.
        policy_optimizer: null freezes the policy.
        reward_model_optimizer: null freezes the reward model.
        critic_optimizer: null freezes the critic.
        policy_scheduler: stepped once per iteration; null keeps the learning rate. Unused for a frozen model.
        reward_model_scheduler: likewise.
        critic_scheduler: likewise.
        rollout: how episodes are played and judged.
        reward: how outcomes and judgments become advantages.
        acceptance: when a rewritten task replaces its parent.
        critiques: who says what was wrong with tasks outside the band.
        policy_update: the policy's part of an iteration.
        reward_model_update: the reward model's part of an iteration.
        critic_update: the critic's part of an iteration.
        policy_format: renders the policy's prompts and reads its answers; null: compact.
        judge_format: renders the judge's prompts and reads its votes; null: compact.
        critic_format: renders the critic's prompts; null: compact.
        test_format: with it the reward model judges programs by writing unit tests; null: it votes on steps.
        policy_sampler: what the policy acts with, such as a server; null: the model in this process.
        judge_sampler: likewise what the reward model judges with.
        seed: of every random draw in here.
    """

    iteration: Tensor
    tokens_generated: Tensor
    tokens_trained: Tensor  # those that carried loss

    def __init__(
        self,
        environment: Environment,
        policy: LanguageModelSpec = LanguageModelSpec(),
        reward_model: LanguageModelSpec = LanguageModelSpec(),
        critic: ValueModelSpec = ValueModelSpec(),
        policy_optimizer: OptimizerCallable | None = torch.optim.AdamW,
        reward_model_optimizer: OptimizerCallable | None = torch.optim.AdamW,
        critic_optimizer: OptimizerCallable | None = torch.optim.AdamW,
        policy_scheduler: LRSchedulerCallable | None = None,
        reward_model_scheduler: LRSchedulerCallable | None = None,
        critic_scheduler: LRSchedulerCallable | None = None,
        rollout: RolloutSettings = RolloutSettings(),
        reward: RewardSettings = RewardSettings(),
        acceptance: AcceptanceSettings = AcceptanceSettings(),
        critiques: CritiqueSettings = CritiqueSettings(),
        policy_update: ClippedUpdateSettings = ClippedUpdateSettings(),
        reward_model_update: ClippedUpdateSettings = ClippedUpdateSettings(success_low=0.2, success_high=0.8),
        critic_update: UpdateSettings = UpdateSettings(),
        policy_format: PolicyFormat | None = None,
        judge_format: JudgeFormat | None = None,
        critic_format: CriticFormat | None = None,
        test_format: UnitTestFormat | None = None,
        policy_sampler: SamplerBackend | None = None,
        judge_sampler: SamplerBackend | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        reward_model = on_policy_base("reward_model", reward_model, policy, may_be_bare=reward_model_optimizer is None)
        critic = on_policy_base("critic", critic, policy)
        require_compatible(
            environment,
            rollout,
            votes=judge_format,
            tests=test_format,
            policy=policy,
            reward_model=reward_model,
            trains_judge=reward_model_optimizer is not None,
            judged_here=judge_sampler is None,
            critiques=critiques,
        )
        self.automatic_optimization = False
        self.strict_loading = False  # frozen and tied weights are not saved; on_load_checkpoint compares the others
        self.environment = environment
        self.policy_spec, self.reward_model_spec, self.critic_spec = policy, reward_model, critic
        shared = {name for name, spec in (("reward_model", reward_model), ("critic", critic)) if spec.base == "policy"}
        self.on_random_base = sorted(shared) if policy.path is None else []
        self.optimizer_factories = dict(zip(MODELS, (policy_optimizer, reward_model_optimizer, critic_optimizer), strict=True))
        self.scheduler_factories = dict(zip(MODELS, (policy_scheduler, reward_model_scheduler, critic_scheduler), strict=True))
        self.rollout, self.reward, self.acceptance, self.critiques = rollout, reward, acceptance, critiques
        self.policy_update, self.reward_model_update, self.critic_update = policy_update, reward_model_update, critic_update
        self.formats = Formats(
            policy_format or CompactPolicyFormat(),
            judge_format or CompactJudgeFormat(),
            critic_format or CompactCriticFormat(),
            test_format,
        )
        self.policy_sampler, self.judge_sampler = policy_sampler, judge_sampler
        self.seed = seed
        self.progress: Progress = no_progress  # callbacks may listen here
        self.policy: Scorer | None = None  # built in configure_model
        self.reward_model: nn.Module | None = None
        self.critic: nn.Module | None = None
        self.register_buffer("iteration", torch.zeros((), dtype=torch.long))
        self.register_buffer("tokens_generated", torch.zeros((), dtype=torch.long))
        self.register_buffer("tokens_trained", torch.zeros((), dtype=torch.long))
        self._feedback: list[TaskFeedback] = []
        self._synced = -1  # the iteration whose weights the players have
        self._seconds: defaultdict[str, float] = defaultdict(float)

    # The loop

    def training_step(self, batch: TaskBatch, batch_idx: int) -> dict[str, IterationResult]:
        """One iteration: roll out, judge, decide on proposals, update all three models."""
        key = f"{self.seed}/iteration/{int(self.iteration)}"
        self._sync_if_trained()
        with self._timed("rollout"):
            groups = self._roll_out(batch.tasks, key)
        with self._timed("judge"):
            groups = self._judge(groups, key)
        values = self._values(groups)
        decisions = decide(batch.proposals, groups, self.acceptance)
        with self._timed("critique"):
            feedback, written = feedback_on(groups, values, decisions, self.acceptance, self.critiques, self.players, key)
        self.tokens_generated += int(written.get("critique/tokens", 0))
        credits = [assign_credit(g, self.reward, value) for g, value in zip(groups, values, strict=True)]
        trained = [i for i, group in enumerate(groups) if is_trained_on(decisions.get(group.task.id), self.acceptance)]
        kept, credit = [groups[i] for i in trained], [credits[i] for i in trained]
        with self._timed("update"), local_seed(f"{key}/update/{rank()}", self.device):  # of dropout on adapters
            updates = self._update_policy(kept, credit, key)
            updates |= self._update_reward_model(kept, credit, key)
            updates |= self._update_critic(groups, key)  # all: accepted proposals alone are selected by their outcomes
        self.iteration += 1
        metrics = iteration_metrics(groups, values, batch.drawn) | learning_signal(kept) | written | updates
        self._finish_iteration(metrics, feedback)
        return {"result": iteration_result(int(self.iteration), feedback, groups, credits, values, metrics)}

    def on_train_epoch_end(self) -> None:
        """Regenerate the tasks from this epoch's feedback; `data.adapter: null` only books it."""
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        self._sync_if_trained()
        self.progress("adapting tasks", 0, 1, float("nan"))
        datamodule.adapt(self._feedback, lambda tasks: from_first(self.players.predict(tasks)))
        self._feedback = []
        counted = datamodule.statistics()
        self.tokens_generated += int(counted.get("critique_tokens", 0) + counted.get("rewrite_tokens", 0))  # the rewriter's
        self.log_dict({f"env/{name}": value for name, value in counted.items()}, batch_size=1)
        self.log("step", float(self.iteration), batch_size=1)

    def _roll_out(self, tasks: Sequence[Task], key: str) -> list[RolloutGroup]:
        settings = self.rollout
        with failing_together():
            mine = self.players.play(share(tasks), settings.group_size, key, max_turns=settings.max_turns, progress=self.progress)
        groups = unshare(mine)
        require_played(groups)
        return groups

    def _judge(self, groups: Sequence[RolloutGroup], key: str) -> list[RolloutGroup]:
        with failing_together():
            mine = self.players.judge(share(groups), key, self.progress, with_solutions=self.rollout.known_programs)
        judged = unshare(mine)
        self.tokens_generated += sum(group.generated_tokens for group in judged)
        return judged

    def _values(self, groups: Sequence[RolloutGroup]) -> list[GroupValues]:
        return unshare([self.players.state_values(group) for group in share(groups)])

    def _finish_iteration(self, metrics: dict[str, float], feedback: list[TaskFeedback]) -> None:
        """Step the schedulers, log on the iteration axis, keep the feedback for `adapt`."""
        rates = {f"{name}/lr": self._optimizers[name].param_groups[0]["lr"] for name in self._optimizers}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # a model without samples
            for scheduler in self._schedulers:
                scheduler.step()
        times = {f"time/{stage}": seconds for stage, seconds in self._seconds.items()}
        self._seconds.clear()
        self.log_dict({**metrics, **rates, **times}, batch_size=1)
        self.log("step", float(self.iteration), batch_size=1)
        self._feedback.extend(feedback)

    # Updates

    def _update_policy(self, groups: Sequence[RolloutGroup], credits: Sequence[GroupCredit], key: str) -> dict[str, float]:
        samples = policy_samples(groups, credits, self.policy_update)
        return self._update_language_model("policy", samples, self.policy_update, key)

    def _update_reward_model(self, groups: Sequence[RolloutGroup], credits: Sequence[GroupCredit], key: str) -> dict[str, float]:
        samples = judge_samples(groups, credits, self.reward, self.reward_model_update, Random(f"{key}/balance"))
        return self._update_language_model("reward_model", samples, self.reward_model_update, key)

    def _update_language_model(
        self, name: str, samples: Sequence[TaskSample], settings: ClippedUpdateSettings, key: str
    ) -> dict[str, float]:
        """Clipped policy-gradient update of the policy or the reward model."""
        if name not in self._optimizers or not samples:
            return {f"{name}/samples": float(len(samples))}
        self.progress(f"updating {name}", 0, 1, float("nan"))
        model, temperature = getattr(self, name), self.rollout.temperature
        steps = pieces(samples, settings, Random(f"{key}/{name}"), self._pad_ids[name], self.device, model.width)
        sums = update_language_model(self, name, model, self._optimizers[name], steps, settings, temperature)
        self.tokens_trained += int(sums.get("tokens", 0))
        used = {"samples": min(len(samples), settings.max_samples)}
        return {f"{name}/{metric}": value for metric, value in {**used, **averages(sums)}.items()}

    def _update_critic(self, groups: Sequence[RolloutGroup], key: str) -> dict[str, float]:
        """Fit the predicted success to the verified outcomes."""
        samples = value_samples(groups, self.critic_update)
        if "critic" not in self._optimizers or not samples:
            return {}
        self.progress("updating critic", 0, 1, float("nan"))
        steps = value_pieces(samples, self.critic_update, Random(f"{key}/critic"), self._pad_ids["critic"], self.device)
        assert self.critic is not None
        sums = update_value_model(self, self.critic, self._optimizers["critic"], steps, self.critic_update)
        return {f"critic/{metric}": value for metric, value in averages(sums).items()}

    # Evaluation

    def validation_step(self, batch: EvaluationSet, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_evaluation("validation", batch)

    def test_step(self, batch: EvaluationSet, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_evaluation("test", batch)

    def on_train_start(self) -> None:
        """The validation row before the first iteration; a resumed run replays it."""
        if int(self.iteration) > 0 or not self.trainer.enable_validation:
            return
        row: dict[str, float] = {}
        for batch in self.trainer.datamodule.evaluation_sets("validation"):  # type: ignore[attr-defined]
            row |= {f"validation/{batch.split}/{name}": value for name, value in self.evaluate(batch, "validation").items()}
        for logger in self.loggers:
            logger.log_metrics(row, step=0)

    def on_validation_epoch_end(self) -> None:
        self.log("step", float(self.iteration), batch_size=1)

    def on_test_epoch_end(self) -> None:
        self.log("step", float(self.iteration), batch_size=1)

    def evaluate(self, batch: EvaluationSet, purpose: Purpose) -> dict[str, float]:
        """Metrics on held-out tasks; the same draws at every call."""
        self._sync_if_trained()

        def progress(stage: str, done: int, total: int, success_rate: float) -> None:
            self.progress(f"{purpose} {batch.split}: {stage}", done, total, success_rate)

        return evaluate(self.players, batch, f"{self.seed}/evaluate/{purpose}/{batch.split}", self.device, progress)

    def _log_evaluation(self, purpose: Purpose, batch: EvaluationSet) -> None:
        metrics = {f"{purpose}/{batch.split}/{name}": value for name, value in self.evaluate(batch, purpose).items()}
        self.log_dict(metrics, batch_size=len(batch.tasks), add_dataloader_idx=False)

    # Models, optimizers, checkpoints

    def configure_model(self) -> None:
        """Build the models once; under a device mesh shard them and keep unsharded copies to sample from."""
        if self.policy is not None:
            return
        self.players = load_players(
            self.environment,
            self.policy_spec,
            self.reward_model_spec,
            self.critic_spec,
            self.formats,
            self.rollout,
            self.seed,
            self.policy_sampler,
            self.judge_sampler,
        )
        self._trained_models = trained_models(
            self.players, self.policy_spec, self.reward_model_spec, self.critic_spec, self.device_mesh
        )
        for name in MODELS:
            setattr(self, name, getattr(self._trained_models, name))
        self._pad_ids = {name: int(getattr(self.players, name).tokenizer.pad_token_id) for name in MODELS}
        if self._trainer is not None:  # before any work: callbacks may train for minutes in on_fit_start
            datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
            datamodule.lend(self.players.policy)
            self.players.check_context(datamodule.tasks)
            require_reader(self.critiques, datamodule.adapter, self.players.reward_model.context_length)

    def sync_players(self) -> None:
        """Act, judge and predict with the weights of now; callbacks that train call this."""
        self._trained_models.update(self.players, self.device)
        self._synced = int(self.iteration)

    def _sync_if_trained(self) -> None:
        if self._synced != int(self.iteration):
            self.sync_players()

    def configure_optimizers(self) -> Any:
        """One optimizer per model that is not frozen, each with its scheduler."""
        optimizers, schedulers = [], []
        for name, factory in self.optimizer_factories.items():
            if factory is None:
                continue
            optimizer = factory([p for p in getattr(self, name).parameters() if p.requires_grad])
            optimizers.append(optimizer)
            make_scheduler = self.scheduler_factories[name]
            if make_scheduler is not None:
                schedulers.append(make_scheduler(optimizer))
        return (optimizers, schedulers) if optimizers else None

    @property
    def _optimizers(self) -> dict[str, LightningOptimizer]:
        """The optimizers of the models that are not frozen, by name."""
        names = [name for name, factory in self.optimizer_factories.items() if factory is not None]
        if not names:
            return {}  # Lightning has a stand-in optimizer then
        optimizers = self.optimizers()
        return dict(zip(names, optimizers if isinstance(optimizers, list) else [optimizers], strict=True))

    @property
    def _schedulers(self) -> list[Any]:
        schedulers = self.lr_schedulers()
        if schedulers is None:
            return []
        return schedulers if isinstance(schedulers, list) else [schedulers]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Counters and trained weights; frozen LoRA bases and tied copies stay out of checkpoints."""
        kept = {f"{name}.{key}" for name in MODELS for key in trainable_state(getattr(self, name))}
        kept |= {name for name, _ in self.named_buffers(recurse=False)}
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in kept}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note which model each optimizer state belongs to (Lightning restores them by position), the seed and the bases."""
        checkpoint["optimizers_of"] = list(self._optimizers)
        checkpoint["seed"], checkpoint["on_random_base"] = self.seed, self.on_random_base

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of other models, or to train on with others of them or another seed."""
        now = [name for name in MODELS if self.optimizer_factories[name] is not None]
        require_continues(checkpoint, self.state_dict(), now, self.seed, self.on_random_base, self.trainer.training)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[stage] += time.perf_counter() - start
