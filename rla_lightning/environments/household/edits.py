"""Small edits that make a spec harder, easier or just different; the goal kind and the turn limit stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Literal

from rla_lightning.environments.alfred.scene import Goal
from rla_lightning.environments.household.affordances import (
    LAMP,
    LAMP_TYPE,
    OPENABLE,
    OPENABLE_TYPES,
    RECEPTACLE_LIMITS,
    TYPE,
    instruction_of,
    split_pairs,
)
from rla_lightning.environments.household.scenes import (
    MAX_OBJECTS,
    MIN_OBJECTS,
    MIN_RECEPTACLES,
    Limits,
    Spec,
    add_distractors,
    add_object,
    add_receptacle,
    goal_of,
    places_for,
)
from rla_lightning.types import Direction

Edit = Callable[[Spec, Random, Limits], bool]  # changes the spec in place; False when it does not apply


def _own(spec: Spec) -> list[dict[str, str]]:
    return [o for o in spec["objects"] if TYPE[o["name"]] == spec["goal"]["object"]]


def _closed(spec: Spec) -> set[str]:
    return {r["name"] for r in spec["receptacles"] if not r["open"]}


def _move(spec: Spec, item: dict[str, str], rng: Random, hidden: bool | None) -> bool:
    places = [p for p in places_for(spec, TYPE[item["name"]], hidden) if p != item["place"]]
    if not places:
        return False
    item["place"] = rng.choice(places)
    return True


def _remove(spec: Spec, gone: dict[str, Any], rng: Random) -> bool:
    """Take a receptacle away and put what was in it elsewhere."""
    spec["receptacles"].remove(gone)
    return all(_move(spec, item, rng, None) for item in spec["objects"] if item["place"] == gone["name"])


def add_distractor(spec: Spec, rng: Random, limits: Limits) -> bool:
    del limits
    return add_distractors(spec, rng.randint(1, 2), rng) > 0


def remove_distractor(spec: Spec, rng: Random, limits: Limits) -> bool:
    del limits
    others = [o for o in spec["objects"] if TYPE[o["name"]] not in (spec["goal"]["object"], LAMP_TYPE)]
    if not others or len(spec["objects"]) <= MIN_OBJECTS:
        return False
    spec["objects"].remove(rng.choice(others))
    return True


def grow_room(spec: Spec, rng: Random, limits: Limits) -> bool:
    if len(spec["receptacles"]) >= limits.max_receptacles:
        return False
    return add_receptacle(spec, rng.choice(list(RECEPTACLE_LIMITS)), is_open=False)


def shrink_room(spec: Spec, rng: Random, limits: Limits) -> bool:
    del limits
    if len(spec["receptacles"]) <= MIN_RECEPTACLES:
        return False
    return _remove(spec, rng.choice(spec["receptacles"]), rng)


def _swap(spec: Spec, rng: Random, openable: bool) -> bool:
    """Take a receptacle away and bring one of the other sort."""
    gone = rng.choice(spec["receptacles"])
    kinds = [kind for kind in RECEPTACLE_LIMITS if (kind in OPENABLE_TYPES) is openable]
    if (gone["name"] in OPENABLE) is openable or not add_receptacle(spec, rng.choice(kinds), is_open=False):
        return False
    return _remove(spec, gone, rng)


def swap_for_closed(spec: Spec, rng: Random, limits: Limits) -> bool:
    del limits
    return _swap(spec, rng, openable=True)


def swap_for_surface(spec: Spec, rng: Random, limits: Limits) -> bool:
    del limits
    return _swap(spec, rng, openable=False)


def hide(spec: Spec, rng: Random, limits: Limits) -> bool:
    """Move a goal object into a closed receptacle."""
    del limits
    closed = _closed(spec)
    items = [o for o in _own(spec) if o["place"] not in closed]
    return bool(items) and _move(spec, rng.choice(items), rng, True)


def unhide(spec: Spec, rng: Random, limits: Limits) -> bool:
    del limits
    closed = _closed(spec)
    items = [o for o in _own(spec) if o["place"] in closed]
    return bool(items) and _move(spec, rng.choice(items), rng, False)


def _set_open(spec: Spec, rng: Random, is_open: bool) -> bool:
    doors = [r for r in spec["receptacles"] if r["name"] in OPENABLE and r["open"] is not is_open]
    if not doors:
        return False
    rng.choice(doors)["open"] = is_open
    return True


def shut(spec: Spec, rng: Random, limits: Limits) -> bool:
    del limits
    return _set_open(spec, rng, False)


def unshut(spec: Spec, rng: Random, limits: Limits) -> bool:
    del limits
    return _set_open(spec, rng, True)


def remove_copy(spec: Spec, rng: Random, limits: Limits) -> bool:
    del limits
    items = _own(spec)
    if len(items) <= goal_of(spec).count or len(spec["objects"]) <= MIN_OBJECTS:
        return False
    spec["objects"].remove(rng.choice(items))
    return True


def add_copy(spec: Spec, rng: Random, limits: Limits) -> bool:
    del limits
    return len(spec["objects"]) < MAX_OBJECTS and add_object(spec, spec["goal"]["object"], rng)


def raise_noise(spec: Spec, rng: Random, limits: Limits) -> bool:
    del rng
    before = spec["noise"]
    spec["noise"] = round(min(limits.max_noise, before + 0.1), 1)
    return spec["noise"] > before


def lower_noise(spec: Spec, rng: Random, limits: Limits) -> bool:
    del rng, limits
    before = spec["noise"]
    spec["noise"] = round(max(0.0, before - 0.1), 1)
    return spec["noise"] < before


def move_goal_object(spec: Spec, rng: Random, limits: Limits) -> bool:
    del limits
    items = [o for o in spec["objects"] if TYPE[o["name"]] in (spec["goal"]["object"], LAMP_TYPE)]
    item = rng.choice(items)
    return _move(spec, item, rng, None if item["name"] == LAMP else item["place"] in _closed(spec))


def re_place(spec: Spec, rng: Random, limits: Limits) -> bool:
    """Draw the places of all objects again."""
    del limits
    moved = [_move(spec, item, rng, None) for item in spec["objects"]]  # a list: every object, not up to the first moved
    return any(moved)


def change_pair(spec: Spec, rng: Random, limits: Limits) -> bool:
    """Another object type or another target type that the room has, within the in-domain pairs of the same kind."""
    del limits
    goal = goal_of(spec)
    room = {TYPE[r["name"]] for r in spec["receptacles"]} | {LAMP_TYPE}
    pairs = [p for p in split_pairs(goal.kind, held_out=False) if p[1] in room and p != (goal.object, goal.target)]
    if not pairs:
        return False
    changed = Goal(goal.kind, *rng.choice(pairs))
    spec["goal"] = {"kind": changed.kind, "object": changed.object, "target": changed.target}
    spec["instruction"] = instruction_of(changed) + "."
    if changed.object != goal.object:
        spec["objects"] = [o for o in spec["objects"] if TYPE[o["name"]] != changed.object]
        if len(spec["objects"]) < MIN_OBJECTS:
            return False
        for item in spec["objects"]:
            if TYPE[item["name"]] == goal.object:
                item["name"] = item["name"].replace(goal.object, changed.object)
        spec["objects"].sort(key=lambda o: o["name"])
    return all(o["place"] in places_for(spec, changed.object) or _move(spec, o, rng, None) for o in _own(spec))


DIRECTED: Mapping[Direction, tuple[Edit, ...]] = {
    "harder": (add_distractor, grow_room, swap_for_closed, hide, shut, remove_copy, raise_noise),
    "easier": (remove_distractor, shrink_room, swap_for_surface, unhide, unshut, add_copy, lower_noise),
}
Change = Literal["layout", "goal"]
NEUTRAL: Mapping[Change, tuple[Edit, ...]] = {"layout": (move_goal_object, re_place), "goal": (change_pair,)}


def _after(spec: Spec, edit: Edit, rng: Random, limits: Limits) -> Spec | None:
    """An edited copy, or None where the edit does not apply."""
    changed: Spec = {
        **spec,
        "goal": dict(spec["goal"]),
        "receptacles": [dict(r) for r in spec["receptacles"]],
        "objects": [dict(o) for o in spec["objects"]],
    }
    return changed if edit(changed, rng, limits) else None


def edited(
    spec: Mapping[str, Any], direction: Direction, rng: Random, limits: Limits, max_edits: int, changes: Sequence[Change]
) -> Spec | None:
    """The spec after 1 to `max_edits` edits in the direction, every other time with one of the given changes on top.

    None when no edit in the direction applies. How far success moves is for a predictor to choose: the steps are of all sizes.
    """
    directed = list(DIRECTED[direction])
    rng.shuffle(directed)
    trials = (_after(dict(spec), edit, rng, limits) for edit in directed)
    changed = next((trial for trial in trials if trial is not None), None)
    if changed is None:
        return None
    for _ in range(rng.randrange(max_edits)):
        changed = _after(changed, rng.choice(directed), rng, limits) or changed
    neutral = [edit for change in changes for edit in NEUTRAL[change]]
    if neutral and rng.random() < 0.5:
        changed = _after(changed, rng.choice(neutral), rng, limits) or changed
    return changed
