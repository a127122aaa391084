"""The contract of an environment: subclass `Environment` and `Episode`, name the class in YAML.

An environment is stateless and picklable: every random draw comes from the generator it is given,
everything about a task is in `Task.spec`. Only `sample`, `start` and `Episode.step` are needed to
train on fixed tasks; `vary` and `validate` switch adaptation on; `expert` and `label_step` serve
warm starts and evaluation where ground truth exists, never the training signal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from random import Random

from rla_lightning.types import (
    CheckRequest,
    Direction,
    ExpertAction,
    ExpertTest,
    Observation,
    Purpose,
    Solution,
    Split,
    StepLabel,
    Task,
    Transition,
)


class Episode(ABC):
    """One single-use playthrough of a task.

    Attributes:
        observation: what the agent sees now.
        max_turns: turns after which the episode counts as lost; the rollout enforces it.
    """

    observation: Observation
    max_turns: int

    @abstractmethod
    def step(self, action: str) -> Transition:
        """Apply one action; "" stands for an answer that could not be parsed.

        An action that is not understood or not admissible leaves the state unchanged and returns
        `is_valid=False`.
        """


class Environment(ABC):
    """Makes tasks, plays them and rewrites them."""

    name: str = "environment"

    @abstractmethod
    def sample(self, rng: Random, difficulty: float, split: Split = "in_domain") -> Task:
        """A fresh task; its id is a function of its spec, so equal specs have equal ids."""

    @abstractmethod
    def start(self, task: Task) -> Episode:
        """A new episode of the task; equal tasks give equal episodes."""

    def corpus(self, purpose: Purpose, split: Split) -> Sequence[Task]:
        """Every task there is for a purpose, where tasks are a fixed set; empty where `sample` makes new ones.

        The tasks of different purposes and splits are disjoint; nothing is trained on but `("train", "in_domain")`.
        """
        del purpose, split
        return ()

    def step_all(self, episodes: Sequence[Episode], actions: Sequence[str]) -> list[Transition | Exception]:
        """One action in each of several episodes; an exception ends only the episode that raised it.

        Override it where episodes can be played side by side.
        """
        results: list[Transition | Exception] = []
        for episode, action in zip(episodes, actions, strict=True):
            try:
                results.append(episode.step(action))
            except Exception as error:
                results.append(error)
        return results

    def vary(self, task: Task, direction: Direction, rng: Random, number: int) -> Sequence[Task]:
        """Up to `number` rewritten candidates, already meant to be harder or easier than `task`."""
        del task, direction, rng, number
        return ()

    def redraw(self, task: Task, rng: Random) -> Task | None:
        """Another task with the same kind and the same knobs, everything else drawn anew; None where there is none."""
        del task, rng
        return None

    def knobs(self, task: Task) -> Mapping[str, float]:
        """The numbers that make the task easy or hard, under the same names for every task of a kind.

        A regression on them predicts success, and they say how far a rewrite is from its root.
        """
        return {"difficulty": task.difficulty}

    def validate(self, task: Task, parent: Task | None = None) -> str | None:
        """The problem that forbids using the task (unsolvable, equal to its parent, ...), or None."""
        del task, parent
        return None

    def resembles(self, task: Task, earlier: Sequence[Task]) -> bool:
        """Whether a rewrite says nearly the same as one of the earlier tasks (or as a held-out one), though not exactly."""
        del task, earlier
        return False

    def rewrite_prompt(self, task: Task, direction: Direction, critique: str, successes: int, rollouts: int) -> str | None:
        """What a rewriter language model is asked, to make the task harder or easier; None when it cannot be rewritten.

        Args:
            task: to be rewritten.
            direction: where to.
            critique: text feedback on its rollouts, may be "".
            successes: of its latest rollouts.
            rollouts: how many they were.
        """
        del task, direction, critique, successes, rollouts
        return None

    def apply_rewrite(self, task: Task, answer: str) -> Task | str:
        """The rewritten task that a rewriter's answer stands for, or what is wrong with the answer."""
        del task, answer
        return "This environment cannot be rewritten by text."

    def describe(self, task: Task) -> str:
        """The task in short, for the critic and the rewriter; vocabulary words for tiny models."""
        del task
        return ""

    def vocabulary(self) -> tuple[str, ...]:
        """Every word that digests, short commands, thoughts and critiques can contain.

        Needed only for tiny models whose tokenizer is made for the environment.
        """
        return ()

    def expert(self, episode: Episode, rng: Random) -> ExpertAction | None:
        """What an expert with the agent's knowledge would do next; None without an expert."""
        del episode, rng
        return None

    def detour(self, episode: Episode, rng: Random) -> str | None:
        """An action that an agent might take instead of the expert's, for noisy demonstrations; None without any."""
        commands = episode.observation.commands
        return rng.choice(commands) if commands else None

    def label_step(self, episode: Episode, action: str) -> StepLabel | None:
        """Ground truth about an action in the episode's present state; None without it."""
        del episode, action
        return None


class TestedEnvironment(Environment):
    """An environment whose actions are programs, so that a reward model can judge them by writing unit tests."""

    __test__ = False  # not a test of pytest's

    @abstractmethod
    def check_programs(self, requests: Sequence[CheckRequest]) -> list[list[list[bool | None]]]:
        """Which programs pass which tests: [request][test][program]; None where a program could not be run."""

    def solutions(self, task: Task) -> Sequence[Solution]:
        """Right and wrong programs to evaluate test writers on; none where they are not known."""
        del task
        return ()

    def example_test(self, task: Task, rng: Random, is_right: bool) -> ExpertTest | None:
        """A unit test to learn from, with the right output or a wrong one; None without an expert."""
        del task, rng, is_right
        return None
