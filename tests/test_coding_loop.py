"""The loop on programs and unit tests, through the command line: everything that models write really runs, in the sandbox."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rla_lightning.cli import main

ROOT = Path(__file__).parent.parent
TINY = {"tiny": {"width": 32, "layers": 1, "heads": 2, "mlp_width": 64}}
WARM_START = {"episodes": 150, "policy_updates": 250, "judge_updates": 250, "batch_size": 8, "action_noise": 0.2, "cache": None}
SMALL = {
    "trainer": {"max_epochs": 2, "check_val_every_n_epoch": 1},
    "model": {
        **dict.fromkeys(("policy", "reward_model", "critic"), TINY),
        "rollout": {"group_size": 4, "num_judgments": 3},
        "acceptance": {"rule": "threshold"},
        "policy_update": {"minibatches": 1, "success_low": 0.0, "success_high": 1.0},
        "reward_model_update": {"minibatches": 1, "success_low": 0.0, "success_high": 1.0},
        "critic_update": {"minibatches": 1},
    },
    "data": {"difficulty_high": 0.0, "tasks_per_iteration": 3, "pool_size": 6, "validation_tasks": 2, "test_tasks": 2},
}
TEST_FORMAT = "rla_lightning.rollout.formats_code.CompactTestFormat"
Rla = Callable[..., Any]


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {name: (config[name], changes[name]) for name in config.keys() & changes.keys()}
    nested = {name: merged(old, new) for name, (old, new) in both.items() if isinstance(old, dict) and isinstance(new, dict)}
    return config | changes | nested


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """configs/coding_tiny.yaml for a run of seconds."""
    config = merged(yaml.safe_load((ROOT / "configs" / "coding_tiny.yaml").read_text()), SMALL)
    options = {
        entry["class_path"].rpartition(".")[2]: entry.setdefault("init_args", {}) for entry in config["trainer"]["callbacks"]
    }
    options["WarmStart"] |= WARM_START
    options["ModelCheckpoint"]["save_top_k"] = -1  # one of them is resumed
    file = tmp_path_factory.mktemp("coding") / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def start(small: Path, experiment: str, *more: str) -> list[str]:
    place = ["--config", str(small), "--runs", str(small.parent / "runs"), "--experiment", experiment]
    return ["fit", *place, *more]


@pytest.fixture(scope="module")
def trained(needs_isolation: None, small: Path) -> Path:
    """A finished run of two epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["rla"])
        main(start(small, "whole"))
    return small.parent / "runs" / "whole" / "version_0"


def rows(folder: Path) -> list[dict[str, str]]:
    """Of metrics.csv, without what the clock says."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if value and name[:5] != "time/"} for row in csv.DictReader(file)]


def test_a_run_trains_on_unit_tests_and_reports_them(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["epochs"] == 2
    for when in ("before", "after"):
        for suffix in ("", "_ood"):  # right and wrong programs of every task are known, so that neither is null
            assert 0 <= summary[when][f"detect{suffix}"] <= summary[when][f"ut{suffix}"] <= 1
        for split in ("in_domain", "out_of_distribution"):
            assert 0 <= summary["test"][when][f"{split}/code/pass_ratio"] <= 1
    iterations = [row for row in rows(trained) if "policy/samples" in row]
    assert [row["step"] for row in iterations] == ["1", "2"]
    for row in iterations:
        assert {"reward_model/ut", "reward_model/detect", "reward_model/readable_rate", "rollout/success_rate"} <= row.keys()
    for name in ("policy", "reward_model"):
        assert any(float(row[f"{name}/samples"]) > 0 for row in iterations)
    validated = [row for row in rows(trained) if "validation/in_domain/rollout/success_rate" in row]
    assert [row["step"] for row in validated] == ["0", "1", "2"]
    assert all("validation/in_domain/reward_model/ut" in row for row in validated)


def test_a_run_keeps_its_settings_and_problems(trained: Path) -> None:
    config = yaml.safe_load((trained / "config.yaml").read_text())
    assert config["model"]["reward"]["outcome"] == "partial"
    assert config["model"]["test_format"]["class_path"] == TEST_FORMAT
    tasks = [json.loads(line)["task"] for line in (trained / "tasks.jsonl").read_text().splitlines()]
    assert len(tasks) >= 6
    assert {task["environment"] for task in tasks} == {"pipelines"}
    assert all(len(task["spec"]["problem"]["tests"]) == 6 for task in tasks)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(small: Path, trained: Path, rla: Rla) -> None:
    first = trained / "checkpoints" / "epoch=0.ckpt"
    ended = rla(*start(small, "whole", "--ckpt_path", str(first)))
    assert ended.code == 0, ended
    resumed = trained.with_name("version_1")
    assert rows(resumed) == rows(trained)
    assert (resumed / "tasks.jsonl").read_text() == (trained / "tasks.jsonl").read_text()


def test_problems_of_one_collection_are_reported_without_an_out_of_distribution_set(
    needs_isolation: None, small: Path, rla: Rla, tmp_path: Path
) -> None:
    """The offline problems, whose held-out ones are all in domain."""
    config = yaml.safe_load(small.read_text())
    config["trainer"] |= {"max_epochs": 1, "callbacks": [{"class_path": "callbacks.RunSummary"}]}
    config["model"]["rollout"] |= {"group_size": 2, "num_judgments": 2, "max_new_tokens": 8, "max_judge_tokens": 8}
    config["data"] |= {
        "environment": "rla_lightning.environments.coding.CodingEnvironment",
        "adapter": None,
        "difficulty_high": 1.0,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    ended = rla("fit", "--config", tmp_path / "run.yaml", "--runs", tmp_path / "runs", "--experiment", "offline")
    assert ended.code == 0, ended
    summary = json.loads((tmp_path / "runs" / "offline" / "version_0" / "summary.json").read_text())
    for when in ("before", "after"):
        assert summary[when]["success_in_domain"] == 0.0  # random words
        assert [summary[when][name] for name in ("success_ood", "ut_ood", "detect_ood")] == [None, None, None]
        assert {name.partition("/")[0] for name in summary["test"][when]} == {"in_domain"}
    assert "success_in_domain" in ended.out
    assert "_ood" not in ended.out


@pytest.mark.parametrize("outcome", ["partial", "binary"])
def test_the_outcome_is_an_option(rla: Rla, small: Path, outcome: str) -> None:
    printed = rla(*start(small, "options", "--model.reward.outcome", outcome, "--print_config"))
    assert printed.code == 0, printed
    assert yaml.safe_load(printed.out)["model"]["reward"]["outcome"] == outcome


def test_another_outcome_is_refused(rla: Rla, small: Path) -> None:
    message = rla(*start(small, "options", "--model.reward.outcome", "some")).message
    assert "model.reward.outcome" in message
    assert message.endswith("Got value: some")


def test_unit_tests_need_programs(rla: Rla, workspace: Path, tmp_path: Path) -> None:
    place = ["--config", workspace / "run.yaml", "--runs", tmp_path / "runs"]
    message = rla("fit", *place, "--model.test_format", TEST_FORMAT).message
    assert message.endswith("model.test_format needs an environment whose actions are programs, not CorridorEnvironment")
    assert not (tmp_path / "runs").exists()


def test_known_programs_need_unit_tests(rla: Rla, workspace: Path, tmp_path: Path) -> None:
    place = ["--config", workspace / "run.yaml", "--runs", tmp_path / "runs"]
    message = rla("fit", *place, "--model.rollout.known_programs", "true").message
    assert message.endswith("rollout.known_programs needs model.test_format")
    assert not (tmp_path / "runs").exists()


def test_programs_are_not_voted_on(rla: Rla, small: Path, tmp_path: Path) -> None:
    message = rla("fit", "--config", small, "--runs", tmp_path / "runs", "--model.test_format", "null").message
    assert "PipelineEnvironment tells its verdict with the first observation" in message
    assert message.endswith("set model.test_format")
    assert not (tmp_path / "runs").exists()


def test_votes_and_unit_tests_exclude_each_other(rla: Rla, small: Path, tmp_path: Path) -> None:
    votes = ["--model.judge_format", "rla_lightning.rollout.formats.CompactJudgeFormat"]
    message = rla("fit", "--config", small, "--runs", tmp_path / "runs", *votes).message
    assert message.endswith("model.judge_format CompactJudgeFormat is of no use with model.test_format")
    assert not (tmp_path / "runs").exists()


def test_a_machine_that_cannot_isolate_programs_runs_none(rla: Rla, small: Path, tmp_path: Path) -> None:
    python = shutil.which("false")  # an interpreter that ends at once, with exit code 1
    place = ["--config", small, "--runs", tmp_path / "runs"]
    message = rla("fit", *place, "--data.environment.init_args.sandbox.python", python).message
    assert "this machine cannot isolate programs" in message
    assert "--data.environment.init_args.sandbox.isolation none" in message
    assert not (tmp_path / "runs").exists()
