"""Shortest plans in general scenes: several receptacles at one location, slicing, lamps in drawers."""

from random import Random

import pytest

from rla_lightning.environments.alfred.episode import AlfredEpisode
from rla_lightning.environments.alfred.planner import distance, plan
from rla_lightning.environments.alfred.scene import Goal, Receptacle, Scene, Thing
from rla_lightning.environments.alfred.world import World

ANY = frozenset({"apple", "bread", "knife", "butterknife", "pen", "book"})
FITS = {
    "countertop": ANY | {"desklamp"},
    "drawer": frozenset({"pen", "knife", "butterknife", "desklamp"}),
    "fridge": frozenset({"apple", "bread"}),
    "microwave": frozenset({"apple", "bread"}),
    "sinkbasin": frozenset({"apple", "knife"}),
    "cabinet": frozenset({"book"}),
    "desk": ANY | {"desklamp"},
}
CAN = {
    "apple": {"pickup", "heat", "cool", "clean", "slice"},
    "bread": {"pickup", "heat", "cool", "slice"},
    "desklamp": {"toggle"},
}
OPENABLE = {"drawer", "fridge", "microwave", "cabinet"}


def make_world(receptacles, objects, opened=()):
    """Receptacles as {name: location}, objects as {name: receptacle}."""
    scene = Scene(
        {name: Receptacle(name.split()[0], at, name.split()[0] in OPENABLE) for name, at in receptacles.items()},
        {name: Thing(name.split()[0], frozenset(CAN.get(name.split()[0], {"pickup"}))) for name in objects},
        FITS,
    )
    world = World(scene, "middle", opened=set(opened))
    for name, place in objects.items():
        world.put(name, place)
        world.spots.add((name, receptacles[place]))
    return world


SHARED = {"countertop 1": "A", "drawer 1": "A", "fridge 1": "B", "microwave 1": "C"}
CASES = {
    "put, shared": (Goal("pick_and_place_simple", "apple", "fridge"), SHARED, {"apple 1": "countertop 1", "pen 1": "drawer 1"}),
    "put sliced": (
        Goal("pick_and_place_simple", "apple", "fridge", sliced=True),
        SHARED,
        {"apple 1": "countertop 1", "knife 1": "drawer 1"},
    ),
    "heat sliced": (
        Goal("pick_heat_then_place_in_recep", "apple", "fridge", sliced=True),
        {"countertop 1": "A", "fridge 1": "B", "microwave 1": "C"},
        {"apple 1": "fridge 1", "butterknife 1": "countertop 1"},
    ),
    "cool sliced, shared": (
        Goal("pick_cool_then_place_in_recep", "bread", "microwave", sliced=True),
        {"countertop 1": "A", "fridge 1": "B", "microwave 1": "B"},
        {"bread 1": "microwave 1", "knife 1": "countertop 1"},
    ),
    "clean sliced": (
        Goal("pick_clean_then_place_in_recep", "apple", "countertop", sliced=True),
        {"countertop 1": "A", "sinkbasin 1": "B", "fridge 1": "C"},
        {"apple 1": "fridge 1", "knife 1": "sinkbasin 1"},
    ),
    "two sliced": (
        Goal("pick_two_obj_and_place", "apple", "fridge", sliced=True),
        {"countertop 1": "A", "fridge 1": "B"},
        {"apple 1": "countertop 1", "apple 2": "fridge 1", "knife 1": "countertop 1"},
    ),
    "light sliced, lamp in a drawer": (
        Goal("look_at_obj_in_light", "apple", "desklamp", sliced=True),
        {"countertop 1": "A", "drawer 1": "B", "desk 1": "C"},
        {"apple 1": "countertop 1", "knife 1": "desk 1", "desklamp 1": "drawer 1"},
    ),
    "two lamps": (
        Goal("look_at_obj_in_light", "book", "desklamp"),
        {"desk 1": "A", "drawer 1": "B", "cabinet 1": "C"},
        {"book 1": "cabinet 1", "desklamp 1": "desk 1", "desklamp 2": "drawer 1"},
    ),
    "two, two targets at one location": (
        Goal("pick_two_obj_and_place", "pen", "drawer"),
        {"drawer 1": "A", "drawer 2": "A", "desk 1": "B"},
        {"pen 1": "drawer 1", "pen 2": "desk 1", "book 1": "desk 1"},
    ),
    "two, targets that do not differ": (
        Goal("pick_two_obj_and_place", "pen", "drawer"),
        {"drawer 1": "A", "drawer 2": "B", "drawer 3": "C", "desk 1": "D"},
        {"pen 1": "desk 1", "pen 2": "desk 1"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_distance_equals_exhaustive_search_in_every_reachable_state(case, exhaustive_distances):
    goal, receptacles, objects = CASES[case]
    states = exhaustive_distances(goal, make_world(receptacles, objects))
    assert len(states) > 100
    if len(states) > 1500:
        states = Random(case).sample(states, 1500)
    assert [(w, exact, distance(goal, w)) for w, exact in states if distance(goal, w) != exact] == []


def test_a_sliced_goal_worked_out_by_hand():
    goal, receptacles, objects = CASES["put sliced"]
    world = make_world(receptacles, objects)
    # The knife lies in the drawer at the apple's location; it can be dropped on the countertop beside the apple.
    assert plan(goal, world) == [
        ("go", "", "drawer 1"),
        ("open", "", "drawer 1"),
        ("take", "knife 1", "drawer 1"),
        ("slice", "apple 1", "knife 1"),
        ("move", "knife 1", plan(goal, world)[4][2]),  # either receptacle there
        ("take", "apple 1", "countertop 1"),
        ("go", "", "fridge 1"),
        ("open", "", "fridge 1"),
        ("move", "apple 1", "fridge 1"),
    ]


def test_no_knife_no_plan():
    goal, receptacles, objects = CASES["put sliced"]
    world = make_world(receptacles, {name: place for name, place in objects.items() if name != "knife 1"})
    assert distance(goal, world) is None


@pytest.mark.parametrize("case", CASES)
def test_the_expert_reaches_every_goal_from_what_it_has_seen(case):
    from rla_lightning.environments.alfred.planner import expert_step

    goal, receptacles, objects = CASES[case]
    for seed in range(10):
        episode, rng = AlfredEpisode(goal, make_world(receptacles, objects), "do it", 60), Random(seed)
        for _ in range(60):
            action = expert_step(episode.knowledge, episode.actions, rng)
            if episode.step(action.action).done:
                break
        assert episode.is_done, episode.observation.digest
