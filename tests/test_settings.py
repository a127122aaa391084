import pytest

from rla_lightning.settings import AcceptanceSettings, ClippedUpdateSettings, RewardSettings, RolloutSettings
from rla_lightning.types import ConfigError, SamplingParams

NAN = float("nan")


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (RolloutSettings, {"group_size": 1}, "rollout.group_size must be at least 2, got 1"),
        (RolloutSettings, {"num_judgments": 0}, "rollout.num_judgments must be at least 1, got 0"),
        (RolloutSettings, {"max_new_tokens": 0}, "rollout.max_new_tokens must be at least 1, got 0"),
        (RolloutSettings, {"max_judge_tokens": 0}, "rollout.max_judge_tokens must be at least 1, got 0"),
        (RolloutSettings, {"eval_samples": 0}, "rollout.eval_samples must be at least 1, got 0"),
        (RolloutSettings, {"sampler_tokens": 0}, "rollout.sampler_tokens must be at least 1, got 0"),
        (RolloutSettings, {"temperature": 0.0}, "rollout.temperature must be positive, got 0.0"),
        (RolloutSettings, {"temperature": NAN}, "rollout.temperature must be positive, got nan"),
        (RolloutSettings, {"top_p": 0.0}, r"rollout.top_p must be in \(0, 1\], got 0.0"),
        (RolloutSettings, {"top_p": 1.1}, r"rollout.top_p must be in \(0, 1\], got 1.1"),
        (RolloutSettings, {"top_k": -1}, "rollout.top_k must not be negative, got -1"),
        (RolloutSettings, {"max_turns": 0}, "rollout.max_turns must be at least 1 or null, got 0"),
        (RolloutSettings, {"eval_max_turns": 0}, "rollout.eval_max_turns must be at least 1 or null, got 0"),
        (RewardSettings, {"score_weight": -1.0}, "reward.score_weight must not be negative, got -1.0"),
        (RewardSettings, {"outcome_weight": -1.0}, "reward.outcome_weight must not be negative, got -1.0"),
        (RewardSettings, {"score_weight": 0.0, "outcome_weight": 0.0}, "both 0"),
        (RewardSettings, {"invalid_penalty": -0.1}, "reward.invalid_penalty must not be negative, got -0.1"),
        (RewardSettings, {"parse_penalty": 0.1}, "reward.parse_penalty must not be positive, got 0.1"),
        (RewardSettings, {"gamma": 1.1}, r"reward.gamma must be in \[0, 1\], got 1.1"),
        (RewardSettings, {"gae_lambda": -0.1}, r"reward.gae_lambda must be in \[0, 1\], got -0.1"),
        (AcceptanceSettings, {"low": 0.8, "high": 0.8}, "0 <= low < high <= 1, got 0.8 and 0.8"),
        (AcceptanceSettings, {"high": 1.2}, "got 0.2 and 1.2"),
        (AcceptanceSettings, {"level": 0.5}, r"acceptance.level must be in \(0.5, 1\), got 0.5"),
        (ClippedUpdateSettings, {"minibatches": 0}, "minibatches must be at least 1, got 0"),
        (ClippedUpdateSettings, {"update_epochs": 0}, "update_epochs must be at least 1, got 0"),
        (ClippedUpdateSettings, {"max_samples": 0}, "max_samples must be at least 1, got 0"),
        (ClippedUpdateSettings, {"token_budget": 0}, "token_budget must be at least 1, got 0"),
        (ClippedUpdateSettings, {"max_grad_norm": 0.0}, "max_grad_norm must be positive, got 0.0"),
        (ClippedUpdateSettings, {"clip_range": 0.0}, "clip_range must be positive, got 0.0"),
        (ClippedUpdateSettings, {"kl_coef": -0.1}, "kl_coef must not be negative, got -0.1"),
        (ClippedUpdateSettings, {"ent_coef": NAN}, "ent_coef must not be negative, got nan"),
        (ClippedUpdateSettings, {"target_kl": 0.0}, "target_kl must be positive or null, got 0.0"),
        (ClippedUpdateSettings, {"success_low": 0.8, "success_high": 0.2}, "got 0.8, 0.2"),
    ],
)
def test_a_value_that_cannot_work_is_named(settings, values, message):
    with pytest.raises(ConfigError, match=message):
        settings(**values)


def test_policy_and_judge_share_everything_but_the_length():
    settings = RolloutSettings(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=11, max_judge_tokens=3)
    assert settings.policy_sampling == SamplingParams(0.7, 0.9, 5, 11)
    assert settings.judge_sampling == SamplingParams(0.7, 0.9, 5, 3)


def test_the_papers_settings_are_valid():
    RewardSettings(advantage="step_index", lone_step="raw", judge_normalization="zscore", judge_balance="none")
    AcceptanceSettings(rule="threshold", low=0.2, high=0.8)
    ClippedUpdateSettings(minibatches=4, clip_range=0.2, kl_coef=0.01, success_low=0.125, success_high=0.875)
