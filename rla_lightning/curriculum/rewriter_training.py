"""Training of the rewriter: an answer is paid when its proposal is accepted.

An answer that could not be used has earned 0. The one that was proposed earns 1 or 0 with its verdict, some iterations later.
Usable answers that were not proposed, and those that repeat another one, are no evidence of anything. Until the verdict a
question waits with its answers as token ids and with the log-probs that they were written with: by then the model may have
been updated, which the ratio of the clipped loss accounts for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from statistics import fmean, pstdev
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

from rla_lightning.algorithm.losses import policy_loss
from rla_lightning.curriculum.pool import TaskPool
from rla_lightning.distributed import failing_together, from_first, rank
from rla_lightning.models.language_model import LoadedModel, evaluating, load_trainable_state, local_seed, trainable_state
from rla_lightning.rollout.batching import MicroBatch, Sample, make_micro_batch, pack
from rla_lightning.rollout.scorer import Scorer
from rla_lightning.settings import require
from rla_lightning.types import Completion, Task

EARNED_NOTHING = frozenset(("truncated", "refused", "unchanged", "known", "invalid", "resembling", "failed"))
PRIOR_ACCEPTANCE = 0.5  # counts as one verdict
VERDICTS_KEPT = 20  # of the running mean, roughly: the policy and the rewriter move
NOTHING_LEARNED = {"reward": math.nan, "samples": 0.0, "loss": math.nan, "grad_norm": math.nan}

Ready = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class RewriterUpdateSettings:
    """How the rewriter is updated in one iteration.

    Args:
        update_epochs: optimizer steps, each on all answers whose reward has become known.
        token_budget: most tokens (padded) in one forward pass; changes memory and speed, never the gradients.
        max_grad_norm: gradients are clipped to this norm.
        clip_range: of the ratio to the probability that an answer was written with.
        kl_coef: weight of the KL penalty to the model that wrote the answer.
    """

    update_epochs: int = 1
    token_budget: int = 4096
    max_grad_norm: float = 1.0
    clip_range: float = 0.2
    kl_coef: float = 0.01

    def __post_init__(self) -> None:
        for name in ("update_epochs", "token_budget"):
            require(getattr(self, name) >= 1, f"the rewriter's {name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_grad_norm", "clip_range"):
            require(getattr(self, name) > 0, f"the rewriter's {name} must be positive, got {getattr(self, name)}")
        require(self.kl_coef >= 0, f"the rewriter's kl_coef must not be negative, got {self.kl_coef}")


@dataclass(frozen=True)
class Answer:
    """One answer of the rewriter that is or will be paid."""

    token_ids: tuple[int, ...]
    is_proposed: bool  # False: it has earned 0
    logprobs: tuple[float, ...] = ()  # of its tokens at the sampling temperature, by the forward pass that is trained


@dataclass(frozen=True)
class Question:
    """What the rewriter was asked, with the answers to learn from."""

    task_id: str
    prompt_ids: tuple[int, ...]
    proposal_id: str | None  # what the proposed answer became; None: none of the answers was proposed
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Asked:
    """What the rewriter was asked about one task, and all its answers."""

    task_id: str
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    read: tuple[tuple[Task | None, str], ...]  # of each the task that it stands for, if it can be used, and what became of it

    def evidence(self, proposal_id: str | None) -> Question:
        """Without the answers that say nothing.

        Args:
            proposal_id: the task that was proposed, whoever wrote it; None: none was.
        """
        answers = []
        for completion, (task, reason) in zip(self.completions, self.read, strict=True):
            is_proposed = task is not None and task.id == proposal_id
            if is_proposed or reason in EARNED_NOTHING:
                answers.append(Answer(completion.token_ids, is_proposed))
        is_ours = any(answer.is_proposed for answer in answers)
        return Question(self.task_id, self.prompt_ids, proposal_id if is_ours else None, tuple(answers))


def rewrite_advantages(rewards: Sequence[float], acceptance: float) -> list[float]:
    """Advantages of the answers to one question whose rewards are known.

        A_i = (r_i - mean r) / std r    where rewards differ
        A_i = 0                         of several that are equal
        A   = r - acceptance            of a lone answer

    Args:
        rewards: in {0, 1}.
        acceptance: running mean of earlier verdicts.
    """
    if len(rewards) == 1:
        return [rewards[0] - acceptance]
    deviation = pstdev(rewards) if rewards else 0.0
    return [(reward - fmean(rewards)) / deviation if deviation else 0.0 for reward in rewards]


def next_acceptance(acceptance: float, verdicts: int, reward: float) -> float:
    """The running mean after one more verdict: of the prior and all verdicts at first, then with weight 1 / VERDICTS_KEPT."""
    return acceptance + (reward - acceptance) / min(verdicts + 2, VERDICTS_KEPT)


@dataclass(frozen=True)
class _WrittenSample:
    """An answer with a reward and what is needed to name and weigh it."""

    sample: Sample
    task_id: str
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class _Piece:
    """One forward pass."""

    batch: MicroBatch
    old_logprobs: Tensor  # [N, R]
    indices: list[int]  # of its N samples


class RewriterTraining:
    """Questions that wait for verdicts, and the updates of the model.

    Under several processes the first one has the model and all that it learns from; the others only see what is logged.
    """

    def __init__(self, optimizer: OptimizerCallable, settings: RewriterUpdateSettings, temperature: float) -> None:
        """Configure the updates.

        Args:
            optimizer: of the weights that are not frozen.
            settings: of an update.
            temperature: that answers are sampled at.
        """
        self.factory, self.settings, self.temperature = optimizer, settings, temperature
        self.asked: list[Asked] = []  # since the latest `await_verdicts`
        self.waiting: list[Question] = []  # oldest first
        self.acceptance, self.verdicts = PRIOR_ACCEPTANCE, 0
        self.learned = NOTHING_LEARNED  # the latest time
        self._scorer: Scorer | None = None
        self._optimizer: Optimizer | None = None
        self._pad_id = 0
        self._saved: Mapping[str, Any] | None = None  # weights and optimizer of a checkpoint, until the model is there

    def attach(self, loaded: LoadedModel, compile: bool) -> None:
        """Train this model, which is on the CPU."""
        self._scorer = Scorer(loaded.model, compile)
        self._optimizer = self.factory([p for p in self._scorer.parameters() if p.requires_grad])
        self._pad_id = int(loaded.tokenizer.pad_token_id)
        if self._saved is not None:
            load_trainable_state(loaded.model, self._saved["weights"])
            self._optimizer.load_state_dict(self._saved["optimizer"])
            self._saved = None

    def learn(self, pool: TaskPool, ready: Ready, key: str) -> None:
        """Update the model on all questions whose rewards are known by now.

        Args:
            pool: has booked the latest verdicts.
            ready: attaches the model if there was none, and holds it on its device.
            key: of the draws of dropout on adapters.

        Raises:
            FloatingPointError: the loss or the gradient is not finite; no step is taken on it and the tasks are named.
        """
        learned: dict[str, float] = {}
        with failing_together():
            if rank() == 0:
                learned = self._learn(pool, ready, key)
        self.learned = from_first(learned)

    def await_verdicts(self, pool: TaskPool, ready: Ready) -> None:
        """Keep what was asked until it is known what became of it; the model has not changed since it answered.

        Args:
            pool: has its proposals.
            ready: holds the model on its device.
        """
        asked, self.asked = self.asked, []
        proposed = {proposal.parent_id: proposal.task.id for proposal in pool.pending if not proposal.is_control}
        questions = [item.evidence(proposed.get(item.task_id)) for item in asked]
        samples = [_sample(question, answer, 0.0) for question in questions for answer in question.answers]
        with failing_together():
            if samples:
                with ready():
                    logprobs = iter(self._logprobs(samples))
                for question in questions:
                    answers = tuple(replace(answer, logprobs=next(logprobs)) for answer in question.answers)
                    self.waiting.append(replace(question, answers=answers))

    def state(self) -> dict[str, Any]:
        """Primitives, lists, tuples, dicts and tensors; frozen weights are not in it."""
        model, saved = {}, self._saved
        if self._scorer is not None and self._optimizer is not None:
            saved = {"weights": trainable_state(self._scorer.model), "optimizer": self._optimizer.state_dict()}
        if saved is not None:
            model = {name: saved[name] for name in ("weights", "optimizer")}
        waiting = [asdict(question) for question in self.waiting]
        return {"waiting": waiting, "acceptance": self.acceptance, "verdicts": self.verdicts, "model": model}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`; the model has to be attached anew, and then gets its weights."""
        self.waiting = [Question(**{**row, "answers": tuple(Answer(**a) for a in row["answers"])}) for row in state["waiting"]]
        self.acceptance, self.verdicts = state["acceptance"], state["verdicts"]
        self._saved = state["model"] or None
        self._scorer = self._optimizer = None

    def _learn(self, pool: TaskPool, ready: Ready, key: str) -> dict[str, float]:
        rewards, samples = self._settle(pool)
        learned = NOTHING_LEARNED | {"samples": float(len(samples))}
        if rewards:
            learned["reward"] = fmean(rewards)
        if samples:
            with ready():
                self._move_optimizer()
                learned["loss"], learned["grad_norm"] = self._update(samples, key)
            self._move_optimizer()
        return learned

    def _settle(self, pool: TaskPool) -> tuple[list[float], list[_WrittenSample]]:
        """Rewards that have become known since the last time, and the samples among their answers; the others go on waiting."""
        rewards: list[float] = []
        samples: list[_WrittenSample] = []
        waiting = []
        for asked in self.waiting:
            verdict = None if asked.proposal_id is None else pool.record(asked.proposal_id).verdict
            if asked.proposal_id is not None and verdict not in ("ACCEPT", "REJECT"):
                waiting.append(asked)
                continue
            earned = [float(a.is_proposed and verdict == "ACCEPT") for a in asked.answers]
            rewards += earned
            for answer, advantage in zip(asked.answers, rewrite_advantages(earned, self.acceptance), strict=True):
                if advantage:
                    samples.append(_sample(asked, answer, advantage))
            if verdict is not None:
                self.acceptance = next_acceptance(self.acceptance, self.verdicts, float(verdict == "ACCEPT"))
                self.verdicts += 1
        self.waiting = waiting
        return rewards, samples

    def _update(self, samples: Sequence[_WrittenSample], key: str) -> tuple[float, float]:
        """The loss and the gradient's norm before clipping, means over the optimizer steps."""
        assert self._scorer is not None
        assert self._optimizer is not None
        settings, losses, norms = self.settings, [], []
        pieces = self._pieces(samples)
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        try:
            with local_seed(key, _device(self._scorer)):
                for _ in range(settings.update_epochs):
                    self._optimizer.zero_grad()
                    parts = [self._backward(piece, len(samples)) for piece in pieces]
                    losses.append(sum(parts))
                    norms.append(float(nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)))
                    if not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
                        bad = [piece for piece, part in zip(pieces, parts, strict=True) if not math.isfinite(part)] or pieces
                        tasks = dict.fromkeys(samples[index].task_id for piece in bad for index in piece.indices)
                        raise FloatingPointError(
                            f"the update of the rewriter is not finite (loss {losses[-1]}, gradient norm {norms[-1]}); "
                            f"tasks: {', '.join(tasks)}"
                        )
                    self._optimizer.step()
        finally:
            self._optimizer.zero_grad()
        return fmean(losses), fmean(norms)

    def _backward(self, piece: _Piece, denominator: int) -> float:
        """This forward pass's part of the loss, its gradient added to the parameters'."""
        assert self._scorer is not None
        logprobs, _ = self._scorer(piece.batch, self.temperature)
        loss = policy_loss(
            logprobs,
            piece.old_logprobs,
            piece.batch.advantages,
            piece.batch.response_mask,
            denominator=denominator,
            clip_range=self.settings.clip_range,
            kl_coef=self.settings.kl_coef,
        ).loss
        loss.backward()
        return float(loss.detach())

    @torch.no_grad()
    def _logprobs(self, samples: Sequence[_WrittenSample]) -> list[tuple[float, ...]]:
        assert self._scorer is not None
        found: dict[int, tuple[float, ...]] = {}
        with evaluating(self._scorer):
            for piece in self._pieces(samples):
                logprobs, _ = self._scorer(piece.batch, self.temperature)
                for row, index in enumerate(piece.indices):
                    found[index] = tuple(logprobs[row, : len(samples[index].sample.response_ids)].tolist())
        return [found[index] for index in range(len(samples))]

    def _pieces(self, samples: Sequence[_WrittenSample]) -> list[_Piece]:
        """Forward passes over all samples; answers to one question share its prompt where the model can."""
        assert self._scorer is not None
        device = _device(self._scorer)
        plain = [item.sample for item in samples]
        pieces = []
        for rows in pack(plain, self.settings.token_budget, self._scorer.width):
            batch, indices = make_micro_batch(plain, rows, self._pad_id)
            old = torch.zeros(batch.response_mask.shape)
            for row, index in enumerate(indices):
                old[row, : len(samples[index].logprobs)] = torch.tensor(samples[index].logprobs)
            pieces.append(_Piece(batch.to(device), old.to(device), indices))
        return pieces

    def _move_optimizer(self) -> None:
        """Its state follows the weights to where they are now."""
        assert self._optimizer is not None
        self._optimizer.load_state_dict(self._optimizer.state_dict())


def _sample(asked: Question, answer: Answer, advantage: float) -> _WrittenSample:
    return _WrittenSample(Sample(asked.prompt_ids, answer.token_ids, advantage), asked.task_id, answer.logprobs)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
