"""What the method promises, computed without sampling: judge supervision, gradients by difficulty, false accepts.

Everything is enumerated over outcomes, votes or numbers of successes, through the functions that training uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import numpy as np

from rla_lightning.algorithm.acceptance import trigger
from rla_lightning.algorithm.advantages import JudgeNormalization, judge_advantages, policy_advantages
from rla_lightning.algorithm.precision import binomial_distribution
from rla_lightning.algorithm.rewards import consistency_rewards, integrated_step_rewards
from rla_lightning.types import LOST, WON, Direction, Verdict

GroupNormalization = Literal["zscore", "centered"]


@dataclass(frozen=True)
class VotePattern:
    """What the judge learns from one step with given votes."""

    outcome: float
    votes: tuple[int, ...]  # [m]
    reward: float  # R of the step
    advantages: tuple[float, ...]  # [m]
    supervised: tuple[float, ...]  # [m] outcome * zscore of the votes: what the outcome alone would teach


def vote_patterns(m: int, score_weight: float, normalization: JudgeNormalization = "zscore") -> list[VotePattern]:
    """The judge's advantages for both outcomes and all 2^m votes on a step.

    Args:
        m: votes on the step.
        score_weight: the paper's lambda.
        normalization: of the rewards R S_j over the votes.
    """
    patterns = []
    for outcome, votes in product((WON, LOST), product((1, -1), repeat=m)):
        reward = integrated_step_rewards(outcome, [votes], [True], score_weight=score_weight)
        (advantages,) = judge_advantages(consistency_rewards(reward, [votes]), normalization=normalization)
        (standardised,) = judge_advantages([votes])
        supervised = tuple(outcome * z for z in standardised)
        patterns.append(VotePattern(outcome, votes, float(reward[0]), tuple(advantages), supervised))
    return patterns


def largest_outcome_weight(m: int) -> float:
    """The lambda up to which the outcome decides the sign of R on every step whose votes differ.

        O R = 1 + lambda O mean(S), and votes that are not all alike have O mean(S) >= -(m - 2)/m:  lambda < m / (m - 2)

    Raises:
        ValueError: m < 1.
    """
    if m < 1:
        raise ValueError(f"m must be at least 1, got {m}")
    return m / (m - 2) if m > 2 else math.inf


def vote_weight(outcome: float, p_agree: float, m: int, score_weight: float = 1.0) -> float:
    """How strongly a step's outcome pulls one vote, by enumeration: half of what agreeing earns more than disagreeing.

        f = (E[R S_j | S_j = O] - E[R S_j | S_j = -O]) / 2 over the other m - 1 votes, each agreeing with chance p_agree

    The gradient of the expected reward of a vote is 2 f d P(S_j = O). The paper states f = 1 + 2 lambda p_agree - lambda
    (section 4; 2 p_agree at lambda = 1), see `paper_vote_weight`.

    Args:
        outcome: O, +1 or -1.
        p_agree: P(a vote equals O) under the judge that voted.
        m: votes on the step, at least 2.
        score_weight: the paper's lambda.

    Raises:
        ValueError: m < 2 or a probability outside [0, 1].
    """
    if m < 2:
        raise ValueError(f"a vote has no others to agree with at m = {m}")
    sign = int(outcome)
    expected = {}
    for vote in (sign, -sign):
        steps = [[vote, *[sign] * agree, *[-sign] * (m - 1 - agree)] for agree in range(m)]
        rewards = integrated_step_rewards(outcome, steps, [True] * m, score_weight=score_weight)
        own = [of_step[0] for of_step in consistency_rewards(rewards, steps)]
        expected[vote] = math.fsum(np.multiply(binomial_distribution(m - 1, p_agree), own))
    return (expected[sign] - expected[-sign]) / 2.0


def paper_vote_weight(p_agree: float, score_weight: float = 1.0) -> float:
    """The paper's f (section 4) = 1 + 2 lambda p_agree - lambda."""
    return 1.0 + 2.0 * score_weight * p_agree - score_weight


def weight_ratio(success: float, f_plus: float, f_minus: float) -> float:
    """||f_plus 1(O = 1)|| / ||f_minus 1(O = -1)|| in L2 over the steps of tasks with one chance of success.

        sqrt(success / (1 - success)) |f_plus / f_minus|

    Raises:
        ValueError: a success outside (0, 1).
    """
    _check_success(success)
    return math.sqrt(success / (1.0 - success)) * abs(f_plus / f_minus)


@dataclass(frozen=True)
class GradientMoments:
    """The policy gradient of one group of rollouts, in the toy of `group_gradient`."""

    signal: float  # expectation along theta
    variance: float  # along theta
    nuisance: float  # variance along each parameter that success does not depend on; the expectation there is 0

    def signal_to_noise(self, nuisances: int = 0) -> float:
        """Length of the expected gradient over the root of the total variance; N groups have sqrt(N) times as much."""
        return self.signal / math.sqrt(self.variance + nuisances * self.nuisance)


def group_gradient(success: float, rollouts: int, normalization: GroupNormalization = "zscore") -> GradientMoments:
    """Moments of REINFORCE over a group when success is one coin of the policy, exact over the number of successes.

        pi(win) = sigmoid(theta) = success,  y_g in {0, 1},  r_g = 2 y_g - 1,  d log pi(y_g) / d theta = y_g - success
        g = 1/G sum_g A_g (y_g - success) with A the group's standardised (zscore) or centred rewards

    With s successes g = sqrt(s (G - s)) / G standardised and 2 s (G - s) / G^2 centred: a group never points the wrong way.
    What misleads in larger models are all the choices that do not matter: a nuisance parameter has a score of mean 0 and
    variance 1 per rollout, independent of y and of each other, so that its gradient has the variance E[mean_g A_g^2] / G.

    Args:
        success: in (0, 1).
        rollouts: G, at least 2.
        normalization: of the rewards over the group.

    Raises:
        ValueError: a success outside (0, 1), fewer than 2 rollouts, or an unknown normalisation.
    """
    _check_success(success)
    if normalization not in get_args(GroupNormalization):
        raise ValueError(f"normalization must be one of {get_args(GroupNormalization)}, got {normalization!r}")
    if rollouts < 2:
        raise ValueError(f"advantages compare rollouts, got a group of {rollouts}")
    gradients, squares = [], []
    for wins in range(rollouts + 1):
        won = np.repeat([1.0, 0.0], [wins, rollouts - wins])
        advantages = _group_advantages(2.0 * won - 1.0, normalization)
        gradients.append(np.mean(advantages * (won - success)))
        squares.append(np.mean(advantages**2))
    chances = np.array(binomial_distribution(rollouts, success))
    signal = float(chances @ gradients)
    variance = float(chances @ (np.array(gradients) - signal) ** 2)
    return GradientMoments(signal, variance, float(chances @ squares) / rollouts)


def _group_advantages(rewards: np.ndarray, normalization: GroupNormalization) -> np.ndarray:
    if normalization == "centered":
        return rewards - rewards.mean()
    return np.concatenate(policy_advantages(list(rewards[:, None])))  # rollouts of one step each


def dead_share(success: float, rollouts: int) -> float:
    """Share of groups without any signal because all rollouts end alike: p^G + (1 - p)^G.

    Raises:
        ValueError: a success outside (0, 1).
    """
    _check_success(success)
    return success**rollouts + (1.0 - success) ** rollouts


AcceptanceRule = Callable[[Direction, int, int, int, int], Verdict]  # direction, parent's successes and rollouts, proposal's


def false_accept_rate(
    rule: AcceptanceRule, direction: Direction, success: float, rollouts: int, *, low: float = 0.2, high: float = 0.8
) -> float:
    """Chance that a proposal as hard as its parent is accepted, given that the parent's rollouts called for it.

    Args:
        rule: gives the verdict.
        direction: of the rewrite.
        success: true chance of success of both tasks, in (0, 1).
        rollouts: of each of them.
        low: lower edge of the band that triggers proposals.
        high: upper edge of it.

    Raises:
        ValueError: a success outside (0, 1), or a band that no number of successes leaves that way.
    """
    _check_success(success)
    chances = binomial_distribution(rollouts, success)
    parents = [s for s in range(rollouts + 1) if trigger(s, rollouts, low, high) == direction]
    if not parents:
        raise ValueError(f"no number of successes in {rollouts} rollouts calls for {direction!r}, band [{low}, {high}]")
    accepted = math.fsum(
        chances[parent] * chances[s]
        for parent in parents
        for s in range(rollouts + 1)
        if rule(direction, parent, rollouts, s, rollouts) == "ACCEPT"
    )
    return accepted / math.fsum(chances[parent] for parent in parents)


def _check_success(success: float) -> None:
    if not 0.0 < success < 1.0:
        raise ValueError(f"success must be in (0, 1), got {success}")
