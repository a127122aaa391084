"""Digests written out for every kind of goal, and that they tell nothing which no observation has told."""

import re
from random import Random

import pytest

from rla_lightning.environments.alfred.episode import AlfredEpisode
from rla_lightning.environments.alfred.scene import Goal, Receptacle, Scene, Thing
from rla_lightning.environments.alfred.vocabulary import alfred_vocabulary
from rla_lightning.environments.alfred.world import World
from rla_lightning.environments.alfworld import AlfWorldEnvironment
from rla_lightning.environments.alfworld.builder import build_games
from rla_lightning.rollout.formats import short_forms

FOOD = frozenset({"pickup", "heat", "cool", "clean", "slice"})
PICKUP = frozenset({"pickup"})
OPENABLE = {"drawer", "fridge", "microwave"}
RECEPTACLES = {"countertop 1": "B", "drawer 1": "A", "drawer 2": "A", "fridge 1": "C", "microwave 1": "D", "sinkbasin 1": "B"}
PLACES = {
    "apple 1": "fridge 1", "apple 2": "drawer 2", "desklamp 1": "drawer 1", "desklamp 2": "countertop 1",
    "knife 1": "countertop 1", "mug 1": "countertop 1", "pen 1": "drawer 1", "pen 2": "fridge 1",
}  # fmt: skip
CAN = {"apple": FOOD, "desklamp": frozenset({"toggle"}), "mug": FOOD - {"slice"}}
ALL = frozenset({"apple", "knife", "mug", "pen"})


def digests(goal, *commands):
    """The digest at the start and after each command, as one string each."""
    receptacles = {name: Receptacle(name.split()[0], at, name.split()[0] in OPENABLE) for name, at in RECEPTACLES.items()}
    objects = {name: Thing(name.split()[0], CAN.get(name.split()[0], PICKUP)) for name in PLACES}
    world = World(Scene(receptacles, objects, {receptacle.type: ALL for receptacle in receptacles.values()}), "middle")
    for name, place in PLACES.items():
        world.put(name, place)
        world.spots.add((name, RECEPTACLES[place]))
    episode = AlfredEpisode(goal, world, "do it", 50)
    return [" ".join(episode.observation.digest), *(" ".join(episode.step(c).observation.digest) for c in commands)]


def test_put():
    assert digests(
        Goal("pick_and_place_simple", "mug", "drawer"),
        "go to drawer 1", "open drawer 1", "examine drawer 2", "go to countertop 1", "take mug 1 from countertop 1", "dance",
        "go to drawer 2", "move mug 1 to drawer 1",
    ) == [
        "put mug drawer hold nothing - at middle - here seen to drawer_1 drawer_2"
        " new countertop_1 drawer_1 drawer_2 fridge_1 microwave_1 ok",
        "put mug drawer hold nothing - at drawer_1 closed here seen to drawer_1 drawer_2"
        " new drawer_1 countertop_1 drawer_2 fridge_1 microwave_1 ok",
        "put mug drawer hold nothing - at drawer_1 open here desklamp_1 pen_1 seen to drawer_1 drawer_2"
        " new countertop_1 drawer_2 fridge_1 microwave_1 sinkbasin_1 ok",
        # Drawer 2 is at the same location, but closed: that it has been looked at says nothing about its contents.
        "put mug drawer hold nothing - at drawer_1 open here desklamp_1 pen_1 seen to drawer_1 drawer_2"
        " new countertop_1 drawer_2 fridge_1 microwave_1 sinkbasin_1 ok",
        # Drawer 1 is known to be open, so it would still be the first to put something into.
        "put mug drawer hold nothing - at countertop_1 - here mug_1 desklamp_2 knife_1 seen to drawer_1 drawer_2 new ok",
        "put mug drawer hold mug_1 - at countertop_1 - here desklamp_2 knife_1 seen to drawer_1 drawer_2 new ok",
        "put mug drawer hold mug_1 - at countertop_1 - here desklamp_2 knife_1 seen to drawer_1 drawer_2 new nothing",
        "put mug drawer hold mug_1 - at drawer_2 closed here desklamp_1 pen_1 seen to drawer_2 drawer_1 new ok",
        "put mug drawer hold nothing - at drawer_2 closed here mug_1 desklamp_1 pen_1 seen to drawer_2 drawer_1 new ok",
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "word", "appliance", "state"), [
    ("pick_heat_then_place_in_recep", "heat", "microwave", "hot"),
    ("pick_cool_then_place_in_recep", "cool", "fridge", "cool"),
    ("pick_clean_then_place_in_recep", "clean", "sinkbasin", "clean"),
])  # fmt: skip
def test_processes(kind, word, appliance, state):
    found = digests(
        Goal(kind, "mug", "drawer"),
        "go to countertop 1", "take mug 1 from countertop 1", f"go to {appliance} 1", f"{word} mug 1 with {appliance} 1",
        "go to drawer 2",
    )  # fmt: skip
    tail = f"seen with {appliance}_1 to drawer_1 drawer_2 new ok"
    last = f"seen with {appliance}_1 to drawer_2 drawer_1 new ok"
    assert found[1] == f"{word} mug drawer hold nothing - at countertop_1 - here mug_1 desklamp_2 knife_1 {tail}"
    assert found[2] == f"{word} mug drawer hold mug_1 - at countertop_1 - here desklamp_2 knife_1 {tail}"
    assert found[4].startswith(f"{word} mug drawer hold mug_1 {state} at ")
    assert found[5] == f"{word} mug drawer hold mug_1 {state} at drawer_2 closed here {last}"


def test_heating_undoes_cooling():
    found = digests(
        Goal("pick_cool_then_place_in_recep", "mug", "drawer"),
        "go to countertop 1", "take mug 1 from countertop 1", "go to fridge 1", "cool mug 1 with fridge 1", "go to microwave 1",
        "heat mug 1 with microwave 1",
    )  # fmt: skip
    assert [" ".join(text.split()[3:6]) for text in found[4:]] == ["hold mug_1 cool", "hold mug_1 cool", "hold mug_1 -"]


def test_two():
    assert digests(
        Goal("pick_two_obj_and_place", "apple", "drawer"),
        "go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "go to drawer 1", "open drawer 1",
        "move apple 1 to drawer 1", "open drawer 2",
    )[2:] == [
        "two apple drawer hold nothing - at fridge_1 open here apple_1 pen_2 seen placed - to drawer_1 drawer_2"
        " new countertop_1 drawer_1 drawer_2 microwave_1 sinkbasin_1 ok",
        "two apple drawer hold apple_1 - at fridge_1 open here pen_2 seen placed - to drawer_1 drawer_2"
        " new countertop_1 drawer_1 drawer_2 microwave_1 sinkbasin_1 ok",
        "two apple drawer hold apple_1 - at drawer_1 closed here seen placed - to drawer_1 drawer_2"
        " new drawer_1 countertop_1 drawer_2 microwave_1 sinkbasin_1 ok",
        "two apple drawer hold apple_1 - at drawer_1 open here desklamp_1 pen_1 seen placed - to drawer_1 drawer_2"
        " new countertop_1 drawer_2 microwave_1 sinkbasin_1 ok",
        "two apple drawer hold nothing - at drawer_1 open here desklamp_1 pen_1 seen placed drawer_1 to drawer_1 drawer_2"
        " new countertop_1 drawer_2 microwave_1 sinkbasin_1 ok",
        # Found: the apple in the other drawer, before which the agent stands, too.
        "two apple drawer hold nothing - at drawer_1 open here apple_2 desklamp_1 pen_1 seen placed drawer_1 to drawer_1 drawer_2"
        " new ok",
    ]  # fmt: skip


def test_light_with_several_lamps():
    assert digests(
        Goal("look_at_obj_in_light", "pen", "desklamp"),
        "go to countertop 1", "use desklamp 2", "go to fridge 1", "open fridge 1", "take pen 2 from fridge 1",
    ) == [
        "light pen desklamp hold nothing - at middle - here seen with - - off"
        " new countertop_1 drawer_1 drawer_2 fridge_1 microwave_1 ok",
        "light pen desklamp hold nothing - at countertop_1 - here knife_1 mug_1 seen with desklamp_2 countertop_1 off"
        " new drawer_1 drawer_2 fridge_1 microwave_1 sinkbasin_1 ok",
        "light pen desklamp hold nothing - at countertop_1 - here knife_1 mug_1 seen with desklamp_2 countertop_1 on"
        " new drawer_1 drawer_2 fridge_1 microwave_1 sinkbasin_1 ok",
        "light pen desklamp hold nothing - at fridge_1 closed here seen with desklamp_2 countertop_1 on"
        " new fridge_1 drawer_1 drawer_2 microwave_1 sinkbasin_1 ok",
        "light pen desklamp hold nothing - at fridge_1 open here pen_2 apple_1 seen with desklamp_2 countertop_1 on new ok",
        "light pen desklamp hold pen_2 - at fridge_1 open here apple_1 seen with desklamp_2 countertop_1 on new ok",
    ]  # fmt: skip


def test_sliced_goals_have_a_slot_for_the_knife():
    assert digests(
        Goal("pick_and_place_simple", "apple", "drawer", sliced=True),
        "go to countertop 1", "take knife 1 from countertop 1", "go to fridge 1", "open fridge 1", "slice apple 1 with knife 1",
    ) == [
        "put apple drawer hold nothing - at middle - here seen cut - - - to drawer_1 drawer_2"
        " new countertop_1 drawer_1 drawer_2 fridge_1 microwave_1 ok",
        "put apple drawer hold nothing - at countertop_1 - here desklamp_2 knife_1 mug_1 seen cut knife_1 countertop_1 -"
        " to drawer_1 drawer_2 new drawer_1 drawer_2 fridge_1 microwave_1 sinkbasin_1 ok",
        "put apple drawer hold knife_1 - at countertop_1 - here desklamp_2 mug_1 seen cut knife_1 hold -"
        " to drawer_1 drawer_2 new drawer_1 drawer_2 fridge_1 microwave_1 sinkbasin_1 ok",
        "put apple drawer hold knife_1 - at fridge_1 closed here seen cut knife_1 hold -"
        " to drawer_1 drawer_2 new fridge_1 drawer_1 drawer_2 microwave_1 sinkbasin_1 ok",
        "put apple drawer hold knife_1 - at fridge_1 open here apple_1 pen_2 seen cut knife_1 hold - to drawer_1 drawer_2 new ok",
        "put apple drawer hold knife_1 - at fridge_1 open here apple_1 pen_2 seen cut knife_1 hold sliced"
        " to drawer_1 drawer_2 new ok",
    ]  # fmt: skip


# Games of full size


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> AlfWorldEnvironment:
    folder = tmp_path_factory.mktemp("games") / "built"
    build_games(folder, 48, seed=6, evaluation_games=6, sliced_share=0.4)
    return AlfWorldEnvironment(str(folder))


def test_digests_tell_only_what_observations_told_in_words_of_the_vocabulary(environment):
    words, cabinets = set(alfred_vocabulary()), 0
    for task in environment.corpus("train", "in_domain"):
        episode, rng = environment.start(task), Random(task.id)
        told = episode.observation.text
        cabinets = max(cabinets, len(episode.world.scene.of_type("cabinet")))
        assert set(environment.describe(task).split()) <= words
        for turn in range(60):
            observation = episode.observation
            assert set(observation.digest) <= words
            named = {word.replace("_", " ") for word in observation.digest if re.search(r"_\d+$", word)}
            assert {name for name in named if not re.search(rf"\b{name}\b", told)} == set()
            short = short_forms(observation.commands).values()
            assert len(set(short)) == len(short)
            assert {word for command in short for word in command.split()} <= words
            if episode.is_done:
                break
            acting = [command for command in observation.commands if not command.startswith("go to")]
            told += episode.step(rng.choice(acting if turn % 2 else observation.commands)).observation.text
    assert cabinets == 14
    assert len(words) == len(alfred_vocabulary()) < 1200


def test_where_a_digest_says_that_things_are_they_are_or_were(environment):
    """Nothing moves but what the agent moves, so beliefs are never wrong."""
    checked = 0
    for task in environment.corpus("train", "in_domain"):
        episode, rng = environment.start(task), Random(task.id)
        for _ in range(40):
            if episode.is_done:
                break
            known, real = episode.knowledge.places, episode.world.places
            assert {name: real[name] for name in known} == known
            assert episode.knowledge.belief.opened <= episode.world.opened
            checked += len(known)
            episode.step(rng.choice(episode.observation.commands))
    assert checked > 1000
