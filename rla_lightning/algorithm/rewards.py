"""From votes to rewards: integrated rewards of the policy's steps, consistency rewards of the judge's votes.

K steps of one trajectory, m votes (scores +1, -1, or None when unparsable) on each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def integrated_step_rewards(
    outcome: float,
    scores: Sequence[Sequence[int | None]],
    is_valid: Sequence[bool],
    *,
    score_weight: float = 1.0,
    outcome_weight: float = 1.0,
    invalid_penalty: float = 0.0,
) -> np.ndarray:
    """Integrate the verified outcome with the judge's votes on each step (paper, section 2: policy reward).

        R_i = outcome_weight * O + (score_weight / m_i) * sum_j S_ij - invalid_penalty * [action i is invalid]

    over the m_i parsed votes of step i; a step without any parsed vote keeps only the other two terms.

    Args:
        outcome: O, +1.0 for a success and -1.0 for a failure; one per trajectory.
        scores: [K][m] votes in {+1, -1, None}; the number of votes may differ between steps.
        is_valid: [K] whether the environment understood and admitted the action.
        score_weight: the paper's lambda; at 1.0 (with outcome_weight 1.0) R is in [-2, 2].
        outcome_weight: weight of O; 0.0 leaves the judge's votes only.
        invalid_penalty: subtracted from the reward of an invalid action, in the units of O.

    Returns:
        [K] float64.

    Raises:
        ValueError: a non-finite outcome or weight, a vote outside {+1, -1, None}, or lengths that differ.
    """
    settings = {
        "outcome": outcome,
        "score_weight": score_weight,
        "outcome_weight": outcome_weight,
        "invalid_penalty": invalid_penalty,
    }
    for name, value in settings.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
    if len(scores) != len(is_valid):
        raise ValueError(f"scores has {len(scores)} steps but is_valid has {len(is_valid)}")
    rewards = np.full(len(scores), outcome_weight * outcome, dtype=np.float64)
    for i, (votes, valid) in enumerate(zip(scores, is_valid, strict=True)):
        parsed = _parsed(votes, step=i)
        if parsed:
            rewards[i] += score_weight * sum(parsed) / len(parsed)
        if not valid:
            rewards[i] -= invalid_penalty
    return rewards


def consistency_rewards(
    step_rewards: np.ndarray, scores: Sequence[Sequence[int | None]], *, parse_penalty: float = -2.0
) -> list[list[float]]:
    """Reward each vote for agreeing with the integrated reward of its step (paper, section 2: reward model).

        r_ij = R_i * S_ij,  and parse_penalty where S_ij could not be parsed

    Args:
        step_rewards: [K] integrated step rewards R_i.
        scores: [K][m] votes in {+1, -1, None}.
        parse_penalty: reward of an unparsable vote; the paper's release uses -2, the worst a parsed vote can get.

    Returns:
        [K][m], in the units of R.

    Raises:
        ValueError: a non-finite reward or penalty, a vote outside {+1, -1, None}, or lengths that differ.
    """
    if not math.isfinite(parse_penalty):
        raise ValueError(f"parse_penalty must be finite, got {parse_penalty}")
    if len(step_rewards) != len(scores):
        raise ValueError(f"step_rewards has {len(step_rewards)} steps but scores has {len(scores)}")
    rewards = []
    for i, (step_reward, votes) in enumerate(zip(step_rewards, scores, strict=True)):
        if not math.isfinite(step_reward):
            raise ValueError(f"the reward of step {i} must be finite, got {step_reward}")
        _parsed(votes, step=i)
        rewards.append([parse_penalty if score is None else float(step_reward) * score for score in votes])
    return rewards


def _parsed(votes: Sequence[int | None], *, step: int) -> list[int]:
    parsed = [score for score in votes if score is not None]
    for score in parsed:
        if score not in (1, -1):
            raise ValueError(f"a vote is +1, -1 or None, got {score} at step {step}")
    return parsed
