"""One playthrough: commands in, AlfWorld's texts out."""

from __future__ import annotations

import hashlib

from rla_lightning.environments.alfred.knowledge import Knowledge
from rla_lightning.environments.alfred.planner import distance
from rla_lightning.environments.alfred.scene import Action, Goal
from rla_lightning.environments.alfred.world import NOTHING_HAPPENS, World, admissible, feedback, first_text, is_won
from rla_lightning.environments.base import Episode
from rla_lightning.types import WON, Observation, Transition

_SHOWING_VERBS = frozenset({"go", "open"})


class AlfredEpisode(Episode):
    """A world, what the agent knows about it, and the commands that are admissible now.

    AlfWorld accepts a command only word for word; other case and white space are accepted here, too.

    Args:
        goal: to be reached.
        world: the first state; the episode changes it.
        instruction: what the agent is told to do, without the full stop.
        max_turns: turns after which the episode counts as lost.
        noise: probability that an observation leaves an object out. With noise, commands name only what has been noticed.
        seed: of the noise.

    Attributes:
        knowledge: from observations only; the expert and the digest read nothing else.
        actions: admissible command -> action, the source of `observation.commands`.
    """

    def __init__(self, goal: Goal, world: World, instruction: str, max_turns: int, noise: float = 0.0, seed: int = 0) -> None:
        self.goal = goal
        self.world = world
        self.max_turns = max_turns
        self.knowledge = Knowledge(goal, world)
        self.turn = 0
        self.is_done = False
        self._noise = noise
        self._seed = seed
        self._distance: int | None = None
        self._distance_turn = -1
        self._observe(first_text(world, instruction), last_ok=True)

    def step(self, action: str) -> Transition:
        if self.is_done:
            raise RuntimeError("The episode is over; start a new one.")
        self.turn += 1
        parsed = self.parse(action)
        if parsed is None:
            self._observe(NOTHING_HAPPENS, last_ok=False)
            return Transition(self.observation, done=False, is_valid=False)
        world, (verb, item, place) = self.world, parsed
        world.apply(parsed)
        mentioned: list[str] | None = None
        if verb in _SHOWING_VERBS or (verb == "examine" and not item):
            mentioned = self._mentioned(place)
        self.knowledge.update(world, place, mentioned)
        self.is_done = is_won(self.goal, world)
        self._observe(feedback(world, parsed, mentioned), last_ok=True)
        return Transition(self.observation, done=self.is_done, outcome=WON if self.is_done else None)

    def parse(self, command: str) -> Action | None:
        """The admissible action that a command stands for; None when there is none."""
        return self.actions.get(command) or self.actions.get(" ".join(command.lower().split()))

    def distance(self) -> int | None:
        """Steps to the goal under full knowledge, computed once per state."""
        if self._distance_turn != self.turn:
            self._distance = distance(self.goal, self.world)
            self._distance_turn = self.turn
        return self._distance

    def _mentioned(self, receptacle: str) -> list[str]:
        """The objects that this observation mentions: each one in view is left out with probability `noise`."""
        if self.world.is_shut(receptacle):
            return []
        names = self.world.contents.get(receptacle, [])
        if not self._noise:
            return names
        return [name for name in names if self._draw(name) >= self._noise]

    def _draw(self, name: str) -> float:
        """In [0, 1), a function of (seed, turn, object), so that equal tasks give equal episodes."""
        key = f"{self._seed} {self.turn} {name}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") / 2**32

    def _observe(self, text: str, last_ok: bool) -> None:
        self.actions = admissible(self.world, self.knowledge.noticed if self._noise else None)
        self.observation = Observation(text, tuple(sorted(self.actions)), self.knowledge.digest(last_ok))
