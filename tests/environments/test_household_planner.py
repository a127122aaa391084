"""Plans, expert and labels of the household: against exhaustive search and against hand-worked cases."""

from random import Random

import pytest

from rla_lightning.environments.alfred.planner import distance, plan
from rla_lightning.environments.alfred.scene import GOAL_KINDS, Goal
from rla_lightning.environments.household import HouseholdEnvironment
from rla_lightning.environments.household.affordances import instruction_of
from rla_lightning.environments.household.scenes import goal_of, initial_world
from rla_lightning.types import LOST, WON, StepLabel, Task

ENVIRONMENT = HouseholdEnvironment()


def make_task(kind, object_type, target, receptacles, objects, max_turns=20, noise=0.0):
    """Receptacles as "cabinet 1*" (closed) or "cabinet 1" (open), objects as {name: place}."""
    spec = {
        "goal": {"kind": kind, "object": object_type, "target": target},
        "instruction": instruction_of(Goal(kind, object_type, target)) + ".",
        "receptacles": [{"name": r.rstrip("*"), "open": not r.endswith("*")} for r in receptacles],
        "objects": [{"name": name, "place": place} for name, place in objects.items()],
        "max_turns": max_turns,
        "noise": noise,
        "seed": 7,
        "split": "in_domain",
    }
    return Task("t", "household", spec, 0.5, root_id="t")


# (kind, object, target, receptacles, objects): two copies and an object in the way, as small as exhaustive search needs.
SMALL = [
    (
        "pick_and_place_simple", "pen", "drawer",
        ("desk 1", "drawer 1*", "drawer 2*", "shelf 1"), {"pen 1": "desk 1", "pen 2": "shelf 1", "book 1": "desk 1"},
    ),
    (
        "look_at_obj_in_light", "book", "desklamp",
        ("desk 1", "drawer 1*", "shelf 1"),
        {"book 1": "drawer 1", "book 2": "shelf 1", "pen 1": "desk 1", "desklamp 1": "desk 1"},
    ),
    (
        "pick_clean_then_place_in_recep", "cup", "cabinet",
        ("cabinet 1*", "cabinet 2", "sinkbasin 1"), {"cup 1": "cabinet 1", "cup 2": "sinkbasin 1", "plate 1": "cabinet 2"},
    ),
    (
        "pick_heat_then_place_in_recep", "apple", "fridge",
        ("countertop 1", "fridge 1*", "microwave 1*"), {"apple 1": "fridge 1", "apple 2": "microwave 1", "pen 1": "countertop 1"},
    ),
    (
        "pick_cool_then_place_in_recep", "egg", "microwave",
        ("countertop 1", "fridge 1*", "microwave 1*"), {"egg 1": "fridge 1", "egg 2": "countertop 1", "pen 1": "countertop 1"},
    ),
    (
        "pick_two_obj_and_place", "pen", "drawer",
        ("drawer 1*", "drawer 2*", "shelf 1"), {"pen 1": "drawer 1", "pen 2": "shelf 1", "pen 3": "shelf 1", "book 1": "shelf 1"},
    ),
]  # fmt: skip


def state_key(world):
    return (
        world.at, world.held, frozenset(world.places.items()), frozenset(world.opened), frozenset(world.clean),
        frozenset(world.hot), frozenset(world.cool), frozenset(world.toggled),
    )  # fmt: skip


@pytest.mark.parametrize("small", SMALL, ids=lambda small: small[0])
def test_distance_equals_exhaustive_search_in_every_reachable_state(small, exhaustive_distances):
    spec = make_task(*small).spec
    goal = goal_of(spec)
    states = exhaustive_distances(goal, initial_world(spec))
    assert len(states) > 500
    wrong = [(world, exact) for world, exact in states if distance(goal, world) != exact]
    assert wrong == []


def test_plans_have_hand_worked_lengths():
    # go desk, take, go drawer, open, move
    assert ENVIRONMENT.start(make_task(*SMALL[0])).distance() == 5
    # go shelf, take, go desk, use (the drawer would need opening)
    assert ENVIRONMENT.start(make_task(*SMALL[1])).distance() == 4
    # go sinkbasin, take, clean, go cabinet 2, move
    assert ENVIRONMENT.start(make_task(*SMALL[2])).distance() == 5
    # go microwave, open, take, heat, go fridge, open, move
    assert ENVIRONMENT.start(make_task(*SMALL[3])).distance() == 7
    # go fridge, open, take, cool, go microwave, open, move
    assert ENVIRONMENT.start(make_task(*SMALL[4])).distance() == 7
    # go shelf, take, go drawer 1 (which holds a pen already), open, move
    assert ENVIRONMENT.start(make_task(*SMALL[5])).distance() == 5


def test_no_plan_without_the_appliance_or_the_object():
    receptacles = ("coffeetable 1", "countertop 1", "sidetable 1", "sidetable 2")
    task = make_task("pick_heat_then_place_in_recep", "egg", "countertop", receptacles, {"egg 1": "sidetable 1"})
    assert ENVIRONMENT.start(task).distance() is None
    assert ENVIRONMENT.validate(task) == "The goal cannot be reached."
    episode = ENVIRONMENT.start(task)
    episode.step("go to sidetable 1")
    assert ENVIRONMENT.expert(episode, Random(1)) is None  # it has found the egg and knows that nothing heats it
    task = make_task("pick_two_obj_and_place", "egg", "countertop", receptacles, {"egg 1": "sidetable 1"})
    assert ENVIRONMENT.start(task).distance() is None


@pytest.mark.parametrize("kind", GOAL_KINDS)
def test_every_goal_kind_is_won_by_its_plan(kind):
    environment = HouseholdEnvironment(goal_kinds=(kind,), max_noise=0.0)
    for index in range(25):
        task = environment.sample(Random(f"plan {index}"), index / 24)
        episode = environment.start(task)
        actions = plan(episode.goal, episode.world)
        assert len(actions) == episode.distance() <= episode.max_turns
        for left, action in zip(range(len(actions), 0, -1), actions, strict=True):
            assert episode.distance() == left
            command = next(text for text, known in episode.actions.items() if known == action)
            assert environment.label_step(episode, command) == StepLabel(1, "#progress")
            transition = episode.step(command)
        assert transition.done
        assert transition.outcome == WON


def play_expert(environment, task, seed):
    episode, rng = environment.start(task), Random(seed)
    for turn in range(1, episode.max_turns + 1):
        action = environment.expert(episode, rng)
        assert action.action in episode.observation.commands
        transition = episode.step(action.action)
        assert transition.is_valid
        if transition.done:
            return transition.outcome, turn
    return LOST, episode.max_turns


def test_the_expert_wins_most_tasks_within_a_tight_turn_limit():
    environment = HouseholdEnvironment(turn_slack=1.2)
    results = {}
    for difficulty in (0.0, 0.5, 1.0):
        tasks = [environment.sample(Random(f"expert {i}"), difficulty) for i in range(150)]
        results[difficulty] = [play_expert(environment, task, i) for i, task in enumerate(tasks)]
    success = {d: sum(outcome == WON for outcome, _ in r) / len(r) for d, r in results.items()}
    assert success[0.0] > 0.95
    assert 0.85 < success[0.5] < 0.99
    assert 0.7 < success[1.0] < success[0.0]
    assert 8 < sum(turns for _, turns in results[0.5]) / 150 < 11


def test_the_expert_recovers_from_random_steps():
    won = 0
    for index in range(100):
        rng = Random(f"recover {index}")
        episode = ENVIRONMENT.start(ENVIRONMENT.sample(rng, rng.random()))
        done = False
        for turn in range(60):
            command = ENVIRONMENT.expert(episode, rng).action if turn > 8 else rng.choice(episode.observation.commands)
            done = episode.step(command).done
            if done:
                break
        won += done
    assert won == 100


def test_labels_worked_out_by_hand():
    objects = {"cup 1": "cabinet 1", "mug 1": "countertop 1"}
    receptacles = ("cabinet 1*", "cabinet 2*", "countertop 1", "shelf 1")
    episode = ENVIRONMENT.start(make_task("pick_and_place_simple", "cup", "shelf", receptacles, objects))

    def score(command):
        found = ENVIRONMENT.label_step(episode, command)
        return found.score, found.critique

    assert score("go to cabinet 1") == (1, "#progress")
    assert score("go to cabinet 2") == (1, "#explore")
    assert score("look") == (-1, "#idle")
    assert score("open cabinet 1") == (-1, "#invalid")
    assert score("") == (-1, "#invalid")
    episode.step("go to cabinet 2")
    assert score("open cabinet 2") == (1, "#explore")
    assert score("go to shelf 1") == (-1, "#wander")  # leaves a closed door unopened
    episode.step("open cabinet 2")
    assert score("close cabinet 2") == (-1, "#useless")
    assert score("go to countertop 1") == (1, "#explore")
    episode.step("go to countertop 1")
    assert score("take mug 1 from countertop 1") == (-1, "#wrong_object")
    assert score("go to cabinet 2") == (-1, "#wander")  # inspected before
    episode.step("go to cabinet 1")
    episode.step("open cabinet 1")
    assert score("go to shelf 1") == (-1, "#wander")  # the cup is in view: the search is over
    assert score("take cup 1 from cabinet 1") == (1, "#progress")
    episode.step("take cup 1 from cabinet 1")
    assert score("move cup 1 to cabinet 1") == (-1, "#undo")
    assert score("go to shelf 1") == (1, "#progress")
    episode.step("go to shelf 1")
    assert score("move cup 1 to shelf 1") == (1, "#progress")


def test_labelling_and_the_expert_change_nothing():
    task = ENVIRONMENT.sample(Random("pure"), 0.7)
    episode, rng = ENVIRONMENT.start(task), Random(3)
    for _ in range(8):
        before = (state_key(episode.world), episode.observation, sorted(episode.knowledge.inspected), episode.turn)
        for command in episode.observation.commands:
            ENVIRONMENT.label_step(episode, command)
        ENVIRONMENT.expert(episode, rng)
        assert (state_key(episode.world), episode.observation, sorted(episode.knowledge.inspected), episode.turn) == before
        if episode.step(rng.choice(episode.observation.commands)).done:
            break
