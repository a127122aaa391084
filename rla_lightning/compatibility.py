"""Arguments of `ClosedLoop` that do not go together."""

from __future__ import annotations

from rla_lightning.curriculum.proposing import TaskAdapter
from rla_lightning.curriculum.rewriter import RewriterAdapter
from rla_lightning.environments.base import Environment, TestedEnvironment
from rla_lightning.models.specs import LanguageModelSpec
from rla_lightning.rollout.formats import JudgeFormat
from rla_lightning.rollout.formats_code import UnitTestFormat
from rla_lightning.settings import CritiqueSettings, RolloutSettings, require


def require_compatible(
    environment: Environment,
    rollout: RolloutSettings,
    *,
    votes: JudgeFormat | None,
    tests: UnitTestFormat | None,
    policy: LanguageModelSpec,
    reward_model: LanguageModelSpec,
    trains_judge: bool,
    judged_here: bool,
    critiques: CritiqueSettings,
) -> None:
    """Raise ConfigError for the first pair that cannot work.

    Args:
        votes: the judge's format, if one is given.
        tests: with it the reward model writes unit tests instead.
        trains_judge: the reward model has an optimizer.
        judged_here: no server judges.
    """
    require(
        tests is None or isinstance(environment, TestedEnvironment),
        f"model.test_format needs an environment whose actions are programs, not {type(environment).__name__}",
    )
    require(
        tests is not None or not isinstance(environment, TestedEnvironment),
        f"{type(environment).__name__} tells its verdict with the first observation, so there is nothing left to vote on: "
        "set model.test_format",
    )
    require(
        not trains_judge or rollout.num_judgments >= 2,
        "rollout.num_judgments is 1, but votes are compared with each other: train the reward model on at least 2 "
        "(or freeze it: model.reward_model_optimizer null)",
    )
    require(tests is not None or not rollout.known_programs, "rollout.known_programs needs model.test_format")
    require(tests is None or votes is None, f"model.judge_format {type(votes).__name__} is of no use with model.test_format")
    require(policy.base == "own", "model.policy.base policy: it is the others that can be on the policy's base")
    require(policy.weights, "model.policy.weights is false, but the policy is trained here")
    require(
        reward_model.weights or (not judged_here and not trains_judge),
        "model.reward_model.weights is false: set model.judge_sampler, and model.reward_model_optimizer null",
    )
    require(
        critiques.writer != "reward_model" or reward_model.path is not None,
        "model.critiques.writer is reward_model, but model.reward_model.path is null: a model of the environment's words cannot "
        "write critiques",
    )


def require_reader(critiques: CritiqueSettings, adapter: TaskAdapter | None, context_length: int) -> None:
    """Raise ConfigError where critiques that a model would write have no writer or nobody reads them.

    Args:
        adapter: that the critiques go to.
        context_length: of the reward model.
    """
    writer, limit = critiques.writer, critiques.max_new_tokens
    require(writer == "template" or adapter is not None, f"model.critiques.writer is {writer}, but data.adapter null reads none")
    require(
        writer != "rewriter" or isinstance(adapter, RewriterAdapter),
        f"model.critiques.writer is rewriter, but data.adapter is {type(adapter).__name__}, not RewriterAdapter",
    )
    require(
        writer != "reward_model" or limit < context_length,
        f"model.critiques.max_new_tokens {limit} leaves no room for a log in the reward model's context, {context_length} tokens",
    )
