"""ClosedLoop on a toy environment, trained by a real Trainer."""

import csv
import statistics
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from rla_lightning.curriculum.adapters import ParametricAdapter
from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.environments.base import Environment, Episode
from rla_lightning.models.specs import LanguageModelSpec, TinySpec, ValueModelSpec
from rla_lightning.module import ClosedLoop
from rla_lightning.rollout.formats import CompactJudgeFormat
from rla_lightning.settings import AcceptanceSettings, ClippedUpdateSettings, RolloutSettings
from rla_lightning.types import (
    WON,
    Decision,
    IterationResult,
    Observation,
    Proposal,
    StepLabel,
    Task,
    TaskFeedback,
    Transition,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers.*")

TINY = TinySpec(width=16, layers=1, heads=2, mlp_width=32, context_length=32)
ALL = ClippedUpdateSettings(minibatches=2)  # no band


class Gate(Environment):
    """Say a, b or c `need` times within 3 turns; d and e are useless, other words invalid; a trapped gate breaks at e."""

    name = "gate"

    def vocabulary(self):
        return (*"abcdef", *(f"n{number}" for number in range(4)))

    def sample(self, rng, difficulty, split="in_domain"):
        return gate(1 + round(2 * difficulty), f"{split}-{rng.randrange(10**6)}")

    def start(self, task):
        return Visit(task)

    def describe(self, task):
        return f"n{task.spec['need']}"

    def vary(self, task, direction, rng, number):
        need = task.spec["need"] + (1 if direction == "harder" else -1)
        names = [f"{task.id}{direction[0]}{rng.randrange(100)}" for _ in range(number)] if 1 <= need <= 3 else []
        return [replace(gate(need, name), parent_id=task.id, root_id=task.root_id) for name in names]

    def label_step(self, episode, action):
        return StepLabel(1 if action[:1] in tuple("abc") else -1)


class Visit(Episode):
    max_turns = 3

    def __init__(self, task):
        self.left, self.trapped = task.spec["need"], task.spec["trapped"]
        self.observation = Observation(f"n{self.left}")

    def step(self, action):
        word = action[:1]
        if self.trapped and word == "e":
            raise OSError("the gate broke")
        self.left -= word in tuple("abc")
        self.observation = Observation(f"n{self.left}")
        return Transition(self.observation, self.left == 0, WON if self.left == 0 else None, word in tuple("abcde"))


def gate(need: int, tag: str, trapped: bool = False) -> Task:
    name = f"{need}-{tag}"
    return Task(name, "gate", {"need": need, "tag": tag, "trapped": trapped}, (need - 1) / 2, name)


class LetterJudge(CompactJudgeFormat):
    """A vote that an untrained model can cast: +1 for a, b or c, -1 for d, e or f."""

    def parse(self, text):
        return next((1 if word in "abc" else -1 for word in text.split()[:1] if word in "abcdef"), None)


class Record(L.Callback):
    def __init__(self) -> None:
        self.results: list[IterationResult] = []
        self.batches = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.results.append(outputs["result"])
        self.batches.append(batch)


@dataclass
class Run:
    loop: ClosedLoop
    data: EnvironmentDataModule
    trainer: L.Trainer
    results: list[IterationResult]
    batches: list
    folder: Path
    start: dict[str, torch.Tensor]

    @property
    def rows(self) -> list[dict[str, float]]:
        with (self.folder / "metrics.csv").open() as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def make_loop(loop_class: type[ClosedLoop] = ClosedLoop, **options) -> ClosedLoop:
    lm, adamw = LanguageModelSpec(tiny=TINY), partial(torch.optim.AdamW, lr=1e-3)
    defaults = {
        **{"policy": lm, "reward_model": lm, "critic": ValueModelSpec(tiny=TINY), "judge_format": LetterJudge()},
        **{f"{name}_optimizer": adamw for name in ("policy", "reward_model", "critic")},
        **{f"{name}_update": ALL for name in ("policy", "reward_model", "critic")},
        "rollout": RolloutSettings(group_size=4, max_new_tokens=2, max_judge_tokens=1),
    }
    return loop_class(**{"environment": Gate(), **defaults, **options})


def make_data(**options) -> EnvironmentDataModule:
    defaults = {"tasks_per_iteration": 6, "pool_size": 12, "validation_tasks": 3, "test_tasks": 3}
    return EnvironmentDataModule(**{"environment": Gate(), **defaults, **options})


def train(loop: ClosedLoop, data: EnvironmentDataModule, folder: Path, epochs: int = 1) -> Run:
    record = Record()
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=CSVLogger(folder, name="", version=""), callbacks=[record],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1, log_every_n_steps=1, use_distributed_sampler=False,
    )  # fmt: skip
    loop.configure_model()
    start = {name: tensor.clone() for name, tensor in loop.state_dict().items()}
    trainer.fit(loop, data)
    return Run(loop, data, trainer, record.results, record.batches, folder, start)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    data = make_data(adapter=ParametricAdapter(max_proposals=2, candidates=2))
    return train(make_loop(), data, tmp_path_factory.mktemp("run"), epochs=3)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory) -> Run:
    """Reward model frozen; no adapter."""
    return train(make_loop(reward_model_optimizer=None), make_data(), tmp_path_factory.mktemp("frozen"), epochs=2)


# What an iteration hands on


def test_the_result_has_one_number_per_step(run):
    assert [result.iteration for result in run.results] == [1, 2, 3]
    for result in run.results:
        assert len(result.groups) == len(result.feedback) == 6
        for i, group in enumerate(result.groups):
            lengths = [len(trajectory.steps) for trajectory in group.trajectories]
            assert len(lengths) == 4
            assert [len(judged) for judged in group.judgments] == lengths
            assert all(len(votes) == 3 for judged in group.judgments for votes in judged)
            for numbers in (result.rewards[i], result.advantages[i], result.values[i]):
                assert [len(of_rollout) for of_rollout in numbers] == lengths


def test_rewards_and_advantages_recomputed_by_hand(run):
    different = 0
    for result in run.results:
        for group, rewards, advantages in zip(result.groups, result.rewards, result.advantages, strict=True):
            expected = []
            for trajectory, judged in zip(group.trajectories, group.judgments, strict=True):
                parsed = [[vote.score for vote in votes if vote.score is not None] for votes in judged]
                expected.append([trajectory.outcome + (sum(v) / len(v) if v else 0.0) for v in parsed])
            assert [list(r) for r in rewards] == [pytest.approx(r) for r in expected]
            first = [r[0] for r in expected]  # every rollout has a first step
            std = statistics.pstdev(first)
            z = [(r - statistics.fmean(first)) / std if std > 1e-6 else 0.0 for r in first]
            assert [a[0] for a in advantages] == pytest.approx(z)
            different += std > 1e-6
    assert different > 5


def test_the_outcome_is_what_the_environment_says(run):
    for trajectory in (t for result in run.results for group in result.groups for t in group.trajectories):
        said = sum(step.action[:1] in tuple("abc") for step in trajectory.steps)
        assert (trajectory.outcome == WON) is (said == trajectory.task.spec["need"])
        assert trajectory.stop_reason == ("DONE" if trajectory.outcome == WON else "MAX_TURNS")
        assert [step.is_valid for step in trajectory.steps] == [step.action[:1] in tuple("abcde") for step in trajectory.steps]


def test_feedback_counts_what_happened(run):
    result = run.results[0]
    assert all(value == 0.5 for group in result.values for rollout in group for value in rollout)  # the head starts at 0
    for group, feedback in zip(result.groups, result.feedback, strict=True):
        won = [t.outcome == WON for t in group.trajectories]
        assert (feedback.task, feedback.successes, feedback.rollouts) == (group.task, sum(won), 4)
        assert feedback.critic_value == 0.5
        assert feedback.verdict is None
        votes = {True: [], False: []}
        for is_won, judged in zip(won, group.judgments, strict=True):
            votes[is_won] += [vote.score for step in judged for vote in step if vote.score is not None]
        assert feedback.p_plus == (votes[True].count(1) / len(votes[True]) if votes[True] else None)
        assert feedback.p_minus == (votes[False].count(-1) / len(votes[False]) if votes[False] else None)
        assert len(feedback.critiques) == won.count(False) + (sum(won) == 4)  # losses, and the win of a task above .8


def test_proposals_come_from_feedback_and_get_a_verdict(run):
    for result, batch in zip(run.results, run.batches, strict=True):
        assert [group.task for group in result.groups] == list(batch.tasks)
        assert len(batch.active) + len(batch.proposals) == 6
        verdicts = [feedback.verdict for feedback in result.feedback]
        assert verdicts[: len(batch.active)] == [None] * len(batch.active)
        assert None not in verdicts[len(batch.active) :]
    assert len(run.batches[0].proposals) == 0
    assert len(run.batches[1].proposals) > 0
    rated = {feedback.task.id: feedback for feedback in run.results[0].feedback}
    for proposal in run.batches[1].proposals:
        parent = rated[proposal.parent_id]
        assert (proposal.parent_successes, proposal.parent_rollouts) == (parent.successes, 4)
        assert proposal.direction == ("harder" if parent.successes == 4 else "easier")
        assert proposal.predicted_success is not None


# What is logged and counted


def test_metrics_csv_has_the_names_people_rely_on(run):
    names = {name for row in run.rows for name in row}
    assert names >= {
        *("policy/approx_kl", "policy/clip_fraction", "policy/entropy", "policy/loss", "policy/grad_norm", "policy/lr"),
        *("reward_model/outcome_accuracy", "reward_model/mu", "reward_model/parse_error_rate", "reward_model/loss"),
        *("critic/brier", "critic/loss", "rollout/success_rate", "rollout/invalid_action_rate", "rollout/mean_turns"),
        *("rollout/frac_reward_zero_std", "env/accept_rate", "env/difficulty", "env/proposed", "env/accepted"),
        *("time/rollout", "time/judge", "time/update"),
        *(f"validation/{split}/rollout/success_rate" for split in ("in_domain", "out_of_distribution")),
        *("validation/in_domain/reward_model/process_accuracy", "validation/in_domain/critic/brier"),
    }
    assert "reward_model/process_accuracy" not in names  # ground truth is for evaluation
    assert not any(name.endswith(("_step", "_epoch", "dataloader_idx_0")) for name in names)


def test_the_x_axis_is_the_iteration(run):
    for name in ("rollout/success_rate", "policy/approx_kl", "env/difficulty"):
        assert [row["step"] for row in run.rows if name in row] == [1.0, 2.0, 3.0], name
    validated = [row["step"] for row in run.rows if "validation/in_domain/rollout/success_rate" in row]
    assert validated == [0.0, 1.0, 2.0, 3.0]  # 0: before training


def test_logged_numbers_are_those_of_the_result(run):
    logged = [row for row in run.rows if "rollout/success_rate" in row]
    for row, result, batch in zip(logged, run.results, run.batches, strict=True):
        active = result.groups[: len(batch.active)]
        wins = sum(t.outcome == WON for group in active for t in group.trajectories)
        assert row["rollout/success_rate"] == pytest.approx(wins / (4 * len(active)))
        assert row["rollout/success_rate"] == pytest.approx(result.metrics["rollout/success_rate"])
        samples = sum(a != 0 for group in result.advantages for rollout in group for a in rollout)
        assert row["policy/samples"] == samples


def test_generated_tokens_are_counted_exactly(run):
    answers = votes = 0
    for group in (group for result in run.results for group in result.groups):
        answers += sum(len(step.completion.token_ids) for t in group.trajectories for step in t.steps)
        votes += sum(len(vote.completion.token_ids) for judged in group.judgments for step in judged for vote in step)
    assert int(run.loop.tokens_generated) == answers + votes
    assert votes == sum(3 * len(t.steps) for result in run.results for g in result.groups for t in g.trajectories)


def test_trained_tokens_are_those_with_an_advantage(frozen):
    expected = 0
    for result in frozen.results:
        for group, advantages in zip(result.groups, result.advantages, strict=True):
            for trajectory, of_rollout in zip(group.trajectories, advantages, strict=True):
                steps = zip(trajectory.steps, of_rollout, strict=True)
                expected += sum(len(step.completion.token_ids) for step, advantage in steps if advantage != 0)
    assert int(frozen.loop.tokens_trained) == expected > 0


# What is trained


def test_all_three_models_learn(run):
    after = run.loop.state_dict()
    for name in ("policy", "reward_model", "critic"):
        keys = [key for key in run.start if key.startswith(f"{name}.")]
        assert keys
        assert all(not torch.equal(run.start[key], after[key]) for key in keys if "bias" not in key), name


def test_a_frozen_model_neither_learns_nor_has_optimizer_state(frozen, tmp_path):
    after = frozen.loop.state_dict()
    assert all(torch.equal(frozen.start[key], after[key]) for key in after if key.startswith("reward_model."))
    assert any(not torch.equal(frozen.start[key], after[key]) for key in after if key.startswith("policy."))
    frozen.trainer.save_checkpoint(tmp_path / "frozen.ckpt")
    checkpoint = torch.load(tmp_path / "frozen.ckpt", weights_only=True)
    assert len(checkpoint["optimizer_states"]) == 2
    assert any(key.startswith("reward_model.") for key in checkpoint["state_dict"])
    assert "reward_model/loss" not in {name for row in frozen.rows for name in row}
    assert "reward_model/mu" in {name for row in frozen.rows for name in row}  # it still judges, and is measured


def test_everything_frozen_still_runs(tmp_path):
    names = ("policy_optimizer", "reward_model_optimizer", "critic_optimizer")
    run = train(make_loop(**dict.fromkeys(names)), make_data(), tmp_path, epochs=2)
    assert len(run.results) == 2
    assert all(torch.equal(tensor, run.start[key]) for key, tensor in run.loop.state_dict().items() if "." in key)
    assert [row["step"] for row in run.rows if "rollout/success_rate" in row] == [1.0, 2.0]


def decided(proposals, groups, settings):
    """The verdict in each task's name."""
    assert [proposal.task for proposal in proposals] == [group.task for group in groups[-len(proposals) :]]
    return {proposal.task.id: Decision(proposal.task.spec["tag"], "by name") for proposal in proposals}


class Recording(ClosedLoop):
    """Records who is trained on."""

    def _update_policy(self, groups, credits, key):
        self.trained = {"policy": [group.task.id for group in groups]}
        return super()._update_policy(groups, credits, key)

    def _update_reward_model(self, groups, credits, key):
        self.trained["reward_model"] = [group.task.id for group in groups]
        return super()._update_reward_model(groups, credits, key)

    def _update_critic(self, groups, key):
        self.trained["critic"] = [group.task.id for group in groups]
        return super()._update_critic(groups, key)


@pytest.mark.parametrize("train_on", ["accepted", "all"])
def test_which_proposals_are_trained_on(tmp_path, monkeypatch, train_on):
    monkeypatch.setattr("rla_lightning.module.decide", decided)
    data = make_data()
    for parent, verdict in zip(data.pool.slots, ("ACCEPT", "REJECT", "UNDECIDED"), strict=False):
        child = replace(gate(2, verdict), parent_id=parent.id, root_id=parent.root_id)
        assert data.pool.propose(Proposal(child, "easier", parent.id, 0, 4))
    run = train(make_loop(Recording, acceptance=AcceptanceSettings(train_on=train_on)), data, tmp_path)
    active = [task.id for task in run.batches[0].active]
    assert len(active) == 3
    proposals = ["2-ACCEPT"] if train_on == "accepted" else ["2-ACCEPT", "2-REJECT", "2-UNDECIDED"]
    assert run.loop.trained["policy"] == run.loop.trained["reward_model"] == [*active, *proposals]
    # the critic learns from all: accepted proposals alone are selected by the outcomes that it is to predict
    assert run.loop.trained["critic"] == [*active, "2-ACCEPT", "2-REJECT", "2-UNDECIDED"]
    assert [feedback.verdict for feedback in run.results[0].feedback] == [None] * 3 + ["ACCEPT", "REJECT", "UNDECIDED"]
    assert len(run.results[0].advantages) == 6  # logged for all
    assert "2-ACCEPT" in {task.id for task in data.pool.slots}
    assert [proposal.task.id for proposal in data.pool.pending] == ["2-UNDECIDED"]


# Faults


def test_an_environment_that_breaks_ends_rollouts_not_the_run(tmp_path):
    class Trapped(Gate):
        def sample(self, rng, difficulty, split="in_domain"):
            return gate(3, f"{split}-{rng.randrange(10**6)}", trapped=True)

    run = train(make_loop(environment=Trapped()), make_data(environment=Trapped()), tmp_path)
    groups = run.results[0].groups
    errors = [t for group in groups for t in group.trajectories if t.stop_reason == "ENV_ERROR"]
    assert errors
    assert any(t.steps for t in errors)  # some broke in the middle
    assert {t.error for t in errors} == {"OSError: the gate broke"}
    for group, feedback, rewards in zip(groups, run.results[0].feedback, run.results[0].rewards, strict=True):
        broken = [t.stop_reason == "ENV_ERROR" for t in group.trajectories]
        assert feedback.rollouts == 4 - sum(broken)
        assert [len(r) == 0 for r in rewards] == broken
    row = next(row for row in run.rows if "rollout/env_error_rate" in row)
    assert row["rollout/env_error_rate"] == pytest.approx(len(errors) / 24)


def test_evaluation_draws_do_not_change_from_call_to_call(run):
    batch = run.data.evaluation_sets("test")[0]
    assert run.loop.evaluate(batch, "test") == pytest.approx(run.loop.evaluate(batch, "test"), nan_ok=True)


class SortedGate(Gate):
    """Every other task is of another kind."""

    def sample(self, rng, difficulty, split="in_domain"):
        task = super().sample(rng, difficulty, split)
        return replace(task, kind="short" if task.spec["need"] == 1 else "long")


def test_evaluation_reports_success_by_kind_and_the_spread_of_samples(tmp_path):
    settings = RolloutSettings(group_size=4, max_new_tokens=2, max_judge_tokens=1, eval_samples=8)
    environment = SortedGate()
    loop = make_loop(environment=environment, rollout=settings)
    data = make_data(environment=environment, validation_tasks=6)
    run = train(loop, data, tmp_path)
    (row,) = [row for row in run.rows if row.get("step") == 1 and "validation/in_domain/rollout/success_rate" in row]
    for batch in data.evaluation_sets("validation"):
        name = f"validation/{batch.split}/rollout/success_rate"
        kinds = [task.kind for task in batch.tasks]
        assert {other for other in row if other.startswith(f"{name}/")} == {f"{name}/long", f"{name}/short"}
        by_kind = (row[f"{name}/{kind}"] * kinds.count(kind) for kind in ("long", "short"))
        assert sum(by_kind) == pytest.approx(6 * row[name])
        assert 0 < row[f"{name}_std"] < 0.5
    trained = {name for name in run.results[0].metrics if name.startswith("rollout/success_rate")}
    assert trained == {"rollout/success_rate"}  # the rest is for evaluation


def test_equal_seeds_give_equal_numbers(run, tmp_path):
    """Same seed, same curves."""
    again = train(make_loop(), make_data(adapter=ParametricAdapter(max_proposals=2, candidates=2)), tmp_path, epochs=3)

    def numbers(rows):
        return [{name: repr(value) for name, value in row.items() if not name.startswith("time/")} for row in rows]

    assert numbers(again.rows) == numbers(run.rows)
    other = train(make_loop(seed=1), make_data(seed=1), tmp_path / "other")
    assert numbers(other.rows)[0] != numbers(run.rows)[0]


def test_feedback_is_booked_once_per_epoch(run):
    rolls = {record.task.id: record.rolls for record in run.data.pool.records}
    seen = [task.id for batch in run.batches for task in batch.tasks]
    assert {task_id: number for task_id, number in rolls.items() if number} == {name: seen.count(name) for name in seen}
    assert isinstance(run.results[0].feedback[0], TaskFeedback)
    assert run.data.epoch == run.data.pool.epoch == 3
