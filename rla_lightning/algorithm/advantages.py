"""From rewards to advantages: of the policy's steps over a group of rollouts, of the judge's votes over a step.

G rollouts of one task with K_g steps each, m votes on each step. Every std is the population's, without an epsilon;
near-ties (std <= tie_tolerance) give exactly 0 so that float noise is never amplified to unit size.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

PolicyAdvantage = Literal["step_index", "trajectory", "return_to_go", "gae"]
LoneStep = Literal["baseline", "raw", "drop"]
JudgeNormalization = Literal["zscore", "centered"]
JudgeBalance = Literal["none", "direction", "critic"]


def policy_advantages(
    rewards: Sequence[np.ndarray],
    *,
    mode: PolicyAdvantage = "step_index",
    lone_step: LoneStep = "baseline",
    values: Sequence[np.ndarray] | None = None,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    tie_tolerance: float = 1e-6,
) -> list[np.ndarray]:
    """Turn the step rewards of one task's rollouts into advantages (paper, section 2: policy optimisation).

        step_index (paper)  A_gi = (R_gi - mean_g R_gi) / std_g R_gi over the trajectories that reach step i
        trajectory          A_gi = z_g, the mean step reward of g standardised over the trajectories
        return_to_go        as step_index, of the returns sum_{k >= i} gamma^(k-i) R_gk
        gae                 A_gi = sum_{k >= i} (gamma gae_lambda)^(k-i) (R_gk + gamma V_g,k+1 - V_gk), V = 0 after the last
                            step, standardised over all steps of the group

    A lone step, reached by one trajectory only, has nothing to be compared with (step_index and return_to_go):

        raw (paper)  its reward (or return) itself: not a comparison, so a long rollout is pushed by the sign of R
        drop         0: the tails of the longest, mostly failed, rollouts are not trained on
        baseline     (R - mean) / std over all steps of the group: 0 where the whole group ties

    Args:
        rewards: [G] arrays of [K_g] step rewards; a trajectory without steps is allowed.
        mode: one of the four above.
        lone_step: one of the three above.
        values: [G] arrays of [K_g], the predicted value of the state before each step, on the scale of the outcome
            (2 P(success) - 1); required by `gae` and unused otherwise. As a baseline V only fits rewards whose sum is on
            that scale too: with O in every R_i an early step of a long rollout keeps a part that grows with its length.
        gamma: discount of return_to_go and gae.
        gae_lambda: 0 gives one-step errors, 1 gives returns minus values.
        tie_tolerance: a std up to this counts as a tie, in the units of the reward.

    Returns:
        [G] arrays of [K_g] float64.

    Raises:
        ValueError: fewer than two trajectories, a non-finite reward or value, values that are missing or do not match,
            or an unknown option.
    """
    group = _as_group(rewards, "rewards")
    if len(group) < 2:
        raise ValueError(f"advantages compare trajectories of one task, got a group of {len(group)}")
    if lone_step not in get_args(LoneStep):
        raise ValueError(f"lone_step must be one of {get_args(LoneStep)}, got {lone_step!r}")
    if mode == "step_index":
        return _standardised_by_index(group, lone_step, tie_tolerance)
    if mode == "trajectory":
        return _standardised_by_trajectory(group, tie_tolerance)
    if mode == "return_to_go":
        return _standardised_by_index([_discounted(r, gamma) for r in group], lone_step, tie_tolerance)
    if mode == "gae":
        if values is None:
            raise ValueError("mode 'gae' needs values")
        estimates = _gae(group, _as_group(values, "values"), gamma, gae_lambda)
        pooled = _standardised(np.concatenate(estimates), tie_tolerance)
        return np.split(pooled, np.cumsum([len(e) for e in estimates])[:-1])
    raise ValueError(f"mode must be one of {get_args(PolicyAdvantage)}, got {mode!r}")


def judge_advantages(
    rewards: Sequence[Sequence[float]], *, normalization: JudgeNormalization = "zscore", tie_tolerance: float = 1e-6
) -> list[list[float]]:
    """Compare the m votes on one step with each other (paper, section 2: reward-model optimisation).

        zscore (paper)  A_ij = (r_ij - mean_j r_ij) / std_j r_ij
        centered        A_ij = r_ij - mean_j r_ij

    zscore cancels |R_i|: with r_ij = R_i S_ij, m = 3 and 0 < lambda < 3 it equals O * zscore_j(S_ij), which is supervision
    by the outcome alone. centered lets agreement among the votes count, and with it amplifies the judge's starting bias.

    Args:
        rewards: [K][m] consistency rewards; m may differ between steps.
        normalization: one of the two above.
        tie_tolerance: votes whose std is up to this get exactly 0, under both normalisations.

    Returns:
        [K][m].

    Raises:
        ValueError: a non-finite reward or an unknown normalisation.
    """
    if normalization not in get_args(JudgeNormalization):
        raise ValueError(f"normalization must be one of {get_args(JudgeNormalization)}, got {normalization!r}")
    advantages = []
    for votes in _as_group(rewards, "rewards"):
        if normalization == "zscore":
            advantages.append(_standardised(votes, tie_tolerance).tolist())
        else:
            advantages.append(_centered(votes, tie_tolerance).tolist())
    return advantages


def balanced_indices(is_praised: Sequence[bool], rng: random.Random) -> list[int]:
    """Draw equally many praised and blamed samples, min(#praised, #blamed) of each without replacement.

    Why: standardised over the votes of a step, only the sign of R_i is left, so each step teaches its votes either "+1" or
    "-1". Lost rollouts are longer and, on hard tasks, more frequent; unbalanced, a small judge drifted to "-1"
    (true-positive rate .70 -> .40 within 20 iterations). Balancing by the outcome is not enough where R_i has other parts:
    with a penalty on invalid actions, steps of won rollouts are blamed, too.

    Args:
        is_praised: [N] whether each sample's reward is positive.
        rng: decides which samples of the larger class are left out.

    Returns:
        Sorted indices into `is_praised`; empty when one class is missing.
    """
    praised = [i for i, flag in enumerate(is_praised) if flag]
    blamed = [i for i, flag in enumerate(is_praised) if not flag]
    count = min(len(praised), len(blamed))
    return sorted(rng.sample(praised, count) + rng.sample(blamed, count))


def surprise(outcome: float, values: np.ndarray) -> np.ndarray:
    """How much the outcome of a rollout surprised the critic before each of its steps.

        w_i = |O - (2 V_i - 1)|

    As a weight on the judge's samples it compares like with like. Supervised by the outcome alone, a judge learns which
    states tend to win, not which steps are right. With a calibrated V, won and lost rollouts that pass a state get the
    same total weight there (V * 2 (1 - V) and (1 - V) * 2 V), so what is left is the step: E[w O | s, a] is the advantage
    Q(s, a) - V(s) of the outcome.

    Args:
        outcome: +1 or -1.
        values: [K] predicted probabilities of success before each step, in [0, 1].

    Returns:
        [K] weights in [0, 2].
    """
    return np.abs(outcome - (2.0 * np.asarray(values, dtype=np.float64) - 1.0))


def _as_group(arrays: Sequence[np.ndarray] | Sequence[Sequence[float]], name: str) -> list[np.ndarray]:
    group = [np.asarray(array, dtype=np.float64) for array in arrays]
    for g, array in enumerate(group):
        if array.ndim != 1:
            raise ValueError(f"{name}[{g}] must have one dimension, got shape {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name}[{g}] must be finite, got {array[~np.isfinite(array)][0]}")
    return group


def _standardised(x: np.ndarray, tie_tolerance: float) -> np.ndarray:
    if x.size == 0 or x.std() <= tie_tolerance:
        return np.zeros_like(x)
    return (x - x.mean()) / x.std()


def _centered(x: np.ndarray, tie_tolerance: float) -> np.ndarray:
    if x.size == 0 or x.std() <= tie_tolerance:
        return np.zeros_like(x)
    return x - x.mean()


def _standardised_by_index(group: list[np.ndarray], lone_step: LoneStep, tie_tolerance: float) -> list[np.ndarray]:
    advantages = [np.zeros_like(r) for r in group]
    against_group = np.split(_standardised(np.concatenate(group), tie_tolerance), np.cumsum([len(r) for r in group])[:-1])
    for i in range(max(len(r) for r in group)):
        reaching = [g for g, r in enumerate(group) if len(r) > i]
        if len(reaching) == 1:
            g = reaching[0]
            advantages[g][i] = {"raw": group[g][i], "drop": 0.0, "baseline": against_group[g][i]}[lone_step]
            continue
        column = _standardised(np.array([group[g][i] for g in reaching]), tie_tolerance)
        for g, advantage in zip(reaching, column, strict=True):
            advantages[g][i] = advantage
    return advantages


def _standardised_by_trajectory(group: list[np.ndarray], tie_tolerance: float) -> list[np.ndarray]:
    acting = [g for g, r in enumerate(group) if len(r) > 0]  # without steps there is no mean step reward
    means = _standardised(np.array([group[g].mean() for g in acting]), tie_tolerance)
    advantages = [np.zeros_like(r) for r in group]
    for g, advantage in zip(acting, means, strict=True):
        advantages[g][:] = advantage
    return advantages


def _discounted(x: np.ndarray, discount: float) -> np.ndarray:
    sums = np.zeros_like(x)
    running = 0.0
    for i in reversed(range(len(x))):
        running = x[i] + discount * running
        sums[i] = running
    return sums


def _gae(group: list[np.ndarray], values: list[np.ndarray], gamma: float, gae_lambda: float) -> list[np.ndarray]:
    lengths, value_lengths = [len(r) for r in group], [len(v) for v in values]
    if lengths != value_lengths:
        raise ValueError(f"values must match rewards of lengths {lengths}, got lengths {value_lengths}")
    estimates = []
    for r, v in zip(group, values, strict=True):
        following = np.append(v[1:], 0.0)[: len(v)]
        estimates.append(_discounted(r + gamma * following - v, gamma * gae_lambda))
    return estimates
