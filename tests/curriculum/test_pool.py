import json
from random import Random

import pytest

from rla_lightning.curriculum.pool import MEMORY, Sighting, TaskPool
from rla_lightning.environments.base import Environment, Episode
from rla_lightning.types import ConfigError, Decision, Proposal, Split, Task, TaskFeedback, Trial, Verdict


def task(name: str, parent: Task | None = None, difficulty: float = 0.5) -> Task:
    if parent is None:
        return Task(name, "numbers", {"name": name, "walls": [1, 2]}, difficulty, root_id=name)
    return Task(name, "numbers", {"name": name}, difficulty, parent.root_id, parent.id, parent.version + 1)


class Numbers(Environment):
    """Tasks 0 to size - 1, by difficulty; multiples of `forbidden` are invalid."""

    name = "numbers"

    def __init__(self, size: int, forbidden: int = 0) -> None:
        self.size = size
        self.forbidden = forbidden

    def sample(self, rng: Random, difficulty: float, split: Split = "in_domain") -> Task:
        number = int(difficulty * self.size)
        return Task(f"n{number}", self.name, {"number": number}, difficulty, root_id=f"n{number}")

    def start(self, task: Task) -> Episode:
        raise NotImplementedError

    def validate(self, task: Task, parent: Task | None = None) -> str | None:
        return "unlucky number" if self.forbidden and task.spec["number"] % self.forbidden == 0 else None


A, B, C, D = task("a", difficulty=0.1), task("b", difficulty=0.3), task("c", difficulty=0.5), task("d", difficulty=0.7)
A1, A2, B1 = task("a1", A, 0.9), task("a2", A, 0.2), task("b1", B, 0.8)


def pool_with_pending() -> TaskPool:
    """Slots a b c d after an epoch in which a was won 8/8 and b 1/8; a1 (harder) and b1 (easier) are pending."""
    pool = TaskPool([A, B, C, D])
    pool.book([TaskFeedback(A, 8, 8, 0.9), TaskFeedback(B, 1, 8, 0.5)])
    assert pool.propose(Proposal(A1, "harder", "a", 8, 8, critique="too short", predicted_success=0.6))
    assert pool.propose(Proposal(B1, "easier", "b", 1, 8))
    return pool


def rolled(task: Task, successes: int, verdict: Verdict, trial: Trial | None = None, reason: str = "because") -> TaskFeedback:
    return TaskFeedback(task, successes, 8, 0.5, decision=Decision(verdict, reason, trial))


def names(tasks: tuple[Task, ...]) -> list[str]:
    return [t.id for t in tasks]


def test_fresh_gives_distinct_valid_tasks_in_the_range_and_repeats_itself() -> None:
    pool = TaskPool.fresh(Numbers(100, forbidden=7), 30, "seed 1", 0.2, 0.8)
    numbers = [t.spec["number"] for t in pool.slots]
    assert len(set(numbers)) == 30
    assert all(20 <= number <= 80 and number % 7 for number in numbers)
    assert TaskPool.fresh(Numbers(100, forbidden=7), 30, "seed 1", 0.2, 0.8).slots == pool.slots
    assert TaskPool.fresh(Numbers(100, forbidden=7), 30, "seed 2", 0.2, 0.8).slots != pool.slots


def test_fresh_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        TaskPool.fresh(Numbers(10), 0, "k")
    with pytest.raises(ConfigError, match="gave only 10 of 11 distinct"):
        TaskPool.fresh(Numbers(10), 11, "k")
    with pytest.raises(ConfigError, match="unlucky number"):
        TaskPool.fresh(Numbers(10, forbidden=1), 1, "k")
    with pytest.raises(ConfigError, match="difficulty_low"):
        TaskPool.fresh(Numbers(10), 1, "k", 0.8, 0.2)
    with pytest.raises(ConfigError, match="'a' occurs twice"):
        TaskPool([A, B, A])
    with pytest.raises(ConfigError, match="at least 1 task"):
        TaskPool([])


def test_draw_takes_proposals_first_and_never_their_parents() -> None:
    pool = pool_with_pending()
    for key in map(str, range(20)):
        batch = pool.draw(4, key)
        assert [p.task.id for p in batch.proposals] == ["a1", "b1"]
        assert sorted(names(batch.active)) == ["c", "d"]
        batch = pool.draw(3, key)
        assert len(batch.tasks) == 3
        assert names(batch.active) in (["c"], ["d"])


def test_draw_leaves_proposals_beyond_the_batch_pending() -> None:
    pool = pool_with_pending()
    batch = pool.draw(1, "k")
    assert names(batch.tasks) == ["a1"]
    assert [p.task.id for p in pool.pending] == ["a1", "b1"]


def test_draw_is_a_pure_function_of_pool_and_key() -> None:
    pool = TaskPool.fresh(Numbers(1000), 20, "k")
    first = pool.draw(6, "seed 0, epoch 3")
    assert pool.draw(6, "seed 0, epoch 3") == first
    assert TaskPool.from_state(pool.state()).draw(6, "seed 0, epoch 3") == first
    assert len(set(names(first.active))) == 6
    assert pool.draw(6, "seed 0, epoch 4") != first


@pytest.mark.parametrize("number", [0, 5])
def test_draw_refuses_more_than_the_slots(number: int) -> None:
    with pytest.raises(ConfigError, match=rf"task slots \(4\), got {number}"):
        pool_with_pending().draw(number, "k")


def test_proposal_goes_through_the_pool_unchanged() -> None:
    proposals = pool_with_pending().pending
    assert proposals[0] == Proposal(A1, "harder", "a", 8, 8, critique="too short", predicted_success=0.6)
    assert proposals[1] == Proposal(B1, "easier", "b", 1, 8)


def test_accept_replaces_the_parent_and_reject_keeps_it() -> None:
    pool = pool_with_pending()
    pool.book([rolled(A1, 4, "ACCEPT"), rolled(B1, 0, "REJECT")])
    assert names(pool.slots) == ["a1", "b", "c", "d"]
    assert pool.pending == ()
    accepted, rejected = pool.record("a1"), pool.record("b1")
    assert (accepted.verdict, accepted.successes, accepted.rollouts) == ("ACCEPT", 4, 8)
    assert accepted.reason == "because"
    assert (accepted.proposed_epoch, accepted.decided_epoch) == (1, 1)
    assert (rejected.verdict, rejected.reason) == ("REJECT", "because")
    numbers = pool.statistics()
    assert (numbers["proposed"], numbers["accepted"], numbers["pending"], numbers["accept_rate"]) == (2, 1, 0, 0.5)
    assert numbers["difficulty"] == pytest.approx((0.9 + 0.3 + 0.5 + 0.7) / 4)
    assert [(row["task"]["id"], row["status"]) for row in pool.history()] == [
        ("a", "replaced"),
        ("b", "active"),
        ("c", "active"),
        ("d", "active"),
        ("a1", "active"),
        ("b1", "rejected"),
    ]


def test_active_tasks_keep_the_latest_counts_only() -> None:
    pool = TaskPool([A, B])
    pool.book([TaskFeedback(A, 8, 8, None), TaskFeedback(B, 2, 8, None)])
    pool.book([TaskFeedback(A, 3, 7, None)])
    pool.book([TaskFeedback(A, 0, 0, None)])  # every rollout ended in an error of the environment
    assert (pool.record("a").successes, pool.record("a").rollouts, pool.record("a").rolls) == (3, 7, 3)
    assert (pool.record("b").successes, pool.record("b").rollouts, pool.record("b").rolls) == (2, 8, 1)
    assert pool.epoch == 3
    assert pool.statistics()["accept_rate"] == 0.0


def test_an_undecided_proposal_stays_and_goes_on_from_its_trial() -> None:
    pool = pool_with_pending()
    pool.book([rolled(A1, 7, "UNDECIDED", Trial()), rolled(B1, 2, "UNDECIDED", Trial())])
    assert [(p.task.id, p.trial) for p in pool.pending] == [("a1", Trial()), ("b1", Trial())]
    assert pool.record("a1").decided_epoch is None
    trial = Trial(6, 8, 8, 8, 1)
    pool.book([rolled(A1, 6, "UNDECIDED", trial), TaskFeedback(A, 8, 8, None), rolled(B1, 5, "ACCEPT", Trial(5, 8, 0, 8, 1))])
    assert [(p.task.id, p.trial) for p in pool.pending] == [("a1", trial)]
    assert pool.record("b1").trial == Trial(5, 8, 0, 8, 1)
    assert (pool.record("b1").rolls, pool.record("b1").decided_epoch) == (2, 2)
    assert names(pool.slots) == ["a", "b1", "c", "d"]
    pool.book([TaskFeedback(B1, 8, 8, 0.5)])  # active now: the latest counts, the trial's stay
    assert (pool.record("b1").successes, pool.record("b1").trial) == (8, Trial(5, 8, 0, 8, 1))


def test_a_proposal_on_trial_brings_its_parent_along() -> None:
    pool = pool_with_pending()
    pool.book([rolled(A1, 7, "UNDECIDED", Trial()), rolled(B1, 0, "REJECT")])
    batch = pool.draw(4, "k")  # a1 with a, and two of the three free slots
    assert [p.task.id for p in batch.proposals] == ["a1"]
    assert (batch.active[-1].id, batch.drawn) == ("a", 2)
    assert len({t.id for t in batch.active} & {"b", "c", "d"}) == 2
    assert names(pool.draw(2, "k").active) == ["a"]
    assert pool.draw(1, "k").proposals == ()  # no room for both: neither is drawn
    assert pool.draw(1, "k").active[0].id in {"b", "c", "d"}


def test_a_control_is_counted_apart_and_never_takes_a_slot() -> None:
    pool = TaskPool([A, B, C, D])
    pool.book([TaskFeedback(A, 8, 8, 0.9), TaskFeedback(B, 0, 8, 0.5), TaskFeedback(C, 0, 8, 0.5)])
    assert pool.propose(Proposal(task("a/unchanged", A), "harder", "a", 8, 8, is_control=True))
    assert pool.propose(Proposal(task("b/unchanged", B), "easier", "b", 0, 8, is_control=True))
    assert pool.propose(Proposal(task("c1", C), "easier", "c", 0, 8))
    assert pool.pending[0].is_control
    wrong, right, change = (proposal.task for proposal in pool.pending)
    pool.book([rolled(wrong, 4, "ACCEPT"), rolled(right, 0, "REJECT"), rolled(change, 4, "ACCEPT")])
    assert names(pool.slots) == ["a", "b", "c1", "d"]
    numbers = pool.statistics()
    assert (numbers["controls"], numbers["false_accept_rate"]) == (2, 0.5)
    assert (numbers["proposed"], numbers["accepted"], numbers["accept_rate"]) == (1, 1, 1.0)
    assert [row["status"] for row in pool.history()][4:] == ["control", "control", "active"]


def test_judge_errors_choose_tasks_whose_votes_mislead() -> None:
    # weights: a misled judge 3 - .2 - .3 = 2.5, a good one 3 - 1 - 1 = 1, one outcome only 1, not seen yet 1
    pool = TaskPool([A, B, C, D])
    pool.book([TaskFeedback(A, 4, 8, None, p_plus=0.2, p_minus=0.3), TaskFeedback(B, 4, 8, None, p_plus=1.0, p_minus=1.0),
               TaskFeedback(C, 0, 8, None, p_minus=0.1)])  # fmt: skip
    drawn = [pool.draw(1, str(i), "judge_errors").active[0].id for i in range(2000)]
    assert drawn.count("a") / 2000 == pytest.approx(2.5 / 5.5, abs=0.05)  # 4.5 standard errors
    assert drawn.count("c") / 2000 == pytest.approx(1 / 5.5, abs=0.04)
    assert len({t.id for t in pool.draw(3, "k", "judge_errors").active}) == 3


def test_sightings_are_remembered_for_a_while() -> None:
    pool = TaskPool([A, B])
    pool.book([TaskFeedback(A, 3, 8, 0.25), TaskFeedback(B, 0, 0, 0.5)])  # b ended in errors of the environment
    assert pool.sightings == (Sighting("a", 0, 3, 8, 0.25),)
    for _ in range(MEMORY):
        pool.book([TaskFeedback(B, 1, 8, None)])
    assert (len(pool.sightings), pool.sightings[0].epoch) == (MEMORY, 1)


def test_a_task_seen_before_is_refused() -> None:
    pool = pool_with_pending()
    pool.book([rolled(A1, 8, "REJECT")])
    assert pool.knows("a1")
    assert not pool.knows("a2")
    assert not pool.propose(Proposal(A1, "harder", "a", 8, 8))
    assert pool.propose(Proposal(A2, "harder", "a", 8, 8))
    assert pool.proposed == 3


def test_misuse_raises_and_changes_nothing() -> None:
    pool = pool_with_pending()
    before = pool.state()
    with pytest.raises(ValueError, match="'a' is not active or already has"):
        pool.propose(Proposal(A2, "harder", "a", 8, 8))
    with pytest.raises(ValueError, match="its proposal names 'c'"):
        pool.propose(Proposal(A2, "harder", "c", 8, 8))
    with pytest.raises(ValueError, match="twice"):
        pool.book([TaskFeedback(C, 1, 8, None), TaskFeedback(C, 1, 8, None)])
    with pytest.raises(ValueError, match="'a1', which is not active"):
        pool.book([TaskFeedback(C, 1, 8, None), TaskFeedback(A1, 1, 8, None)])
    with pytest.raises(ValueError, match="'d', which is not a pending"):
        pool.book([TaskFeedback(C, 1, 8, None), rolled(D, 1, "ACCEPT")])
    with pytest.raises(ValueError, match="9 successes in 8"):
        pool.book([TaskFeedback(C, 9, 8, None)])
    with pytest.raises(ValueError, match="'a' is not active or has a pending"):
        pool.replace_slots(["a"], [task("new")])
    with pytest.raises(ValueError, match="tasks that stay in the pool"):
        pool.replace_slots(["c"], [D])
    with pytest.raises(ValueError, match="repeat each other"):
        pool.replace_slots(["c", "d"], [A2, A2])
    with pytest.raises(ValueError, match="zip"):
        pool.replace_slots(["c", "d"], [A2])
    pool.held_out = frozenset({"a2"})
    with pytest.raises(ValueError, match="'a2' is held out"):
        pool.replace_slots(["c"], [A2])
    assert not pool.propose(Proposal(A2, "harder", "c", 8, 8))
    assert pool.state() == before


def test_replaced_task_may_come_back_and_keeps_its_record() -> None:
    pool = TaskPool([A, B])
    pool.book([TaskFeedback(A, 5, 8, None)])
    pool.replace_slots(["a"], [C])
    assert names(pool.slots) == ["c", "b"]
    assert pool.record("c").proposed_epoch == 1
    pool.replace_slots(["b"], [A])
    assert names(pool.slots) == ["c", "a"]
    assert pool.record("a").successes == 5
    pool.replace_slots(["c", "a"], [A, B])  # a moves to the other slot
    assert names(pool.slots) == ["a", "b"]


def test_state_survives_json_and_torch_with_pending_and_rerolls() -> None:
    pool = pool_with_pending()
    pool.book([rolled(A1, 7, "UNDECIDED", Trial()), rolled(B1, 0, "REJECT")])
    restored = TaskPool.from_state(json.loads(json.dumps(pool.state())))
    assert restored.state() == pool.state()
    assert (restored.slots, restored.pending, restored.records) == (pool.slots, pool.pending, pool.records)
    assert restored.sightings == pool.sightings
    for each in (pool, restored):
        each.book([rolled(A1, 7, "UNDECIDED", Trial(7, 8, 8, 8, 1)), TaskFeedback(C, 1, 8, 0.5)])
    assert restored.state() == pool.state()
    assert [p.trial for p in restored.pending] == [Trial(7, 8, 8, 8, 1)]
    json.dumps(pool.history())


def test_state_passes_torch_weights_only(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    pool = pool_with_pending()
    torch.save(pool.state(), tmp_path / "state.pt")
    assert TaskPool.from_state(torch.load(tmp_path / "state.pt", weights_only=True)).state() == pool.state()


def test_state_is_a_snapshot() -> None:
    pool = pool_with_pending()
    state = pool.state()
    pool.book([rolled(A1, 4, "ACCEPT")])
    assert state["slots"] == ["a", "b", "c", "d"]
    assert TaskPool.from_state(state).record("a1").verdict is None


@pytest.mark.parametrize("number", [2, 3])
def test_every_draw_succeeds_whatever_is_pending(number: int) -> None:
    tasks = [task(f"t{i}") for i in range(number)]
    pool = TaskPool(tasks)
    pool.book([TaskFeedback(t, 0, 8, None) for t in tasks])
    for parent in tasks:  # every slot has a pending proposal, none of them gets on
        assert pool.propose(Proposal(task(f"{parent.id}/child", parent), "easier", parent.id, 0, 8))
    pool.book([rolled(proposal.task, 4, "UNDECIDED", Trial()) for proposal in pool.pending])
    batch = pool.draw(number, "k")
    assert len(batch.tasks) == len({t.id for t in batch.tasks}) == number
    assert len(batch.proposals) == 1  # with its parent
    assert batch.proposals[0].parent_id in {t.id for t in batch.active}
