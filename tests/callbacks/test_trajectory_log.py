import json
from dataclasses import replace

import pytest

from callbacks.trajectory_log import TrajectoryLog, trajectory_rows
from rla_lightning.models.tokenizer import environment_tokenizer
from rla_lightning.types import (
    LOST,
    WON,
    Completion,
    ConfigError,
    IterationResult,
    Judgment,
    Observation,
    RolloutGroup,
    Step,
    Task,
    Trajectory,
)

TOKENIZER = environment_tokenizer(["go", "left", "right", "near"])
ACT, JUDGE, EOS, PLUS, MINUS, GO, LEFT, NEAR, RIGHT = TOKENIZER.convert_tokens_to_ids(
    ["<act>", "<judge>", "</s>", "+1", "-1", "go", "left", "near", "right"]
)
TASK = Task("t", "toy", {}, 0.5, "t")
STEP = Step(
    (ACT, NEAR),
    Completion((GO, RIGHT, EOS), (-0.5, -0.25, -0.125), "go right", "EOS"),
    Observation("You are near."),
    "go right",
    True,
    "You arrive.",
)
UNREADABLE = Step((ACT, NEAR), Completion((LEFT,), (-2.0,), "left", "TRUNCATED"), Observation("You are near."), "", False, "Huh?")
VOTES = (
    Judgment((JUDGE, NEAR, GO, RIGHT), Completion((PLUS, EOS), (-0.1, -0.1), "+1", "EOS"), 1),
    Judgment((JUDGE, NEAR, GO, RIGHT), Completion((GO, EOS), (-3.0, -0.1), "go", "EOS"), None),
)
RESULT = IterationResult(
    iteration=7,
    feedback=(),
    groups=(
        RolloutGroup(
            TASK,
            (
                Trajectory(TASK, (STEP,), WON, "DONE"),
                Trajectory(TASK, (UNREADABLE,), LOST, "ENV_ERROR", "OSError: no door"),
                Trajectory(TASK, (), LOST, "ENV_ERROR", "OSError: no house"),
            ),
            ((VOTES,), ((),), ()),
        ),
        RolloutGroup(TASK, (Trajectory(TASK, (STEP,), LOST, "MAX_TURNS"),), ()),
    ),
    advantages=(((0.75,), (), ()), ((0.0,),)),
    rewards=(((2.0,), (), ()), ((-1.0,),)),
    values=(((0.5,), (0.25,), ()), ((0.125,),)),
)


def rows(max_groups: int | None = None) -> list[dict]:
    return json.loads(json.dumps(trajectory_rows(RESULT, max_groups, TOKENIZER, TOKENIZER), allow_nan=False))


def test_a_row_holds_all_that_happened():
    assert rows()[0] == {
        "iteration": 7,
        "task_id": "t",
        "rollout": 0,
        "outcome": 1.0,
        "stop_reason": "DONE",
        "error": "",
        "steps": [
            {
                "messages": [
                    {"role": "user", "content": "<act> near"},
                    {"role": "assistant", "content": "go right"},
                ],
                "token_ids": [ACT, NEAR, GO, RIGHT, EOS],
                "loss_mask": [0, 0, 1, 1, 1],  # the end token is trained on
                "logprobs": [-0.5, -0.25, -0.125],
                "observation": "You are near.",
                "action": "go right",
                "is_valid": True,
                "feedback": "You arrive.",
                "checks": [],
                "scores": [1, None],
                "critiques": ["+1", "go"],
                "judge_prompt": "<judge> near go right",
                "reward": 2.0,
                "advantage": 0.75,
                "value": 0.5,
            }
        ],
    }


def test_a_rollout_that_the_environment_ended_keeps_its_steps_without_credit():
    broken, never_started = rows()[1:3]
    assert (broken["stop_reason"], broken["error"]) == ("ENV_ERROR", "OSError: no door")
    (step,) = broken["steps"]
    assert (step["action"], step["is_valid"], step["scores"], step["judge_prompt"]) == ("", False, [], "")
    assert (step["reward"], step["advantage"], step["value"]) == (None, None, 0.25)
    assert never_started["steps"] == []


def test_a_group_without_judgments_keeps_its_steps():
    (step,) = rows()[3]["steps"]
    assert (step["scores"], step["reward"], step["advantage"], step["value"]) == ([], -1.0, 0.0, 0.125)


def test_max_groups_are_spread_over_the_iteration():
    assert [row["rollout"] for row in rows()] == [0, 1, 2, 0]
    assert [row["rollout"] for row in rows(1)] == [0, 1, 2]
    twice = {name: getattr(RESULT, name) * 2 for name in ("groups", "rewards", "advantages", "values")}
    four = trajectory_rows(replace(RESULT, **twice), 2, TOKENIZER, TOKENIZER)
    assert [row["rollout"] for row in four] == [0, 1, 2, 0, 1, 2]  # groups 0 and 2, which is group 0 again


def test_every_n_epochs(make_loop, train, tmp_path):
    train(make_loop(), tmp_path, [TrajectoryLog(every_n_epochs=2)], epochs=3)
    written = sorted(path.name for path in (tmp_path / "toy" / "v" / "trajectories").iterdir())
    assert written == ["epoch=000.jsonl", "epoch=002.jsonl"]
    with pytest.raises(ConfigError, match="every_n_epochs must be at least 1, got 0"):
        TrajectoryLog(every_n_epochs=0)
