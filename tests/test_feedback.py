import numpy as np
import pytest

from rla_lightning.feedback import decide, is_trained_on, task_feedback
from rla_lightning.settings import AcceptanceSettings
from rla_lightning.types import (
    LOST,
    WON,
    Completion,
    Decision,
    Judgment,
    Observation,
    Proposal,
    RolloutGroup,
    Step,
    Task,
    TaskFeedback,
    Trajectory,
    Trial,
)

TASK = Task("child", "toy", {}, 0.5, "root", "parent", 1)
ANSWER = Completion((1,), (0.0,), "", "EOS")


PARENT = Task("parent", "toy", {}, 0.5, "root")


def rolled(wins: int, losses: int, task: Task = TASK) -> RolloutGroup:
    return RolloutGroup(task, tuple(Trajectory(task, (), outcome, "DONE") for outcome in [WON] * wins + [LOST] * losses))


def proposal_of(direction, parent: tuple[int, int], trial: Trial | None = None) -> Proposal:
    return Proposal(TASK, direction, "parent", *parent, trial=trial)


@pytest.mark.parametrize(
    ("direction", "parent", "now", "verdict"),
    [
        ("harder", (4, 4), (2, 2), "ACCEPT"),  # 2/4 is in [.2, 1)
        ("harder", (4, 4), (0, 4), "REJECT"),
        ("easier", (0, 4), (2, 2), "ACCEPT"),
        ("easier", (0, 4), (4, 0), "REJECT"),  # above .8
    ],
)
def test_the_threshold_rule_decides_at_once(direction, parent, now, verdict):
    decision = decide([proposal_of(direction, parent)], [rolled(*now)], AcceptanceSettings(rule="threshold"))["child"]
    assert decision.verdict == verdict
    assert decision.reason == f"{now[0]}/4 against the {parent[0]}/4 that asked for it"
    assert decision.trial == Trial(now[0], 4, *parent, 1)


def test_a_proposal_without_rollouts_is_dropped_by_the_threshold_rule():
    decision = decide([proposal_of("easier", (0, 4))], [rolled(0, 0)], AcceptanceSettings(rule="threshold"))["child"]
    assert (decision.verdict, decision.reason) == ("REJECT", "no rollouts")


def test_first_rollouts_can_only_reject():
    settings = AcceptanceSettings(futility=0.5)
    # P(theta < theta' <= .8) with theta ~ Beta(1, 9), theta' ~ Beta(1 + s, 9 - s): 0/8 against 0/8 is below .5
    reject = decide([proposal_of("easier", (0, 8))], [rolled(0, 8)], settings)["child"]
    assert (reject.verdict, reject.reason, reject.trial) == ("REJECT", "0/8 against the 0/8 that asked for it", None)
    passed = decide([proposal_of("easier", (0, 8))], [rolled(4, 4)], settings)["child"]  # as clear as can be
    assert (passed.verdict, passed.trial) == ("UNDECIDED", Trial())
    failed = decide([proposal_of("easier", (0, 8))], [rolled(0, 0)], settings)["child"]
    assert (failed.verdict, failed.reason) == ("REJECT", "no rollouts")


def test_a_trial_compares_rollouts_of_the_same_iterations():
    settings = AcceptanceSettings(level=0.9, futility=0.5, max_rerolls=2)
    on_trial = proposal_of("easier", (0, 8), Trial())
    groups = [rolled(1, 7, PARENT), rolled(4, 4)]
    # 4/8 against 1/8: P(theta < theta' <= .8), Beta(2, 8) and Beta(5, 5), is .93 (midpoint sum over a grid of 2,000)
    accepted = decide([on_trial], groups, settings)["child"]
    assert (accepted.verdict, accepted.reason) == ("ACCEPT", "4/8 against the parent's 1/8")
    assert accepted.trial == Trial(4, 8, 1, 8, 1)
    # the parent's 0/8 of before do not count: at 3/8 both are alike
    alike = decide([on_trial], [rolled(3, 5, PARENT), rolled(3, 5)], settings)["child"]
    assert alike.verdict == "REJECT"
    # 3/8 against 1/8, about .85, goes on; 3/8 against 2/8 after it make 6/16 against 3/16, not sure enough in the last roll
    first = decide([on_trial], [rolled(1, 7, PARENT), rolled(3, 5)], settings)["child"]
    assert (first.verdict, first.trial) == ("UNDECIDED", Trial(3, 8, 1, 8, 1))
    last = decide([proposal_of("easier", (0, 8), first.trial)], [rolled(2, 6, PARENT), rolled(3, 5)], settings)["child"]
    assert (last.verdict, last.reason) == ("REJECT", "undecided: 6/16 against the parent's 3/16")
    assert last.trial == Trial(6, 16, 3, 16, 2)


def test_each_proposal_is_decided_by_its_own_group():
    with pytest.raises(KeyError, match="child"):
        decide([proposal_of("harder", (4, 4))], [], AcceptanceSettings())
    assert decide([], [], AcceptanceSettings()) == {}


def test_what_is_trained_on():
    accept, reject = Decision("ACCEPT", ""), Decision("REJECT", "")
    wrongly = Decision("ACCEPT", "", is_control=True)
    assert not is_trained_on(wrongly, AcceptanceSettings(train_on="accepted"))
    paper, everything = AcceptanceSettings(train_on="accepted"), AcceptanceSettings(train_on="all")
    assert [is_trained_on(decision, paper) for decision in (None, accept, reject)] == [True, True, False]
    assert [is_trained_on(decision, everything) for decision in (None, accept, reject)] == [True, True, True]


def judged(outcome: float, votes: tuple[int | None, ...], stop="DONE") -> tuple[Trajectory, tuple[tuple[Judgment, ...], ...]]:
    """A rollout of one step."""
    trajectory = Trajectory(TASK, (Step((1,), ANSWER, Observation(""), "go", True),), outcome, stop)
    return trajectory, (tuple(Judgment((1,), ANSWER, vote) for vote in votes),)


def test_feedback_on_a_task():
    rollouts = [judged(WON, (1, 1, -1)), judged(LOST, (-1, None, -1)), judged(LOST, (1, 1, 1), "ENV_ERROR"), judged(WON, (1,))]
    group = RolloutGroup(TASK, tuple(t for t, _ in rollouts), tuple(votes for _, votes in rollouts))
    values = [np.array([0.5]), np.array([0.25]), np.array([]), np.array([0.75])]
    feedback = task_feedback(
        group, values, {"child": Decision("ACCEPT", "why"), "other": Decision("REJECT", "why")}, AcceptanceSettings(high=0.6)
    )
    assert (feedback.task, feedback.successes, feedback.rollouts, feedback.verdict) == (TASK, 2, 3, "ACCEPT")
    assert feedback.critic_value == 0.5  # of the three rollouts that were played
    assert (feedback.p_plus, feedback.p_minus) == (0.75, 1.0)  # 3 of 4 votes on wins, 2 of 2 readable ones on the loss
    assert len(feedback.critiques) == 2  # the loss, and a win because 2/3 is above the band
    assert len(task_feedback(group, values, {}, AcceptanceSettings(high=0.7)).critiques) == 1


def test_feedback_where_every_rollout_failed():
    broken = Trajectory(TASK, (), LOST, "ENV_ERROR")
    feedback = task_feedback(RolloutGroup(TASK, (broken,), ((),)), [np.array([])], {}, AcceptanceSettings())
    assert feedback == TaskFeedback(TASK, successes=0, rollouts=0, critic_value=None)
