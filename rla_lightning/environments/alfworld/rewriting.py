r"""What a rewriter language model is asked about a game, and how its answer is read: two \boxed{} tokens.

As in the paper only the two type tokens of the goal may change, object and receptacle (or lamp); unlike in its public
release the instruction is rebuilt from the new goal and every constraint is a hard filter (paper's release: warnings).
"""

from __future__ import annotations

import re
from collections import Counter

from rla_lightning.environments.alfred.scene import KNIVES, Goal, Scene
from rla_lightning.environments.alfworld.games import Game
from rla_lightning.types import Direction

BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\text\s*\{)?([^{}]*)\}")
_ABILITY_WORDS = {"clean": "cleaned", "heat": "heated", "cool": "cooled", "slice": "sliced"}
_ADVICE = {
    "harder": "Make the task somewhat HARDER: an object that is hidden, far from what comes to mind or needs more steps.",
    "easier": "Make the task somewhat EASIER: an object that lies open or a place that is quickly found.",
}


def rewrite_prompt(game: Game, direction: Direction, critique: str, successes: int, rollouts: int) -> str:
    """The question for the rewriter: the room at the start, the old goal and how the agent did."""
    goal = game.problem.goal
    second = "lamp" if goal.word == "light" else "receptacle"
    accuracy = f"{successes} of {rollouts} attempts succeeded" if rollouts else "it has not been attempted"
    parts = [
        "You design tasks for an agent in a simulated household. Change the goal of the task below so that its difficulty "
        "suits the agent. The room stays as it is, and so does the kind of task.",
        f"Task: {game.instruction}.\nGoal object: {goal.object}\nGoal {second}: {goal.target}",
        f"How the agent did: {accuracy}.",
    ]
    parts += [f"What was noticed in its attempts:\n{critique}"] if critique else []
    parts.append(f"The room at the start:\n{digest(game)}")
    parts.append(_constraints(goal, game.scene))
    parts.append(
        f"{_ADVICE[direction]} At least one of the two words has to change. Think briefly, then answer with the new object and "
        f"the new {second}, each in a box of its own: \\boxed{{object}} \\boxed{{{second}}}"
    )
    return "\n\n".join(parts)


def digest(game: Game) -> str:
    """Every receptacle with what is in it, and what can be done to which types of object."""
    scene, start = game.scene, game.start
    lines = []
    for name in scene.receptacles:
        state = " (closed)" if start.is_shut(name) else ""
        lines.append(f"{name}{state}: {', '.join(start.contents.get(name, ())) or 'nothing'}")
    for ability, word in _ABILITY_WORDS.items():
        kinds = sorted({thing.type for thing in scene.objects.values() if ability in thing.can})
        lines.append(f"Can be {word}: {', '.join(kinds) or 'nothing'}")
    return "\n".join(lines)


def _constraints(goal: Goal, scene: Scene) -> str:
    counts = Counter(thing.type for thing in scene.objects.values())
    rules = ["The object has to be in the room."]
    if goal.word == "light":
        rules.append("The lamp has to be in the room.")
    else:
        rules.append("The receptacle has to be in the room and the object has to fit there; it must not be there already.")
    if goal.process:
        rules.append(f"It must be possible to {goal.word} the object.")
    if goal.word == "two":
        twice = sorted(kind for kind, count in counts.items() if count >= 2)
        rules.append(f"The room needs two of the object; it has two or more of: {', '.join(twice) or 'nothing'}.")
    if goal.sliced:
        rules.append(f"The object must be one that can be sliced, with a {' or '.join(sorted(KNIVES))}.")
    return "Rules:\n" + "\n".join(f"- {rule}" for rule in rules)


def goal_of_answer(goal: Goal, scene: Scene, answer: str) -> Goal | str:
    r"""The goal that an answer names, or what is wrong with the answer.

    The last two boxes after the thinking count; the tokens may be swapped, and case, numbers ("apple 1") and the
    endings "type" and "sliced" do not matter.
    """
    boxes = [_token(text) for text in BOXED.findall(answer.rpartition("</think>")[2])]
    if len(boxes) < 2:
        return f"The answer has {len(boxes)} boxes, not two."
    first, second = boxes[-2:]
    objects = {thing.type for thing in scene.objects.values() if "pickup" in thing.can}
    lamps = {thing.type for thing in scene.objects.values() if "toggle" in thing.can}
    targets = lamps if goal.word == "light" else {receptacle.type for receptacle in scene.receptacles.values()}
    for item, target in ((first, second), (second, first)):
        if item in objects and target in targets:
            return Goal(goal.kind, item, target, goal.sliced)
    return f"The room has no object {first!r} with a target {second!r}."


def _token(text: str) -> str:
    word = re.sub(r"[\s_-]*\d*\s*$", "", text.strip().lower()).replace(" ", "")
    for ending in ("type", "sliced"):
        word = word.removesuffix(ending)
    return word
