"""Draws scenes: from knobs to a spec, plain JSON data that says everything about a task.

A spec is {goal: {kind, object, target}, instruction, receptacles: [{name, open}], objects: [{name, place}],
max_turns, noise, seed, split}. `open` is true for receptacles that cannot be closed. The lists are sorted
by name, so that equal scenes are equal specs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from random import Random
from typing import Any

from rla_lightning.environments.alfred.knowledge import MIDDLE
from rla_lightning.environments.alfred.planner import distance
from rla_lightning.environments.alfred.scene import Goal, Receptacle, Scene, Thing
from rla_lightning.environments.alfred.world import World
from rla_lightning.environments.household.affordances import (
    FITS,
    LAMP,
    LAMP_HOLDERS,
    LAMP_TYPE,
    MAX_COPIES,
    OBJECT_TYPES,
    OPENABLE,
    OPENABLE_TYPES,
    PROCESS_APPLIANCE,
    RECEPTACLE_LIMITS,
    TYPE,
    abilities_of,
    instruction_of,
    split_pairs,
)
from rla_lightning.types import Split

Spec = dict[str, Any]

MIN_RECEPTACLES, MIN_OBJECTS, MAX_OBJECTS = 4, 3, 14
MIN_TURNS, MAX_TURNS, MAX_TURNS_OOD = 12, 24, 30
_REDRAWS = 60  # attempts at a scene with given knobs
OOD_EXTRA = 3  # out-of-distribution scenes have 1 to 3 receptacles more than any in-domain scene


@dataclass(frozen=True)
class Limits:
    """Bounds of in-domain scenes, for sampling and for rewriting."""

    max_receptacles: int = 9
    max_noise: float = 0.3
    turn_slack: float = 1.8  # turn limit over an expert's expected number of turns
    turns: int | None = None  # the turn limit of every scene, whatever the slack


@dataclass(frozen=True)
class Knobs:
    """What makes a scene easy or hard, read off a spec."""

    receptacles: int
    distractors: int  # objects that the goal does not need
    closed: int  # receptacles that start closed
    hidden: int  # goal objects that start in closed receptacles
    copies: int  # objects of the goal's type
    noise: float
    max_turns: int


def spec_id(spec: Mapping[str, Any]) -> str:
    """A short name that is a function of the spec."""
    return "household-" + hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:12]


def goal_of(spec: Mapping[str, Any]) -> Goal:
    return Goal(**spec["goal"])


def scene_of(spec: Mapping[str, Any]) -> Scene:
    """The fixed part of a spec; every receptacle is a location of its own."""
    receptacles = {r["name"]: Receptacle(TYPE[r["name"]], r["name"], r["name"] in OPENABLE) for r in spec["receptacles"]}
    objects = {o["name"]: Thing(TYPE[o["name"]], abilities_of(TYPE[o["name"]])) for o in spec["objects"]}
    return Scene(receptacles, objects, FITS)


def initial_world(spec: Mapping[str, Any]) -> World:
    """The state in which a spec starts."""
    world = World(scene_of(spec), MIDDLE, opened={r["name"] for r in spec["receptacles"] if r["open"] and r["name"] in OPENABLE})
    for item in spec["objects"]:
        world.put(item["name"], item["place"])
        world.spots.add((item["name"], item["place"]))
    return world


def knobs_of(spec: Mapping[str, Any]) -> Knobs:
    goal, closed = goal_of(spec), {r["name"] for r in spec["receptacles"] if not r["open"]}
    own = [o for o in spec["objects"] if TYPE[o["name"]] == goal.object]
    return Knobs(
        receptacles=len(spec["receptacles"]),
        distractors=sum(TYPE[o["name"]] not in (goal.object, LAMP_TYPE) for o in spec["objects"]),
        closed=len(closed),
        hidden=sum(o["place"] in closed for o in own),
        copies=len(own),
        noise=spec["noise"],
        max_turns=spec["max_turns"],
    )


def plan_length(spec: Mapping[str, Any]) -> int | None:
    """Steps of the shortest plan of somebody who knows where everything is; None where the goal cannot be reached."""
    return _plan_length(json.dumps(spec, sort_keys=True))


@lru_cache(maxsize=1 << 14)  # validation and the knobs ask for the same plans
def _plan_length(spec: str) -> int | None:
    return distance(goal_of(json.loads(spec)), initial_world(json.loads(spec)))


def difficulty_of(spec: Mapping[str, Any]) -> float:
    """Where the spec lies on the environment's own scale, in [0, 1]; `draw_spec` aims at its inverse."""
    knobs = knobs_of(spec)
    openable = sum(r["name"] in OPENABLE for r in spec["receptacles"])
    parts = (
        (0.35, (knobs.receptacles - MIN_RECEPTACLES) / 5),
        (0.2, (knobs.distractors - 1) / 8),
        (0.15, knobs.closed / max(1, openable)),
        (0.15, knobs.hidden / knobs.copies),
        (0.1, knobs.noise / 0.2),
        (0.05, 1 - (knobs.copies - goal_of(spec).count) / 2),
    )
    return round(sum(weight * min(1.0, max(0.0, value)) for weight, value in parts), 4)


def expected_turns(spec: Mapping[str, Any]) -> float:
    """About how long an expert who has to search needs, for a solvable spec."""
    goal, world, knobs = goal_of(spec), initial_world(spec), knobs_of(spec)
    shortest = distance(goal, world)
    if shortest is None:
        raise ValueError("The goal cannot be reached.")
    search = knobs.receptacles + knobs.closed  # to look into everything
    share = goal.count / (knobs.copies + 1)  # the expected rank of the last needed one of `copies` random places
    if goal.word == "light":
        share = max(2 / 3, share)  # the lamp has to be found too
    return shortest + search * share * (1 + knobs.noise)


def turn_limit(spec: Mapping[str, Any], limits: Limits) -> int:
    if limits.turns is not None:
        return limits.turns
    largest = MAX_TURNS if spec["split"] == "in_domain" else MAX_TURNS_OOD
    return min(largest, max(MIN_TURNS, ceil(limits.turn_slack * expected_turns(spec))))


def free_name(kind: str, taken: Sequence[str], largest: int) -> str | None:
    """The first unused name of a type, or None."""
    return next((name for i in range(1, largest + 1) if (name := f"{kind} {i}") not in taken), None)


def places_for(spec: Mapping[str, Any], object_type: str, hidden: bool | None = None) -> list[str]:
    """Receptacles where an object may start, only closed (hidden) or open ones; goal objects never start at the target."""
    goal = goal_of(spec)
    if object_type == LAMP_TYPE:
        return [r["name"] for r in spec["receptacles"] if TYPE[r["name"]] in LAMP_HOLDERS]
    return [
        r["name"]
        for r in spec["receptacles"]
        if object_type in FITS[TYPE[r["name"]]]
        and not (object_type == goal.object and TYPE[r["name"]] == goal.target)
        and (hidden is None or r["open"] is not hidden)
    ]


def add_receptacle(spec: Spec, kind: str, is_open: bool) -> bool:
    name = free_name(kind, [r["name"] for r in spec["receptacles"]], RECEPTACLE_LIMITS[kind])
    if name is None:
        return False
    spec["receptacles"].append({"name": name, "open": is_open or name not in OPENABLE})
    spec["receptacles"].sort(key=lambda r: r["name"])
    return True


def add_object(spec: Spec, kind: str, rng: Random, hidden: bool | None = None) -> bool:
    """Put one more object of a type somewhere; False when nothing fits."""
    places = places_for(spec, kind, hidden) or places_for(spec, kind)
    name = LAMP if kind == LAMP_TYPE else free_name(kind, [o["name"] for o in spec["objects"]], MAX_COPIES)
    if not places or name is None:
        return False
    spec["objects"].append({"name": name, "place": rng.choice(places)})
    spec["objects"].sort(key=lambda o: o["name"])
    return True


def add_distractors(spec: Spec, number: int, rng: Random) -> int:
    """Add up to `number` objects that the goal does not need; returns how many found a place."""
    goal, added = goal_of(spec), 0
    for _ in range(4 * number):
        if added == number or len(spec["objects"]) == MAX_OBJECTS:
            break
        kind = rng.choice(OBJECT_TYPES)
        added += kind != goal.object and add_object(spec, kind, rng)
    return added


def required_types(goal: Goal, rng: Random) -> list[str]:
    """Receptacle types without which the goal has no solution."""
    if goal.word == "light":
        return [rng.choice(LAMP_HOLDERS)]
    appliance = PROCESS_APPLIANCE.get(goal.word)
    return [goal.target] if appliance is None else [goal.target, appliance]


def draw_goal(rng: Random, kinds: Sequence[str], split: Split) -> Goal:
    kind = rng.choice(list(kinds))
    return Goal(kind, *rng.choice(split_pairs(kind, held_out=split == "out_of_distribution")))


def draw_spec(rng: Random, difficulty: float, split: Split, kinds: Sequence[str], limits: Limits) -> Spec:
    """A solvable spec whose knobs scatter around what the difficulty asks for."""
    while True:
        spec = _attempt(rng, difficulty, draw_goal(rng, kinds, split), split, limits)
        if spec is not None:
            return spec


def _spread(rng: Random, low: int, high: int, difficulty: float) -> int:
    """A whole number near `difficulty` of the way from low to high."""
    return min(high, max(low, round(low + (high - low) * difficulty + rng.gauss(0, 0.8))))


def _attempt(rng: Random, difficulty: float, goal: Goal, split: Split, limits: Limits) -> Spec | None:
    spec: Spec = {
        "goal": {"kind": goal.kind, "object": goal.object, "target": goal.target},
        "instruction": instruction_of(goal) + ".",
        "receptacles": [],
        "objects": [],
        "max_turns": 0,
        "noise": 0.0,
        "seed": rng.randrange(2**16),
        "split": split,
    }
    largest = limits.max_receptacles
    number = _spread(rng, MIN_RECEPTACLES, largest, difficulty)
    if split == "out_of_distribution":
        number = largest + rng.randint(1, OOD_EXTRA)
    kinds = required_types(goal, rng)
    pool = [kind for kind, limit in RECEPTACLE_LIMITS.items() for _ in range(limit)]
    rng.shuffle(pool)
    for kind in [*kinds, *pool]:
        if len(spec["receptacles"]) < number:
            add_receptacle(spec, kind, is_open=rng.random() > 0.3 + 0.7 * difficulty)
    copies = goal.count + (rng.random() > 0.3 + difficulty) * rng.randint(1, MAX_COPIES - goal.count)
    for _ in range(copies):
        if not add_object(spec, goal.object, rng, hidden=rng.random() < difficulty):
            return None
    if goal.word == "light" and not add_object(spec, LAMP_TYPE, rng):
        return None
    add_distractors(spec, max(_spread(rng, 1, 9, difficulty), MIN_OBJECTS - len(spec["objects"])), rng)
    if len(spec["objects"]) < MIN_OBJECTS:
        return None
    level = max(0.0, difficulty - 0.3) * rng.random() * 0.4
    spec["noise"] = min(limits.max_noise, round(level, 1))
    if distance(goal, initial_world(spec)) is None:
        return None
    spec["max_turns"] = turn_limit(spec, limits)
    return spec


def redrawn_spec(spec: Mapping[str, Any], rng: Random) -> Spec | None:
    """Another scene and goal of the same kind with the same knobs, plan length and difficulty; None where no draw has them."""
    knobs, like = knobs_of(spec), (difficulty_of(spec), plan_length(spec))
    for _ in range(_REDRAWS):
        drawn = _with_knobs(rng, draw_goal(rng, [spec["goal"]["kind"]], spec["split"]), spec, knobs)
        if drawn is not None and knobs_of(drawn) == knobs and (difficulty_of(drawn), plan_length(drawn)) == like:
            return drawn
    return None


def _with_knobs(rng: Random, goal: Goal, like: Mapping[str, Any], knobs: Knobs) -> Spec | None:
    """An attempt at a solvable spec with the knobs, and as many receptacles that can be opened as `like` has."""
    spec: Spec = {
        "goal": {"kind": goal.kind, "object": goal.object, "target": goal.target},
        "instruction": instruction_of(goal) + ".",
        "receptacles": [],
        "objects": [],
        "max_turns": knobs.max_turns,
        "noise": knobs.noise,
        "seed": rng.randrange(2**16),
        "split": like["split"],
    }
    doors = sum(r["name"] in OPENABLE for r in like["receptacles"])
    surfaces = knobs.receptacles - doors
    pool = [kind for kind, limit in RECEPTACLE_LIMITS.items() for _ in range(limit)]
    rng.shuffle(pool)
    for kind in [*required_types(goal, rng), *pool]:
        opens = kind in OPENABLE_TYPES
        if (doors if opens else surfaces) > 0 and add_receptacle(spec, kind, is_open=True):
            doors, surfaces = doors - opens, surfaces - (not opens)
    openable = [r for r in spec["receptacles"] if r["name"] in OPENABLE]
    for receptacle in rng.sample(openable, min(knobs.closed, len(openable))):
        receptacle["open"] = False
    placed = [add_object(spec, goal.object, rng, hidden=number < knobs.hidden) for number in range(knobs.copies)]
    if goal.word == "light":
        placed.append(add_object(spec, LAMP_TYPE, rng))
    if not all(placed) or add_distractors(spec, knobs.distractors, rng) < knobs.distractors:
        return None
    return spec
