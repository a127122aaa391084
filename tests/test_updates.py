from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from rla_lightning import updates
from rla_lightning.settings import RewardSettings, UpdateSettings
from rla_lightning.types import (
    LOST,
    WON,
    CheckedSolution,
    Completion,
    Judgment,
    Observation,
    RolloutGroup,
    Step,
    Task,
    Trajectory,
    UnitTest,
    WrittenTest,
)
from rla_lightning.updates import (
    GroupCredit,
    TaskSample,
    ValueSample,
    assign_credit,
    judge_samples,
    minibatches,
    pieces,
    policy_samples,
    value_pieces,
    value_samples,
)

CPU = torch.device("cpu")
EMPTY = Observation("")
SCORE = {"+": 1, "-": -1, "?": None}


def rollout(outcome: float, *votes: str, stop="DONE", invalid=(), name=0) -> tuple[Trajectory, tuple[tuple[Judgment, ...], ...]]:
    """One step per string of votes; step k of rollout `name` has prompt (name, k), its vote j the answer (name, k, j)."""
    steps = tuple(
        Step((name, k), Completion((50 + k, 1), (-0.5, -0.25), "", "EOS"), EMPTY, "a", k not in invalid, critic_ids=(9, name, k))
        for k in range(len(votes))
    )
    judged = tuple(
        tuple(Judgment((name, k), Completion((name, k, j), (-0.1, -0.2, -0.3), "", "EOS"), SCORE[v]) for j, v in enumerate(text))
        for k, text in enumerate(votes)
    )
    return Trajectory(Task("t", "toy", {}, 0.5, "t"), steps, outcome, stop), judged


def group_of(*rollouts, task_id: str = "t") -> RolloutGroup:
    return RolloutGroup(Task(task_id, "toy", {}, 0.5, task_id), tuple(t for t, _ in rollouts), tuple(v for _, v in rollouts))


def credit_of(group: RolloutGroup, *values: float, **reward) -> GroupCredit:
    """`values` of the steps one after the other; by default the critic says .5 everywhere."""
    lengths = [len(trajectory.steps) for trajectory in group.trajectories]
    flat = np.array(values or [0.5] * sum(lengths))
    return assign_credit(group, RewardSettings(**reward), np.split(flat, np.cumsum(lengths)[:-1]))


def judge(group: RolloutGroup, *values: float, update: UpdateSettings | None = None, key: str = "k", **reward):
    credit = credit_of(group, *values, **reward)
    return judge_samples([group], [credit], RewardSettings(**reward), update or UpdateSettings(), Random(key))


def advantages_of(samples: list[TaskSample]) -> dict[tuple[int, ...], float]:
    return {item.sample.response_ids: item.sample.advantage for item in samples}


# Credit


def test_step_votes_are_added_to_the_outcome_not_overwritten_by_it():
    group = group_of(rollout(WON, "+++"), rollout(WON, "---"), rollout(LOST, "++?"), rollout(LOST, "---"))
    credit = credit_of(group)
    # R = O + mean of the parsed votes = (2, 0, 0, -2); mean 0, std sqrt((4 + 0 + 0 + 4) / 4) = sqrt 2
    assert [r.tolist() for r in credit.rewards] == [[2.0], [0.0], [0.0], [-2.0]]
    assert [a[0] for a in credit.advantages] == pytest.approx([2**0.5, 0.0, 0.0, -(2**0.5)])


def test_weights_and_the_invalid_penalty():
    group = group_of(rollout(WON, "+++", "++-", invalid=(1,)), rollout(LOST, "??-", "???"))
    # 2 * 1 + .5 * 1 = 2.5;  2 + .5 / 3 - .25;  -2 - .5 = -2.5;  -2 without a parsed vote
    first, second = credit_of(group, score_weight=0.5, outcome_weight=2.0, invalid_penalty=0.25).rewards
    assert first.tolist() == pytest.approx([2.5, 2 + 0.5 / 3 - 0.25])
    assert second.tolist() == pytest.approx([-2.5, -2.0])


@pytest.mark.parametrize(("mode", "expected"), [("raw", 2.0), ("drop", 0.0), ("baseline", 0.5**0.5)])
def test_a_lone_step(mode, expected):
    # R = (2, 2) and (-2): step 0 compares 2 with -2; step 1 is alone. All three: mean 2/3, squared deviations 16/9, 16/9,
    # 64/9, std sqrt(32/9) = 4 sqrt(2) / 3, so (2 - 2/3) / std = 1 / sqrt 2
    credit = credit_of(group_of(rollout(WON, "+++", "+++"), rollout(LOST, "---")), lone_step=mode)
    assert credit.advantages[0].tolist() == pytest.approx([1.0, expected])
    assert credit.advantages[1].tolist() == [-1.0]


def test_gae_pays_the_outcome_once_to_the_policy_and_leaves_the_judge_its_integrated_rewards():
    group = group_of(rollout(WON, "+++", "---"), rollout(LOST, "---"))
    # success probabilities .75, .5 and .25 are the values .5, 0 and -.5
    credit = credit_of(group, 0.75, 0.5, 0.25, advantage="gae", gamma=1.0, gae_lambda=1.0)
    # paid once: (1, -1 + 1) and (-1 - 1); returns minus values: 1 + 0 - .5 = .5, 0 - 0 = 0, -2 + .5 = -1.5
    # mean -1/3, deviations 5/6, 1/3, -7/6, variance (25 + 4 + 49) / 36 / 3 = 13/18, std .849837
    assert np.concatenate(credit.advantages).tolist() == pytest.approx([0.980581, 0.392232, -1.372813], abs=1e-5)
    assert [r.tolist() for r in credit.rewards] == [[2.0, 0.0], [-2.0]]


def test_gae_does_not_change_what_the_judge_learns():
    # The first step of the win: R = 1 - 1/3 > 0, so its +1 vote is right. Without the outcome R would be -1/3.
    group = group_of(rollout(WON, "--+", "+++"), rollout(LOST, "++-", name=1))
    learned = advantages_of(judge(group, advantage="gae", judge_balance="none"))
    assert learned[0, 0, 2] == pytest.approx(2**0.5)
    assert learned == advantages_of(judge(group, judge_balance="none"))


def test_the_votes_alone_pay_the_policy_while_the_judge_learns_from_the_outcome():
    group = group_of(rollout(WON, "--+"), rollout(LOST, "++-", name=1))
    credit = credit_of(group, policy_outcome=False)
    # votes of -1/3 on the win and 1/3 on the loss: the policy is told to do as the loss did
    assert np.concatenate(credit.advantages).tolist() == pytest.approx([-1.0, 1.0])
    assert [r.tolist() for r in credit.rewards] == [pytest.approx([2 / 3]), pytest.approx([-2 / 3])]
    learned = advantages_of(judge(group, policy_outcome=False, judge_balance="none"))
    assert learned == advantages_of(judge(group, judge_balance="none"))


def test_an_environment_error_gets_no_credit_and_is_trained_on_by_nobody():
    error = rollout(LOST, "", "", stop="ENV_ERROR", name=9)  # two steps, never judged
    group = group_of(rollout(WON, "++-", name=1), error, rollout(LOST, "--+", name=2))
    credit = credit_of(group)
    assert [len(r) for r in credit.rewards] == [1, 0, 1] == [len(a) for a in credit.advantages]
    # two valid rollouts: R = 4/3 and -4/3, so +1 and -1
    assert [item.sample.prompt_ids for item in policy_samples([group], [credit], UpdateSettings())] == [(1, 0), (2, 0)]
    assert {item.sample.prompt_ids for item in judge(group)} == {(1, 0), (2, 0)}
    assert [item.prompt_ids for item in value_samples([group], UpdateSettings())] == [(9, 1, 0), (9, 2, 0)]


def test_a_group_with_one_valid_rollout_teaches_the_policy_nothing():
    group = group_of(rollout(WON, "+++", "---"), rollout(LOST, stop="ENV_ERROR"))
    credit = credit_of(group)
    assert [a.tolist() for a in credit.advantages] == [[0.0, 0.0], []]
    assert policy_samples([group], [credit], UpdateSettings()) == []


def test_a_group_without_valid_rollouts_is_left_out():
    group = group_of(rollout(LOST, "", stop="ENV_ERROR"), rollout(LOST, stop="ENV_ERROR"))
    credit = credit_of(group)
    assert policy_samples([group], [credit], UpdateSettings()) == []
    assert judge(group) == []
    assert value_samples([group], UpdateSettings()) == []


@pytest.mark.parametrize("poison", ["outcome", "value"])
def test_a_number_that_is_not_finite_is_reported_with_its_task(poison):
    outcome = float("nan") if poison == "outcome" else WON
    group = group_of(rollout(outcome, "+++"), rollout(LOST, "---"), task_id="poisoned")
    with pytest.raises(ValueError, match=r"task poisoned: .*nan"):
        credit_of(group, float("nan") if poison == "value" else 0.5, 0.5, advantage="gae")


# Samples


def test_policy_samples_drop_exact_zeros_and_keep_the_samplers_numbers():
    group = group_of(*(rollout(o, v, name=n) for n, (o, v) in enumerate([(WON, "+"), (WON, "-"), (LOST, "+"), (LOST, "-")])))
    samples = policy_samples([group], [credit_of(group)], UpdateSettings())
    assert [(item.sample.prompt_ids, item.sample.advantage) for item in samples] == [
        ((0, 0), pytest.approx(2**0.5)),
        ((3, 0), pytest.approx(-(2**0.5))),
    ]
    assert [(item.sample.response_ids, item.sampler_logprobs, item.task_id) for item in samples] == [
        ((50, 1), (-0.5, -0.25), "t")
    ] * 2


def test_votes_are_standardised_on_their_step_and_signed_by_the_outcome():
    samples = judge(group_of(rollout(WON, "++-", name=1), rollout(LOST, "++-", name=2)))
    # won: R = 4/3, r = 4/3 (1, 1, -1), mean 4/9, std 4/3 sqrt(8/9): z = (.7071, .7071, -1.4142)
    # lost: R = -2/3 turns the signs round
    assert advantages_of(samples) == {
        (1, 0, 0): pytest.approx(0.5**0.5),
        (1, 0, 1): pytest.approx(0.5**0.5),
        (1, 0, 2): pytest.approx(-(2**0.5)),
        (2, 0, 0): pytest.approx(-(0.5**0.5)),
        (2, 0, 1): pytest.approx(-(0.5**0.5)),
        (2, 0, 2): pytest.approx(2**0.5),
    }


def test_centered_votes_keep_the_size_of_the_reward():
    samples = judge(group_of(rollout(WON, "++-", name=1), rollout(LOST, "++-", name=2)), judge_normalization="centered")
    # won: r = (4/3, 4/3, -4/3), mean 4/9; lost: r = (-2/3, -2/3, 2/3), mean -2/9
    assert list(advantages_of(samples).values()) == pytest.approx([8 / 9, 8 / 9, -16 / 9, -4 / 9, -4 / 9, 8 / 9])


def test_unparsed_votes_get_the_penalty_and_stay_out_of_the_normalisation():
    group = group_of(rollout(WON, "+-?", "???", name=1), rollout(LOST, "+-", name=2))
    samples = judge(group, parse_penalty=-1.5)
    # the two parsed votes of the win: R = 1, r = (1, -1), z = (1, -1); of the loss R = -1, z = (-1, 1)
    assert advantages_of(samples) == {
        (1, 0, 0): 1.0,
        (1, 0, 1): -1.0,
        (2, 0, 0): -1.0,
        (2, 0, 1): 1.0,
        (1, 0, 2): -1.5,
        (1, 1, 0): -1.5,
        (1, 1, 1): -1.5,
        (1, 1, 2): -1.5,
    }


def test_without_a_penalty_unparsed_votes_are_no_samples():
    group = group_of(rollout(WON, "+-?", name=1), rollout(LOST, "+-?", name=2))
    assert {ids[2] for ids in advantages_of(judge(group, parse_penalty=0.0))} == {0, 1}


def test_unanimous_votes_teach_nothing():
    assert judge(group_of(rollout(WON, "+++", "---"), rollout(LOST, "---", "+++"))) == []


@pytest.mark.parametrize(("won", "is_used"), [(0, False), (1, True), (4, True), (5, False)])
def test_the_band_of_success_rates_includes_its_ends(won, is_used):
    group = group_of(*(rollout(WON if g < won else LOST, "++-", name=g) for g in range(5)))  # rates 0, .2, .8, 1
    band = UpdateSettings(success_low=0.2, success_high=0.8)
    credit = credit_of(group)
    assert bool(judge(group, update=band, judge_balance="none")) is is_used
    assert bool(value_samples([group], band)) is is_used
    assert bool(policy_samples([group], [credit], band)) is is_used
    assert len(value_samples([group], UpdateSettings())) == 5


def test_balance_keeps_equally_many_praised_and_blamed_steps():
    group = group_of(rollout(WON, "+-", name=1), rollout(LOST, *["+-"] * 5, name=2), rollout(LOST, *["+-"] * 4, name=3))
    chosen = judge(group, key="a")
    steps = {item.sample.prompt_ids for item in chosen}
    assert len(chosen) == 4  # one step of the win and one of a loss, two votes each
    assert len(steps) == 2
    assert (1, 0) in steps
    assert [item.sample for item in judge(group, key="a")] == [item.sample for item in chosen]
    picked = {tuple(advantages_of(judge(group, key=str(key)))) for key in range(30)}
    assert len(picked) > 3  # of 9 possible choices: it is the generator that decides
    assert len(judge(group, judge_balance="none")) == 20
    assert judge(group_of(rollout(WON, "+-"), rollout(WON, "+-"))) == []  # no lost step to set against them


def test_the_critics_surprise_weighs_the_steps():
    # won rollout: |1 - (2 V - 1)| = .5 at V = .75 and 1.5 at V = .25; lost rollout: |-1 - (2 V - 1)| = 1.8 at V = .9
    group = group_of(rollout(WON, "+-", "+-", name=1), rollout(LOST, "+-", name=2))
    credit = credit_of(group, 0.75, 0.25, 0.9)
    assert [s.tolist() for s in credit.surprise] == [pytest.approx([0.5, 1.5]), pytest.approx([1.8])]
    # praise weighs .5 + 1.5 = 2, blame 1.8: both are scaled to 1.9, by .95 and by 1.9 / 1.8
    assert advantages_of(judge(group, 0.75, 0.25, 0.9, judge_balance="critic")) == {
        (1, 0, 0): pytest.approx(0.475),
        (1, 0, 1): pytest.approx(-0.475),
        (1, 1, 0): pytest.approx(1.425),
        (1, 1, 1): pytest.approx(-1.425),
        (2, 0, 0): pytest.approx(-1.9),
        (2, 0, 1): pytest.approx(1.9),
    }
    assert judge(group_of(rollout(WON, "+-"), rollout(WON, "+-")), judge_balance="critic") == []  # praise alone


def test_balance_is_between_praise_and_blame_not_between_won_and_lost():
    # the invalid step of the win: R = 1 - 1/3 - 1 < 0, blame like the lost step's, so there is no praise to set against it
    group = group_of(rollout(WON, "--+", invalid=(0,), name=1), rollout(LOST, "--+", name=2))
    assert judge(group, invalid_penalty=1.0) == []
    assert len(judge(group, invalid_penalty=0.5)) == 6  # R = 1/6 > 0


def test_value_samples_pair_every_state_with_the_outcome():
    group = group_of(rollout(WON, "+", "+", name=1), rollout(LOST, "-", name=2))
    assert value_samples([group], UpdateSettings()) == [
        ValueSample((9, 1, 0), 1.0, "t"),
        ValueSample((9, 1, 1), 1.0, "t"),
        ValueSample((9, 2, 0), -1.0, "t"),
    ]


# Forward passes


@pytest.mark.parametrize(
    ("number", "parts", "most", "sizes"),
    [(10, 4, 99, [3, 3, 2, 2]), (10, 4, 5, [2, 1, 1, 1]), (2, 4, 99, [1, 1]), (8, 1, 99, [8]), (0, 4, 99, [])],
)
def test_minibatches_use_every_sample_once(number, parts, most, sizes):
    settings = UpdateSettings(minibatches=parts, max_samples=most)
    units = [[i] for i in range(number)]
    cut = minibatches(units, settings, Random("x"))
    used = [item for part in cut for item in part]
    assert [len(part) for part in cut] == sizes
    assert len(set(used)) == len(used) == min(number, most)
    assert set(used) <= set(range(number))
    assert cut == minibatches(units, settings, Random("x"))


def sample(prompt: tuple[int, ...], response: tuple[int, ...], advantage: float, task_id: str) -> TaskSample:
    return TaskSample(updates.Sample(prompt, response, advantage), task_id, tuple(-token / 10 for token in response))


LONG = sample((7, 8, 9), (1, 2), 0.5, "long")
SHORT = sample((5,), (3, 4, 6), -1.0, "short")


def test_what_shares_work_stays_in_one_minibatch():
    units = [["a"] * 5, ["b"] * 3, ["c"] * 3, ["d"]]
    parts = minibatches(units, UpdateSettings(minibatches=2), Random("x"))
    assert sorted("".join(sorted(part)) for part in parts) == ["aaaaad", "bbbccc"]
    cut = minibatches(units, UpdateSettings(minibatches=1, max_samples=7), Random("x"))
    assert [len(part) for part in cut] == [7]


def test_pieces_hold_masks_by_position_and_the_samplers_logprobs_in_place():
    # pad id 2 is also the last token of the long answer, which is predicted but not fed
    ((piece,),) = pieces([LONG, SHORT], UpdateSettings(minibatches=1), Random(0), pad_id=2, device=CPU)
    rows = {"long": [7, 8, 9, 1], "short": [5, 3, 4, 2]}  # the last of the short one is padding
    assert piece.batch.input_ids.tolist() == [rows["short"], rows["long"]]
    assert piece.batch.subtree_ends is None
    assert piece.batch.response_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert piece.batch.response_ids[0].tolist() == [3, 4, 6]
    assert piece.batch.response_ids[1, :2].tolist() == [1, 2]
    assert piece.batch.places[piece.batch.predictions[0]].tolist() == [0, 1, 2]
    assert piece.batch.places[piece.batch.predictions[1, :2]].tolist() == [6, 7]
    assert piece.batch.advantages.tolist() == [-1.0, 0.5]
    assert piece.batch.weights.tolist() == [1.0, 1.0]
    assert piece.sampler_logprobs.flatten().tolist() == pytest.approx([-0.3, -0.4, -0.6, -0.1, -0.2, 0.0])
    assert (piece.denominator, piece.task_ids) == (2, ("short", "long"))


def test_the_denominator_counts_the_optimizer_step_not_the_piece():
    first, second = pieces([LONG, SHORT] * 2, UpdateSettings(minibatches=2, token_budget=1), Random(0), 0, CPU)
    assert [len(step) for step in (first, second)] == [2, 2]
    assert [piece.denominator for piece in first + second] == [2, 2, 2, 2]


def as_rank(monkeypatch, rank: int, world_size: int) -> None:
    monkeypatch.setattr(updates, "rank", lambda: rank)
    monkeypatch.setattr(updates, "world_size", lambda: world_size)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, [("a", True), ("c", True)]), (1, [("b", True), ("a", False)])],
)
def test_every_rank_makes_as_many_calls(monkeypatch, rank, expected):
    as_rank(monkeypatch, rank, 2)
    assert list(updates._share_of_rank(["a", "b", "c"])) == expected
    assert list(updates._share_of_rank([])) == []


def test_padding_pieces_carry_no_loss(monkeypatch):
    as_rank(monkeypatch, 1, 2)
    settings = UpdateSettings(minibatches=1, token_budget=1)  # one sample per piece, shortest first: SHORT, LONG, LONG
    ((real, padding),) = pieces([LONG, SHORT, LONG], settings, Random(0), 0, CPU)
    assert (real.task_ids, real.batch.weights.tolist(), real.denominator) == (("long",), [1.0], 3)
    assert (padding.task_ids, padding.batch.weights.tolist(), padding.denominator) == (("short",), [0.0], 3)
    assert padding.batch.response_mask.tolist() == [[0.0, 0.0, 0.0]]
    assert padding.batch.advantages.tolist() == [0.0]


def test_value_pieces(monkeypatch):
    samples = [ValueSample((1, 2, 3), 1.0, "a"), ValueSample((4,), -1.0, "b"), ValueSample((5, 6), 1.0, "c")]
    ((piece,),) = value_pieces(samples, UpdateSettings(minibatches=1), Random(0), 0, CPU)
    assert piece.batch.input_ids.tolist() == [[4, 0, 0], [5, 6, 0], [1, 2, 3]]
    assert piece.batch.attention_mask.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert (piece.batch.outcomes.tolist(), piece.batch.weights.tolist()) == ([-1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    assert (piece.denominator, piece.task_ids) == (3, ("b", "c", "a"))
    as_rank(monkeypatch, 1, 2)
    ((real, padding),) = value_pieces(samples, UpdateSettings(minibatches=1, token_budget=1), Random(0), 0, CPU)
    assert (real.task_ids, real.batch.weights.tolist()) == (("c",), [1.0])
    assert (padding.task_ids, padding.batch.weights.tolist(), padding.denominator) == (("b",), [0.0], 3)


# Unit tests as judgments


def with_tests(*programs: tuple[float, str], task_id: str = "t") -> RolloutGroup:
    """Programs with what they make of test j at place j of a string; where all say "?", the test is unreadable.

    Test j has the prompt (5,) and the answer (60 + j, 1).
    """
    group = group_of(*(rollout(outcome, marks, name=g) for g, (outcome, marks) in enumerate(programs)), task_id=task_id)
    columns = list(zip(*(marks for _, marks in programs), strict=True))
    return replace(
        group,
        tests=tuple(
            WrittenTest(
                (5,),
                Completion((60 + j, 1), (-0.75, -0.125), "", "EOS"),
                None if set(column) == {"?"} else UnitTest("1", "2"),
            )
            for j, column in enumerate(columns)
        ),
    )


# tests:    0 passes the right programs alone, 1 one of the wrong ones, too, 2 is unreadable, 3 rejects a right program
# p_c       1                                  1                                              0
# p_d       1                                  .5                                             .5
# reward    1                                  .5                                             -.5
# mean 1/3, deviations 4/6, 1/6 and -5/6, variance (16 + 1 + 25) / 36 / 3, std sqrt(14) / 6
TESTED = ((WON, "++?+"), (WON, "++?-"), (LOST, "-+?-"), (LOST, "--?+"))
GAINS = {(60, 1): 4 / 14**0.5, (61, 1): 1 / 14**0.5, (63, 1): -5 / 14**0.5}


def test_unit_tests_gain_where_right_programs_pass_and_wrong_ones_fail():
    samples = judge(with_tests(*TESTED), parse_penalty=-1.5)
    assert advantages_of(samples) == pytest.approx(GAINS | {(62, 1): -1.5})
    assert [item.sample.response_ids for item in samples] == [(60, 1), (61, 1), (62, 1), (63, 1)]
    assert {(item.sample.prompt_ids, item.sampler_logprobs, item.task_id) for item in samples} == {((5,), (-0.75, -0.125), "t")}


@pytest.mark.parametrize("reward", [{"judge_balance": "none"}, {"judge_balance": "critic"}, {"judge_normalization": "centered"}])
def test_what_is_set_for_votes_changes_nothing_for_unit_tests(reward):
    assert advantages_of(judge(with_tests(*TESTED), parse_penalty=0.0, **reward)) == pytest.approx(GAINS)


@pytest.mark.parametrize(("low", "high", "is_used"), [(0.5, 0.9, True), (0.1, 0.5, True), (0.51, 1.0, False), (0.0, 0.49, False)])
def test_unit_tests_outside_the_band_of_success_rates_teach_nothing(low, high, is_used):
    samples = judge(with_tests(*TESTED), update=UpdateSettings(success_low=low, success_high=high))  # the rate is .5
    assert len(samples) == (4 if is_used else 0)


def test_known_programs_teach_where_the_policy_always_fails_or_succeeds():
    # task t: no program of the policy passes; a known right one passes test 0 and a known wrong one fails it: 1 against 0
    group = replace(
        with_tests((LOST, "-+")), solutions=(CheckedSolution(True, (True, True)), CheckedSolution(False, (False, True)))
    )
    for low, high in ((0.0, 1.0), (0.2, 0.8)):
        samples = judge(group, update=UpdateSettings(success_low=low, success_high=high))
        assert advantages_of(samples) == {(60, 1): 1.0, (61, 1): -1.0}


def test_a_unit_test_is_compared_with_those_of_its_task():
    # task u: test 0 lets the wrong program pass (1 * 0 - 0 * 1 = 0), test 1 tells both apart (1): mean .5, std .5
    groups = [with_tests(*TESTED), with_tests((WON, "++"), (LOST, "+-"), task_id="u")]
    samples = judge_samples(groups, [credit_of(group) for group in groups], RewardSettings(), UpdateSettings(), Random("k"))
    assert [(item.task_id, item.sample.advantage) for item in samples[-2:]] == [("u", -1.0), ("u", 1.0)]
    assert advantages_of(samples[:-2]) == pytest.approx(GAINS | {(62, 1): -2.0})


@pytest.mark.parametrize("outcome", [WON, LOST])
def test_unit_tests_of_a_task_that_is_always_or_never_solved_cannot_be_told_apart(outcome):
    group = with_tests((outcome, "+-?"), (outcome, "-+?"))
    assert advantages_of(judge(group)) == {(62, 1): -2.0}  # readable ones are as good as each other, whatever they are
    assert judge(group, parse_penalty=0.0) == []


def test_what_is_no_program_says_nothing_about_a_unit_test():
    group = with_tests(*TESTED)
    nothing, judged = rollout(LOST, "--?-", invalid=(0,), name=4)
    more = replace(group, trajectories=(*group.trajectories, nothing), judgments=(*group.judgments, judged))
    assert advantages_of(judge(more)) == pytest.approx(GAINS | {(62, 1): -2.0})


def partly(outcome: float, checks: str, *votes: str, invalid=()) -> tuple[Trajectory, tuple[tuple[Judgment, ...], ...]]:
    """A rollout whose last step passed the hidden tests marked "+"."""
    trajectory, judged = rollout(outcome, *votes, invalid=invalid)
    last = replace(trajectory.steps[-1], checks=tuple("passed" if check == "+" else "wrong_answer" for check in checks))
    return replace(trajectory, steps=(*trajectory.steps[:-1], last)), judged


PARTLY = (
    partly(LOST, "+-++", "++?"),
    partly(LOST, "----", "-+?"),
    partly(WON, "++++", "+-+"),
    partly(LOST, "", "--?", invalid=(0,)),
)


def test_a_partial_outcome_is_the_share_of_hidden_tests():
    # 2 * 3/4 - 1 + .5 * 1;  -1 + 0;  1 + .5 * 1/3;  no program: -1 - .5 - .25
    rewards = credit_of(group_of(*PARTLY), outcome="partial", score_weight=0.5, invalid_penalty=0.25).rewards
    assert [r.tolist() for r in rewards] == [[1.0], [-1.0], [pytest.approx(7 / 6)], [-1.75]]


def test_a_binary_outcome_counts_hidden_tests_together():
    # -1 + .5 * 1;  -1 + 0;  1 + .5 * 1/3;  -1 - .5 - .25
    rewards = credit_of(group_of(*PARTLY), score_weight=0.5, invalid_penalty=0.25).rewards
    assert [r.tolist() for r in rewards] == [[-0.5], [-1.0], [pytest.approx(7 / 6)], [-1.75]]


def test_a_partial_outcome_alone_is_a_signal_where_no_rollout_won():
    # outcomes .5 and -.5, without votes that can be read
    group = group_of(partly(LOST, "+++-", "??"), partly(LOST, "-+--", "??"))
    assert [a.tolist() for a in credit_of(group, outcome="partial").advantages] == [[1.0], [-1.0]]
    assert [a.tolist() for a in credit_of(group).advantages] == [[0.0], [0.0]]


def test_without_parts_a_partial_outcome_is_all_or_nothing():
    rewards = credit_of(group_of(rollout(WON, "??"), rollout(LOST, "??")), outcome="partial").rewards
    assert [r.tolist() for r in rewards] == [[1.0], [-1.0]]


def test_gae_pays_a_partial_outcome_once():
    group = group_of(partly(LOST, "+++-", "??", "??"), partly(LOST, "----", "??"))
    credit = credit_of(group, outcome="partial", advantage="gae", gamma=1.0, gae_lambda=1.0)  # the values are 0
    # paid once: (0, .5) and -1; returns .5, .5, -1 with mean 0 and variance 1.5 / 3
    assert np.concatenate(credit.advantages).tolist() == pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5)])
    assert [r.tolist() for r in credit.rewards] == [[0.5, 0.5], [-1.0]]
