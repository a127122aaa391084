"""The three models as they are used between updates: acting, judging, predicting."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rla_lightning.environments.base import Environment, TestedEnvironment
from rla_lightning.models.language_model import LoadedModel, evaluating, load_language_model, share_language_model
from rla_lightning.models.specs import LanguageModelSpec, ValueModelSpec
from rla_lightning.models.value_model import LoadedValueModel, load_value_model, share_value_model
from rla_lightning.rollout.batching import make_value_batch, split_by_budget
from rla_lightning.rollout.collect import Progress, collect, describe_error, judge
from rla_lightning.rollout.explorer import Explorer
from rla_lightning.rollout.formats import CriticFormat, JudgeFormat, PolicyFormat
from rla_lightning.rollout.formats_code import UnitTestFormat
from rla_lightning.rollout.sampler import Sampler, SamplerBackend
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.rollout.unit_tests import judge_by_tests
from rla_lightning.settings import RolloutSettings
from rla_lightning.types import ConfigError, RolloutGroup, Task

logger = logging.getLogger(__name__)


def no_progress(stage: str, done: int, total: int, success_rate: float) -> None:
    """A `Progress` that nobody watches."""


@dataclass(frozen=True)
class Formats:
    """How each model is asked and how its answers are read."""

    policy: PolicyFormat
    judge: JudgeFormat
    critic: CriticFormat
    test: UnitTestFormat | None = None  # the reward model writes unit tests instead of voting on steps


@dataclass(frozen=True)
class Players:
    """Unsharded models with what is needed to use them; the tasks may be one rank's share."""

    environment: Environment
    policy: LoadedModel
    reward_model: LoadedModel
    critic: LoadedValueModel
    policy_sampler: Sampler
    judge_sampler: Sampler
    formats: Formats
    settings: RolloutSettings

    def play(
        self,
        tasks: Sequence[Task],
        group_size: int,
        key: str,
        *,
        max_turns: int | None,
        with_labels: bool = False,
        progress: Progress | None = None,
    ) -> list[RolloutGroup]:
        """Roll out every task `group_size` times; the draws depend on `key` and the task's id alone."""
        if not tasks:  # a process more than there are tasks
            return []
        return collect(
            tasks,
            group_size,
            environment=self.environment,
            sampler=self.policy_sampler,
            tokenizer=self.policy.tokenizer,
            policy_format=self.formats.policy,
            critic_format=self.formats.critic,
            critic_tokenizer=self.critic.tokenizer,
            params=self.settings.policy_sampling,
            key=f"{key}/act",  # other draws than those of the votes on the same turn
            max_turns=max_turns,
            context_length=self.policy.context_length,
            critic_context_length=self.critic.context_length,
            with_labels=with_labels,
            progress=progress,
        )

    def judge(
        self, groups: Sequence[RolloutGroup], key: str, progress: Progress | None = None, with_solutions: bool = False
    ) -> list[RolloutGroup]:
        """Add `num_judgments` votes of the reward model to every step, or as many unit tests to every task.

        With solutions, unit tests are rated by the known programs of the task, too.
        """
        if self.formats.test is not None:
            assert isinstance(self.environment, TestedEnvironment)
            return judge_by_tests(
                groups,
                self.settings.num_judgments,
                environment=self.environment,
                sampler=self.judge_sampler,
                tokenizer=self.reward_model.tokenizer,
                test_format=self.formats.test,
                params=self.settings.judge_sampling,
                key=f"{key}/judge",
                context_length=self.reward_model.context_length,
                with_solutions=with_solutions,
                progress=progress,
            )
        return judge(
            groups,
            self.settings.num_judgments,
            sampler=self.judge_sampler,
            tokenizer=self.reward_model.tokenizer,
            judge_format=self.formats.judge,
            params=self.settings.judge_sampling,
            key=f"{key}/judge",
            context_length=self.reward_model.context_length,
            progress=progress,
        )

    def explore(self, tasks: Sequence[Task], key: str) -> list[RolloutGroup]:
        """An episode of a scripted agent per task: steps to be judged that no model has a part in."""
        return Explorer(self.environment, self.formats.policy, self.policy.tokenizer).rollouts(tasks, key)

    def check_context(self, tasks: Sequence[Task]) -> None:
        """Raise ConfigError when the first prompt of a task leaves one of the models no room for its answer."""
        for task in tasks:
            try:
                observation, description = self.environment.start(task).observation, self.environment.describe(task)
            except Exception:  # its rollouts will end with ENV_ERROR
                continue
            action = observation.commands[0] if observation.commands else ""
            policy, reward_model, critic, tests = self.policy, self.reward_model, self.critic, self.formats.test
            judge_format = self.formats.judge
            prompts = {
                "policy": self.formats.policy.prompt(policy.tokenizer, (), observation),
                "reward_model": judge_format.prompt(reward_model.tokenizer, (), observation, action, action, True, "")
                if tests is None
                else tests.prompt(reward_model.tokenizer, observation),
                "critic": self.formats.critic.prompt(critic.tokenizer, description, (), observation),
            }
            contexts = (policy.context_length, reward_model.context_length, critic.context_length)
            answers = (self.settings.max_new_tokens, self.settings.max_judge_tokens, 0)
            for (name, prompt), context, answer in zip(prompts.items(), contexts, answers, strict=True):
                if len(prompt) + answer > context:
                    raise ConfigError(
                        f"the context of the {name}, {context} tokens, is too short for task {task.id}: "
                        f"its first prompt has {len(prompt)} tokens, its answer may have {answer}"
                    )

    def predict(self, tasks: Sequence[Task]) -> list[float]:
        """The critic's success probability of each task before the first action; NaN where the environment fails."""
        prompts: dict[int, tuple[int, ...]] = {}
        for index, task in enumerate(tasks):
            try:
                description, observation = self.environment.describe(task), self.environment.start(task).observation
            except Exception as error:
                logger.warning("task %s: the environment failed: %s", task.id, describe_error(error))
                continue
            prompts[index] = self.formats.critic.prompt(self.critic.tokenizer, description, (), observation)
        predicted = dict(zip(prompts, self.values(list(prompts.values())).tolist(), strict=True))
        return [predicted.get(index, math.nan) for index in range(len(tasks))]

    def state_values(self, group: RolloutGroup) -> list[np.ndarray]:
        """Predicted success probability before each step of the group, [G] arrays of [K]."""
        lengths = [len(trajectory.steps) for trajectory in group.trajectories]
        predicted = self.values([step.critic_ids for trajectory in group.trajectories for step in trajectory.steps])
        return np.split(predicted, np.cumsum(lengths)[:-1])

    def values(self, prompts: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Predicted success probabilities [N] of critic prompts; equal prompts are computed once."""
        if not prompts:
            return np.zeros(0)
        unique = list(dict.fromkeys(prompts))
        predicted = np.zeros(len(unique))
        device = next(self.critic.model.parameters()).device
        lengths = np.array([[len(prompt)] for prompt in unique])
        with torch.no_grad(), evaluating(self.critic.model):
            for rows in split_by_budget(lengths, self.settings.sampler_tokens):
                chosen = [unique[row] for row in rows]
                batch = make_value_batch(chosen, [0.0] * len(rows), [1.0] * len(rows), self.critic.tokenizer.pad_token_id)
                batch = batch.to(device)
                predicted[rows] = self.critic.model.success_probability(batch.input_ids, batch.attention_mask).cpu().numpy()
        index = {prompt: row for row, prompt in enumerate(unique)}
        return predicted[[index[prompt] for prompt in prompts]]


def load_players(
    environment: Environment,
    policy: LanguageModelSpec,
    reward_model: LanguageModelSpec,
    critic: ValueModelSpec,
    formats: Formats,
    settings: RolloutSettings,
    seed: int,
    policy_sampler: SamplerBackend | None = None,
    judge_sampler: SamplerBackend | None = None,
) -> Players:
    """Build or load the three models, on the CPU, and what samples from them; null: this process."""
    words = environment.vocabulary()
    actor = load_language_model(policy, words, f"{seed}/policy")
    judge_key, critic_key = f"{seed}/reward_model", f"{seed}/critic"
    shares_judge, shares_critic = reward_model.base == "policy", critic.base == "policy"
    judging = (
        share_language_model(actor, reward_model, judge_key)
        if shares_judge
        else load_language_model(reward_model, words, judge_key)
    )
    return Players(
        environment=environment,
        policy=actor,
        reward_model=judging,
        critic=share_value_model(actor, critic, critic_key) if shares_critic else load_value_model(critic, words, critic_key),
        policy_sampler=_sampler(policy_sampler, actor, "policy", settings),
        judge_sampler=_sampler(judge_sampler, judging, "reward_model", settings),
        formats=formats,
        settings=settings,
    )


def _sampler(backend: SamplerBackend | None, loaded: LoadedModel, name: str, settings: RolloutSettings) -> Sampler:
    if backend is not None:
        return backend.build(loaded, name)
    return TransformersSampler(loaded.model, loaded.tokenizer, settings.sampler_tokens)
