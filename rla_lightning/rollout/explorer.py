"""A scripted agent: an environment's expert that sometimes takes a detour or gives an unusable answer.

It teaches tiny models before the loop, and its episodes on held-out tasks are the fixed steps on which reward models are
compared: were they judged on the policy's own steps, a frozen judge's accuracy would move with the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from transformers import PreTrainedTokenizerBase

from rla_lightning.environments.base import Environment, Episode, TestedEnvironment
from rla_lightning.rollout.collect import describe_error
from rla_lightning.rollout.formats import History, PolicyFormat, Turn
from rla_lightning.types import (
    LOST,
    WON,
    Completion,
    ExpertAction,
    Observation,
    RolloutGroup,
    Step,
    StepLabel,
    Task,
    Trajectory,
    Transition,
)

DETOURS, INVALID = 0.3, 0.1  # shares of the actions on the fixed steps


@dataclass(frozen=True)
class Visit:
    """One turn of the scripted agent."""

    history: tuple[Turn, ...]
    observation: Observation
    expert: ExpertAction  # what would have been right
    shown: ExpertAction  # what a demonstration shows, which may be wrong
    raw_text: str  # what was answered
    action: str  # what that meant to the environment, "" when nothing
    label: StepLabel | None  # ground truth about the action
    transition: Transition


@dataclass(frozen=True)
class Explorer:
    """Plays episodes of an environment that has an expert.

    Args:
        environment: with an expert.
        policy_format: of the answers.
        tokenizer: of the policy.
        detour_rate: share of the actions that are a detour.
        invalid_rate: share of the answers that break off or name a command that was admissible earlier.
        action_noise: share of the demonstrations that show a detour.
    """

    environment: Environment
    policy_format: PolicyFormat
    tokenizer: PreTrainedTokenizerBase
    detour_rate: float = DETOURS
    invalid_rate: float = INVALID
    action_noise: float = 0.0

    def episode(self, task: Task, rng: Random) -> Iterator[Visit]:
        """The visits of one episode; none where the environment has no expert."""
        episode = self.environment.start(task)
        history: tuple[Turn, ...] = ()
        for number in range(1, episode.max_turns + 1):
            observation = episode.observation
            expert = self.environment.expert(episode, rng)
            if expert is None:
                return
            action, answer_ids, raw_text = self._answer(episode, expert, history, rng)
            label = self.environment.label_step(episode, action)
            is_noise = self.action_noise > 0 and rng.random() < self.action_noise
            shown = self._detour(episode, expert, rng) if is_noise else expert
            transition = episode.step(action)
            yield Visit(history, observation, expert, shown, raw_text, action, label, transition)
            if transition.done:
                return
            history = (*history, Turn(number, observation, action, completion_ids=answer_ids))

    def rollouts(self, tasks: Sequence[Task], key: str) -> list[RolloutGroup]:
        """One episode of each task that the expert can play, as a group of one, ready to be judged.

        Where actions are programs: a group of all programs whose correctness is known.
        """
        if isinstance(self.environment, TestedEnvironment):
            return [group for task in tasks if (group := self._known_programs(self.environment, task)).trajectories]
        groups = []
        for task in tasks:
            try:
                visits = list(self.episode(task, Random(f"{key}/{task.id}")))
            except Exception as error:
                failed = Trajectory(task, (), LOST, "ENV_ERROR", describe_error(error))
                groups.append(RolloutGroup(task, (failed,), judgments=((),)))
                continue
            if not visits:  # no expert, at least for this task
                continue
            steps = tuple(
                Step(
                    prompt_ids=(),
                    completion=Completion((), (), visit.raw_text, "EOS"),
                    observation=visit.observation,
                    action=visit.action,
                    is_valid=visit.transition.is_valid,
                    feedback=visit.transition.observation.text,
                    label=visit.label,
                )
                for visit in visits
            )
            last = visits[-1].transition
            outcome = last.outcome if last.done and last.outcome is not None else LOST
            trajectory = Trajectory(task, steps, outcome, "DONE" if last.done else "MAX_TURNS")
            groups.append(RolloutGroup(task, (trajectory,)))
        return groups

    def _known_programs(self, environment: TestedEnvironment, task: Task) -> RolloutGroup:
        try:
            observation, solutions = environment.start(task).observation, environment.solutions(task)
        except Exception as error:
            return RolloutGroup(task, (Trajectory(task, (), LOST, "ENV_ERROR", describe_error(error)),), judgments=((),))
        trajectories = []
        for solution in solutions:
            label = StepLabel(1 if solution.is_correct else -1)
            written = Completion((), (), solution.program, "EOS")
            step = Step((), written, observation, solution.program, True, label=label)
            trajectories.append(Trajectory(task, (step,), WON if solution.is_correct else LOST, "DONE"))
        return RolloutGroup(task, tuple(trajectories))

    def _answer(self, episode: Episode, expert: ExpertAction, history: History, rng: Random) -> tuple[str, tuple[int, ...], str]:
        """The action that is taken ("" when the answer names none), and the answer that led to it as tokens and as text."""
        observation, draw = episode.observation, rng.random()
        if draw < self.invalid_rate:
            stale = [(t.observation, c) for t in history for c in t.observation.commands if c not in observation.commands]
            if stale and rng.random() < 0.5:
                shown, command = rng.choice(stale)  # was possible earlier in this episode, is not now
                ids, text = self._tell(shown, replace(expert, action=command))
            else:
                words = self._tell(observation, expert)[1].split()
                text = " ".join(words[: rng.randrange(len(words))])  # breaks off
                ids = tuple(self.tokenizer(text, add_special_tokens=False).input_ids)
            if self.policy_format.parse(text, observation) is None:
                return "", ids, text
        if draw < self.invalid_rate + self.detour_rate:
            expert = self._detour(episode, expert, rng)
        return (expert.action, *self._tell(observation, expert))

    def _detour(self, episode: Episode, expert: ExpertAction, rng: Random) -> ExpertAction:
        action = self.environment.detour(episode, rng)
        return expert if action is None else replace(expert, action=action)

    def _tell(self, observation: Observation, expert: ExpertAction) -> tuple[tuple[int, ...], str]:
        ids = self.policy_format.answer(self.tokenizer, observation, expert)
        return ids, str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
