"""Kill a run at any point, resume it: the same numbers and weights as without the accident, bit for bit."""

import csv
import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rla_lightning.cli import main
from rla_lightning.runs import discard_unused, last_checkpoint, logged_rows, new_run_folder

EPOCHS = 4
SEEDS = (9, *range(4, 9), *range(10, 24))  # which of them has proposals of every kind differs as floats do between machines


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def curves(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if value and name[:5] != "time/"} for row in csv.DictReader(file)]


def summary(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "summary.json").read_text())
    return {name: repr(value) for name, value in content.items() if name not in ("experiment", "seconds")}  # nan == nan


def state(folder: Path) -> dict[str, Any]:
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "EnvironmentDataModule", "epoch", "global_step")
    return {name: checkpoint[name] for name in kept}


def assert_same(a: Any, b: Any, place: str = "") -> None:
    assert type(a) is type(b), place
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), place
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), place
        for key in a:
            assert_same(a[key], b[key], f"{place}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), place
        for index, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{place}/{index}")
    else:
        assert a == b, place


def assert_same_run(a: Path, b: Path) -> None:
    assert curves(a) == curves(b)
    assert (a / "tasks.jsonl").read_text() == (b / "tasks.jsonl").read_text()
    assert summary(a) == summary(b)
    assert_same(state(a), state(b))


def start(experiment: str, workspace: Path, *more: str, epochs: int = EPOCHS) -> list[str]:
    place = ["--config", str(workspace / "run.yaml"), "--runs", str(workspace / "runs"), "--experiment", experiment]
    place += ["--seed_everything", (workspace / "seed").read_text()]
    return ["fit", *place, *more, "--trainer.max_epochs", str(epochs)]


def killer(workspace: Path, name: str) -> list[str]:
    """A config that adds a callback of callbacks_of_tests.py; it kills in the third of four epochs."""
    file = workspace / f"{name}.yaml"
    callback = f"{{class_path: callbacks_of_tests.{name}, init_args: {{epoch: 2}}}}"
    text = (workspace / "run.yaml").read_text()
    if name == "KillAfterCheckpoint":  # behind ModelCheckpoint, the last of the list
        file.write_text(f"trainer: {{callbacks+: [{callback}]}}\n")
        return ["--config", str(file)]
    file.write_text(text.replace("  callbacks:\n", f"  callbacks:\n    - {callback}\n"))
    return ["--config", str(file)]


def forked(args: list[str]) -> int:
    """Exit code of a command line in a copy of this process, much faster than a new one."""
    process = multiprocessing.get_context("fork").Process(target=main, args=(args,))
    process.start()
    process.join(240)
    assert process.exitcode is not None
    return process.exitcode


@pytest.fixture(scope="module", autouse=True)
def _no_arguments() -> Iterator[None]:
    """Or Lightning warns that there are arguments of pytest, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["rla"])
        yield


@pytest.fixture(scope="module")
def uninterrupted(workspace: Path) -> Path:
    """The first run with proposals that are accepted, decided and pending where others of its seed are killed."""
    for number, seed in enumerate(SEEDS):
        (workspace / "seed").write_text(str(seed))
        main(start("whole", workspace))
        folder = workspace / "runs" / "whole" / f"version_{number}"
        if has_proposals_of_every_kind(folder):
            return folder
    raise AssertionError("no seed has proposals of every kind")


def has_proposals_of_every_kind(folder: Path) -> bool:
    rows = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
    proposals = [row for row in rows if row["direction"] is not None]
    return (
        any(row["decided_epoch"] is not None and row["decided_epoch"] < 2 for row in proposals)
        and any(row["verdict"] == "ACCEPT" for row in proposals)
        and any(row["proposed_epoch"] == 2 for row in proposals)  # pending when epoch 2 began
        and any(row["proposed_epoch"] == EPOCHS for row in proposals)
    )


def test_the_rows_of_a_run(uninterrupted: Path) -> None:
    assert {row["step"] for row in curves(uninterrupted) if "policy/loss" in row} == {"1", "2", "3", "4"}
    validated = [row["step"] for row in curves(uninterrupted) if "validation/in_domain/rollout/success_rate" in row]
    assert validated == ["0", "2", "4"]


def test_tasks_are_written_after_the_last_verdicts(uninterrupted: Path) -> None:
    rows = [json.loads(line) for line in (uninterrupted / "tasks.jsonl").read_text().splitlines()]
    written = json.loads((uninterrupted / "summary.json").read_text())
    assert sum(row["direction"] is not None for row in rows) == written["proposed_tasks"]
    assert sum(row["verdict"] == "ACCEPT" for row in rows) == written["accepted_tasks"]
    assert any(row["proposed_epoch"] == EPOCHS for row in rows)


def test_killed_in_a_new_process_and_resumed_in_this_one(
    workspace: Path, uninterrupted: Path, rla_process: Callable[..., Any]
) -> None:
    ended = rla_process(*start("batch", workspace, *killer(workspace, "KillAfterBatch")), cwd=workspace)
    assert ended.code == -signal.SIGKILL, ended
    old = workspace / "runs" / "batch" / "version_0"
    assert curves(old)[-1]["step"] == "2"
    before = contents(old)
    main(start("batch", workspace, "--ckpt_path", "last"))
    assert_same_run(workspace / "runs" / "batch" / "version_1", uninterrupted)
    assert contents(old) == before


@pytest.mark.parametrize(("name", "trained"), [("KillAtEpochEnd", 3), ("KillAfterCheckpoint", 3)])
def test_killed_at_the_end_of_an_epoch(workspace: Path, uninterrupted: Path, name: str, trained: int) -> None:
    """Before the epoch's checkpoint is saved, and after it is but before its last row of metrics is."""
    assert forked(start(name, workspace, *killer(workspace, name))) == -signal.SIGKILL
    old = workspace / "runs" / name / "version_0"
    assert curves(old)[-1]["step"] == str(trained)
    assert "env/proposed" not in curves(old)[-1]
    before = contents(old)
    main(start(name, workspace, "--ckpt_path", "last"))
    assert_same_run(workspace / "runs" / name / "version_1", uninterrupted)
    assert contents(old) == before


def test_a_resumed_run_is_resumed(workspace: Path, uninterrupted: Path) -> None:
    main(start("chain", workspace, epochs=1))
    for epochs in (2, 3, 4):
        main(start("chain", workspace, "--ckpt_path", "last", epochs=epochs))
    assert_same_run(workspace / "runs" / "chain" / "version_3", uninterrupted)
    rows = curves(workspace / "runs" / "chain" / "version_1")
    assert [row["step"] for row in rows if "env/proposed" in row] == ["1", "2"]


@pytest.mark.usefixtures("uninterrupted")  # which chooses the seed
def test_dropout_on_adapters_does_not_depend_on_what_was_drawn_before(workspace: Path) -> None:
    dropout = ["--model.policy.lora.rank", "2", "--model.policy.lora.dropout", "0.5"]
    main(start("dropout", workspace, *dropout))
    main(start("resumed", workspace, *dropout, epochs=2))
    torch.rand(7)
    main(start("resumed", workspace, *dropout, "--ckpt_path", "last"))
    whole, resumed = (workspace / "runs" / name for name in ("dropout/version_0", "resumed/version_1"))
    assert_same_run(resumed, whole)


def test_one_seed_gives_one_run_and_two_seeds_give_two(workspace: Path, uninterrupted: Path) -> None:
    main(start("again", workspace))
    assert_same_run(workspace / "runs" / "again" / "version_0", uninterrupted)
    main(start("other", workspace, "--seed_everything", "1"))
    other = workspace / "runs" / "other" / "version_0"
    assert curves(other) != curves(uninterrupted)
    assert (other / "tasks.jsonl").read_text() != (uninterrupted / "tasks.jsonl").read_text()
    weights, others = state(uninterrupted)["state_dict"], state(other)["state_dict"]
    assert not any(torch.equal(weights[name], others[name]) for name in weights if name.endswith("embed_tokens.weight"))


def test_a_run_that_is_complete_is_left_alone(workspace: Path, uninterrupted: Path) -> None:
    before = contents(uninterrupted)
    main(start("whole", workspace, "--ckpt_path", str(uninterrupted / "checkpoints" / "last.ckpt")))
    assert contents(uninterrupted) == before
    again = uninterrupted.with_name(f"version_{int(uninterrupted.name.removeprefix('version_')) + 1}")
    assert summary(again) == summary(uninterrupted)


def test_rows_cut_short_by_a_crash_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("a,step\n0.5,1\n,2\n0.25,1")  # it was iteration 12
    assert logged_rows(file, 2) == [{"a": 0.5, "step": 1.0}, {"step": 2.0}]
    assert logged_rows(file, 1) == [{"a": 0.5, "step": 1.0}]
    assert logged_rows(tmp_path / "none.csv", 1) == []


def test_run_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "runs" / "x"
    assert [new_run_folder(root).name for _ in range(2)] == ["version_0", "version_1"]
    (root / "version_10").mkdir()
    assert new_run_folder(root).name == "version_11"
    (root / "version_1" / "checkpoints").mkdir()
    (root / "version_1" / "checkpoints" / "last.ckpt").touch()
    assert last_checkpoint(root) == root / "version_1" / "checkpoints" / "last.ckpt"
    discard_unused(root / "version_1")
    assert (root / "version_1").is_dir()
    (root / "version_11" / "config.yaml").touch()
    discard_unused(root / "version_11")
    assert not (root / "version_11").exists()
    monkeypatch.setenv("NODE_RANK", "1")
    assert new_run_folder(root) == root / "version_11"
    assert not (root / "version_11").exists()
