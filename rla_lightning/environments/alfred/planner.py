"""Plans, the expert that follows from the agent's knowledge, and step labels."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from rla_lightning.environments.alfred.knowledge import Knowledge
from rla_lightning.environments.alfred.scene import Action, Goal
from rla_lightning.environments.alfred.search import Search, Until
from rla_lightning.environments.alfred.world import World, is_won
from rla_lightning.types import ExpertAction, StepLabel

NEUTRAL_VERBS = frozenset({"look", "inventory", "help", "examine"})
THOUGHTS = ("#search", "#fetch", "#use", "#deliver", "#drop")
CUT_THOUGHT = "#cut"  # where something has to be sliced
CRITIQUES = ("#progress", "#explore", "#invalid", "#idle", "#wander", "#wrong_object", "#undo", "#useless")


def plan(goal: Goal, world: World, until: Until = "won") -> list[Action] | None:
    """A shortest plan; None when the goal cannot be reached."""
    if until == "won" and is_won(goal, world):
        return []
    decisions = Search(goal, world, until).run()
    if decisions is None:
        return None
    actions: list[Action] = []
    at, opened = world.at, set(world.opened)
    for decision in decisions:
        location = world.scene.location_of[decision.place]
        if location != at:
            actions.append(("go", "", decision.place))
            at = location
        if decision.opens and decision.place in world.scene.openable and decision.place not in opened:
            actions.append(("open", "", decision.place))
            opened.add(decision.place)
        if decision.action is not None:
            actions.append(decision.action)
    return actions


def distance(goal: Goal, world: World) -> int | None:
    """Steps of a shortest plan; None when the goal cannot be reached."""
    actions = plan(goal, world)
    return None if actions is None else len(actions)


def _partial_plan(knowledge: Knowledge) -> list[Action] | None:
    """What is worth doing although something that the goal needs is still unknown."""
    goal, world = knowledge.goal, knowledge.belief
    kind = world.scene.type_of.get(world.held)
    if goal.word == "light" and kind != goal.object and not goal.sliced:
        return plan(goal, world, "held")
    if goal.word == "two" and not goal.sliced and not knowledge.filled_target():
        return plan(goal, world, "delivered")
    if world.held and kind != goal.object:
        here = [
            place
            for place in world.scene.receptacles_at(world.at)
            if world.scene.accepts(place, world.held) and not world.is_shut(place)
        ]
        return [("move", world.held, here[0])] if here and not (goal.sliced and world.held == knowledge.knife) else None
    return None


def expert_action(knowledge: Knowledge, rng: Random) -> tuple[Action, str] | None:
    """What to do next and the phase it belongs to, from the agent's knowledge alone; None where no plan can exist."""
    goal, world = knowledge.goal, knowledge.belief
    actions = _partial_plan(knowledge) if knowledge.is_searching else plan(goal, world)
    if actions:
        purpose = next((action for action in actions if action[0] not in ("go", "open")), actions[-1])
        return actions[0], _thought(goal, world, purpose)
    if knowledge.is_before_uninspected():
        return ("open", "", knowledge.facing), "#search"
    candidates = knowledge.candidates
    if not candidates:
        return None
    chosen = rng.choice(candidates)
    if world.scene.location_of[chosen] != world.at:
        return ("go", "", chosen), "#search"
    return ("open" if world.is_shut(chosen) else "examine", "", chosen), "#search"


def _thought(goal: Goal, world: World, purpose: Action) -> str:
    verb, item, _ = purpose
    kind = world.scene.type_of.get(item)
    if verb == "move":
        return "#deliver" if kind == goal.object else "#drop"
    if verb == "slice" or (verb == "take" and kind != goal.object):
        return CUT_THOUGHT
    return "#fetch" if verb == "take" else "#use"


def expert_step(knowledge: Knowledge, commands: Mapping[str, Action], rng: Random) -> ExpertAction | None:
    """`expert_action` as the command that stands for it."""
    chosen = expert_action(knowledge, rng)
    if chosen is None:
        return None
    action, thought = chosen
    return ExpertAction(next(command for command, known in commands.items() if known == action), thought)


def is_exploring(knowledge: Knowledge, action: Action) -> bool:
    """Whether the action looks into a receptacle that may hold something needed that has not been seen so far.

    Leaving a closed receptacle unopened does not count, else walking from door to door would.
    """
    verb, item, place = action
    if not knowledge.is_searching or place in knowledge.inspected:
        return False
    if verb == "examine":  # the only way to look at a second receptacle at the same location
        return not item and place != knowledge.facing and not knowledge.belief.is_shut(place)
    return verb == "open" or (verb == "go" and not knowledge.is_before_uninspected())


def label(knowledge: Knowledge, world: World, before: int | None, action: Action | None) -> StepLabel:
    """+1 iff the action shortens the way to the goal or explores while something needed is unknown.

    `before` is the present distance to the goal under full knowledge; `action` is None for a command
    that is not admissible.
    """
    if action is None:
        return StepLabel(-1, "#invalid")
    exploring = is_exploring(knowledge, action)
    if action[0] in NEUTRAL_VERBS and not exploring:
        return StepLabel(-1, "#idle")
    changed = world.copy()
    changed.apply(action)
    after = distance(knowledge.goal, changed)
    if after is not None and (before is None or after < before):
        return StepLabel(1, "#progress")
    if exploring:
        return StepLabel(1, "#explore")
    return StepLabel(-1, _blame(knowledge, before, after, action))


def _blame(knowledge: Knowledge, before: int | None, after: int | None, action: Action) -> str:
    """Why an admissible action that changes the world is of no use."""
    verb, item, _ = action
    goal = knowledge.goal
    kind = knowledge.belief.scene.type_of.get(item, "")
    if verb == "go":
        return "#wander"
    if item and kind != goal.object and not (goal.word == "light" and kind == goal.target):
        return "#wrong_object"
    if before is not None and (after is None or after > before):
        return "#undo"
    return "#useless"
