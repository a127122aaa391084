"""Small changes of a game that keep its room and kind: other goal tokens, distractors, hiding places.

Edits are made on the planning problem, by entity id, so that the simulator and the real engine play the same game:
AlfWorld numbers objects by their ids, and one object more or less renames others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any, Literal

from rla_lightning.environments.alfred.affordances import ABILITIES, FITS, OBJECT_TYPES, goal_problem
from rla_lightning.environments.alfred.planner import distance
from rla_lightning.environments.alfred.scene import KNIVES, Goal
from rla_lightning.environments.alfworld.games import Game
from rla_lightning.environments.alfworld.pddl import Fact, Problem
from rla_lightning.types import Direction

Change = Literal["goal", "distractors", "hiding"]
CHANGES: tuple[Change, ...] = ("goal", "distractors", "hiding")

MAX_ADDED = 8  # distractors beyond those of the game


@dataclass(frozen=True)
class Edits:
    """What is different from a game's own problem; entities are ids.

    Attributes:
        goal: null where the game's own goal stays.
        added: new object -> (its type, the receptacle that it lies in).
        moved: object -> the receptacle that it starts in instead of its own.
        removed: objects that are gone.
    """

    goal: Goal | None = None
    added: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()

    def reduced(self, problem: Problem) -> Edits:
        """Without what is so in the game's own problem anyway, so that equal games have equal edits."""
        locations = _locations(problem)
        lying = {name: {fact for fact in problem.facts if fact[0] in _LYING and fact[1] == name} for name in self.moved}
        moved = {name: place for name, place in self.moved.items() if _lying(name, place, locations) != lying[name]}
        return replace(self, goal=None if self.goal == problem.goal else self.goal, moved=moved)

    def to_spec(self) -> dict[str, Any]:
        """As JSON values, without what does not differ."""
        spec = asdict(self)
        spec["added"] = {name: list(self.added[name]) for name in sorted(self.added)}
        spec["moved"] = {name: self.moved[name] for name in sorted(self.moved)}
        spec["removed"] = sorted(self.removed)
        return {name: value for name, value in spec.items() if value}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Edits:
        goal = spec.get("goal")
        return cls(
            None if goal is None else Goal(**goal),
            {name: (kind, place) for name, (kind, place) in spec.get("added", {}).items()},
            dict(spec.get("moved", {})),
            tuple(spec.get("removed", ())),
        )


def apply_edits(problem: Problem, edits: Edits) -> Problem:
    """The problem with the edits made; edits of entities that it does not have raise ValueError."""
    for name in (*edits.moved, *edits.removed, *edits.moved.values(), *(place for _, place in edits.added.values())):
        if name not in problem.objects:
            raise ValueError(f"an edit names {name!r}, which the game does not have")
    gone, moved = set(edits.removed), edits.moved
    locations = _locations(problem)
    facts = {fact for fact in problem.facts if not gone.intersection(fact[1:]) and not (fact[0] in _LYING and fact[1] in moved)}
    objects = {name: kind for name, kind in problem.objects.items() if name not in gone}
    for name, place in moved.items():
        facts |= _lying(name, place, locations)
    for name, (kind, place) in edits.added.items():
        objects |= {name: "object", f"{kind}type": "otype"}
        facts |= {("objecttype", name, f"{kind}type"), ("pickupable", name)} | _lying(name, place, locations)
        facts |= {
            (_PREDICATES[ability], name) for ability, kinds in ABILITIES.items() if kind in kinds and ability in _PREDICATES
        }
        facts |= {
            ("cancontain", f"{r}type", f"{kind}type") for r, fitting in FITS.items() if kind in fitting and f"{r}type" in objects
        }
    return replace(problem, objects=objects, facts=frozenset(facts), goal=edits.goal or problem.goal)


_PREDICATES = {"heat": "heatable", "cool": "coolable", "clean": "cleanable", "slice": "sliceable"}
_LYING = ("inreceptacle", "objectatlocation")  # where an object is


def _locations(problem: Problem) -> dict[str, str]:
    """Of the receptacles that the agent can walk to, by id."""
    return {fact[1]: fact[2] for fact in problem.facts if fact[0] == "receptacleatlocation"}


def _lying(name: str, place: str, locations: Mapping[str, str]) -> set[Fact]:
    return {("inreceptacle", name, place), ("objectatlocation", name, locations[place])}


def expected_turns(game: Game) -> float | None:
    """About how many turns an expert who has to search needs; None when the goal cannot be reached."""
    goal, scene, start = game.problem.goal, game.scene, game.start
    if goal_problem(goal, scene, start) is not None:  # quickly said; a search for a plan that does not exist is long
        return None
    shortest = distance(goal, start)
    if shortest is None:
        return None
    search = len(scene.receptacles) + sum(start.is_shut(name) for name in scene.receptacles)
    copies = len(scene.of_type(goal.object))
    share = goal.count / (copies + 1)  # the expected rank of the last needed one of `copies` random places
    if goal.word == "light" or goal.sliced:
        share = max(2 / 3, share)  # the lamp or a knife has to be found too
    return shortest + search * share


# Single edits: each returns the changed edits, or None where it does not apply

Edit = Callable[[Game, Edits, Random], Edits | None]  # the game as it is with the edits made


def add_distractor(game: Game, edits: Edits, rng: Random) -> Edits | None:
    """One more object that the goal does not need, somewhere it fits."""
    goal, scene = game.problem.goal, game.scene
    if len(edits.added) >= MAX_ADDED:
        return None
    kinds = [kind for kind in OBJECT_TYPES if kind not in KNIVES and kind not in (goal.object, goal.target)]
    kind = rng.choice(kinds)
    ids = _ids(game)
    places = [ids[name] for name, receptacle in scene.receptacles.items() if kind in FITS.get(receptacle.type, ())]
    places = [place for place in places if place in _locations(game.problem)]
    if not places:
        return None
    entity = next(name for n in range(MAX_ADDED) if (name := f"{kind}_bar_extra_{n}") not in edits.added)
    return replace(edits, added={**edits.added, entity: (kind, rng.choice(places))})


def remove_distractor(game: Game, edits: Edits, rng: Random) -> Edits | None:
    """One object less that the goal does not need: the latest added ones first."""
    if edits.added:
        leaving = rng.choice(sorted(edits.added))
        return replace(edits, added={name: value for name, value in edits.added.items() if name != leaving})
    goal, scene, ids = game.problem.goal, game.scene, _ids(game)
    needed = {goal.object, goal.target, *(KNIVES if goal.sliced else ())}
    others = [
        ids[n]
        for n, thing in scene.objects.items()
        if thing.type not in needed and thing.inside is None and "pickup" in thing.can
    ]
    if not others:
        return None
    leaving = rng.choice(others)
    return replace(edits, removed=(*edits.removed, leaving), moved={n: p for n, p in edits.moved.items() if n != leaving})


def hide(game: Game, edits: Edits, rng: Random) -> Edits | None:
    """Move an object that the goal needs into a closed receptacle."""
    return _move_needed(game, edits, rng, into_shut=True)


def unhide(game: Game, edits: Edits, rng: Random) -> Edits | None:
    """Move an object that the goal needs out of a closed receptacle."""
    return _move_needed(game, edits, rng, into_shut=False)


def _move_needed(game: Game, edits: Edits, rng: Random, into_shut: bool) -> Edits | None:
    goal, scene, start, ids = game.problem.goal, game.scene, game.start, _ids(game)
    places = start.places
    needed = [n for n in scene.of_type(goal.object) if n in places and start.is_shut(places[n]) is not into_shut]
    if not needed:
        return None
    name = rng.choice(needed)
    located = _locations(game.problem)
    fitting = [
        r
        for r in scene.receptacles
        if ids[r] in located
        and scene.accepts(r, name)
        and start.is_shut(r) is into_shut
        and scene.receptacles[r].type != goal.target
    ]
    if not fitting:
        return None
    moved, place = ids[name], ids[rng.choice(fitting)]
    if moved in edits.added:
        return replace(edits, added={**edits.added, moved: (edits.added[moved][0], place)})
    return replace(edits, moved={**edits.moved, moved: place})


def _ids(game: Game) -> dict[str, str]:
    return {name: entity for entity, name in game.names.items()}


def change_goal(game: Game, edits: Edits, rng: Random) -> Edits | None:
    """Another object, another target or both, of the same kind."""
    goal, scene = game.problem.goal, game.scene
    objects = sorted({thing.type for thing in scene.objects.values()})
    targets = sorted({scene.type_of[name] for name in (scene.objects if goal.word == "light" else scene.receptacles)})
    goals = [replace(goal, object=item, target=target) for item in objects for target in targets]
    possible = [other for other in goals if other != goal and goal_problem(other, scene, game.start) is None]
    return replace(edits, goal=rng.choice(possible)) if possible else None


DIRECTED: Mapping[tuple[Direction, Change], tuple[Edit, ...]] = {
    ("harder", "goal"): (change_goal,),
    ("easier", "goal"): (change_goal,),
    ("harder", "distractors"): (add_distractor,),
    ("easier", "distractors"): (remove_distractor,),
    ("harder", "hiding"): (hide,),
    ("easier", "hiding"): (unhide,),
}
