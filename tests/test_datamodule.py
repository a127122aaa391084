from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from rla_lightning.curriculum.adapters import FreshTasks, ParametricAdapter
from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.environments.base import Environment
from rla_lightning.environments.household import HouseholdEnvironment
from rla_lightning.types import ConfigError, Decision, Task, TaskBatch, TaskFeedback, Trial

HOUSEHOLD = HouseholdEnvironment()


def make(**options) -> EnvironmentDataModule:
    defaults = {"tasks_per_iteration": 6, "pool_size": 12, "validation_tasks": 5, "test_tasks": 8}
    return EnvironmentDataModule(HOUSEHOLD, **{**defaults, **options})


def draw(data: EnvironmentDataModule) -> TaskBatch:
    (batch,) = data.train_dataloader()
    return batch


def ids(tasks) -> list[str]:
    return [task.id for task in tasks]


def held_out(data: EnvironmentDataModule) -> list[list[str]]:
    """Validation in and out of domain, test in and out of domain."""
    return [ids(tasks.tasks) for purpose in ("validation", "test") for tasks in data.evaluation_sets(purpose)]


def predict(tasks) -> list[float]:
    return [1 - task.difficulty for task in tasks]


def feedback_on(batch: TaskBatch, rng: Random) -> list[TaskFeedback]:
    """Invented results: active tasks at success 0, .5 or 1, proposals with any verdict."""
    active = [TaskFeedback(task, rng.choice((0, 4, 8)), 8, 0.5, ("why",)) for task in batch.active]
    verdicts = [rng.choice(("ACCEPT", "REJECT", "UNDECIDED")) for _ in batch.proposals]
    return active + [
        TaskFeedback(p.task, rng.randrange(9), 8, 0.5, decision=Decision(verdict, "", Trial()))
        for p, verdict in zip(batch.proposals, verdicts, strict=True)
    ]


# Training tasks


def test_the_train_loader_is_a_pure_function_of_the_state():
    data = make(adapter=ParametricAdapter())
    first = draw(data)
    assert draw(data) == first  # after a resume Lightning asks twice
    assert draw(make(adapter=ParametricAdapter())) == first
    assert ids(draw(make(seed=1)).active) != ids(first.active)
    data.adapt(feedback_on(first, Random(0)), predict)
    assert draw(data) != first
    assert len(data.train_dataloader()) == 1


def test_a_restored_state_goes_on_as_if_nothing_had_happened(tmp_path: Path):
    data = make(adapter=ParametricAdapter())
    for epoch in range(3):
        data.adapt(feedback_on(draw(data), Random(epoch)), predict)
    assert data.pool.pending  # so that there is something to lose
    torch.save(data.state_dict(), tmp_path / "state.pt")
    restored = make(adapter=ParametricAdapter())
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert restored.epoch == 3
    for epoch in range(3, 6):
        batch = draw(data)
        assert draw(restored) == batch
        for module in (data, restored):
            module.adapt(feedback_on(batch, Random(epoch)), predict)
    assert restored.state_dict() == data.state_dict()
    assert restored.pool.history() == data.pool.history()
    assert restored.pool.held_out == data.pool.held_out


@pytest.mark.parametrize("adapter", [ParametricAdapter(), ParametricAdapter(max_proposals=2), FreshTasks()])
def test_held_out_tasks_never_enter_and_every_iteration_rolls_out_as_many(adapter):
    data = make(adapter=adapter, tasks_per_iteration=5, pool_size=10, validation_tasks=20, test_tasks=40)
    forbidden = {task_id for group in held_out(data) for task_id in group}
    proposed = 0
    for epoch in range(6):
        batch = draw(data)
        names = ids(batch.tasks)
        assert len(batch.active) + len(batch.proposals) == 5 == len(set(names))
        data.adapt(feedback_on(batch, Random(epoch)), predict)
        proposed += len(batch.proposals)
        assert len(data.pool.slots) == 10 == len(set(ids(data.pool.slots)))
        for record in data.pool.records:
            assert record.task.id not in forbidden
            assert record.task.spec["split"] == "in_domain"
            assert HOUSEHOLD.validate(record.task) is None
    assert (proposed > 0) is isinstance(adapter, ParametricAdapter)


class Repeating(Environment):
    """Ten tasks in and ten out of domain; a rewrite leads to the next one, be it held out or not."""

    name = "repeating"

    def sample(self, rng, difficulty, split="in_domain"):
        return numbered(rng.randrange(10), split)

    def start(self, task):
        raise NotImplementedError

    def vary(self, task, direction, rng, number):
        return [
            replace(numbered(n, "in_domain"), parent_id=task.id, root_id=task.root_id) for n in range(10) if n != task.spec["n"]
        ]


def numbered(n: int, split: str) -> Task:
    return Task(f"{split}{n}", "repeating", {"n": n}, n / 10, f"{split}{n}")


def test_a_rewrite_into_a_held_out_task_is_refused():
    data = EnvironmentDataModule(
        Repeating(), ParametricAdapter(control_share=0.0), tasks_per_iteration=2, pool_size=4, validation_tasks=2, test_tasks=2
    )
    in_domain = {f"in_domain{n}" for n in range(10)}
    forbidden = {task_id for group in held_out(data) for task_id in group}
    assert len(forbidden & in_domain) == 4
    for _ in range(8):  # the pool uses 4 of the other 6 tasks, so only 2 rewrites are possible at all
        batch = draw(data)
        accept = Decision("ACCEPT", "")
        decided = [TaskFeedback(proposal.task, 4, 8, 0.5, decision=accept) for proposal in batch.proposals]
        data.adapt([TaskFeedback(task, 8, 8, 0.5) for task in batch.active] + decided, predict)
    assert {record.task.id for record in data.pool.records} == in_domain - forbidden


def test_without_an_adapter_the_tasks_stay():
    data = make(adapter=None, pool_size=6)
    before, first = data.pool.slots, draw(data)
    assert sorted(ids(first.active)) == sorted(ids(before))  # as many slots as are drawn
    data.adapt(feedback_on(first, Random(0)), predict)
    assert data.pool.slots == before
    assert draw(data).proposals == ()
    assert data.epoch == data.pool.epoch == 1
    assert all(record.rolls == 1 for record in data.pool.records)  # booked all the same


def test_the_draw_changes_from_epoch_to_epoch_without_an_adapter():
    data = make(adapter=None, pool_size=40)
    drawn = []
    for _ in range(3):
        drawn.append(tuple(ids(draw(data).active)))
        data.adapt([TaskFeedback(task, 4, 8, 0.5) for task in draw(data).active], predict)
    assert len(set(drawn)) == 3


# Held-out tasks


def test_held_out_tasks_are_the_same_for_every_seed_and_disjoint():
    data = make()
    sets = held_out(data)
    assert held_out(make(seed=5, pool_size=20, adapter=ParametricAdapter())) == sets
    assert [len(group) for group in sets] == [5, 5, 8, 8]
    assert len({task_id for group in sets for task_id in group}) == 26
    for purpose in ("validation", "test"):
        for tasks in data.evaluation_sets(purpose):
            assert {task.spec["split"] for task in tasks.tasks} == {tasks.split}
            assert all(HOUSEHOLD.validate(task) is None for task in tasks.tasks)
    assert [tasks.split for tasks in data.evaluation_sets("test")] == ["in_domain", "out_of_distribution"]


def test_more_held_out_tasks_extend_the_same_list():
    few, many = held_out(make()), held_out(make(test_tasks=16))
    assert many[:2] == few[:2]
    assert [group[:8] for group in many[2:]] == few[2:]


def test_evaluation_loaders_give_one_set_each():
    data = make()
    for loaders, purpose in ((data.val_dataloader(), "validation"), (data.test_dataloader(), "test")):
        assert [list(loader) for loader in loaders] == [[tasks] for tasks in data.evaluation_sets(purpose)]


# Fixed task sets


ARCHIVED = {
    ("train", "in_domain"): 40,
    ("validation", "in_domain"): 8,
    ("validation", "out_of_distribution"): 4,
    ("test", "in_domain"): 6,
    ("test", "out_of_distribution"): 5,
}


class Archive(Environment):
    """Forty training tasks, eight and four to tune on, six and five that are reported; the names say which."""

    name = "archive"

    def __init__(self, *broken: str) -> None:
        self.broken = broken

    def sample(self, rng, difficulty, split="in_domain"):
        raise AssertionError("there is nothing to sample")

    def start(self, task):
        raise NotImplementedError

    def corpus(self, purpose, split):
        number = ARCHIVED.get((purpose, split), 0)
        return [Task(f"{purpose} {split} {n}", "archive", {"n": n}, n / number, f"{n}", kind="odd") for n in range(number)]

    def validate(self, task, parent=None):
        return "broken" if task.id in self.broken else None


class AnyAdapter(ParametricAdapter):
    """For settings that are refused before it is used."""

    def check(self, environment: Environment) -> None:
        pass


def archive(*broken: str, **options) -> EnvironmentDataModule:
    sizes = {"tasks_per_iteration": 4, "pool_size": None, "validation_tasks": None, "test_tasks": None}
    return EnvironmentDataModule(Archive(*broken), **{**sizes, **options})


def test_null_takes_the_whole_of_every_fixed_set():
    data = archive()
    assert sorted(ids(data.pool.slots)) == sorted(f"train in_domain {n}" for n in range(40))
    assert [sorted(group) for group in held_out(data)] == [
        [f"validation in_domain {n}" for n in range(8)],
        [f"validation out_of_distribution {n}" for n in range(4)],
        [f"test in_domain {n}" for n in range(6)],
        [f"test out_of_distribution {n}" for n in range(5)],
    ]


def test_a_number_takes_some_the_pool_by_seed_and_the_held_out_ones_not():
    data, other = archive(pool_size=10, test_tasks=3), archive(pool_size=10, test_tasks=3, seed=1)
    assert ids(archive().pool.slots)[:10] == ids(data.pool.slots)
    assert len({*ids(data.pool.slots)}) == 10
    assert set(ids(other.pool.slots)) != set(ids(data.pool.slots))
    assert held_out(other) == held_out(data)
    assert [len(group) for group in held_out(data)] == [8, 4, 3, 3]
    assert [group[:3] for group in held_out(archive())[2:]] == held_out(data)[2:]


def test_difficulties_bound_the_training_tasks_not_the_reported_ones():
    data = archive(difficulty_low=0.25, difficulty_high=0.5)
    assert sorted(task.spec["n"] for task in data.pool.slots) == list(range(10, 21))  # of 40
    assert [len(group) for group in held_out(data)] == [8, 4, 6, 5]


def test_the_tasks_of_a_fixed_set_are_validated():
    data = archive("train in_domain 3", "validation in_domain 2")
    assert "train in_domain 3" not in ids(data.pool.slots)
    assert [len(group) for group in held_out(data)] == [7, 4, 6, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_size": 41}, "'archive' has only 40 usable training tasks .* 41 asked for"),
        (
            {"validation_tasks": 5},
            "archive has only 4 out_of_distribution tasks for validation; data.validation_tasks asks for 5",
        ),
        ({"test_tasks": 6}, "archive has only 5 out_of_distribution tasks for test; data.test_tasks asks for 6"),
        ({"tasks_per_iteration": 41}, "data.pool_size 40 is too small for data.tasks_per_iteration 41"),
        ({"tasks_per_iteration": 21, "adapter": AnyAdapter()}, "data.pool_size 40 is too small .* twice as many"),
    ],
)
def test_more_than_a_fixed_set_has_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        archive(**options)


def test_a_pool_of_a_fixed_set_resumes():
    data, restored = archive(adapter=FreshTasks(), pool_size=10), archive(adapter=FreshTasks(), pool_size=10)
    for epoch in range(4):
        if epoch == 2:
            restored.load_state_dict(data.state_dict())
        for module in (data, restored) if epoch >= 2 else (data,):
            module.adapt([TaskFeedback(task, 8, 8, 0.5) for task in draw(module).active], predict)
    assert restored.state_dict() == data.state_dict()
    assert restored.pool.slots == data.pool.slots != archive(pool_size=10).pool.slots
    assert len({*ids(data.pool.slots)}) == 10


class InDomain(Archive):
    """A fixed set without tasks out of distribution."""

    def corpus(self, purpose, split):
        return super().corpus(purpose, split) if split == "in_domain" else []


class Reported(Archive):
    """A fixed set with tasks out of distribution that are reported, and none to tune on."""

    def corpus(self, purpose, split):
        return [] if (purpose, split) == ("validation", "out_of_distribution") else super().corpus(purpose, split)


def splits(data: EnvironmentDataModule) -> dict[str, list[tuple[str, int]]]:
    return {
        purpose: [(tasks.split, len(tasks.tasks)) for tasks in data.evaluation_sets(purpose)]
        for purpose in ("validation", "test")
    }


@pytest.mark.parametrize(
    ("environment", "validation", "test"),
    [
        (InDomain(), [("in_domain", 8)], [("in_domain", 6)]),
        (Reported(), [("in_domain", 8)], [("in_domain", 6), ("out_of_distribution", 5)]),
    ],
)
def test_a_fixed_set_may_have_no_tasks_out_of_distribution(environment, validation, test):
    data = EnvironmentDataModule(environment, tasks_per_iteration=4, pool_size=None, validation_tasks=None, test_tasks=None)
    assert splits(data) == {"validation": validation, "test": test}
    assert [list(loader) for loader in data.test_dataloader()] == [[tasks] for tasks in data.evaluation_sets("test")]
    assert len(data.val_dataloader()) == 1
    held = {task.id for purpose in ("validation", "test") for tasks in data.evaluation_sets(purpose) for task in tasks.tasks}
    assert data.pool.held_out == held
    assert len(data.tasks) == 40 + len(held)


def test_all_held_out_sets_are_of_the_size_asked_for_where_one_split_is_missing():
    data = EnvironmentDataModule(InDomain(), tasks_per_iteration=4, pool_size=None, validation_tasks=3, test_tasks=2)
    assert splits(data) == {"validation": [("in_domain", 3)], "test": [("in_domain", 2)]}
    with pytest.raises(ConfigError, match=r"archive has only 6 in_domain tasks for test; data\.test_tasks asks for 7"):
        EnvironmentDataModule(InDomain(), tasks_per_iteration=4, pool_size=None, validation_tasks=3, test_tasks=7)


def test_what_the_adapter_counted_is_logged_and_survives_a_resume():
    class Counting(FreshTasks):
        def statistics(self):
            return {"counted": 3.0}

    data, restored = make(adapter=Counting()), make(adapter=Counting())
    knobs = {name: value for name, value in data.statistics().items() if name.startswith("knob/")}
    assert data.statistics() == data.pool.statistics() | knobs  # nothing was adapted yet
    plans = [HOUSEHOLD.knobs(task)["plan"] for task in data.pool.slots]
    assert knobs["knob/plan"] == pytest.approx(sum(plans) / len(plans))
    data.adapt([TaskFeedback(task, 4, 8, 0.5) for task in draw(data).active], predict)
    assert data.statistics()["counted"] == 3.0
    restored.load_state_dict(data.state_dict())
    assert restored.statistics() == data.statistics()


# Settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks_per_iteration": 0}, "data.tasks_per_iteration must be at least 1, got 0"),
        ({"pool_size": 5}, "data.pool_size 5 is too small for data.tasks_per_iteration 6"),
        ({"pool_size": 11, "adapter": ParametricAdapter()}, "data.pool_size 11 is too small .* twice as many"),
        ({"difficulty_low": 0.6, "difficulty_high": 0.5}, "0 <= low <= high <= 1, got 0.6 and 0.5"),
        ({"difficulty_high": 1.5}, "got 0.0 and 1.5"),
        ({"validation_tasks": 0}, "data.validation_tasks must be at least 1, got 0"),
        ({"test_tasks": 0}, "data.test_tasks must be at least 1, got 0"),
        ({"pool_size": None}, "'household' makes new tasks without end: give data.pool_size, not null"),
        ({"validation_tasks": None}, "data.validation_tasks null stands for all in_domain tasks of a fixed set, which household"),
        ({"test_tasks": None}, "data.test_tasks null stands for all in_domain tasks of a fixed set, which household"),
        ({"task_choice": "best"}, "data.task_choice must be uniform or judge_errors, got 'best'"),
        ({"evaluation_difficulty_low": 1.5}, "data.evaluation_difficulty_low and data.evaluation_difficulty_high must satisfy"),
    ],
)
def test_settings_that_cannot_work_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_an_environment_with_too_few_tasks_is_named():
    with pytest.raises(ConfigError, match=r"gave only 9 distinct in_domain tasks; data\.test_tasks asks for 20"):
        EnvironmentDataModule(Repeating(), None, tasks_per_iteration=1, pool_size=1, validation_tasks=1, test_tasks=20)
    with pytest.raises(ConfigError, match="'repeating' gave only 6 of 7 distinct valid tasks"):
        EnvironmentDataModule(Repeating(), None, tasks_per_iteration=1, pool_size=7, validation_tasks=2, test_tasks=2)


def test_a_checkpoint_whose_tasks_are_held_out_here_is_refused():
    def tiny(test_tasks: int) -> EnvironmentDataModule:
        return EnvironmentDataModule(
            Repeating(), None, tasks_per_iteration=1, pool_size=8 - test_tasks, validation_tasks=2, test_tasks=test_tasks
        )

    state = tiny(1).state_dict()  # 7 of the 8 other tasks; with 3 test tasks at least 2 of them are held out
    with pytest.raises(ConfigError, match=r"trained on task in_domain\d, which is held out here"):
        tiny(3).load_state_dict(state)
    tiny(1).load_state_dict(state)
