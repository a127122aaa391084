"""Rewritten games: more than a thousand proposals, and what may be said of every one that is accepted."""

import json
import re
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from rla_lightning.environments.alfred.affordances import (
    ABILITIES,
    FITS,
    LAMP_TYPES,
    OBJECT_TYPES,
    RECEPTACLE_TYPES,
    instructions,
)
from rla_lightning.environments.alfred.planner import plan
from rla_lightning.environments.alfred.scene import KNIVES, Goal, Scene, Thing
from rla_lightning.environments.alfred.world import is_won
from rla_lightning.environments.alfworld import AlfWorldEnvironment
from rla_lightning.environments.alfworld.builder import build_games
from rla_lightning.environments.alfworld.edits import expected_turns
from rla_lightning.environments.alfworld.games import read_game, write_json
from rla_lightning.environments.alfworld.pddl import render_goal, render_problem
from rla_lightning.environments.alfworld.rewriting import goal_of_answer
from rla_lightning.types import WON, Task

GARBAGE = (
    "", "I cannot do that.", "\\boxed{}", "\\boxed{apple}", "\\boxed{apple, desk}", "boxed{apple} boxed{desk}",
    "\\boxed{} \\boxed{}", "\\boxed{12} \\boxed{3}", "\\boxed{unicorn} \\boxed{desk}", "\\boxed{apple} \\boxed{moon}",
    "\\boxed{\\boxed{apple}} {desk}", "\x00\\boxed{\ud800} \\boxed{é}", "<think>\\boxed{apple} \\boxed{desk}</think> Done.",
)  # fmt: skip


def boxed(item: str, target: str) -> str:
    return f"\\boxed{{{item}}} \\boxed{{{target}}}"


def disguised(item: str, target: str, rng: Random) -> str:
    """The same answer as a model may write it."""
    forms = (
        boxed(target, item),
        boxed(item.upper(), target.title()),
        boxed(f" {item} {rng.randint(1, 12)} ", f"{target}_{rng.randint(1, 12)}"),
        boxed(f"\\text{{{item}}}", f"\\text{{{target} 1}}"),
        boxed(f"{item}Type", f"{target}Type"),
        boxed(f"{item.title()}Sliced", target),
        f"<think>First \\boxed{{pen}} \\boxed{{desk}}, no.</think>\nObject: \\boxed {{{item}}}, and \\boxed{{ {target} }}.",
        "Not \\boxed{spoon} but " + boxed(item, target),
    )
    return rng.choice(forms)


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> AlfWorldEnvironment:
    folder = tmp_path_factory.mktemp("games") / "built"
    build_games(folder, 72, seed=2, size="small", evaluation_games=6, sliced_share=0.4)
    return AlfWorldEnvironment(str(folder))


@pytest.fixture(scope="module")
def rooms(tmp_path_factory) -> AlfWorldEnvironment:
    """Of full size: kitchens with many cabinets, and receptacles that share a location."""
    folder = tmp_path_factory.mktemp("games") / "built"
    build_games(folder, 24, seed=4, evaluation_games=6, sliced_share=0.5)
    return AlfWorldEnvironment(str(folder))


class Lineage:
    """Every version of one game so far, by id and by what the game is."""

    def __init__(self, environment: AlfWorldEnvironment, root: Task) -> None:
        self.environment = environment
        self.versions: dict[str, Task] = {root.id: root}
        self.games = {self.identity(root)}

    def identity(self, task: Task):
        problem = self.environment._game(task.spec).problem
        return problem.facts, problem.goal

    def add(self, child: Task, parent: Task) -> None:
        """A version that has been accepted: checks everything that the issue asks of it."""
        check_accepted(self.environment, child, parent)
        assert self.identity(child) not in self.games, "an earlier version under another id"
        self.versions[child.id] = child
        self.games.add(self.identity(child))


def check_accepted(environment: AlfWorldEnvironment, child: Task, parent: Task) -> None:
    game, before = environment._game(child.spec), environment._game(parent.spec)
    goal, scene, start = game.problem.goal, game.scene, game.start
    assert environment.validate(child, parent) is None
    assert json.loads(json.dumps(child.spec)) == child.spec
    assert (child.root_id, child.parent_id, child.version) == (parent.root_id, parent.id, parent.version + 1)
    assert child.spec["purpose"] == "train"
    assert (goal.kind, goal.sliced) == (before.problem.goal.kind, before.problem.goal.sliced)
    assert child.kind == goal.kind
    # Text and goal agree.
    assert game.instruction in instructions(goal)
    assert environment.start(child).observation.text.endswith(f"\n\nYour task is to: {game.instruction}.")
    # The constraints.
    own = [name for name, thing in scene.objects.items() if thing.type == goal.object]
    assert len(own) >= goal.count
    assert goal.object in OBJECT_TYPES
    if goal.word == "light":
        assert goal.target in LAMP_TYPES
        assert any(scene.type_of[name] == goal.target for name in start.places)
    else:
        assert goal.object in FITS[goal.target]
        assert any(receptacle.type == goal.target for receptacle in scene.receptacles.values())
    if goal.process is not None:
        appliance = {"heat": "microwave", "cool": "fridge", "clean": "sinkbasin"}[goal.process]
        assert goal.object in ABILITIES[goal.process]
        assert any(receptacle.type == appliance for receptacle in scene.receptacles.values())
    if goal.sliced:
        assert goal.object in ABILITIES["slice"]
        assert any(thing.type in KNIVES for thing in scene.objects.values())
    assert not is_won(goal, start)
    check_plan_wins(environment, child)


def check_plan_wins(environment: AlfWorldEnvironment, task: Task) -> None:
    episode = environment.start(task)
    actions = plan(episode.goal, episode.world)
    assert actions
    assert len(actions) <= task.spec["max_turns"] == episode.max_turns
    for position, action in enumerate(actions, 1):
        transition = episode.step(next(command for command, known in episode.actions.items() if known == action))
        assert transition.is_valid
        assert transition.done is (position == len(actions))
    assert transition.outcome == WON


def check_file(environment: AlfWorldEnvironment, task: Task, folder: Path) -> None:
    """The game can be written and read back."""
    game = environment._game(task.spec)
    text = render_problem(game.problem)
    data = {"pddl_domain": "", "grammar": "", "pddl_problem": text, "solvable": True, "instruction": game.instruction}
    write_json(folder / "game.tw-pddl", data)
    again = read_game(folder / "game.tw-pddl")
    assert (again.scene, again.start, again.instruction) == (game.scene, game.start, game.instruction)
    assert (again.problem.facts, again.problem.goal) == (game.problem.facts, game.problem.goal)


def reason_of(message: str) -> str:
    """The message without what it is about."""
    message = re.sub(r"'[^']*'", "_", message)
    message = re.sub(r"\b(The|no|of|to) (" + "|".join((*OBJECT_TYPES, *RECEPTACLE_TYPES, *LAMP_TYPES)) + r")\b", r"\1 _", message)
    message = re.sub(r"the (" + "|".join((*RECEPTACLE_TYPES, *LAMP_TYPES)) + r")\b", "the _", message)
    return re.sub(r"to (heat|cool|clean|slice)\b", "to _", re.sub(r"\d+", "n", message))


def test_every_accepted_answer_of_a_rewriter_is_a_good_task(environment, rooms):
    """Chains of answers, as the paper's rewriter would give them over several iterations."""
    counts: Counter[str] = Counter()
    for source, answers, share in ((environment, 34, 0.5), (rooms, 20, 0.4)):
        for task in source.corpus("train", "in_domain"):
            rng, lineage, latest = Random(task.id), Lineage(source, task), task
            for _ in range(answers):
                scene = source._game(latest.spec).scene
                present = sorted({thing.type for thing in scene.objects.values()})
                targets = sorted({receptacle.type for receptacle in scene.receptacles.values()} | set(LAMP_TYPES))
                item = rng.choice(present if rng.random() < 0.8 else OBJECT_TYPES)
                target = rng.choice(targets if rng.random() < 0.8 else RECEPTACLE_TYPES)
                answer = rng.choice(GARBAGE) if rng.random() < 0.1 else boxed(item, target)
                answer = disguised(item, target, rng) if answer[-1:] == "}" and rng.random() < share else answer
                result = source.apply_rewrite(latest, answer)
                if isinstance(result, str):
                    counts[reason_of(result)] += 1
                elif result.id in lineage.versions:
                    counts["an earlier version"] += 1
                else:
                    lineage.add(result, latest)
                    latest = result
                    counts["accepted"] += 1
    assert counts.total() > 2000
    assert counts["accepted"] > 150
    assert counts["an earlier version"] > 10
    often = {reason for reason, number in counts.items() if number >= 5}
    assert often >= {
        "accepted", "an earlier version", "The goal is unchanged.", "The goal is that of the original game.",
        "The room has no object _ with a target _.", "The _ does not fit the _.", "The _ is nothing to _.",
        "The goal needs n of _, the room has n.", "The goal holds at the start.", "The answer has n boxes, not two.",
    }  # fmt: skip


def test_every_accepted_variation_is_a_good_task(environment, rooms):
    """Chains of random edits of all kinds, tried as `vary` tries them, and those that it lets through."""
    counts: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for source, tries in ((environment, 10), (rooms, 6)):
        for task in source.corpus("train", "in_domain"):
            rng, lineage, latest = Random(task.id), Lineage(source, task), task
            for attempt in range(tries):
                child = source._child(latest, source._edited(latest, ("harder", "easier")[attempt % 2], rng))
                problem = "Nothing is left of the edits." if child is None else source.validate(child, latest)
                if problem is not None:
                    counts[reason_of(problem)] += 1
                elif child.id in lineage.versions:
                    counts["an earlier version"] += 1
                else:
                    lineage.add(child, latest)
                    latest = child
                    counts["accepted"] += 1
                    changed.update(list(child.spec["edits"]))
    assert counts.total() > 700
    assert counts["accepted"] > 300
    assert counts.total() - counts["accepted"] > 80
    assert min(changed[name] for name in ("goal", "added", "moved", "removed")) > 50


@pytest.mark.parametrize("direction", ["harder", "easier"])
def test_variations_go_where_they_are_asked_to(environment, rooms, direction, tmp_path):
    found = defaultdict(list)
    for source, number in ((environment, 40), (rooms, 12)):
        for index, task in enumerate(source.corpus("train", "in_domain")[:number]):
            before = expected_turns(source._game(task.spec))
            children = source.vary(task, direction, Random(index), 2)
            assert children == source.vary(task, direction, Random(index), 2)
            assert len({child.id for child in children}) == len(children) <= 2
            for child in children:
                check_accepted(source, child, task)
                after = expected_turns(source._game(child.spec))
                assert after > before if direction == "harder" else after < before
                check_file(source, child, tmp_path)
                found[task.id].append(child)
    assert len(found) > 30
    assert len({name for children in found.values() for child in children for name in child.spec["edits"]}) >= 3


def test_held_out_games_are_never_rewritten(environment):
    held_out = [(purpose, split) for purpose in ("validation", "test") for split in ("in_domain", "out_of_distribution")]
    refused = 0
    for purpose, split in held_out:
        for task in environment.corpus(purpose, split):
            game = environment._game(task.spec)
            assert environment.vary(task, "harder", Random(0), 3) == ()
            assert environment.rewrite_prompt(task, "harder", "", 1, 2) is None
            items = {thing.type for thing in game.scene.objects.values() if "pickup" in thing.can}
            for item in items - {game.problem.goal.object}:
                result = environment.apply_rewrite(task, boxed(item, game.problem.goal.target))
                assert isinstance(result, str)
                refused += result == "A held-out game cannot be rewritten."
            child = environment._child(task, environment._edited(task, "harder", Random(1)))
            assert child is None or environment.validate(child, task) == "A held-out game cannot be rewritten."
    assert refused > 50


# One small kitchen


PROBLEM = """
(define (problem p) (:domain alfred)
  (:objects agent1 - agent loc_bar_0 loc_bar_1 loc_bar_2 loc_bar_3 - location
    countertop_bar_1 fridge_bar_1 microwave_bar_1 - receptacle
    apple_bar_1 apple_bar_2 bread_bar_1 knife_bar_1 mug_bar_1 painting_bar_1 - object
    countertoptype fridgetype microwavetype - rtype appletype breadtype knifetype mugtype paintingtype - otype)
  (:init (atlocation agent1 loc_bar_0)
    (receptacletype countertop_bar_1 countertoptype) (receptacleatlocation countertop_bar_1 loc_bar_1)
    (receptacletype fridge_bar_1 fridgetype) (receptacleatlocation fridge_bar_1 loc_bar_2) (openable fridge_bar_1)
    (receptacletype microwave_bar_1 microwavetype) (receptacleatlocation microwave_bar_1 loc_bar_3) (openable microwave_bar_1)
    (cancontain countertoptype appletype) (cancontain countertoptype breadtype) (cancontain countertoptype mugtype)
    (cancontain fridgetype appletype) (cancontain fridgetype mugtype) (cancontain microwavetype mugtype)
    (objecttype apple_bar_1 appletype) (pickupable apple_bar_1) (inreceptacle apple_bar_1 fridge_bar_1)
    (objectatlocation apple_bar_1 loc_bar_2) (heatable apple_bar_1) (coolable apple_bar_1) (sliceable apple_bar_1)
    (objecttype apple_bar_2 appletype) (pickupable apple_bar_2) (inreceptacle apple_bar_2 countertop_bar_1)
    (objectatlocation apple_bar_2 loc_bar_1) (heatable apple_bar_2) (coolable apple_bar_2) (sliceable apple_bar_2)
    (objecttype bread_bar_1 breadtype) (pickupable bread_bar_1) (inreceptacle bread_bar_1 countertop_bar_1)
    (objectatlocation bread_bar_1 loc_bar_1) (heatable bread_bar_1) (coolable bread_bar_1) (sliceable bread_bar_1)
    (objecttype knife_bar_1 knifetype) (pickupable knife_bar_1) (inreceptacle knife_bar_1 countertop_bar_1)
    (objectatlocation knife_bar_1 loc_bar_1)
    (objecttype mug_bar_1 mugtype) (pickupable mug_bar_1) (inreceptacle mug_bar_1 microwave_bar_1)
    (objectatlocation mug_bar_1 loc_bar_3) (heatable mug_bar_1) (coolable mug_bar_1) (cleanable mug_bar_1)
    (objecttype painting_bar_1 paintingtype) (inreceptacle painting_bar_1 countertop_bar_1))
  GOAL)
"""
PEN, LAMP = Thing("pen", frozenset({"pickup"})), Thing("desklamp", frozenset({"toggle"}))
HEAT = Goal("pick_heat_then_place_in_recep", "apple", "countertop")


def kitchen(folder: Path, goal: Goal, instruction: str, **arguments: object) -> tuple[AlfWorldEnvironment, Task]:
    text = PROBLEM.replace("GOAL", render_goal(goal))
    data = {"pddl_domain": "", "grammar": "", "pddl_problem": text, "solvable": True, "instruction": instruction}
    write_json(folder / "train" / f"{goal.kind}-Any-None-Any-7" / "trial_1" / "game.tw-pddl", data)
    environment = AlfWorldEnvironment(str(folder), **arguments)
    (task,) = environment.corpus("train", "in_domain")
    return environment, task


def test_what_a_rewriter_is_asked(tmp_path):
    environment, task = kitchen(tmp_path, HEAT, "heat some apple and put it in countertop")
    assert (
        environment.rewrite_prompt(task, "harder", "#search often helps", 3, 8)
        == """\
You design tasks for an agent in a simulated household. Change the goal of the task below so that its difficulty suits \
the agent. The room stays as it is, and so does the kind of task.

Task: heat some apple and put it in countertop.
Goal object: apple
Goal receptacle: countertop

How the agent did: 3 of 8 attempts succeeded.

What was noticed in its attempts:
#search often helps

The room at the start:
countertop 1: apple 1, bread 1, knife 1, painting 1
fridge 1 (closed): apple 2
microwave 1 (closed): mug 1
Can be cleaned: mug
Can be heated: apple, bread, mug
Can be cooled: apple, bread, mug
Can be sliced: apple, bread

Rules:
- The object has to be in the room.
- The receptacle has to be in the room and the object has to fit there; it must not be there already.
- It must be possible to heat the object.

Make the task somewhat HARDER: an object that is hidden, far from what comes to mind or needs more steps. At least one \
of the two words has to change. Think briefly, then answer with the new object and the new receptacle, each in a box of \
its own: \\boxed{object} \\boxed{receptacle}"""
    )


def test_what_differs_in_other_prompts(tmp_path):
    two = Goal("pick_two_obj_and_place", "apple", "fridge", sliced=True)
    environment, task = kitchen(tmp_path, two, "put two sliced apple in fridge")
    prompt = environment.rewrite_prompt(task, "easier", "", 0, 0)
    assert "How the agent did: it has not been attempted.\n\nThe room at the start:" in prompt
    assert "- The room needs two of the object; it has two or more of: apple.\n" in prompt
    assert "- The object must be one that can be sliced, with a butterknife or knife.\n" in prompt
    assert "somewhat EASIER: an object that lies open" in prompt
    environment.changes = ("distractors", "hiding")
    assert environment.rewrite_prompt(task, "easier", "", 0, 0) is None


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("", "The answer has 0 boxes, not two."),
        ("\\boxed{apple}", "The answer has 1 boxes, not two."),
        ("<think>\\boxed{mug} \\boxed{fridge}</think> Done.", "The answer has 0 boxes, not two."),
        (boxed("apple", "countertop"), "The goal is unchanged."),
        (boxed("Countertop", "Apple 2"), "The goal is unchanged."),
        (boxed("egg", "fridge"), "The room has no object 'egg' with a target 'fridge'."),
        (boxed("painting", "fridge"), "The room has no object 'painting' with a target 'fridge'."),
        (boxed("apple", "desk"), "The room has no object 'apple' with a target 'desk'."),
        (boxed("apple", "apple"), "The room has no object 'apple' with a target 'apple'."),
        (boxed("fridge", "countertop"), "The room has no object 'fridge' with a target 'countertop'."),
        (boxed("apple", "microwave"), "The apple does not fit the microwave."),
        (boxed("knife", "countertop"), "The knife is nothing to heat."),
    ],
)
def test_answers_that_are_refused(tmp_path, answer, problem):
    environment, task = kitchen(tmp_path, HEAT, "put a hot apple in countertop")
    assert environment.apply_rewrite(task, answer) == problem


@pytest.mark.parametrize(
    "answer",
    [
        "\\boxed{mug} \\boxed{fridge}",
        "\\boxed{FRIDGE}, \\boxed{Mug 1}",
        "<think>\\boxed{apple} \\boxed{fridge}</think> \\boxed{\\text{mug}}\n\\boxed{\\text{fridge 1}}",
        "\\boxed{bread} \\boxed{apple} \\boxed {mugType} \\boxed{ fridge_1 }",
    ],
)
def test_an_answer_that_is_taken(tmp_path, answer):
    environment, task = kitchen(tmp_path, HEAT, "heat some apple and put it in countertop")
    child = environment.apply_rewrite(task, answer)
    goal = {"kind": "pick_heat_then_place_in_recep", "object": "mug", "target": "fridge", "sliced": False}
    assert child.spec == {**task.spec, "edits": {"goal": goal}, "instruction": "put a hot mug in fridge"}
    assert (child.parent_id, child.root_id, child.version, child.kind) == (task.id, task.id, 1, HEAT.kind)
    # go to microwave, open, take, heat, go to fridge, open, move: 7 steps; 3 + 2 receptacles to search for one of one copy
    assert child.difficulty == (7 + 5 / 2) / 40
    assert environment.apply_rewrite(child, boxed("apple", "countertop")) == "The goal is that of the original game."
    again = environment.apply_rewrite(environment.apply_rewrite(child, boxed("bread", "countertop")), answer)
    assert (again.id, again.version) == (child.id, 3)  # the pool knows the id


def test_the_original_goal_is_new_in_a_room_that_has_changed(tmp_path):
    environment, task = kitchen(tmp_path, HEAT, "heat some apple and put it in countertop")
    child = environment.apply_rewrite(task, boxed("mug", "fridge"))
    edits = {**child.spec["edits"], "removed": ["bread_bar_1"]}
    back = environment.apply_rewrite(replace(child, spec={**child.spec, "edits": edits}), boxed("apple", "countertop"))
    assert back.spec == {**task.spec, "edits": {"removed": ["bread_bar_1"]}}  # with the file's own instruction
    assert "heat some apple and put it in countertop" in environment.start(back).observation.text


def test_lamps_are_named_first_or_last():
    scene = Scene({}, {"pen 1": PEN, "desklamp 1": LAMP, "floorlamp 1": replace(LAMP, type="floorlamp")}, {})
    goal = Goal("look_at_obj_in_light", "pen", "desklamp")
    for answer in (boxed("pen", "floorlamp"), boxed("FloorLamp", "pen")):
        assert goal_of_answer(goal, scene, answer) == replace(goal, target="floorlamp")
    assert goal_of_answer(goal, scene, boxed("desklamp", "pen")) == goal
    refused = "The room has no object 'desklamp' with a target 'floorlamp'."
    assert goal_of_answer(goal, scene, boxed("desklamp", "floorlamp")) == refused


def test_a_plan_must_leave_turns_to_spare(tmp_path):
    # 7 steps for the mug: 1.25 * 7 = 8.75
    environment, task = kitchen(tmp_path, HEAT, "put a hot apple in countertop", max_turns=9)
    assert isinstance(environment.apply_rewrite(task, boxed("mug", "fridge")), Task)
    short = AlfWorldEnvironment(str(tmp_path), max_turns=8)
    (task,) = short.corpus("train", "in_domain")
    problem = "The turn limit 8 is too short for a plan of 7 steps."
    assert short.apply_rewrite(task, boxed("mug", "fridge")) == problem


def test_texts_that_disagree_with_the_goal_are_refused(tmp_path):
    environment, task = kitchen(tmp_path, HEAT, "put a hot apple in countertop")
    child = environment.apply_rewrite(task, boxed("mug", "fridge"))
    wrong = replace(child, spec={**child.spec, "instruction": "put a hot mug in countertop"})
    assert environment.validate(wrong) == "The instruction 'put a hot mug in countertop' disagrees with the goal."
    assert environment.validate(child, child) == "The task equals its parent."
    assert environment.validate(task, task) == "The task equals its parent."
    assert environment.validate(task) is None
    gone = replace(child, spec={**child.spec, "game": "train/gone/trial_1/game.tw-pddl"})
    assert environment.validate(gone) == "no game.tw-pddl"
