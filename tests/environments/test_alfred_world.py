"""The simulator's texts and commands, written out; test_alfworld_engine.py compares them with the engine."""

import pytest

from rla_lightning.environments.alfred.episode import AlfredEpisode
from rla_lightning.environments.alfred.scene import Goal, Receptacle, Scene, Thing
from rla_lightning.environments.alfred.world import HELP, World, join, listing
from rla_lightning.types import WON

FOOD = frozenset({"pickup", "heat", "cool", "clean", "slice"})
PICKUP = frozenset({"pickup"})
ALWAYS = ("help", "inventory", "look")
RECEPTACLES = {
    "cabinet 1": Receptacle("cabinet", "A", is_openable=True),
    "drawer 1": Receptacle("drawer", "A", is_openable=True),
    "countertop 1": Receptacle("countertop", "B"),
    "fridge 1": Receptacle("fridge", "C", is_openable=True),
    "microwave 1": Receptacle("microwave", "C", is_openable=True),
    "sinkbasin 1": Receptacle("sinkbasin", "D"),
}
OBJECTS = {
    "apple 1": Thing("apple", FOOD),
    "apple 2": Thing("apple", FOOD),
    "cup 1": Thing("cup", FOOD - {"slice"}, inside=("spoon 1",)),
    "desklamp 1": Thing("desklamp", frozenset({"toggle"})),
    "knife 1": Thing("knife", PICKUP | {"clean"}),
    "pen 1": Thing("pen", PICKUP),
    "plate 1": Thing("plate", FOOD - {"slice"}, inside=()),
    "spoon 1": Thing("spoon", PICKUP),
}
FITS = {
    "cabinet": frozenset({"cup", "plate"}),
    "drawer": frozenset({"knife", "pen", "spoon"}),
    "countertop": frozenset({"apple", "cup", "knife", "pen", "plate", "spoon"}),
    "fridge": frozenset({"apple", "cup"}),
    "microwave": frozenset({"apple", "cup"}),
    "sinkbasin": frozenset({"apple", "knife"}),
}
PLACES = {
    "apple 1": "fridge 1", "apple 2": "countertop 1", "cup 1": "countertop 1", "desklamp 1": "drawer 1",
    "knife 1": "countertop 1", "pen 1": "drawer 1", "plate 1": "cabinet 1", "spoon 1": "countertop 1",
}  # fmt: skip


NO_GOAL = Goal("pick_and_place_simple", "egg", "fridge")  # there is no egg


def start(goal=NO_GOAL):
    world = World(Scene(RECEPTACLES, OBJECTS, FITS), "middle")
    for name, place in PLACES.items():
        world.put(name, place)
        world.spots.add((name, RECEPTACLES[place].location))
    return AlfredEpisode(goal, world, "do it", max_turns=50)


def said(episode, *commands):
    """The text after each command."""
    return [episode.step(command).observation.text for command in commands]


def test_the_first_observation():
    episode = start()
    assert episode.observation.text == (
        "-= Welcome to TextWorld, ALFRED! =-\n\n"
        "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a drawer 1, a countertop 1, "
        "a fridge 1, a microwave 1, and a sinkbasin 1.\n\n"
        "Your task is to: do it."
    )
    assert episode.observation.commands == (
        "go to cabinet 1", "go to countertop 1", "go to drawer 1", "go to fridge 1", "go to microwave 1", "go to sinkbasin 1",
        *ALWAYS,
    )  # fmt: skip


def test_verbs_and_their_sentences():
    assert said(
        start(),
        "look", "inventory", "help", "go to fridge 1", "open fridge 1", "examine fridge 1", "take apple 1 from fridge 1",
        "inventory", "examine apple 1", "close fridge 1", "cool apple 1 with fridge 1", "examine apple 1",
        "heat apple 1 with microwave 1", "examine apple 1", "go to sinkbasin 1", "clean apple 1 with sinkbasin 1",
        "examine apple 1", "move apple 1 to sinkbasin 1", "inventory",
    ) == [
        "You are in the middle of a room. Looking quickly around you, you see nothing.",
        "You are not carrying anything.",
        HELP,
        "You arrive at fridge 1. The fridge 1 is closed.",
        "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1.",
        "The fridge 1 is open. In it, you see a apple 1.",
        "You pick up the apple 1 from the fridge 1.",
        "You are carrying: a apple 1.",
        "There's nothing special about apple 1.",
        "You close the fridge 1.",
        "You cool the apple 1 using the fridge 1.",
        "This is a cold apple 1.",
        "You heat the apple 1 using the microwave 1.",
        "This is a hot apple 1.",
        "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.",
        "You clean the apple 1 using the sinkbasin 1.",
        "This is a hot and clean apple 1.",
        "You move the apple 1 to the sinkbasin 1.",
        "You are not carrying anything.",
    ]  # fmt: skip


def test_commands_where_two_receptacles_are():
    episode = start()
    episode.step("go to drawer 1")
    assert episode.observation.commands == (
        "examine cabinet 1", "examine drawer 1", "go to countertop 1", "go to fridge 1", "go to microwave 1", "go to sinkbasin 1",
        "help", "inventory", "look", "open cabinet 1", "open drawer 1", "use desklamp 1",
    )  # fmt: skip
    assert said(episode, "look", "go to cabinet 1", "open drawer 1", "examine cabinet 1", "examine drawer 1") == [
        "You are facing the cabinet 1, and drawer 1. Next to it, you see nothing.",
        "Nothing happens.",  # the agent is there already
        "You open the drawer 1. The drawer 1 is open. In it, you see a desklamp 1, and a pen 1.",
        "The cabinet 1 is closed.",
        "The drawer 1 is open. In it, you see a desklamp 1, and a pen 1.",
    ]
    assert "take pen 1 from drawer 1" in episode.observation.commands
    assert "take desklamp 1 from drawer 1" not in episode.observation.commands
    assert "close drawer 1" in episode.observation.commands
    assert "take plate 1 from cabinet 1" not in episode.observation.commands  # closed


def test_a_lamp_in_a_closed_drawer_can_be_switched():
    assert said(start(), "go to cabinet 1", "use desklamp 1", "use desklamp 1") == [
        "You arrive at cabinet 1. The cabinet 1 is closed.",
        "You turn on the desklamp 1.",
        "You turn on the desklamp 1.",
    ]


def test_looking_under_a_lamp_wins_in_either_order():
    goal = Goal("look_at_obj_in_light", "pen", "desklamp")
    for commands in (
        ("go to drawer 1", "open drawer 1", "take pen 1 from drawer 1", "use desklamp 1"),
        ("go to drawer 1", "use desklamp 1", "open drawer 1", "take pen 1 from drawer 1"),
    ):
        episode = start(goal)
        transitions = [episode.step(command) for command in commands]
        assert [(t.done, t.outcome, t.is_valid) for t in transitions] == [(False, None, True)] * 3 + [(True, WON, True)]
        with pytest.raises(RuntimeError, match="episode is over"):
            episode.step("look")


def test_slicing_reaches_into_a_closed_fridge():
    episode = start()
    said(episode, "go to countertop 1", "take knife 1 from countertop 1")
    assert [command for command in episode.observation.commands if command.startswith("slice")] == ["slice apple 2 with knife 1"]
    assert said(episode, "slice apple 2 with knife 1", "go to fridge 1", "slice apple 1 with knife 1", "open fridge 1") == [
        "You sliced the apple 2 with the knife 1.",
        "You arrive at fridge 1. The fridge 1 is closed.",
        "You sliced the apple 1 with the knife 1.",
        "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1.",
    ]
    assert said(episode, "go to sinkbasin 1", "move knife 1 to sinkbasin 1", "go to fridge 1", "take apple 1 from fridge 1") == [
        "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.",
        "You move the knife 1 to the sinkbasin 1.",
        "You arrive at fridge 1. The fridge 1 is open. In it, you see a apple 1.",
        "You pick up the apple 1 from the fridge 1.",
    ]
    assert said(
        episode,
        "examine apple 1", "cool apple 1 with fridge 1", "examine apple 1", "heat apple 1 with microwave 1", "examine apple 1",
        "go to sinkbasin 1", "clean apple 1 with sinkbasin 1", "examine apple 1",
    ) == [
        "This is a sliced apple 1.",
        "You cool the apple 1 using the fridge 1.",
        "This is a cool sliced apple 1.",
        "You heat the apple 1 using the microwave 1.",
        "This is a hot sliced apple 1.",
        "You arrive at sinkbasin 1. On the sinkbasin 1, you see a knife 1.",
        "You clean the apple 1 using the sinkbasin 1.",
        "This is a hot and clean sliced apple 1.",
    ]  # fmt: skip


def test_an_object_is_sliced_where_it_was_put_last():
    episode = start()
    said(episode, "go to countertop 1", "take apple 2 from countertop 1", "go to sinkbasin 1", "move apple 2 to sinkbasin 1")
    said(episode, "go to countertop 1", "take knife 1 from countertop 1")
    assert "slice apple 2 with knife 1" not in episode.observation.commands
    episode.step("go to sinkbasin 1")
    assert "slice apple 2 with knife 1" in episode.observation.commands


def test_movable_receptacles_say_what_is_in_them():
    episode = start()
    commands = ("go to countertop 1", "take cup 1 from countertop 1", "examine cup 1")
    assert said(episode, *commands)[-1] == "This is a normal cup 1. In it, you see a spoon 1."
    assert said(episode, "go to fridge 1", "cool cup 1 with fridge 1", "examine cup 1")[-1] == (
        "This is a normal cup 1. In it, you see a spoon 1."
    )
    episode = start()
    commands = ("go to cabinet 1", "open cabinet 1", "take plate 1 from cabinet 1", "examine plate 1")
    assert said(episode, *commands)[-1] == "This is a normal plate 1. In it, you see nothing."


def test_next_to_it_is_what_was_put_into_another_receptacle_there():
    episode = start()
    said(episode, "go to fridge 1", "open fridge 1", "open microwave 1", "take apple 1 from fridge 1")
    assert said(episode, "look", "move apple 1 to microwave 1", "look", "take apple 1 from microwave 1") == [
        "You are facing the fridge 1, and microwave 1. Next to it, you see nothing.",
        "You move the apple 1 to the microwave 1.",
        "You are facing the fridge 1, and microwave 1. Next to it, you see a apple 1.",
        "You pick up the apple 1 from the microwave 1.",
    ]
    assert said(episode, "move apple 1 to fridge 1", "look") == [
        "You move the apple 1 to the fridge 1.",
        "You are facing the fridge 1, and microwave 1. Next to it, you see a apple 1.",  # it has left the microwave
    ]
    episode = start()
    said(episode, "go to countertop 1", "take spoon 1 from countertop 1", "move spoon 1 to countertop 1")
    assert said(episode, "look") == ["You are facing the countertop 1. Next to it, you see nothing."]


def test_only_what_fits_can_be_moved_and_only_with_empty_hands_taken():
    episode = start()
    said(episode, "go to countertop 1", "take spoon 1 from countertop 1")
    assert not [command for command in episode.observation.commands if command.startswith("take")]
    episode.step("go to fridge 1")
    episode.step("open fridge 1")
    assert episode.observation.commands == (
        "close fridge 1", "examine fridge 1", "examine microwave 1", "examine spoon 1", "go to cabinet 1", "go to countertop 1",
        "go to drawer 1", "go to sinkbasin 1", *ALWAYS, "open microwave 1",
    )  # fmt: skip


def test_objects_are_listed_in_the_scenes_order_whatever_was_moved():
    episode = start()
    commands = ("go to countertop 1", "take apple 2 from countertop 1", "move apple 2 to countertop 1", "examine countertop 1")
    assert said(episode, *commands) == [
        "You arrive at countertop 1. On the countertop 1, you see a apple 2, a cup 1, a knife 1, and a spoon 1.",
        "You pick up the apple 2 from the countertop 1.",
        "You move the apple 2 to the countertop 1.",
        "On the countertop 1, you see a apple 2, a cup 1, a knife 1, and a spoon 1.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "command",
    ["", " ", "go", "go to", "go to cabinet 9", "go to cabinet", "take apple 2", "open countertop 1", "¿"],
)
def test_nothing_happens_when_a_command_is_not_admissible(command):
    episode = start()
    before = episode.observation
    transition = episode.step(command)
    assert (transition.observation.text, transition.is_valid, transition.done) == ("Nothing happens.", False, False)
    assert transition.observation.commands == before.commands
    assert transition.observation.digest == (*before.digest[:-1], "nothing")


def test_case_and_white_space_do_not_matter():
    assert start().step("  GO to\tFridge  1 ").observation.text == "You arrive at fridge 1. The fridge 1 is closed."


def test_lists_of_words():
    assert [join(words) for words in ((), ("a",), ("a", "b"), ("a", "b", "c"))] == ["nothing", "a", "a, and b", "a, b, and c"]
    twelve = listing([f"apple {number}" for number in range(1, 13)])
    assert twelve.startswith("a apple 1, a apple 2, ")
    assert twelve.endswith(", a apple 11, and a apple 12")


def test_two_objects_must_be_in_one_receptacle():
    receptacles = {"shelf 1": Receptacle("shelf", "A"), "shelf 2": Receptacle("shelf", "A"), "desk 1": Receptacle("desk", "B")}
    things = {f"pen {number}": Thing("pen", PICKUP) for number in (1, 2, 3)}
    world = World(Scene(receptacles, things, dict.fromkeys(("shelf", "desk"), frozenset({"pen"}))), "middle")
    for name in things:
        world.put(name, "desk 1")
    episode = AlfredEpisode(Goal("pick_two_obj_and_place", "pen", "shelf"), world, "do it", 50)
    for number, place in ((1, "shelf 1"), (2, "shelf 2"), (3, "shelf 2")):
        assert not episode.is_done
        said(episode, "go to desk 1", f"take pen {number} from desk 1", f"go to {place}", f"move pen {number} to {place}")
    assert episode.is_done


@pytest.mark.parametrize(
    ("commands", "won"),
    [
        (("heat apple 2 with microwave 1",), True),
        (("cool apple 2 with fridge 1",), False),
        ((), False),
        (("heat apple 2 with microwave 1", "cool apple 2 with fridge 1"), False),
    ],
)
def test_heated_objects_must_still_be_hot(commands, won):
    episode = start(Goal("pick_heat_then_place_in_recep", "apple", "sinkbasin"))
    said(episode, "go to countertop 1", "take apple 2 from countertop 1", "go to microwave 1")
    said(episode, *commands, "go to sinkbasin 1", "move apple 2 to sinkbasin 1")
    assert episode.is_done is won
