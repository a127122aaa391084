"""Shortest plans in closed form, and the expert and step labels that follow from them.

Any receptacle can be reached in one step, so a plan is a short list of visits and its length is the sum
over visits of 1 for walking there (unless already there), 1 for opening (when needed) and 1 for the
action. The shortest plan is the minimum over the few lists of visits that can reach the goal; the tests
compare it with exhaustive search in the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random

from rla_lightning.environments.household.affordances import FITS, LAMP, PROCESS_APPLIANCE, TYPE, Goal
from rla_lightning.environments.household.knowledge import Knowledge
from rla_lightning.environments.household.world import Action, World, is_won
from rla_lightning.types import ExpertAction, StepLabel

NEUTRAL_VERBS = frozenset({"look", "inventory", "help", "examine"})
THOUGHTS = ("#search", "#fetch", "#use", "#deliver", "#drop")
CRITIQUES = ("#progress", "#explore", "#invalid", "#idle", "#wander", "#wrong_object", "#undo", "#useless")


@dataclass(frozen=True, slots=True)
class Visit:
    """One stop of a plan."""

    place: str
    verb: str  # "" to just be there
    item: str = ""
    needs_open: bool = True

    @property
    def action(self) -> Action:
        return (self.verb, self.item, "" if self.verb == "use" else self.place)


Program = Sequence[Visit]


def _length(world: World, program: Program) -> int:
    at, total = world.at, 0
    unlocked: list[str] = []
    for visit in program:
        place = visit.place
        if place != at:
            total += 1
            at = place
        if visit.needs_open and place not in unlocked and world.is_shut(place):
            total += 1
            unlocked.append(place)
        if visit.verb:
            total += 1
    return total


def _actions(world: World, program: Program) -> Iterator[Action]:
    at, opened = world.at, set(world.opened)
    for visit in program:
        if visit.place != at:
            yield ("go", "", visit.place)
            at = visit.place
        if visit.needs_open and world.is_shut(at) and at not in opened:
            yield ("open", "", at)
            opened.add(at)
        if visit.verb:
            yield visit.action


def _drops(world: World, receptacles: Sequence[str], objects: Sequence[str], targets: Sequence[str]) -> list[Visit]:
    """Where an object in the way can be put down: every useful place and one of the other places."""
    special = {world.at, *targets, *(world.places[name] for name in objects)}
    fitting = [r for r in receptacles if TYPE[world.held] in FITS[TYPE[r]]]
    useful = [r for r in fitting if r in special]
    others = [r for r in fitting if r not in special]
    useful += sorted(others, key=world.is_shut)[:1]
    return [Visit(r, "move", world.held) for r in useful]


def _fetches(goal: Goal, world: World, receptacles: Sequence[str], objects: Sequence[str]) -> Iterator[tuple[str, list[Visit]]]:
    """(object, visits after which it is held), for every object of the goal's type."""
    if TYPE.get(world.held) == goal.object:
        yield world.held, []
    targets = [r for r in receptacles if TYPE[r] == goal.target]
    before = [[drop] for drop in _drops(world, receptacles, objects, targets)] if world.held else [[]]
    for name in objects:
        for drop in before:
            yield name, [*drop, Visit(world.places[name], "take", name)]


def _programs(goal: Goal, world: World, receptacles: Sequence[str]) -> Iterator[Program]:
    """Every list of visits that may be the shortest way to the goal."""
    word, places = goal.word, world.places
    objects = [name for name in places if TYPE[name] == goal.object]
    targets = [r for r in receptacles if TYPE[r] == goal.target]
    if word == "light":
        lamp_place = places.get(LAMP)
        if lamp_place is not None:
            light = Visit(lamp_place, "", needs_open=False) if LAMP in world.toggled else Visit(lamp_place, "use", LAMP)
            for _, fetch in _fetches(goal, world, receptacles, objects):
                yield [*fetch, light]
        return
    if word == "two":
        yield from _programs_for_two(goal, world, receptacles, objects)
        return
    appliance = next((r for r in receptacles if TYPE[r] == PROCESS_APPLIANCE.get(word)), None)
    for name, fetch in _fetches(goal, world, receptacles, objects):
        process: list[Visit] = []
        if word != "put" and name not in world.state_set(word):
            if appliance is None:
                continue
            process = [Visit(appliance, word, name, needs_open=False)]
        for target in targets:
            yield [*fetch, *process, Visit(target, "move", name)]


def _programs_for_two(goal: Goal, world: World, receptacles: Sequence[str], objects: Sequence[str]) -> Iterator[Program]:
    places = world.places
    holds_one = TYPE.get(world.held) == goal.object
    for target in (r for r in receptacles if TYPE[r] == goal.target):
        outside = [name for name in objects if places[name] != target]
        if len(outside) < len(objects):  # one is there already
            for name, fetch in _fetches(goal, world, receptacles, outside):
                yield [*fetch, Visit(target, "move", name)]
            continue
        if holds_one:
            for name in outside:
                yield [Visit(target, "move", world.held), Visit(places[name], "take", name), Visit(target, "move", name)]
            continue
        for first, second in permutations(outside, 2):
            drops = [[d] for d in _drops(world, receptacles, objects, (target,))] if world.held else [[]]
            for drop in drops:
                yield [
                    *drop,
                    Visit(places[first], "take", first),
                    Visit(target, "move", first),
                    Visit(places[second], "take", second),
                    Visit(target, "move", second),
                ]


def _shortest(world: World, programs: Iterable[Program]) -> Program | None:
    return min(programs, key=lambda program: _length(world, program), default=None)


def distance(goal: Goal, world: World, receptacles: Sequence[str]) -> int | None:
    """Steps of a shortest plan; None when the goal cannot be reached."""
    if is_won(goal, world):
        return 0
    return min((_length(world, program) for program in _programs(goal, world, receptacles)), default=None)


def plan(goal: Goal, world: World, receptacles: Sequence[str]) -> list[Action] | None:
    """A shortest plan; None when the goal cannot be reached."""
    if is_won(goal, world):
        return []
    program = _shortest(world, _programs(goal, world, receptacles))
    return None if program is None else list(_actions(world, program))


def _partial_programs(knowledge: Knowledge) -> Iterator[Program]:
    """What is worth doing although a needed object is still unknown."""
    goal, world = knowledge.goal, knowledge.belief
    objects = [name for name in world.places if TYPE[name] == goal.object]
    holds_one = TYPE.get(world.held) == goal.object
    if goal.word == "light" and not holds_one:
        for _, fetch in _fetches(goal, world, knowledge.receptacles, objects):
            yield fetch
    elif goal.word == "two" and not knowledge.filled_target():
        for name, fetch in _fetches(goal, world, knowledge.receptacles, objects):
            for target in knowledge.targets:
                yield [*fetch, Visit(target, "move", name)]
    elif world.held and not holds_one and TYPE[world.held] in FITS.get(TYPE.get(world.at, ""), ()):
        yield [Visit(world.at, "move", world.held)]


def expert_action(knowledge: Knowledge, rng: Random) -> tuple[Action, str] | None:
    """What to do next and the phase it belongs to, from the agent's knowledge alone; None where no plan can exist."""
    goal, world = knowledge.goal, knowledge.belief
    if knowledge.is_searching:
        program = _shortest(world, _partial_programs(knowledge))
    else:
        program = _shortest(world, _programs(goal, world, knowledge.receptacles))
    if program:
        visit = program[0]
        action = next(_actions(world, program))
        if visit.verb == "move":
            return action, "#deliver" if TYPE[visit.item] == goal.object else "#drop"
        return action, "#fetch" if visit.verb == "take" else "#use"
    if knowledge.is_before_uninspected():
        return ("open", "", world.at), "#search"
    candidates = knowledge.candidates
    return (("go", "", rng.choice(candidates)), "#search") if candidates else None


def expert_step(knowledge: Knowledge, commands: dict[str, Action], rng: Random) -> ExpertAction | None:
    """`expert_action` as the command that stands for it."""
    chosen = expert_action(knowledge, rng)
    if chosen is None:
        return None
    action, thought = chosen
    return ExpertAction(next(command for command, known in commands.items() if known == action), thought)


def is_exploring(knowledge: Knowledge, action: Action) -> bool:
    """Whether the action looks into a receptacle that may hold a needed object not seen so far.

    Leaving a closed receptacle unopened does not count, else walking from door to door would.
    """
    verb, _, place = action
    if not knowledge.is_searching or place in knowledge.inspected:
        return False
    return verb == "open" or (verb == "go" and not knowledge.is_before_uninspected())


def label(knowledge: Knowledge, world: World, before: int | None, action: Action | None) -> StepLabel:
    """+1 iff the action shortens the way to the goal or explores while a needed object is unknown.

    `before` is the present distance to the goal under full knowledge; `action` is None for a command
    that is not admissible.
    """
    if action is None:
        return StepLabel(-1, "#invalid")
    if action[0] in NEUTRAL_VERBS:
        return StepLabel(-1, "#idle")
    changed = world.copy()
    changed.apply(action)
    after = distance(knowledge.goal, changed, knowledge.receptacles)
    if after is not None and (before is None or after < before):
        return StepLabel(1, "#progress")
    if is_exploring(knowledge, action):
        return StepLabel(1, "#explore")
    return StepLabel(-1, _blame(knowledge.goal, before, after, action))


def _blame(goal: Goal, before: int | None, after: int | None, action: Action) -> str:
    """Why an admissible action that changes the world is of no use."""
    verb, item, _ = action
    if verb == "go":
        return "#wander"
    if item and item != LAMP and TYPE[item] != goal.object:
        return "#wrong_object"
    if before is not None and (after is None or after > before):
        return "#undo"
    return "#useless"
