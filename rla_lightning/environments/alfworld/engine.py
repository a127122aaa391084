"""The real engine: TextWorld in worker processes, because it is not thread-safe and slow (about 20 steps per second each).

The parent sends games and commands; a reader thread per worker collects the replies, so that neither side ever waits
for the other to empty a pipe.
"""

from __future__ import annotations

import atexit
import multiprocessing
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count, cycle
from multiprocessing.connection import Connection
from typing import Any

from rla_lightning.environments.base import Episode
from rla_lightning.types import WON, ConfigError, Observation, Transition

PACKAGES = ("textworld", "fast_downward", "alfworld")


class EngineError(RuntimeError):
    """The engine failed in a worker; the message is the worker's."""


@dataclass(frozen=True)
class Reply:
    """What the engine says after loading a game or taking a command."""

    feedback: str
    commands: tuple[str, ...]  # admissible, in the engine's order
    won: bool
    score: int


class TextWorldEngine:
    """Worker processes that are started when the first game is; picklable without them.

    Args:
        workers: processes; each has its own share of the episodes.
    """

    def __init__(self, workers: int = 2) -> None:
        missing = [name for name in PACKAGES if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"the textworld backend needs {', '.join(missing)}: pip install 'rla_lightning[alfworld]' (or make engine)"
            )
        self.number = workers
        self._workers: list[_Worker] = []
        self._next = cycle(range(workers))

    def __getstate__(self) -> dict[str, Any]:
        return {"number": self.number}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["number"])  # type: ignore[misc]

    def start(self, texts: Mapping[str, str], max_turns: int) -> TextWorldEpisode:
        """Load a game in one of the workers; its first observation is waited for when it is read.

        Args:
            texts: pddl_domain, grammar and pddl_problem, as in a game file.
            max_turns: of the episode.
        """
        if not self._workers:
            self._workers = [_Worker() for _ in range(self.number)]
        return TextWorldEpisode(self._workers[next(self._next)], dict(texts), max_turns)

    def play_all(self, episodes: Sequence[TextWorldEpisode], actions: Sequence[str]) -> list[Transition | Exception]:
        """One action in each episode, in all workers at the same time."""
        for episode, action in zip(episodes, actions, strict=True):
            episode.send(action)
        results: list[Transition | Exception] = []
        for episode in episodes:
            try:
                results.append(episode.receive())
            except EngineError as error:
                results.append(error)
        return results

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []


class TextWorldEpisode(Episode):
    """A game in a worker.

    AlfWorld accepts a command only word for word; other case and white space are accepted here, too.
    """

    def __init__(self, worker: _Worker, texts: dict[str, str], max_turns: int) -> None:
        self.max_turns = max_turns
        self._worker, self._key = worker, worker.new_key()
        self._reply: Reply | None = None
        self._is_valid = True
        worker.send(("load", self._key, texts))
        weakref.finalize(self, worker.send, ("drop", self._key, None))

    @property
    def reply(self) -> Reply:
        """The latest one, waited for if need be."""
        if self._reply is None:
            self._reply = self._worker.receive(self._key)
        return self._reply

    @property
    def observation(self) -> Observation:  # type: ignore[override]
        return Observation(self.reply.feedback, self.reply.commands)

    def send(self, action: str) -> None:
        """Give the command to the engine; `receive` has to follow."""
        commands = self.reply.commands
        words = " ".join(action.lower().split())
        command = words if words in commands else action
        self._is_valid = command.strip() in commands
        self._worker.send(("step", self._key, command))

    def receive(self) -> Transition:
        self._reply = self._worker.receive(self._key)
        won = self._reply.won
        return Transition(self.observation, done=won, outcome=WON if won else None, is_valid=self._is_valid)

    def step(self, action: str) -> Transition:
        self.send(action)
        return self.receive()


class _Worker:
    """One process and the thread that reads its replies."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._keys = count()
        self._replies: dict[int, Reply | str] = {}
        self._arrived = threading.Condition()
        self._sending = threading.Lock()
        self._is_over = False
        threading.Thread(target=self._read, daemon=True).start()
        atexit.register(self.close)

    def new_key(self) -> int:
        return next(self._keys)

    def send(self, message: tuple[str, int, Any]) -> None:
        """Messages to a worker that has ended are lost; whoever waits for the reply is told."""
        with self._sending:
            if not self._is_over:
                try:
                    self._connection.send(message)
                except (BrokenPipeError, OSError):
                    self._end()

    def receive(self, key: int) -> Reply:
        with self._arrived:
            self._arrived.wait_for(lambda: key in self._replies or self._is_over)
            reply = self._replies.pop(key, None)
        if reply is None:
            raise EngineError(f"the engine's process ended with exit code {self._process.exitcode}")
        if isinstance(reply, str):
            raise EngineError(reply)
        return reply

    def close(self) -> None:
        self.send(("stop", 0, None))
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
        atexit.unregister(self.close)

    def _read(self) -> None:
        while True:
            try:
                key, reply = self._connection.recv()
            except (EOFError, OSError):
                self._process.join(timeout=5)
                self._end()
                return
            with self._arrived:
                self._replies[key] = reply
                self._arrived.notify_all()

    def _end(self) -> None:
        with self._arrived:
            self._is_over = True
            self._arrived.notify_all()


def _serve(connection: Connection) -> None:
    """The worker's loop. Environments are used again: the planner's library is loaded once for each and never freed."""
    sys.argv = sys.argv[:1]  # the planner's translator reads it
    import textworld  # noqa: PLC0415
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler  # noqa: PLC0415
    from textworld.envs import PddlEnv  # noqa: PLC0415

    playing: dict[int, Any] = {}
    idle: list[Any] = []
    while True:
        try:
            order, key, content = connection.recv()
        except EOFError:
            return
        if order == "stop":
            return
        if order == "drop":
            if key in playing:
                idle.append(playing.pop(key))
            continue
        try:
            if order == "load":
                infos = textworld.EnvInfos(won=True, admissible_commands=True)
                playing[key] = idle.pop() if idle else AlfredDemangler(PddlEnv(infos))
                playing[key].load(content)
                state, score = playing[key].reset(), 0
            else:
                state, score, _ = playing[key].step(content)
            reply: Reply | str = Reply(str(state.feedback), tuple(state.admissible_commands), bool(state.won), int(score))
        except (Exception, SystemExit) as error:  # the planner ends its process for what it cannot read
            reply = f"{type(error).__name__}: {error}"
        connection.send((key, reply))
