import math
from collections.abc import Sequence
from random import Random

import pytest

from rla_lightning.algorithm.acceptance import threshold
from rla_lightning.curriculum.adapters import FreshTasks, ParametricAdapter, SameKnobs
from rla_lightning.curriculum.pool import TaskPool
from rla_lightning.curriculum.proposing import Predict, TaskAdapter, anchored_success, knob_distance
from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.environments.base import Environment, Episode
from rla_lightning.types import ConfigError, Decision, Direction, Split, Task, TaskFeedback, Verdict


def make(level: int, layout: int = 0, parent: Task | None = None) -> Task:
    task_id = f"ladder-{level}-{layout}"
    return Task(
        id=task_id,
        environment="ladder",
        spec={"level": level, "layout": layout},
        difficulty=level / 100,
        root_id=task_id if parent is None else parent.root_id,
        parent_id=None if parent is None else parent.id,
        version=0 if parent is None else parent.version + 1,
    )


def true_success(task: Task) -> float:
    """Half at level 50, .27 and .73 five levels away; inside [.2, .8] at levels 44 to 56."""
    return 1 / (1 + math.exp((task.spec["level"] - 50) / 5))


class Ladder(Environment):
    """Levels 0 to 100; a rewrite moves -5 to 30 levels the wanted way and draws a new layout."""

    name = "ladder"

    def __init__(self, layouts: int = 10**6) -> None:
        self.layouts = layouts

    def sample(self, rng: Random, difficulty: float, split: Split = "in_domain") -> Task:
        return make(round(100 * difficulty), rng.randrange(self.layouts))

    def start(self, task: Task) -> Episode:
        raise NotImplementedError

    def vary(self, task: Task, direction: Direction, rng: Random, number: int) -> list[Task]:
        sign = 1 if direction == "harder" else -1
        moves = [sign * rng.randint(-5, 30) for _ in range(number)]
        return [make(task.spec["level"] + move, rng.randrange(self.layouts), task) for move in moves]

    def validate(self, task: Task, parent: Task | None = None) -> str | None:
        if not 0 <= task.spec["level"] <= 100:
            return f"level {task.spec['level']} is not on the ladder"
        return "equal to its parent" if parent is not None and parent.id == task.id else None


class Scripted(Ladder):
    """Offers a given list of levels, whatever is asked for."""

    def __init__(self, *levels: int) -> None:
        super().__init__()
        self.levels = levels

    def vary(self, task: Task, direction: Direction, rng: Random, number: int) -> list[Task]:
        return [make(level, 1, task) for level in self.levels[:number]]


class Critic:
    """Predicts from a table of levels and counts its calls."""

    def __init__(self, table: dict[int, float]) -> None:
        self.table = table
        self.calls: list[list[str]] = []

    def __call__(self, tasks: Sequence[Task]) -> list[float]:
        self.calls.append([task.id for task in tasks])
        return [self.table[task.spec["level"]] for task in tasks]


def constant(tasks: Sequence[Task]) -> list[float]:
    return [0.5] * len(tasks)


def booked(pool: TaskPool, *feedback: TaskFeedback) -> tuple[TaskFeedback, ...]:
    pool.book(feedback)
    return feedback


def guided(**settings) -> ParametricAdapter:
    """By the critic alone, towards the target, without controls."""
    return ParametricAdapter(**{"ranking": "critic", "pull": "target", "control_share": 0.0, **settings})


def decided(task: Task, successes: int, rollouts: int, verdict: Verdict) -> TaskFeedback:
    return TaskFeedback(task, successes, rollouts, None, decision=Decision(verdict, "because"))


def test_anchored_success_by_hand() -> None:
    # 8/8 and four rollouts' worth of .8: 11.2/12, odds 14. The critic sees odds 4 -> 1, a quarter: 3.5, 3.5/4.5.
    assert anchored_success(8, 8, 0.8, 0.5) == pytest.approx(3.5 / 4.5)
    # 0/8 and .1: .4/12, odds 1/29; odds 1/9 -> 1 multiply by 9: 9/29, 9/38.
    assert anchored_success(0, 8, 0.1, 0.5) == pytest.approx(9 / 38)
    # Observed as predicted, 4/8 and .5: the prediction of the rewrite stands.
    assert anchored_success(4, 8, 0.5, 0.3) == pytest.approx(0.3)
    # Certainty is held at odds 99: 4/8 has odds 1, 1/99 of 1.
    assert anchored_success(4, 8, 0.5, 0.0) == pytest.approx(0.01)


@pytest.mark.parametrize("wrong", [math.nan, -0.1, 1.5])
def test_anchored_success_refuses_what_is_no_probability(wrong: float) -> None:
    with pytest.raises(ValueError, match="success probability"):
        anchored_success(4, 8, 0.5, wrong)


def test_critic_ranking_chooses_the_candidate_nearest_the_target_relative_to_the_parent() -> None:
    # Parent 8/8, predicted 0.9 (odds 9): 11.6/12, odds 29. Expected odds of the candidates: 29/9 * their predicted odds.
    #   level 21: .8 -> 4 * 29/9 = 12.9 -> .928    level 22: .5 -> 29/9 -> .763
    #   level 23: .3 -> 3/7 * 29/9 = 1.38 -> .580 (nearest)   level 24: .1 -> .36 -> .264
    # A critic taken at its word would have chosen level 22.
    parent = make(20)
    pool = TaskPool([parent, make(50)])
    feedback = booked(pool, TaskFeedback(parent, 8, 8, 0.9, critiques=("Short.", "Short.", "Easy.")))
    critic = Critic({20: 0.9, 21: 0.8, 22: 0.5, 23: 0.3, 24: 0.1})
    guided().adapt(Scripted(21, 22, 23, 24), pool, feedback, critic, "k")
    (proposal,) = pool.pending
    assert proposal.task.spec["level"] == 23
    assert (proposal.direction, proposal.parent_id) == ("harder", parent.id)
    assert (proposal.parent_successes, proposal.parent_rollouts) == (8, 8)
    assert proposal.predicted_success == 0.3
    assert proposal.critique == "Short. Easy."


def test_candidates_that_move_the_wrong_way_are_a_last_resort() -> None:
    # Parent 7/8: 7.5/9, odds 5, predicted .2. Level 31 (.19, odds 81/19 lower) stays far from the target and still wins
    # against level 32, predicted easier than the parent.
    parent = make(30)
    for levels, chosen in [((31, 32), 31), ((32,), 32)]:
        pool = TaskPool([parent])
        feedback = booked(pool, TaskFeedback(parent, 7, 8, 0.2))
        guided().adapt(Scripted(*levels), pool, feedback, Critic({30: 0.2, 31: 0.19, 32: 0.21}), "k")
        assert pool.pending[0].task.spec["level"] == chosen


def test_predict_is_called_once_for_all_tasks_and_only_when_needed() -> None:
    easy, fair, hard = make(20), make(50), make(80)
    pool = TaskPool([easy, fair, hard])
    feedback = booked(pool, TaskFeedback(easy, 8, 8, None), TaskFeedback(fair, 4, 8, None), TaskFeedback(hard, 0, 8, None))
    critic = Critic({20: 0.9, 50: 0.5, 60: 0.3, 80: 0.1})
    guided().adapt(Scripted(50, 60), pool, feedback, critic, "k")
    assert len(critic.calls) == 1
    assert sorted(critic.calls[0]) == ["ladder-20-0", "ladder-50-1", "ladder-60-1", "ladder-80-0"]
    # Both parents want level 50 (after 17 * 1/9 and 1/17 * 9); the second gets the next best.
    assert sorted(p.task.spec["level"] for p in pool.pending) == [50, 60]
    assert {p.parent_id: p.direction for p in pool.pending} == {easy.id: "harder", hard.id: "easier"}
    guided().adapt(Scripted(51), pool, feedback, critic, "k")  # all have a pending proposal or are in the band
    assert len(critic.calls) == 1


def test_band_edges_no_rollouts_and_proposals_are_left_alone() -> None:
    tasks = [make(level) for level in (10, 20, 30, 40)]
    pool = TaskPool(tasks)
    counts = [(8, 10), (2, 10), (0, 0), (9, 10)]
    feedback = booked(pool, *(TaskFeedback(t, s, n, None) for t, (s, n) in zip(tasks, counts, strict=True)))
    guided().adapt(Scripted(60), pool, feedback, constant, "k")
    (proposal,) = pool.pending
    assert proposal.parent_id == "ladder-40-0"
    feedback = booked(pool, decided(proposal.task, 10, 10, "REJECT"))
    guided().adapt(Scripted(61), pool, feedback, constant, "k")
    assert pool.pending == ()


def test_an_accepted_task_still_outside_the_band_is_rewritten_again_at_once() -> None:
    parent = make(10)
    pool = TaskPool([parent])
    guided().adapt(Scripted(20), pool, booked(pool, TaskFeedback(parent, 10, 10, None)), constant, "k")
    feedback = booked(pool, decided(pool.pending[0].task, 9, 10, "ACCEPT"))
    guided().adapt(Scripted(30), pool, feedback, constant, "k")
    assert pool.pending[0].task.root_id == parent.id
    assert (pool.pending[0].task.version, pool.pending[0].parent_id) == (2, "ladder-20-1")


def test_known_invalid_and_repeated_candidates_are_dropped() -> None:
    parent = make(20)
    pool = TaskPool([parent, make(30, 1)])
    feedback = booked(pool, TaskFeedback(parent, 8, 8, None))
    critic = Critic({20: 0.9, 40: 0.5})
    guided().adapt(Scripted(30, 101, 40, 40), pool, feedback, critic, "k")
    assert sorted(critic.calls[0]) == ["ladder-20-0", "ladder-40-1"]
    assert pool.pending[0].task.id == "ladder-40-1"
    pool.book([decided(pool.pending[0].task, 8, 8, "REJECT")])
    guided().adapt(Scripted(30, 101, 40), pool, feedback, critic, "k2")  # nothing left to propose
    assert pool.pending == ()


def test_max_proposals_limits_what_is_pending() -> None:
    tasks = [make(0, layout) for layout in range(10)]
    pool = TaskPool(tasks)
    feedback = booked(pool, *(TaskFeedback(t, 8, 8, None) for t in tasks))
    adapter = guided(max_proposals=3)
    adapter.adapt(Ladder(), pool, feedback, constant, "k")
    assert len(pool.pending) == 3
    pool.book([decided(pool.pending[0].task, 8, 8, "REJECT")])
    adapter.adapt(Ladder(), pool, feedback, constant, "k2")
    assert len(pool.pending) == 3


def test_random_ranking_asks_no_critic_and_depends_on_the_key_only() -> None:
    def chosen(key: str) -> int:
        pool = TaskPool([make(10)])
        feedback = booked(pool, TaskFeedback(make(10), 8, 8, None))
        critic = Critic({})
        guided(ranking="random").adapt(Scripted(*range(20, 40)), pool, feedback, critic, key)
        assert critic.calls == []
        assert pool.pending[0].predicted_success is None
        return pool.pending[0].task.spec["level"]

    assert chosen("a") == chosen("a")
    assert len({chosen(str(key)) for key in range(30)}) > 10


@pytest.mark.parametrize(
    "setting",
    [
        {"low": 0.9},
        {"target": 0.1},
        {"candidates": 0},
        {"max_proposals": 0},
        {"ranking": "best"},
        {"pull": "up"},
        {"control_share": 1.0},
        {"fresh_share": -0.1},
    ],
)
def test_parametric_adapter_refuses_settings_that_cannot_work(setting: dict) -> None:
    with pytest.raises(ConfigError):
        ParametricAdapter(**setting)


def test_candidates_that_cannot_be_played_are_not_proposed() -> None:
    pool = TaskPool([make(20), make(50)])
    feedback = booked(pool, TaskFeedback(make(20), 8, 8, None))

    def broken(tasks):
        return [0.9 if task.id == "ladder-20-0" else math.nan for task in tasks]

    guided().adapt(Ladder(), pool, feedback, broken, "k")
    assert pool.pending == ()


def test_an_environment_without_variants_is_refused() -> None:
    class Fixed(Ladder):
        vary = Environment.vary

    with pytest.raises(ConfigError, match=r"environment 'ladder' has no vary, .*RewriterAdapter, or no adapter"):
        EnvironmentDataModule(Fixed(), ParametricAdapter())


def test_a_task_whose_rewrite_fails_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Ladder):
        def vary(self, task, direction, rng, number):
            raise OSError("no paper")

    pool = TaskPool([make(20), make(50)])
    feedback = booked(pool, TaskFeedback(make(20), 8, 8, None))
    guided().adapt(Broken(), pool, feedback, constant, "k")
    assert pool.pending == ()
    assert "task ladder-20-0 could not be rewritten: OSError: no paper" in caplog.text


def test_fresh_tasks_replaces_all_or_only_those_out_of_the_band() -> None:
    tasks = [make(level) for level in (20, 50, 80, 90)]
    for replace, kept in [("all", {"ladder-90-0"}), ("out_of_band", {"ladder-50-0", "ladder-90-0"})]:
        pool = TaskPool(tasks, difficulty=(0.2, 0.4))
        feedback = booked(pool, *(TaskFeedback(t, s, 8, None) for t, s in zip(tasks, (8, 4, 0), strict=False)))
        FreshTasks(replace).adapt(Ladder(), pool, feedback, constant, "k")
        assert {t.id for t in pool.slots} & {t.id for t in tasks} == kept
        assert all(t.difficulty <= 0.4 for t in pool.slots if t.id not in kept)
        assert (len(pool.slots), pool.proposed, pool.pending) == (4, 0, ())


def test_fresh_tasks_goes_on_in_a_space_that_it_has_seen_in_full() -> None:
    pool = TaskPool.fresh(Ladder(layouts=1), 20, "k", 0.0, 0.25)  # 26 tasks exist
    for epoch in range(20):
        feedback = booked(pool, *(TaskFeedback(t, 0, 8, None) for t in pool.draw(10, str(epoch)).active))
        FreshTasks().adapt(Ladder(layouts=1), pool, feedback, constant, str(epoch))
        assert len({t.id for t in pool.slots}) == 20
    assert len(pool.records) == 26


def test_fresh_tasks_are_never_held_out() -> None:
    held_out = frozenset(f"ladder-{level}-0" for level in range(0, 26, 2))
    pool = TaskPool.fresh(Ladder(layouts=1), 10, "k", 0.0, 0.25, held_out=held_out)  # 13 tasks are left
    for epoch in range(20):
        feedback = booked(pool, *(TaskFeedback(t, 0, 8, None) for t in pool.draw(5, str(epoch)).active))
        FreshTasks().adapt(Ladder(layouts=1), pool, feedback, constant, str(epoch))
    assert {record.task.id for record in pool.records} == {f"ladder-{level}-0" for level in range(1, 26, 2)}


def test_fresh_tasks_of_a_fixed_set_are_others_of_the_set() -> None:
    class Library(Ladder):
        def sample(self, rng, difficulty, split="in_domain"):
            raise AssertionError("a fixed set is not sampled")

        def corpus(self, purpose, split):
            return [make(level) for level in range(8)] if (purpose, split) == ("train", "in_domain") else []

    library, tasks = {f"ladder-{level}-0" for level in range(8)}, [make(level) for level in range(5)]
    pool = TaskPool(tasks, held_out=frozenset(["ladder-7-0"]))
    feedback = booked(pool, TaskFeedback(tasks[0], 8, 8, None), TaskFeedback(tasks[1], 8, 8, None))
    FreshTasks().adapt(Library(), pool, feedback, constant, "k")
    assert {t.id for t in pool.slots} > {"ladder-2-0", "ladder-3-0", "ladder-4-0"}
    assert len(pool.slots) == len({t.id for t in pool.slots} & library - {"ladder-7-0"}) == 5
    seen = set()
    for epoch in range(20):
        feedback = booked(pool, TaskFeedback(pool.slots[0], 8, 8, None), TaskFeedback(pool.slots[1], 8, 8, None))
        FreshTasks().adapt(Library(), pool, feedback, constant, str(epoch))
        seen |= {t.id for t in pool.slots}
    assert seen == library - {"ladder-7-0"}


@pytest.mark.parametrize("setting", [{"replace": "some"}, {"low": 0.9}, {"high": 0.1}])
def test_fresh_tasks_refuses_settings_that_cannot_work(setting: dict) -> None:
    with pytest.raises(ConfigError):
        FreshTasks(**setting)


def roll_out(pool: TaskPool, epoch: int) -> tuple[TaskFeedback, ...]:
    """One epoch of binomial rollouts, 8 per task, judged by the paper's rule; checks the pool's promises."""
    batch = pool.draw(24, f"draw/{epoch}")
    assert len(batch.tasks) == 24
    parents = {p.parent_id for p in pool.pending}
    assert not parents & {t.id for t in batch.active}
    rng = Random(f"rollouts/{epoch}")
    wins = {t.id: sum(rng.random() < true_success(t) for _ in range(8)) for t in batch.tasks}
    active = [TaskFeedback(t, wins[t.id], 8, None) for t in batch.active]
    judged = [
        decided(p.task, wins[p.task.id], 8, threshold(p.direction, p.parent_successes, p.parent_rollouts, wins[p.task.id], 8))
        for p in batch.proposals
    ]
    return booked(pool, *active, *judged)


def share_in_band(pool: TaskPool) -> float:
    return sum(0.2 <= true_success(task) <= 0.8 for task in pool.slots) / len(pool.slots)


def walk(adapter: TaskAdapter, predict: Predict, epochs: int = 200) -> tuple[TaskPool, list[float]]:
    pool = TaskPool.fresh(Ladder(), 48, "walk", 0.0, 1.0)
    shares = [share_in_band(pool)]
    for epoch in range(epochs):
        adapter.adapt(Ladder(), pool, roll_out(pool, epoch), predict, f"adapt/{epoch}")
        assert len({task.id for task in pool.slots}) == 48
        shares.append(share_in_band(pool))
    return pool, shares


def oracle(tasks: Sequence[Task]) -> list[float]:
    return [true_success(task) for task in tasks]


@pytest.mark.parametrize("predict", [oracle, constant])
def test_difficulty_walks_into_the_band(predict: Predict) -> None:
    _, shares = walk(guided(), predict)
    assert shares[0] < 0.2
    assert sum(shares[-50:]) / 50 > 0.85


def test_an_oracle_gets_there_sooner_and_wastes_fewer_rollouts() -> None:
    led, led_shares = walk(guided(), oracle, epochs=30)
    blind, blind_shares = walk(guided(), constant, epochs=30)
    assert sum(led_shares) > 1.2 * sum(blind_shares)
    assert led.statistics()["accept_rate"] > 1.5 * blind.statistics()["accept_rate"]


def test_a_critic_that_sees_no_difference_ranks_at_random() -> None:
    blind, _ = walk(guided(), constant, epochs=10)
    random, _ = walk(guided(ranking="random"), constant, epochs=10)
    assert blind.slots == random.slots


def test_a_walk_repeats_itself_and_survives_a_resume_at_every_epoch() -> None:
    adapter = guided()
    straight, _ = walk(adapter, oracle, epochs=12)
    pool = TaskPool.fresh(Ladder(), 48, "walk", 0.0, 1.0)
    for epoch in range(12):
        pool = TaskPool.from_state(pool.state())
        adapter.adapt(Ladder(), pool, roll_out(pool, epoch), oracle, f"adapt/{epoch}")
    assert pool.state() == straight.state()


def test_yaml_names_adapters_by_class_path() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--adapter", type=TaskAdapter | None)
    for name, init in [("ParametricAdapter", {"candidates": 7}), ("FreshTasks", {"replace": "out_of_band"})]:
        config = {"class_path": f"rla_lightning.curriculum.adapters.{name}", "init_args": init}
        adapter = parser.instantiate_classes(parser.parse_object({"adapter": config})).adapter
        assert type(adapter).__name__ == name
    assert parser.instantiate_classes(parser.parse_object({"adapter": None})).adapter is None


class Knobbed(Scripted):
    """Two knobs; success depends on the level alone."""

    def knobs(self, task: Task) -> dict[str, float]:
        return {"level": float(task.spec["level"]), "layout": float(task.spec["layout"])}


def test_knob_distance_by_hand() -> None:
    # |3 - 4| / 4 + |2 - 0| / 2, and a knob of one task alone does not count
    assert knob_distance({"a": 3, "b": 2, "c": 1}, {"a": 4, "b": 0, "c": 1, "d": 9}) == pytest.approx(0.25 + 1.0)
    assert knob_distance({"a": -2.0}, {"a": -2.0}) == 0.0


def test_the_pull_of_the_root_chooses_the_nearest_of_those_in_reach() -> None:
    # The root is at level 80. Its descendant at 20 is won 8/8, predicted .9: expected odds are 29/9 of the predicted ones.
    # Expected: level 30 .36/.64 = .5625 * 29/9 -> .644, 40 .28 -> .556, 50 .2 -> .446, 60 .1 -> .264. Within .15 of one half
    # are 30, 40 and 50, of which 50 is nearest to the root; towards the target 50 wins by .054, 40 loses by .002.
    root, easy = make(80), make(20, parent=make(80))
    for pull, chosen in [("root", 50), ("target", 50)]:
        pool = TaskPool([root, make(50)])
        feedback = booked(pool, TaskFeedback(root, 0, 8, None))
        pool.replace_slots([root.id], [easy])
        feedback = booked(pool, TaskFeedback(easy, 8, 8, None))
        critic = Critic({20: 0.9, 30: 0.36, 40: 0.28, 50: 0.2, 60: 0.1, 80: 0.01})
        guided(pull=pull).adapt(Knobbed(30, 40, 50, 60), pool, feedback, critic, "k")
        assert pool.pending[0].task.spec["level"] == chosen
    pool = TaskPool([root, make(50)])
    pool.replace_slots([root.id], [easy])
    critic = Critic({20: 0.9, 30: 0.36, 40: 0.26, 50: 0.17, 60: 0.1, 80: 0.01})  # 50: .398, now farther than 40's .531
    for pull, chosen in [("root", 50), ("target", 40)]:
        pool = TaskPool([root, make(50)])
        pool.replace_slots([root.id], [easy])
        guided(pull=pull).adapt(Knobbed(30, 40, 50, 60), pool, booked(pool, TaskFeedback(easy, 8, 8, None)), critic, "k")
        assert pool.pending[0].task.spec["level"] == chosen


def test_half_of_the_candidates_near_the_root_are_easier_variants_of_it() -> None:
    class Asked(Ladder):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[tuple[str, str, int]] = []

        def vary(self, task, direction, rng, number):
            self.asked.append((task.id, direction, number))
            return [make(task.spec["level"] + (1 if direction == "harder" else -1), 7, task)]

    root, easy = make(80), make(20, parent=make(80))
    pool = TaskPool([root, make(50)])
    pool.replace_slots([root.id], [easy])
    environment = Asked()
    feedback = booked(pool, TaskFeedback(easy, 8, 8, None))
    guided(pull="root", candidates=9).adapt(environment, pool, feedback, Critic({20: 0.9, 21: 0.8, 79: 0.3}), "k")
    assert environment.asked == [("ladder-20-0", "harder", 5), ("ladder-80-0", "easier", 4)]
    (proposal,) = pool.pending
    assert (proposal.task.spec["level"], proposal.task.parent_id) == (79, easy.id)
    assert (proposal.task.root_id, proposal.task.version) == (root.id, 2)


def test_controls_are_the_tasks_themselves() -> None:
    tasks = [make(0, layout) for layout in range(200)]
    pool = TaskPool(tasks)
    feedback = booked(pool, *(TaskFeedback(t, 8, 8, None) for t in tasks))
    guided(control_share=0.2).adapt(Ladder(), pool, feedback, constant, "k")
    controls = [proposal for proposal in pool.pending if proposal.is_control]
    assert 20 <= len(controls) <= 60  # 40 expected, 5.7 their deviation
    assert len(pool.pending) == 200
    for proposal in controls:
        parent = pool.record(proposal.parent_id).task
        assert proposal.task.spec == parent.spec
        assert proposal.task.id != parent.id
        assert proposal.task.difficulty == parent.difficulty
    assert pool.proposed == 200 - len(controls)


def test_fresh_slots_are_never_rewritten_and_get_another_task_after_each_visit() -> None:
    tasks = [make(0, layout) for layout in range(8)]
    pool = TaskPool(tasks, difficulty=(0.9, 1.0))
    feedback = booked(pool, *(TaskFeedback(t, 8, 8, None) for t in tasks[:6]))
    guided(fresh_share=0.5).adapt(Ladder(), pool, feedback, constant, "k")
    assert all(task.spec["level"] >= 90 for task in pool.slots[:4])
    assert {proposal.parent_id for proposal in pool.pending} == {tasks[4].id, tasks[5].id}
    assert pool.slots[6:] == tuple(tasks[6:])


class Redrawing(Ladder):
    def redraw(self, task: Task, rng: Random) -> Task | None:
        return None if task.spec["level"] == 99 else make(task.spec["level"], rng.randrange(100, 10**6))


def test_same_knobs_redraws_what_was_rolled_out() -> None:
    tasks = [make(10), make(20), make(99), make(40)]
    pool = TaskPool(tasks)
    feedback = booked(pool, *(TaskFeedback(t, 0, 8, None) for t in tasks[:3]))
    SameKnobs().adapt(Redrawing(), pool, feedback, constant, "k")
    assert [task.spec["level"] for task in pool.slots] == [10, 20, 99, 40]
    assert [task in tasks for task in pool.slots] == [False, False, True, True]
    first = pool.slots[0]
    assert (first.root_id, first.parent_id, first.version) == (tasks[0].id, tasks[0].id, 0)
    with pytest.raises(ConfigError, match="'ladder' cannot redraw"):
        EnvironmentDataModule(Ladder(), SameKnobs())
    with pytest.raises(ConfigError, match="set redraw to false"):
        EnvironmentDataModule(Ladder(), ParametricAdapter(redraw=True))


def test_redraw_leaves_parents_of_proposals_alone() -> None:
    tasks = [make(50), make(10)]
    pool = TaskPool(tasks)
    feedback = booked(pool, TaskFeedback(tasks[0], 4, 8, None), TaskFeedback(tasks[1], 8, 8, None))
    guided(redraw=True).adapt(Redrawing(), pool, feedback, constant, "k")
    assert pool.slots[0] not in tasks
    assert pool.slots[1] == tasks[1]
    assert pool.pending[0].parent_id == tasks[1].id


def test_a_task_that_cannot_be_redrawn_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Redrawing):
        def redraw(self, task, rng):
            raise OSError("no paper")

    pool = TaskPool([make(50)])
    SameKnobs().adapt(Broken(), pool, booked(pool, TaskFeedback(make(50), 4, 8, None)), constant, "k")
    assert pool.slots == (make(50),)
    assert "task ladder-50-0 could not be redrawn: OSError: no paper" in caplog.text


def test_random_proposals_are_drawn_from_variants_in_the_asked_direction() -> None:
    root, easy = make(80), make(20, parent=make(80))
    pool = TaskPool([root, make(50)])
    pool.replace_slots([root.id], [easy])
    feedback = booked(pool, TaskFeedback(easy, 8, 8, None))
    ParametricAdapter(ranking="random", control_share=0.0).adapt(Ladder(), pool, feedback, constant, "k")
    assert pool.pending[0].task.spec["level"] <= 50  # at most 30 above 20; variants of the root are at 50 and more
