"""Shared by the environments' tests: exhaustive search, and what continuous integration has to have: engine and sandbox."""

import os
from collections import deque
from importlib.util import find_spec

import pytest

from rla_lightning.environments.alfred.planner import NEUTRAL_VERBS
from rla_lightning.environments.alfred.world import admissible, is_won

ENGINE = ("textworld", "fast_downward", "alfworld")


@pytest.fixture(scope="session")
def needs_engine() -> None:
    missing = [name for name in ENGINE if find_spec(name) is None]
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"not installed: {', '.join(missing)}; run make engine")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; run make engine")


def state_key(world):
    return (
        world.at, world.held, frozenset(world.places.items()), frozenset(world.opened), frozenset(world.clean),
        frozenset(world.hot), frozenset(world.cool), frozenset(world.sliced), frozenset(world.toggled), frozenset(world.spots),
    )  # fmt: skip


def every_reachable_state(goal, start):
    """(world, exact distance or None) of every state that the simulator's commands can reach."""
    worlds, parents, queue = {state_key(start): start}, {state_key(start): set()}, deque([start])
    while queue:
        world = queue.popleft()
        if is_won(goal, world):
            continue
        for action in admissible(world).values():
            if action[0] in NEUTRAL_VERBS:
                continue
            after = world.copy()
            after.apply(action)
            key = state_key(after)
            if key not in worlds:
                worlds[key], parents[key] = after, set()
                queue.append(after)
            parents[key].add(state_key(world))
    steps = {key: 0 for key, world in worlds.items() if is_won(goal, world)}
    frontier = deque(steps)
    while frontier:
        key = frontier.popleft()
        for before in parents[key]:
            if before not in steps:
                steps[before] = steps[key] + 1
                frontier.append(before)
    return [(world, steps.get(key)) for key, world in worlds.items()]


@pytest.fixture(scope="session")
def exhaustive_distances():
    return every_reachable_state
