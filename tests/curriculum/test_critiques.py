from rla_lightning.curriculum.critiques import template_critique
from rla_lightning.types import LOST, WON, Completion, Judgment, Observation, RolloutGroup, Step, Task, Trajectory, TrajectoryStop

TASK = Task("t", "numbers", {}, 0.5, root_id="t")
EMPTY = Completion((), (), "", "EOS")


def rollout(outcome: float, *actions: str, stop: TrajectoryStop = "DONE") -> Trajectory:
    steps = tuple(Step((), EMPTY, Observation(""), action, is_valid=bool(action)) for action in actions)
    return Trajectory(TASK, steps, outcome, stop)


def votes(*scores: int | None) -> tuple[Judgment, ...]:
    return tuple(Judgment((), EMPTY, score) for score in scores)


def test_losses_name_the_steps_that_every_vote_rejects() -> None:
    group = RolloutGroup(
        TASK,
        (rollout(LOST, "look", "", "wait", "open box", stop="MAX_TURNS"), rollout(WON, "go"), rollout(LOST, "jump")),
        (
            (votes(-1, -1, 1), votes(-1, -1, -1), votes(-1, None, -1), votes(-1, -1, -1)),
            (votes(-1, -1, -1),),
            (votes(1, 1, -1),),
        ),
    )
    assert template_critique(group) == (
        "The rollout ran out of turns after 4 turns. All votes are negative at steps 1 (no readable action), 3 (open box).",
        "The rollout lost after 1 turn. No step has only negative votes.",
    )


def test_long_lists_are_cut_and_one_step_is_singular() -> None:
    group = RolloutGroup(
        TASK,
        (rollout(LOST, *"abcdefg"), rollout(LOST, "a", "b")),
        (tuple(votes(-1) for _ in range(7)), (votes(1), votes(-1))),
    )
    first, second = template_critique(group)
    assert first.endswith("All votes are negative at steps 0 (a), 1 (b), 2 (c), 3 (d), 4 (e) and 2 more.")
    assert second.endswith("All votes are negative at step 1 (b).")


def test_above_the_band_the_shortest_win_is_told() -> None:
    wins = [rollout(WON, *"abcdefg"), rollout(WON, "take", "put"), rollout(WON, "take", "look", "put")]
    assert template_critique(RolloutGroup(TASK, tuple(wins))) == (
        "3 of 3 rollouts won, in 4.0 turns on average. The shortest took 2 turns: take, put.",  # (7 + 2 + 3) / 3
    )
    long = RolloutGroup(TASK, (wins[0],))
    assert template_critique(long) == (
        "1 of 1 rollouts won, in 7.0 turns on average. The shortest took 7 turns: a, b, c, d, e and 2 more.",
    )


def test_losses_and_errors_do_not_count_in_the_mean_turns() -> None:
    lost, failed = rollout(LOST, *"abcdefgh"), rollout(LOST, *"abcdefgh", stop="ENV_ERROR")
    wins = [rollout(WON, "take", "put")] * 8 + [rollout(WON, "look", "take", "put")]  # 19 turns in 9 wins
    first, second = template_critique(RolloutGroup(TASK, (lost, failed, *wins)))
    assert first == "The rollout lost after 8 turns."
    assert second == "9 of 10 rollouts won, in 2.1 turns on average. The shortest took 2 turns: take, put."


def test_the_edge_of_the_band_is_not_easy() -> None:
    four_of_five = RolloutGroup(TASK, (*[rollout(WON, "a")] * 4, rollout(LOST, "b")))
    assert template_critique(four_of_five) == ("The rollout lost after 1 turn.",)
    assert (
        template_critique(four_of_five, high=0.7)[1]
        == "4 of 5 rollouts won, in 1.0 turns on average. The shortest took 1 turn: a."
    )


def test_errors_of_the_environment_are_no_failures() -> None:
    group = RolloutGroup(TASK, (rollout(LOST, "a", stop="ENV_ERROR"), rollout(LOST)))
    assert template_critique(group) == ("The rollout lost after 0 turns.",)
    assert template_critique(RolloutGroup(TASK, (rollout(LOST, stop="ENV_ERROR"),))) == ()


def test_no_votes_on_a_step_are_no_blame() -> None:
    group = RolloutGroup(TASK, (rollout(LOST, "a"),), ((votes(),),))
    assert template_critique(group)[0].endswith("No step has only negative votes.")


def program(outcome: float, *checks: str) -> Trajectory:
    step = Step((), EMPTY, Observation(""), "print(1)", True, checks=checks)
    return Trajectory(TASK, (step,), outcome, "DONE")


def test_programs_are_criticised_by_the_pass_rates_of_the_hidden_tests() -> None:
    programs = (
        program(WON, "passed", "passed", "passed"),
        program(LOST, "passed", "wrong_answer", "timeout"),
        program(LOST, "passed", "wrong_answer", "wrong_answer"),
        program(LOST, "passed", "runtime_error", "timeout"),
    )
    expected = (
        "Pass rates of the hidden tests over 4 programs: "
        "1: 100%; 2: 25% (2 wrong_answer, 1 runtime_error); 3: 25% (2 timeout, 1 wrong_answer).",
    )
    assert template_critique(RolloutGroup(TASK, programs)) == expected
    assert template_critique(RolloutGroup(TASK, programs), high=0.1) == expected  # above the band, too
    judged = tuple((votes(-1, -1),) for _ in programs)
    assert template_critique(RolloutGroup(TASK, programs, judged)) == expected


def test_answers_without_a_program_and_errors_do_not_count_in_pass_rates() -> None:
    nothing = rollout(LOST, "")
    failed = program(WON, "wrong_answer", "wrong_answer")
    group = RolloutGroup(
        TASK,
        (
            nothing,
            program(WON, "passed", "passed"),
            Trajectory(TASK, failed.steps, LOST, "ENV_ERROR"),
            program(LOST, "passed", "memory"),
            program(LOST, "passed", "passed"),
            nothing,
        ),
    )
    assert template_critique(group) == (
        "Pass rates of the hidden tests over 3 programs: 1: 100%; 2: 67% (1 memory). 2 gave nothing that could be run.",
    )


def test_the_last_of_several_programs_is_the_one_that_counts() -> None:
    first, last = program(LOST, "timeout", "timeout"), program(WON, "passed", "passed")
    group = RolloutGroup(TASK, (Trajectory(TASK, first.steps + last.steps, WON, "DONE"),))
    assert template_critique(group) == ("Pass rates of the hidden tests over 1 program: 1: 100%; 2: 100%.",)


def test_without_any_program_there_are_no_pass_rates() -> None:
    assert template_critique(RolloutGroup(TASK, (rollout(LOST, ""),))) == ("The rollout lost after 1 turn.",)
