"""The household's dialect, admissible commands, digests and observation noise."""

import pickle
from collections import Counter
from random import Random

import pytest

from rla_lightning.environments.alfred.knowledge import SLOT_WORDS
from rla_lightning.environments.alfred.planner import CRITIQUES, THOUGHTS
from rla_lightning.environments.alfred.scene import Goal
from rla_lightning.environments.household import HouseholdEnvironment
from rla_lightning.environments.household.affordances import instruction_of
from rla_lightning.types import WON, Task

ENVIRONMENT = HouseholdEnvironment()
FUNCTION_WORDS = {"to", "from", "with", "in", "on"}


def make_task(kind, object_type, target, receptacles, objects, noise=0.0, seed=7):
    """Receptacles as "cabinet 1*" (closed) or "cabinet 1" (open), objects as {name: place}."""
    spec = {
        "goal": {"kind": kind, "object": object_type, "target": target},
        "instruction": instruction_of(Goal(kind, object_type, target)) + ".",
        "receptacles": [{"name": r.rstrip("*"), "open": not r.endswith("*")} for r in receptacles],
        "objects": [{"name": name, "place": place} for name, place in objects.items()],
        "max_turns": 20,
        "noise": noise,
        "seed": seed,
        "split": "in_domain",
    }
    return Task("t", "household", spec, 0.5, root_id="t")


def short_form(command):
    """The compact prompt's form of a command: entities are one word, function words dropped, two words kept."""
    words = []
    for word in command.split():
        if word.isdigit():
            words[-1] += f"_{word}"
        elif word not in FUNCTION_WORDS:
            words.append(word)
    return " ".join(words[:2])


KITCHEN = ("cabinet 1*", "countertop 1", "fridge 1*", "microwave 1*", "sidetable 1", "sinkbasin 1")
THINGS = {
    "apple 1": "fridge 1",
    "apple 2": "countertop 1",
    "cup 1": "cabinet 1",
    "desklamp 1": "sidetable 1",
    "knife 1": "countertop 1",
}


def kitchen(kind="pick_and_place_simple", object_type="cup", target="sidetable"):
    return ENVIRONMENT.start(make_task(kind, object_type, target, KITCHEN, THINGS))


def test_transcript_of_every_verb():
    episode = kitchen()
    assert episode.observation.text == (
        "-= Welcome to TextWorld, ALFRED! =-\n\n"
        "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a countertop 1, a fridge 1, "
        "a microwave 1, a sidetable 1, and a sinkbasin 1.\n\n"
        "Your task is to: put some cup on sidetable."
    )
    transcript = [
        ("inventory", "You are not carrying anything."),
        ("go to countertop 1", "You arrive at countertop 1. On the countertop 1, you see a apple 2, and a knife 1."),
        ("look", "You are facing the countertop 1. Next to it, you see nothing."),
        ("take knife 1 from countertop 1", "You pick up the knife 1 from the countertop 1."),
        ("inventory", "You are carrying: a knife 1."),
        ("slice apple 2 with knife 1", "You sliced the apple 2 with the knife 1."),
        ("examine apple 2", "Nothing happens."),
        ("take apple 2 from countertop 1", "Nothing happens."),
        ("examine knife 1", "There's nothing special about knife 1."),
        ("move knife 1 to countertop 1", "You move the knife 1 to the countertop 1."),
        ("take apple 2 from countertop 1", "You pick up the apple 2 from the countertop 1."),
        ("examine apple 2", "This is a sliced apple 2."),
        ("move apple 2 to countertop 1", "You move the apple 2 to the countertop 1."),
        ("examine countertop 1", "On the countertop 1, you see a apple 2, and a knife 1."),
        ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("take apple 1 from fridge 1", "Nothing happens."),
        ("examine fridge 1", "The fridge 1 is closed."),
        ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1."),
        ("take apple 1 from fridge 1", "You pick up the apple 1 from the fridge 1."),
        ("examine fridge 1", "The fridge 1 is open. In it, you see nothing."),
        ("close fridge 1", "You close the fridge 1."),
        ("cool apple 1 with fridge 1", "You cool the apple 1 using the fridge 1."),
        ("examine apple 1", "This is a cold apple 1."),
        ("clean apple 1 with sinkbasin 1", "Nothing happens."),
        ("go to sinkbasin 1", "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing."),
        ("clean apple 1 with sinkbasin 1", "You clean the apple 1 using the sinkbasin 1."),
        ("examine apple 1", "This is a cool and clean apple 1."),
        ("go to microwave 1", "You arrive at microwave 1. The microwave 1 is closed."),
        ("heat apple 1 with microwave 1", "You heat the apple 1 using the microwave 1."),
        ("examine apple 1", "This is a hot and clean apple 1."),
        ("go to sidetable 1", "You arrive at sidetable 1. On the sidetable 1, you see a desklamp 1."),
        ("examine desklamp 1", "Nothing happens."),
        ("use desklamp 1", "You turn on the desklamp 1."),
        ("take desklamp 1 from sidetable 1", "Nothing happens."),
        ("eat apple 1", "Nothing happens."),
        ("", "Nothing happens."),
        ("move apple 1 to sidetable 1", "You move the apple 1 to the sidetable 1."),
        ("go to cabinet 1", "You arrive at cabinet 1. The cabinet 1 is closed."),
        ("open cabinet 1", "You open the cabinet 1. The cabinet 1 is open. In it, you see a cup 1."),
        ("take cup 1 from cabinet 1", "You pick up the cup 1 from the cabinet 1."),
        ("Go To  sidetable 1", "You arrive at sidetable 1. On the sidetable 1, you see a apple 1, and a desklamp 1."),
    ]
    for command, text in transcript:
        transition = episode.step(command)
        assert (command, transition.observation.text) == (command, text)
        assert transition.is_valid is (text != "Nothing happens.")
        assert not transition.done
    assert episode.step("help").observation.text.startswith("Available commands:\n  look:  ")
    last = episode.step("move cup 1 to sidetable 1")
    assert (last.done, last.outcome, last.observation.text) == (True, WON, "You move the cup 1 to the sidetable 1.")
    with pytest.raises(RuntimeError, match="over"):
        episode.step("look")


def test_heating_undoes_cooling_and_cooling_undoes_heating():
    things = {"egg 1": "countertop 1", "egg 2": "countertop 1"}
    task = make_task("pick_cool_then_place_in_recep", "egg", "sidetable", KITCHEN, things)
    for last, wins in (("heat egg 1 with microwave 1", False), ("cool egg 1 with fridge 1", True)):
        episode = ENVIRONMENT.start(task)
        commands = ["go to countertop 1", "take egg 1 from countertop 1"]
        for process in ("heat egg 1 with microwave 1", "cool egg 1 with fridge 1", "heat egg 1 with microwave 1", last):
            commands += [f"go to {process[-11:] if 'microwave' in process else process[-8:]}", process]
        commands += ["go to sidetable 1", "move egg 1 to sidetable 1"]
        assert [episode.step(command).done for command in commands][-1] is wins


def test_admissible_commands_are_listed_in_order():
    episode = kitchen()
    going = [f"go to {name.rstrip('*')}" for name in KITCHEN]
    assert episode.observation.commands == (*going, "help", "inventory", "look")
    episode.step("go to countertop 1")
    assert episode.observation.commands == (
        "examine countertop 1", "go to cabinet 1", "go to fridge 1", "go to microwave 1",
        "go to sidetable 1", "go to sinkbasin 1", "help", "inventory", "look", "take apple 2 from countertop 1",
        "take knife 1 from countertop 1",
    )  # fmt: skip
    episode.step("take apple 2 from countertop 1")
    episode.step("go to microwave 1")
    assert [c for c in episode.observation.commands if not c.startswith("go")] == [
        "examine apple 2", "examine microwave 1", "heat apple 2 with microwave 1", "help", "inventory", "look",
        "open microwave 1",
    ]  # fmt: skip


def test_digest_of_a_hand_worked_episode():
    episode = kitchen("pick_cool_then_place_in_recep", "apple", "countertop")

    def digest():
        return " ".join(episode.observation.digest)

    assert digest() == (
        "cool apple countertop hold nothing - at middle - here seen with fridge_1 to countertop_1 "
        "new cabinet_1 countertop_1 fridge_1 microwave_1 sidetable_1 ok"
    )
    episode.step("go to fridge 1")
    assert digest() == (
        "cool apple countertop hold nothing - at fridge_1 closed here seen with fridge_1 to countertop_1 "
        "new fridge_1 cabinet_1 countertop_1 microwave_1 sidetable_1 ok"
    )
    episode.step("open fridge 1")  # the search is over: nothing is new any more
    assert digest() == (
        "cool apple countertop hold nothing - at fridge_1 open here apple_1 seen with fridge_1 to countertop_1 new ok"
    )
    episode.step("open fridge 1")
    assert digest().endswith("new nothing")
    episode.step("go to cabinet 1")
    assert digest() == (
        "cool apple countertop hold nothing - at cabinet_1 closed here seen apple_1 fridge_1 with fridge_1 to countertop_1 new ok"
    )
    episode.step("go to fridge 1")
    episode.step("take apple 1 from fridge 1")
    episode.step("cool apple 1 with fridge 1")
    assert digest() == "cool apple countertop hold apple_1 cool at fridge_1 open here seen with fridge_1 to countertop_1 new ok"
    assert not episode.step("go to countertop 1").done  # the apple that lies there is not cool
    assert digest() == (
        "cool apple countertop hold apple_1 cool at countertop_1 - here apple_2 knife_1 seen with fridge_1 to countertop_1 new ok"
    )
    assert episode.step("move apple 1 to countertop 1").done


def test_digest_of_two_and_of_light():
    receptacles = ("desk 1", "drawer 1*", "drawer 2", "shelf 1")
    pens = {"pen 1": "desk 1", "pen 2": "shelf 1", "desklamp 1": "desk 1"}
    episode = ENVIRONMENT.start(make_task("pick_two_obj_and_place", "pen", "drawer", receptacles, pens))
    for command in ("go to desk 1", "take pen 1 from desk 1", "go to drawer 2", "move pen 1 to drawer 2"):
        episode.step(command)
    assert " ".join(episode.observation.digest) == (
        "two pen drawer hold nothing - at drawer_2 open here seen placed drawer_2 to drawer_2 drawer_1 new drawer_1 shelf_1 ok"
    )
    episode = ENVIRONMENT.start(make_task("look_at_obj_in_light", "pen", "desklamp", receptacles, pens))
    assert " ".join(episode.observation.digest) == (
        "light pen desklamp hold nothing - at middle - here seen with - - off new desk_1 drawer_1 drawer_2 shelf_1 ok"
    )
    episode.step("go to desk 1")
    episode.step("use desklamp 1")
    assert " ".join(episode.observation.digest) == (
        "light pen desklamp hold nothing - at desk_1 - here pen_1 seen with desklamp_1 desk_1 on new ok"
    )
    assert episode.step("take pen 1 from desk 1").done


def random_walks(number, split="in_domain"):
    """(task, episode, rng) in states that mixed expert and random steps reach."""
    for index in range(number):
        rng = Random(f"walk {index} {split}")
        task = ENVIRONMENT.sample(rng, rng.random(), split)
        episode = ENVIRONMENT.start(task)
        for _ in range(episode.max_turns):
            yield task, episode, rng
            command = rng.choice(episode.observation.commands)
            if rng.random() < 0.5:
                command = ENVIRONMENT.expert(episode, rng).action
            if episode.step(command).done:
                break
        yield task, episode, rng


@pytest.mark.parametrize("split", ["in_domain", "out_of_distribution"])
def test_words_are_in_the_vocabulary_and_short_forms_are_unique(split):
    vocabulary = ENVIRONMENT.vocabulary()
    assert list(vocabulary) == sorted(set(vocabulary))
    assert len(vocabulary) <= 300
    known, used = set(vocabulary), set()
    for task, episode, rng in random_walks(150, split):
        observation = episode.observation
        shorts = [short_form(command) for command in observation.commands]
        assert len(set(shorts)) == len(shorts)
        used.update(*(short.split() for short in shorts), observation.digest, ENVIRONMENT.describe(task).split())
        assert len(observation.digest) <= 32
        if not episode.is_done:
            used.add(ENVIRONMENT.expert(episode, rng).thought)
            used.add(ENVIRONMENT.label_step(episode, rng.choice([*observation.commands, "jump"])).critique)
    assert used <= known


def test_the_vocabulary_has_no_unused_kind_of_word():
    used = set()
    for split in ("in_domain", "out_of_distribution"):
        for task, episode, _ in random_walks(150, split):
            used.update(episode.observation.digest, ENVIRONMENT.describe(task).split())
            used.update(*(short_form(command).split() for command in episode.observation.commands))
    unused = set(ENVIRONMENT.vocabulary()) - used
    rare = {word for word in unused if word.endswith("_3") or word[1:].isdigit()}  # third copies, the largest knob values
    assert len(rare) < 12
    assert unused - rare == {*THOUGHTS, *CRITIQUES}


def test_every_listed_command_is_valid_and_others_change_nothing():
    checked = Counter()
    for _, episode, rng in random_walks(60):
        if episode.is_done:
            continue
        for command in rng.sample(episode.observation.commands, 3):
            assert pickle.loads(pickle.dumps(episode)).step(command).is_valid
            checked["valid"] += 1
        twin = pickle.loads(pickle.dumps(episode))
        wrong = rng.choice(("take apple 3 from sofa 1", "open countertop 2", "go to attic 1", "use lamp", "apple"))
        if wrong in episode.observation.commands:
            continue
        transition = twin.step(wrong)
        assert not transition.is_valid
        assert not transition.done
        assert transition.observation.commands == episode.observation.commands
        assert twin.world == episode.world
        checked["invalid"] += 1
    assert min(checked.values()) > 200


def test_observations_do_not_depend_on_what_is_hidden():
    """Two worlds that differ only where the agent has not looked show the same, word for word."""
    shown = []
    for places in (("cabinet 1", "fridge 1"), ("fridge 1", "cabinet 1")):
        things = {
            "cup 1": places[0],
            "cup 2": places[0],
            "plate 1": places[1],
            "mug 1": "countertop 1",
            "desklamp 1": "sidetable 1",
        }
        task = make_task("pick_and_place_simple", "cup", "sidetable", KITCHEN, things)
        episode = ENVIRONMENT.start(task)
        seen = [episode.observation]
        for command in ("go to cabinet 1", "go to countertop 1", "take mug 1 from countertop 1", "go to fridge 1", "look", "fly"):
            seen.append(episode.step(command).observation)
        shown.append((seen, ENVIRONMENT.expert(episode, Random(1))))
    assert shown[0] == shown[1]


def test_the_digest_names_only_objects_that_some_observation_mentioned():
    mentioned, current = "", None
    for _, episode, _ in random_walks(150):
        mentioned = mentioned if episode is current else ""
        current = episode
        mentioned += episode.observation.text
        entities = [word.replace("_", " ") for word in episode.observation.digest if "_" in word]
        assert all(name in mentioned for name in entities)


def parse_digest(digest):
    slots, name = {}, ""
    for word in digest[3:-1]:
        if word in SLOT_WORDS:
            name = word
            slots[name] = []
        else:
            slots[name].append(word)
    return slots


def act_holding(kind, slots, explore):
    (held, state), (at, door) = slots["hold"], slots["at"]
    if kind in ("clean", "heat", "cool") and state == "-":
        appliance = slots["with"][0]
        return f"{kind} {held}" if at == appliance else f"go {appliance}"
    if kind == "light":
        lamp, place, _ = slots["with"]
        return explore if lamp == "-" else f"use {lamp}" if at == place else f"go {place}"
    if at not in slots["to"]:
        return f"go {slots['to'][0]}"
    return f"open {at}" if door == "closed" else f"move {held}"


def act_on_digest(digest, rng):
    """The short command that the digest alone suggests to somebody who remembers nothing."""
    slots = parse_digest(digest)
    at, new, here = slots["at"][0], slots["new"], slots["here"]
    explore = "" if not new else f"open {at}" if at == new[0] else f"go {rng.choice(new)}"
    if slots["hold"][0] != "nothing":
        return act_holding(digest[0], slots, explore)
    if here and here[0].startswith(f"{digest[1]}_"):
        return f"take {here[0]}"
    if slots["seen"]:
        place = slots["seen"][1]
        return f"open {at}" if at == place else f"go {place}"
    return explore


def test_the_digest_alone_says_enough_to_act_as_well_as_the_expert():
    won = Counter()
    for index in range(300):
        task = ENVIRONMENT.sample(Random(f"digest {index}"), index / 299)
        for player in ("digest", "expert"):
            episode, rng = ENVIRONMENT.start(task), Random(index)
            for _ in range(episode.max_turns):
                if player == "expert":
                    command = ENVIRONMENT.expert(episode, rng).action
                else:
                    short = act_on_digest(episode.observation.digest, rng)
                    command = next(c for c in episode.observation.commands if short_form(c) == short)
                if episode.step(command).done:
                    won[player] += 1
                    break
    assert won["digest"] > 0.96 * won["expert"] > 240


def test_noise_leaves_objects_out_at_its_rate_and_deterministically():
    things = {f"{kind} {i}": "countertop 1" for kind in ("cup", "mug", "plate") for i in (1, 2, 3)}
    texts, left_out, total = [], 0, 0
    for seed in range(60):
        task = make_task("pick_and_place_simple", "pen", "sidetable", KITCHEN, things | {"pen 1": "cabinet 1"}, 0.3, seed)
        for _ in range(2):
            episode = ENVIRONMENT.start(task)
            episode.step("go to countertop 1")
            text = episode.observation.text
            first = {name for name in things if name in text}
            assert {c.split(" from")[0][5:] for c in episode.observation.commands if c.startswith("take")} == first
            episode.step("examine countertop 1")
            second = {name for name in things if name in episode.observation.text}
            # What was noticed once stays known; what has never been mentioned is not in the commands.
            assert {c.split(" from")[0][5:] for c in episode.observation.commands if c.startswith("take")} == first | second
            texts.append((text, episode.observation))
        assert texts[-1] == texts[-2]
        left_out, total = left_out + 18 - len(first) - len(second), total + 18
    assert 0.24 < left_out / total < 0.36  # 1,080 draws at 0.3: standard error 0.014


def test_a_search_that_noise_made_fail_starts_over():
    things = {"pen 1": "desk 1", "book 1": "desk 1", "cup 1": "shelf 1"}
    for seed in range(200):
        task = make_task("pick_and_place_simple", "pen", "drawer", ("desk 1", "drawer 1", "shelf 1", "sofa 1"), things, 0.5, seed)
        episode = ENVIRONMENT.start(task)
        if "pen 1" not in episode.step("go to desk 1").observation.text:
            break
    for command in ("go to drawer 1", "go to shelf 1"):
        episode.step(command)
    assert episode.observation.digest[-3:] == ("new", "sofa_1", "ok")
    episode.step("go to sofa 1")
    assert episode.observation.digest[-5:] == ("new", "desk_1", "drawer_1", "shelf_1", "ok")
    assert ENVIRONMENT.label_step(episode, "go to shelf 1").critique == "#explore"
