"""Single edits of a small game, made on its planning problem."""

from dataclasses import replace
from random import Random

import pytest

from rla_lightning.environments.alfred.scene import Goal
from rla_lightning.environments.alfworld.edits import (
    MAX_ADDED,
    Edits,
    add_distractor,
    apply_edits,
    change_goal,
    expected_turns,
    hide,
    remove_distractor,
    unhide,
)
from rla_lightning.environments.alfworld.games import game_of
from rla_lightning.environments.alfworld.pddl import Problem

HEAT = Goal("pick_heat_then_place_in_recep", "mug", "fridge")
FACTS = """
    atlocation agent1 loc_bar_0
    receptacletype desk_bar_1 desktype; receptacleatlocation desk_bar_1 loc_bar_1
    receptacletype cabinet_bar_1 cabinettype; receptacleatlocation cabinet_bar_1 loc_bar_2; openable cabinet_bar_1
    receptacletype fridge_bar_1 fridgetype; receptacleatlocation fridge_bar_1 loc_bar_3; openable fridge_bar_1
    receptacletype microwave_bar_1 microwavetype; receptacleatlocation microwave_bar_1 loc_bar_4; openable microwave_bar_1
    cancontain desktype mugtype; cancontain cabinettype mugtype; cancontain fridgetype mugtype; cancontain desktype pentype
    cancontain microwavetype mugtype; cancontain fridgetype cuptype
    objecttype mug_bar_1 mugtype; pickupable mug_bar_1; heatable mug_bar_1; inreceptacle mug_bar_1 desk_bar_1
    objectatlocation mug_bar_1 loc_bar_1
    objecttype pen_bar_1 pentype; pickupable pen_bar_1; inreceptacle pen_bar_1 desk_bar_1; objectatlocation pen_bar_1 loc_bar_1
    objecttype cup_bar_1 cuptype; pickupable cup_bar_1; heatable cup_bar_1; inreceptacle cup_bar_1 cabinet_bar_1
    objectatlocation cup_bar_1 loc_bar_2; isreceptacleobject cup_bar_1; inreceptacleobject pen_bar_1 cup_bar_1
"""
OBJECTS = {
    "agent1": "agent", **{f"loc_bar_{number}": "location" for number in range(5)},
    **{f"{kind}_bar_1": "receptacle" for kind in ("desk", "cabinet", "fridge", "microwave")},
    **{f"{kind}type": "rtype" for kind in ("desk", "cabinet", "fridge", "microwave")},
    **{f"{kind}_bar_1": "object" for kind in ("mug", "pen", "cup")}, "mugtype": "otype", "pentype": "otype", "cuptype": "otype",
}  # fmt: skip
PROBLEM = Problem(
    OBJECTS, frozenset(tuple(fact.split()) for line in FACTS.splitlines() for fact in line.split(";") if fact.strip()), HEAT
)


def game(edits=None, goal=HEAT):
    """The game with edits made."""
    return game_of(apply_edits(replace(PROBLEM, goal=goal), edits or Edits()), "do it")


def contents(edits):
    return {name: lying for name, lying in game(edits).start.contents.items() if lying}


def test_edits_are_written_as_json_and_read_back():
    edits = Edits(HEAT, {"vase_bar_extra_0": ("vase", "desk_bar_1")}, {"mug_bar_1": "cabinet_bar_1"}, ("pen_bar_1", "cup_bar_1"))
    assert edits.to_spec() == {
        "goal": {"kind": "pick_heat_then_place_in_recep", "object": "mug", "target": "fridge", "sliced": False},
        "added": {"vase_bar_extra_0": ["vase", "desk_bar_1"]},
        "moved": {"mug_bar_1": "cabinet_bar_1"},
        "removed": ["cup_bar_1", "pen_bar_1"],
    }
    assert Edits.from_spec(edits.to_spec()) == replace(edits, removed=("cup_bar_1", "pen_bar_1"))
    assert Edits().to_spec() == {}
    assert Edits.from_spec({}) == Edits()


def test_what_edits_do_to_a_problem():
    assert contents(Edits()) == {"desk 1": ["mug 1", "pen 1"], "cabinet 1": ["cup 1"]}
    assert apply_edits(PROBLEM, Edits()) == PROBLEM
    moved = game(Edits(moved={"mug_bar_1": "microwave_bar_1"}))
    assert moved.start.places == {"pen 1": "desk 1", "cup 1": "cabinet 1", "mug 1": "microwave 1"}
    assert ("mug 1", "loc_bar_4") in moved.start.spots
    assert ("mug 1", "loc_bar_1") not in moved.start.spots
    removed = apply_edits(PROBLEM, Edits(removed=("pen_bar_1",)))
    assert "pen_bar_1" not in removed.objects
    assert not [fact for fact in removed.facts if "pen_bar_1" in fact]
    assert game_of(removed, "").scene.objects["cup 1"].inside == ()
    added = game(Edits(added={"mug_bar_extra_0": ("mug", "cabinet_bar_1"), "book_bar_extra_0": ("book", "desk_bar_1")}))
    # The last id has the lowest number: the game's own mug is now mug 2.
    assert added.start.places == {
        "mug 1": "cabinet 1", "mug 2": "desk 1", "pen 1": "desk 1", "cup 1": "cabinet 1", "book 1": "desk 1",
    }  # fmt: skip
    assert added.scene.objects["mug 1"].can == {"pickup", "heat", "cool", "clean"}
    assert added.scene.fits["desk"] == {"mug", "pen", "book"}
    assert added.scene.fits["cabinet"] == {"mug", "book"}


@pytest.mark.parametrize("edits", [
    Edits(removed=("egg_bar_1",)), Edits(moved={"egg_bar_1": "desk_bar_1"}), Edits(moved={"mug_bar_1": "sofa_bar_1"}),
    Edits(added={"pen_bar_extra_0": ("pen", "sofa_bar_1")}),
])  # fmt: skip
def test_edits_of_what_a_game_does_not_have_are_refused(edits):
    with pytest.raises(ValueError, match=r"an edit names '(egg|sofa)_bar_1', which the game does not have"):
        apply_edits(PROBLEM, edits)


def test_edits_that_change_nothing_are_dropped():
    there_and_back = Edits(HEAT, moved={"mug_bar_1": "desk_bar_1", "cup_bar_1": "desk_bar_1"})
    assert there_and_back.reduced(PROBLEM) == Edits(moved={"cup_bar_1": "desk_bar_1"})
    other = Edits(replace(HEAT, object="cup"))
    assert other.reduced(PROBLEM) == other
    # An object in two places is moved even when one of them is the new one.
    two_places = replace(PROBLEM, facts=PROBLEM.facts | {("inreceptacle", "mug_bar_1", "cabinet_bar_1")})
    assert Edits(moved={"mug_bar_1": "desk_bar_1"}).reduced(two_places).moved == {"mug_bar_1": "desk_bar_1"}


def test_hiding_and_unhiding():
    """Closed are cabinet, fridge and microwave, of which the fridge is the target."""
    places = set()
    for seed in range(20):
        hidden = hide(game(), Edits(), Random(seed))
        places.add(hidden.moved["mug_bar_1"])
        assert hide(game(hidden), hidden, Random(seed)) is None  # there is no other mug
        found = unhide(game(hidden), hidden, Random(seed))
        assert found.moved == {"mug_bar_1": "desk_bar_1"}
        assert found.reduced(PROBLEM) == Edits()
    assert places == {"cabinet_bar_1", "microwave_bar_1"}
    assert unhide(game(), Edits(), Random(0)) is None  # it lies open
    edits = Edits(added={"mug_bar_extra_0": ("mug", "cabinet_bar_1")})
    assert unhide(game(edits), edits, Random(0)) == Edits(added={"mug_bar_extra_0": ("mug", "desk_bar_1")})


def test_distractors_are_numbered_within_their_type():
    edits, rng = Edits(), Random(0)
    for _ in range(MAX_ADDED):
        edits = add_distractor(game(edits), edits, rng) or edits
    for name, (kind, place) in edits.added.items():
        assert name.startswith(f"{kind}_bar_extra_")
        assert kind not in ("mug", "fridge", "knife", "butterknife")
        assert place in ("desk_bar_1", "cabinet_bar_1", "fridge_bar_1", "microwave_bar_1")
    for kind in {kind for kind, _ in edits.added.values()}:
        numbers = sorted(int(name.rpartition("_")[2]) for name in edits.added if name.startswith(f"{kind}_bar"))
        assert numbers == list(range(len(numbers)))
    full = Edits(added={f"vase_bar_extra_{number}": ("vase", "desk_bar_1") for number in range(MAX_ADDED)})
    assert add_distractor(game(full), full, rng) is None


def test_distractors_leave_the_added_ones_first_and_never_what_is_needed():
    edits = Edits(added={"vase_bar_extra_0": ("vase", "desk_bar_1")}, moved={"pen_bar_1": "fridge_bar_1"})
    edits = remove_distractor(game(edits), edits, Random(0))
    assert edits == Edits(moved={"pen_bar_1": "fridge_bar_1"})
    edits = remove_distractor(game(edits), edits, Random(0))
    assert edits == Edits(removed=("pen_bar_1",))
    assert remove_distractor(game(edits), edits, Random(0)) is None  # the mug is needed, things may be in the cup


def test_goals_change_to_possible_ones():
    """Of mug and cup to heat: the mug fits everywhere (on the desk it is not hot yet), the cup fits the fridge."""
    goals = [change_goal(game(), Edits(), Random(seed)).goal for seed in range(60)]
    assert {(goal.object, goal.target) for goal in goals} == {
        ("mug", "desk"), ("mug", "cabinet"), ("mug", "microwave"), ("cup", "fridge"),
    }  # fmt: skip
    lonely = Goal("pick_cool_then_place_in_recep", "mug", "fridge")
    assert change_goal(game(goal=lonely), Edits(), Random(0)) is None  # nothing here can be cooled


def test_expected_turns():
    # go to desk, take, go to microwave, heat, go to fridge, open, move: 7; of 4 receptacles 3 are closed: 7 looks for one of
    # one mug in a random place.
    assert expected_turns(game()) == 7 + 7 / 2
    second = Edits(added={"mug_bar_extra_0": ("mug", "cabinet_bar_1")})
    assert expected_turns(game(second)) == pytest.approx(7 + 7 / 3)
    assert expected_turns(game(Edits(moved={"mug_bar_1": "cabinet_bar_1"}))) == 8 + 7 / 2  # the cabinet has to be opened
    assert expected_turns(game(goal=replace(HEAT, object="pen"))) is None
