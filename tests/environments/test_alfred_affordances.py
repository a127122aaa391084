"""Our tables say what AlfWorld's say; constraints and sentences worked out by hand."""

import sys

import pytest

from rla_lightning.environments.alfred.affordances import (
    ABILITIES,
    FITS,
    LAMP_TYPES,
    MOVABLE_RECEPTACLES,
    OBJECT_TYPES,
    OPENABLE_TYPES,
    RECEPTACLE_TYPES,
    SPELLING,
    goal_problem,
    instructions,
)
from rla_lightning.environments.alfred.scene import GOAL_KINDS, Goal, Receptacle, Scene, Thing
from rla_lightning.environments.alfred.world import World


@pytest.fixture
def alfworld(monkeypatch, needs_engine):
    monkeypatch.setattr(sys, "argv", ["test"])
    import alfworld.gen.constants
    import alfworld.gen.goal_library

    return alfworld.gen


def test_the_tables_are_alfworlds(alfworld):
    constants = alfworld.constants
    movable = {name.lower() for name in constants.MOVABLE_RECEPTACLES_SET}
    theirs = {
        kind.lower(): {name.lower() for name in names if "Sliced" not in name}
        for kind, names in constants.VAL_RECEPTACLE_OBJECTS.items()
        if kind.lower() not in movable and kind != "TableTop"
    }
    assert {kind: set(FITS[kind]) for kind in RECEPTACLE_TYPES if kind in theirs} == theirs
    assert set(RECEPTACLE_TYPES) == theirs.keys()
    assert set(MOVABLE_RECEPTACLES) == movable
    assert {name.lower() for name in constants.OPENABLE_CLASS_LIST} - movable == OPENABLE_TYPES
    names = {"heat": "Heatable", "cool": "Coolable", "clean": "Cleanable", "slice": "Sliceable", "toggle": "Toggleable"}
    for ability, name in names.items():
        known = {*OBJECT_TYPES, *LAMP_TYPES}
        theirs = {kind.lower() for kind in constants.VAL_ACTION_OBJECTS[name]} & known
        assert ABILITIES[ability] == theirs
    assert set(SPELLING.values()) <= {*constants.OBJECTS, *constants.RECEPTACLES}


def test_the_sentences_are_alfworlds(alfworld):
    for kind in GOAL_KINDS:
        for sliced in (False, True):
            library = alfworld.goal_library.gdict[kind + ("_slice" if sliced else "")]["templates"]
            theirs = {text.format(obj="apple", recep="fridge", toggle="fridge") for text in library}
            assert set(instructions(Goal(kind, "apple", "fridge", sliced))) == theirs


def room(**things):
    """A countertop with an apple and a knife, a fridge, and more objects as type=number."""
    objects = {"apple 1": ("apple", {"pickup", "cool", "slice"}), "knife 1": ("knife", {"pickup"})}
    objects |= {f"{kind} {i + 1}": (kind, {"pickup"}) for kind, number in things.items() for i in range(number)}
    scene = Scene(
        {"countertop 1": Receptacle("countertop", "A"), "fridge 1": Receptacle("fridge", "B", True)},
        {name: Thing(kind, frozenset(can)) for name, (kind, can) in objects.items()},
        {"countertop": frozenset({"apple", "knife", "pen"}), "fridge": frozenset({"apple"})},
    )
    world = World(scene, "middle")
    for name in objects:
        world.put(name, "countertop 1")
    return scene, world


@pytest.mark.parametrize(
    ("goal", "problem"),
    [
        (Goal("pick_and_place_simple", "apple", "fridge"), None),
        (Goal("pick_and_place_simple", "apple", "fridge", sliced=True), None),
        (Goal("pick_cool_then_place_in_recep", "apple", "countertop"), None),
        (Goal("pick_two_obj_and_place", "pen", "fridge"), "The pen does not fit the fridge."),
        (Goal("pick_two_obj_and_place", "apple", "fridge"), "The goal needs 2 of apple, the room has 1."),
        (Goal("pick_and_place_simple", "egg", "fridge"), "The room has no egg that can be picked up."),
        (Goal("pick_and_place_simple", "apple", "desk"), "The room has no desk to put things in."),
        (Goal("pick_and_place_simple", "apple", "pen"), "The room has no pen to put things in."),
        (Goal("pick_and_place_simple", "knife", "fridge"), "The knife does not fit the fridge."),
        (Goal("pick_and_place_simple", "apple", "countertop"), "The goal holds at the start."),
        (Goal("pick_heat_then_place_in_recep", "apple", "fridge"), "The apple is nothing to heat."),
        (Goal("pick_cool_then_place_in_recep", "knife", "countertop"), "The knife is nothing to cool."),
        (Goal("pick_and_place_simple", "pen", "countertop", sliced=True), "The pen is nothing to slice."),
        (Goal("look_at_obj_in_light", "pen", "desklamp"), "The room has no desklamp that can be switched."),
    ],
)
def test_constraints(goal, problem):
    assert goal_problem(goal, *room(pen=2)) == problem
