import numpy as np
import pytest

from rla_lightning.feedback import decide, task_feedback
from rla_lightning.settings import AcceptanceSettings
from rla_lightning.types import (
    LOST,
    WON,
    Completion,
    Judgment,
    Observation,
    Proposal,
    RolloutGroup,
    Step,
    Task,
    TaskFeedback,
    Trajectory,
)

TASK = Task("child", "toy", {}, 0.5, "root", "parent", 1)
ANSWER = Completion((1,), (0.0,), "", "EOS")


def rolled(wins: int, losses: int) -> RolloutGroup:
    return RolloutGroup(TASK, tuple(Trajectory(TASK, (), outcome, "DONE") for outcome in [WON] * wins + [LOST] * losses))


def proposal_of(direction, parent: tuple[int, int], earlier: tuple[int, int] = (0, 0)) -> Proposal:
    return Proposal(TASK, direction, "parent", *parent, successes=earlier[0], rollouts=earlier[1])


@pytest.mark.parametrize(
    ("direction", "parent", "earlier", "now", "verdict"),
    [
        ("harder", (4, 4), (0, 0), (2, 2), "ACCEPT"),  # 2/4 is in [.2, 1)
        ("harder", (4, 4), (0, 0), (0, 4), "REJECT"),
        ("harder", (4, 4), (4, 0), (0, 4), "ACCEPT"),  # 4/4 before, 0/4 now: 4/8
        ("harder", (4, 4), (0, 4), (1, 3), "REJECT"),  # 1/8 < .2, although 1/4 would do
        ("easier", (0, 4), (0, 4), (4, 0), "ACCEPT"),  # 4/8; 4/4 alone is above .8
        ("easier", (0, 4), (0, 0), (4, 0), "REJECT"),
    ],
)
def test_a_verdict_counts_the_proposals_earlier_rolls(direction, parent, earlier, now, verdict):
    proposal = proposal_of(direction, parent, (earlier[0], sum(earlier)))
    assert decide([proposal], [rolled(*now)], AcceptanceSettings(rule="threshold")) == {"child": verdict}


def test_the_posterior_rule_waits_for_evidence():
    settings = AcceptanceSettings()
    # P(theta < theta' <= .8) with theta ~ Beta(1, 5) of the parent, summed on a fine grid: for 2/4, Beta(3, 3), 0.859,
    # for 1/4, Beta(2, 4), 0.771; .8 is asked for
    assert decide([proposal_of("easier", (0, 4))], [rolled(2, 2)], settings) == {"child": "ACCEPT"}
    assert decide([proposal_of("easier", (0, 4))], [rolled(1, 3)], settings) == {"child": "UNDECIDED"}
    assert decide([proposal_of("easier", (0, 4))], [rolled(0, 0)], settings) == {"child": "UNDECIDED"}


def test_each_proposal_is_decided_by_its_own_group():
    with pytest.raises(ValueError, match="zip"):
        decide([proposal_of("harder", (4, 4))], [], AcceptanceSettings())
    assert decide([], [], AcceptanceSettings()) == {}


def judged(outcome: float, votes: tuple[int | None, ...], stop="DONE") -> tuple[Trajectory, tuple[tuple[Judgment, ...], ...]]:
    """A rollout of one step."""
    trajectory = Trajectory(TASK, (Step((1,), ANSWER, Observation(""), "go", True),), outcome, stop)
    return trajectory, (tuple(Judgment((1,), ANSWER, vote) for vote in votes),)


def test_feedback_on_a_task():
    rollouts = [judged(WON, (1, 1, -1)), judged(LOST, (-1, None, -1)), judged(LOST, (1, 1, 1), "ENV_ERROR"), judged(WON, (1,))]
    group = RolloutGroup(TASK, tuple(t for t, _ in rollouts), tuple(votes for _, votes in rollouts))
    values = [np.array([0.5]), np.array([0.25]), np.array([]), np.array([0.75])]
    feedback = task_feedback(group, values, {"child": "ACCEPT", "other": "REJECT"}, AcceptanceSettings(high=0.6))
    assert (feedback.task, feedback.successes, feedback.rollouts, feedback.verdict) == (TASK, 2, 3, "ACCEPT")
    assert feedback.critic_value == 0.5  # of the three rollouts that were played
    assert (feedback.p_plus, feedback.p_minus) == (0.75, 1.0)  # 3 of 4 votes on wins, 2 of 2 readable ones on the loss
    assert len(feedback.critiques) == 2  # the loss, and a win because 2/3 is above the band
    assert len(task_feedback(group, values, {}, AcceptanceSettings(high=0.7)).critiques) == 1


def test_feedback_where_every_rollout_failed():
    broken = Trajectory(TASK, (), LOST, "ENV_ERROR")
    feedback = task_feedback(RolloutGroup(TASK, (broken,), ((),)), [np.array([])], {}, AcceptanceSettings())
    assert feedback == TaskFeedback(TASK, successes=0, rollouts=0, critic_value=None)
