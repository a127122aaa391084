"""One playthrough of a household task: commands in, AlfWorld's texts out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from rla_lightning.environments.base import Episode
from rla_lightning.environments.household.affordances import MIDDLE, OPENABLE, Goal
from rla_lightning.environments.household.knowledge import Knowledge
from rla_lightning.environments.household.planner import distance
from rla_lightning.environments.household.world import (
    NOTHING_HAPPENS,
    Action,
    World,
    admissible,
    feedback,
    is_won,
    look_text,
)
from rla_lightning.types import WON, Observation, Transition

WELCOME = "-= Welcome to TextWorld, ALFRED! =-"
_SHOWING_VERBS = frozenset({"go", "open"})


def initial_world(spec: Mapping[str, Any]) -> World:
    """The state in which a spec starts."""
    places = {item["name"]: item["place"] for item in spec["objects"]}
    opened = {r["name"] for r in spec["receptacles"] if r["open"] and r["name"] in OPENABLE}
    return World(MIDDLE, "", places, opened, set(), set(), set(), set(), set())


def goal_of(spec: Mapping[str, Any]) -> Goal:
    return Goal(**spec["goal"])


def receptacles_of(spec: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(r["name"] for r in spec["receptacles"])


class HouseholdEpisode(Episode):
    """A world, what the agent knows about it, and the commands that are admissible now.

    Attributes:
        knowledge: from observations only; the expert and the digest read nothing else.
        actions: admissible command -> action, the source of `observation.commands`.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.goal = goal_of(spec)
        self.receptacles = receptacles_of(spec)
        self.world = initial_world(spec)
        self.max_turns = spec["max_turns"]
        self.knowledge = Knowledge(self.goal, self.receptacles, self.world)
        self.turn = 0
        self.is_done = False
        self._noise = spec["noise"]
        self._seed = spec["seed"]
        self._distance: int | None = None
        self._distance_turn = -1
        room = look_text(self.world, self.receptacles)
        self._observe(f"{WELCOME}\n\n{room}\n\nYour task is to: {self.goal.instruction}", last_ok=True)

    def step(self, action: str) -> Transition:
        if self.is_done:
            raise RuntimeError("The episode is over; start a new one.")
        self.turn += 1
        parsed = self.parse(action)
        if parsed is None:
            self._observe(NOTHING_HAPPENS, last_ok=False)
            return Transition(self.observation, done=False, is_valid=False)
        world = self.world
        world.apply(parsed)
        mentioned: list[str] | None = None
        if parsed[0] in _SHOWING_VERBS or (parsed[0] == "examine" and parsed[2]):
            mentioned = self._mentioned()
        self.knowledge.update(world, mentioned)
        self.is_done = is_won(self.goal, world)
        self._observe(feedback(world, parsed, self.receptacles, mentioned or ()), last_ok=True)
        return Transition(self.observation, done=self.is_done, outcome=WON if self.is_done else None)

    def parse(self, command: str) -> Action | None:
        """The admissible action that a command stands for; None when there is none."""
        return self.actions.get(command) or self.actions.get(" ".join(command.lower().split()))

    def distance(self) -> int | None:
        """Steps to the goal under full knowledge, computed once per state."""
        if self._distance_turn != self.turn:
            self._distance = distance(self.goal, self.world, self.receptacles)
            self._distance_turn = self.turn
        return self._distance

    def _mentioned(self) -> list[str]:
        """The objects that this observation mentions: each one in view is left out with probability `noise`."""
        world = self.world
        if world.is_shut(world.at):
            return []
        names = world.contents(world.at)
        if not self._noise:
            return names
        return [name for name in names if self._draw(name) >= self._noise]

    def _draw(self, name: str) -> float:
        """In [0, 1), a function of (seed, turn, object), so that equal tasks give equal episodes."""
        key = f"{self._seed} {self.turn} {name}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") / 2**32

    def _observe(self, text: str, last_ok: bool) -> None:
        knowledge = self.knowledge
        self.actions = admissible(self.world, self.receptacles, knowledge.noticed)
        self.observation = Observation(text, tuple(sorted(self.actions)), knowledge.digest(last_ok))
