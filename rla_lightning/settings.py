"""Groups of settings that belong together; each is checked when it is built.

They are arguments of `ClosedLoop`, so `--model.rollout.group_size 16` or the same keys in YAML set them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rla_lightning.algorithm.advantages import JudgeBalance, JudgeNormalization, LoneStep, PolicyAdvantage
from rla_lightning.types import ConfigError, SamplingParams


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class RolloutSettings:
    """How episodes are played and judged.

    Args:
        group_size: rollouts of each task per iteration (G).
        num_judgments: votes of the reward model on each step, or unit tests that it writes for each task (m).
        temperature: of the policy and the judge, in training and in evaluation.
        top_p: nucleus filter, 1 switches it off.
        top_k: keep the k likeliest tokens, 0 switches it off.
        max_new_tokens: limit of one answer of the policy.
        max_judge_tokens: limit of one judgment.
        known_programs: in training, rate unit tests by the known right and wrong programs of a task, too (those of its source),
            so that the test writer also learns where the policy always succeeds or always fails; the paper does not.
        max_turns: limit of turns in training, on top of the environment's own.
        eval_max_turns: the same for evaluation.
        eval_samples: rollouts of each evaluation task; with more than one, their spread is reported too.
        sampler_tokens: most tokens (prompts and answers, padded) decoded in one batch. Their keys and values are in memory twice
            while a batch is put together anew, and as many again may be kept of conversations that wait.
    """

    group_size: int = 8
    num_judgments: int = 3
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 8
    max_judge_tokens: int = 8
    known_programs: bool = False
    max_turns: int | None = None
    eval_max_turns: int | None = None
    eval_samples: int = 1
    sampler_tokens: int = 32768

    def __post_init__(self) -> None:
        for name in ("num_judgments", "max_new_tokens", "max_judge_tokens", "eval_samples", "sampler_tokens"):
            require(getattr(self, name) >= 1, f"rollout.{name} must be at least 1, got {getattr(self, name)}")
        require(
            self.group_size >= 2,
            f"rollout.group_size must be at least 2, got {self.group_size}: advantages are normalised within a group",
        )
        require(self.temperature > 0, f"rollout.temperature must be positive, got {self.temperature}")
        require(0 < self.top_p <= 1, f"rollout.top_p must be in (0, 1], got {self.top_p}")
        require(self.top_k >= 0, f"rollout.top_k must not be negative, got {self.top_k}")
        for name in ("max_turns", "eval_max_turns"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"rollout.{name} must be at least 1 or null, got {value}")

    @property
    def policy_sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_p, self.top_k, self.max_new_tokens)

    @property
    def judge_sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_p, self.top_k, self.max_judge_tokens)


@dataclass(frozen=True)
class RewardSettings:
    """How outcomes and judgments become rewards and advantages.

    Args:
        score_weight: weight of the mean judgment in a step's reward (the paper's lambda).
        outcome_weight: weight of the verified outcome in a step's reward.
        policy_outcome: whether the outcome pays the policy, too; false leaves it the votes, while the judge goes on learning from
            the outcome.
        outcome: what counts as the outcome there; binary is +1 or -1, partial grows from -1 to +1 with the share of the goal
            that was reached, where the environment verifies it in parts (a program's hidden tests).
        invalid_penalty: taken from the reward of a step whose action was not valid.
        parse_penalty: advantage of a judgment that cannot be parsed.
        advantage: how step rewards become advantages of the policy; the paper uses step_index.
        lone_step: what step_index does where only one rollout is left; the paper uses raw.
        gamma: discount of return_to_go and gae.
        gae_lambda: trace decay of gae.
        judge_normalization: of the reward model's rewards over the votes on one step (tests are always standardised).
        judge_balance: of praise (steps with a positive reward) and blame in the update on votes. direction draws
            equally many steps of both; critic weighs each step by how much its outcome surprised the critic and scales
            both sides to the same sum; none is the paper.
    """

    score_weight: float = 1.0
    outcome_weight: float = 1.0
    policy_outcome: bool = True
    outcome: Literal["binary", "partial"] = "binary"
    invalid_penalty: float = 0.0
    parse_penalty: float = -2.0
    advantage: PolicyAdvantage = "step_index"
    lone_step: LoneStep = "baseline"
    gamma: float = 1.0
    gae_lambda: float = 0.95
    judge_normalization: JudgeNormalization = "zscore"
    judge_balance: JudgeBalance = "direction"

    def __post_init__(self) -> None:
        require(self.score_weight >= 0, f"reward.score_weight must not be negative, got {self.score_weight}")
        require(self.outcome_weight >= 0, f"reward.outcome_weight must not be negative, got {self.outcome_weight}")
        require(
            self.score_weight + self.outcome_weight > 0,
            "reward.score_weight and reward.outcome_weight are both 0: nothing would be learned",
        )
        require(
            self.policy_outcome or self.score_weight > 0,
            "reward.policy_outcome is false and reward.score_weight is 0: nothing would pay the policy",
        )
        require(self.invalid_penalty >= 0, f"reward.invalid_penalty must not be negative, got {self.invalid_penalty}")
        require(self.parse_penalty <= 0, f"reward.parse_penalty must not be positive, got {self.parse_penalty}")
        for name in ("gamma", "gae_lambda"):
            require(0 <= getattr(self, name) <= 1, f"reward.{name} must be in [0, 1], got {getattr(self, name)}")


@dataclass(frozen=True)
class AcceptanceSettings:
    """When a rewritten task replaces its parent.

    Args:
        rule: threshold is the paper's comparison of two success rates. posterior drops a proposal whose first rollouts speak
            against it and then rolls it out together with its parent until the Beta posteriors of these new counts decide.
        low: lower end of the success band.
        high: upper end of the success band.
        level: probability at which the posterior rule accepts.
        futility: probability at which it rejects.
        max_rerolls: iterations that a proposal and its parent get together; undecided after them is rejected.
        train_on: which proposals' rollouts the policy and the reward model learn from, besides active tasks: accepted ones
            in the iteration that accepts them (the paper), or all.
    """

    rule: Literal["threshold", "posterior"] = "posterior"
    low: float = 0.2
    high: float = 0.8
    level: float = 0.95
    futility: float = 0.5
    max_rerolls: int = 3
    train_on: Literal["accepted", "all"] = "all"

    def __post_init__(self) -> None:
        require(0 <= self.low < self.high <= 1, f"acceptance needs 0 <= low < high <= 1, got {self.low} and {self.high}")
        require(0.5 < self.level < 1, f"acceptance.level must be in (0.5, 1), got {self.level}")
        require(
            0 < self.futility < self.level,
            f"acceptance.futility must be above 0 and below the level {self.level}, got {self.futility}",
        )
        require(self.max_rerolls >= 1, f"acceptance.max_rerolls must be at least 1, got {self.max_rerolls}")


@dataclass(frozen=True)
class CritiqueSettings:
    """Who says in words why rollouts of tasks outside the band failed or succeeded too easily; the rewriter reads it.

    Args:
        writer: template fills counts and actions into sentences. reward_model reads the logs and writes, as it is before its
            update; the rewriter (a RewriterAdapter) does so before it rewrites, under its own limits. What a model fails to
            write is the template's.
        max_rollouts: most rollouts of a task that a model reads; above the band the shortest win is among them.
        max_new_tokens: limit of one answer of the reward model, thinking included; a longer one is refused.
    """

    writer: Literal["template", "reward_model", "rewriter"] = "template"
    max_rollouts: int = 4
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        writers = ("template", "reward_model", "rewriter")
        require(self.writer in writers, f"critiques.writer must be one of {', '.join(writers)}, got '{self.writer}'")
        for name in ("max_rollouts", "max_new_tokens"):
            require(getattr(self, name) >= 1, f"critiques.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class UpdateSettings:
    """How a model is updated in one iteration; all there is to say about the critic.

    Args:
        minibatches: optimizer steps per pass over the samples.
        update_epochs: passes over the samples.
        max_samples: most samples used per iteration, drawn at random.
        token_budget: most tokens (padded) in one forward pass; changes memory and speed, never the gradients. More than a few
            thousand are of use on a GPU only.
        max_grad_norm: gradients are clipped to this norm.
        success_low: tasks with a lower success rate are left out.
        success_high: tasks with a higher success rate are left out.
    """

    minibatches: int = 4
    update_epochs: int = 1
    max_samples: int = 2048
    token_budget: int = 4096
    max_grad_norm: float = 1.0
    success_low: float = 0.0
    success_high: float = 1.0

    def __post_init__(self) -> None:
        for name in ("minibatches", "update_epochs", "max_samples", "token_budget"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.max_grad_norm > 0, f"max_grad_norm must be positive, got {self.max_grad_norm}")
        require(
            0 <= self.success_low < self.success_high <= 1,
            f"success_low and success_high must satisfy 0 <= low < high <= 1, got {self.success_low}, {self.success_high}",
        )


@dataclass(frozen=True)
class ClippedUpdateSettings(UpdateSettings):
    """How a language model is updated in one iteration.

    Args:
        clip_range: of the probability ratio.
        kl_coef: weight of the KL penalty to the model before this iteration's update.
        ent_coef: weight of the entropy bonus.
        target_kl: the update ends early when an optimizer step saw a mean KL above this.
    """

    clip_range: float = 0.2
    kl_coef: float = 0.01
    ent_coef: float = 0.0
    target_kl: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.clip_range > 0, f"clip_range must be positive, got {self.clip_range}")
        for name in ("kl_coef", "ent_coef"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        require(self.target_kl is None or self.target_kl > 0, f"target_kl must be positive or null, got {self.target_kl}")
