"""The loop on questions of reasoning-gym, through the command line."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml

CONFIG = Path(__file__).parent.parent / "configs" / "reasoning_gym_tiny.yaml"
WARM_START = {"episodes": 400, "policy_updates": 250, "judge_updates": 20, "batch_size": 32, "action_noise": 0.0, "cache": None}
TINY = {"tiny": {"width": 32, "layers": 1, "heads": 2, "mlp_width": 64}}
SMALL = {
    "trainer": {
        "max_epochs": 2,
        "check_val_every_n_epoch": 1,
        "callbacks": [
            {"class_path": "callbacks.WarmStart", "init_args": WARM_START},
            {"class_path": "callbacks.RunSummary"},
            {"class_path": "callbacks.TrajectoryLog"},
        ],
    },
    "model": {**dict.fromkeys(("policy", "reward_model", "critic"), TINY), "rollout": {"group_size": 4}},
    "data": {
        "environment": {"init_args": {"families": ["spell_backward"], "max_level": 2}},
        "difficulty_high": 0.0,
        "tasks_per_iteration": 6,
        "pool_size": 24,
        "validation_tasks": 4,
        "test_tasks": 16,
    },
}
Rla = Callable[..., Any]
assert L  # imported here: its log handler keeps the standard error of the first import, which a test closes


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    return ["fit", "--config", str(CONFIG), "--config", str(file), "--runs", str(tmp_path / "runs"), "--experiment", "small"]


def test_a_run_of_two_iterations(rla: Rla, small: list[str], tmp_path: Path) -> None:
    ended = rla(*small)
    assert ended.code == 0, ended
    folder = tmp_path / "runs" / "small" / "version_0"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["epochs"] == 2
    assert summary["before"]["success_in_domain"] > 0  # words of three letters, after a warm start of seconds
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("env/difficulty")]
    assert [row["step"] for row in rows] == ["1", "2"]
    tasks = [json.loads(line)["task"] for line in (folder / "tasks.jsonl").read_text().splitlines()]
    assert {task["kind"] for task in tasks} == {"spell_backward"}
    assert {task["spec"]["levels"]["word_len"] for task in tasks if task["version"] == 0} == {0}
    assert "out_of_distribution/rollout/success_rate" in summary["test"]["before"]


def test_a_family_with_too_few_items_is_one_error(rla: Rla, small: list[str], tmp_path: Path) -> None:
    message = rla(
        *small, "--data.environment.init_args.families", '["coin_flip"]', "--data.environment.init_args.max_level=0"
    ).message
    assert "reasoning_gym gave only" in message
    assert "data.test_tasks asks for 16" in message
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_family_is_one_error(rla: Rla, small: list[str], tmp_path: Path) -> None:
    message = rla(*small, "--data.environment.init_args.families", '["chain_sums"]').message
    assert "families cannot be used: 'chain_sums' (unknown; near are chain_sum" in message
    assert not (tmp_path / "runs").exists()
