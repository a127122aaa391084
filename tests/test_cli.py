"""The command line: bad input ends in one clear message before any work, nothing already saved is overwritten."""

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace

from rla_lightning import cli

ENVIRONMENTS = """
from corridor import CorridorEnvironment


class OneTask(CorridorEnvironment):
    def sample(self, rng, difficulty, split="in_domain"):
        return self._task(0, 1)


class NoValidTask(CorridorEnvironment):
    def validate(self, task, parent=None):
        return "It cannot be solved."


class NoWords(CorridorEnvironment):
    def vocabulary(self):
        return ()


class Abstract(CorridorEnvironment):
    start = None

    def __init__(self, needed: int) -> None:
        super().__init__()
"""
DDP = "lightning.pytorch.strategies.DDPStrategy"
CHECKPOINT = "lightning.pytorch.callbacks.ModelCheckpoint"

BAD_VALUES = {  # option: value, words of the message
    "--model.rollout.grup_size": (4, ["--model.rollout.grup_size"]),
    "--modle.rollout.group_size": (4, ["--modle.rollout.group_size"]),
    "--model.rollout.group_size": (1, ["group_size", "got 1", "normalised within a group"]),
    "--model.rollout.num_judgments": (0, ["num_judgments", "got 0"]),
    "--model.rollout.temperature": (0, ["temperature", "got 0"]),
    "--model.rollout.max_turns": ("many", ["model.rollout.max_turns", "many"]),
    "--model.policy.path": ("/nowhere/model", ["'/nowhere/model'", "neither a directory nor a hub name"]),
    "--model.critic.path": ("/nowhere/critic", ["'/nowhere/critic'"]),
    "--model.policy.lora.rank": (0, ["lora.rank must be at least 1, got 0"]),
    "--model.policy.tiny.width": (17, ["tiny.width 17"]),
    "--model.policy.tiny.architecture": ("qwen9", ["'qwen9'"]),
    "--model.policy.tiny.context_length": (6, ["policy, 6 tokens", "too short for task corridor-", "8 tokens"]),
    "--model.reward_model.tiny.context_length": (8, ["reward_model, 8 tokens", "too short for task corridor-"]),
    "--model.critic.tiny.context_length": (5, ["critic, 5 tokens", "too short for task corridor-"]),
    "--model.acceptance.low": (0.9, ["low < high", "0.9"]),
    "--model.policy_optimizer": ("torch.optim.Nope", ["model.policy_optimizer", "Nope"]),
    "--data.pool_size": (0, ["data.pool_size 0"]),
    "--data.tasks_per_iteration": (0, ["data.tasks_per_iteration", "got 0"]),
    "--data.validation_tasks": (0, ["data.validation_tasks", "got 0"]),
    "--data.test_tasks": (0, ["data.test_tasks", "got 0"]),
    "--data.environment": ("environments_of_tests.NoValidTask", ["corridor", "distinct in_domain tasks"]),
    "--data.environment ": ("environments_of_tests.OneTask", ["corridor", "distinct in_domain tasks"]),
    "--data.environment  ": ("environments_of_tests.NoWords", ["no vocabulary"]),
    "--data.environment   ": ("environments_of_tests.Nothing", ["data.environment", "Nothing"]),
    "--data.environment    ": ("environments_of_tests.Abstract", ["needed"]),
    "--data.environment.init_args.rooms": (2, ["corridor: rooms must be at least 4, got 2"]),
    "--data.adapter.init_args.candidates": (0, ["candidates must be at least 1, got 0"]),
    "--data.difficulty_high": (2, ["data.difficulty_high", "2"]),
    "--trainer.strategy": ("ddp", ["'ddp'", "configs/trainer/fsdp2.yaml"]),
    "--trainer.strategy ": ("fsdp", ["'fsdp'", "configs/trainer/fsdp2.yaml"]),
    "--trainer.strategy.class_path": (DDP, ["'DDPStrategy'", "configs/trainer/fsdp2.yaml"]),
    "--trainer.devices": (2, ["DDPStrategy", "configs/trainer/fsdp2.yaml"]),
    "--trainer.accelerator": ("gpu", ["gpu"]),
    "--trainer.gradient_clip_val": (1.0, ["trainer.gradient_clip_val 1.0", "max_grad_norm"]),
    "--trainer.accumulate_grad_batches": (2, ["trainer.accumulate_grad_batches 2"]),
    "--trainer.max_steps": (5, ["trainer.max_steps 5", "max_epochs"]),
    "--trainer.precision": ("16-mixed", ["trainer.precision 16-mixed", "bf16-mixed"]),
    "--model.rollout.num_judgments  ": (1, ["rollout.num_judgments is 1"]),
    "--trainer.reload_dataloaders_every_n_epochs": (0, ["reload_dataloaders_every_n_epochs must be 1, got 0"]),
    "--trainer.use_distributed_sampler": ("true", ["use_distributed_sampler must be False, got True"]),
    "--seed_everything": ("true", ["seed_everything must be a number, got true"]),
    "--config": ("/nowhere/run.yaml", ["'/nowhere/run.yaml'"]),
    "--ckpt_path": ("/nowhere/last.ckpt", ["'/nowhere/last.ckpt' does not exist"]),
    "--ckpt_path ": ("last", ["ckpt_path: last", "no run in"]),
    "--ckpt_path  ": ("best", ["'best' does not exist"]),
}

Rla = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def _environments(workspace: Path) -> None:
    (workspace / "environments_of_tests.py").write_text(ENVIRONMENTS)


@pytest.fixture
def options(workspace: Path, tmp_path: Path) -> list[str]:
    return ["--config", str(workspace / "run.yaml"), "--runs", str(tmp_path / "runs")]


def contents(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "option", [name for name in BAD_VALUES if name != "--trainer.accelerator" or not torch.cuda.is_available()]
)
def test_a_bad_value_is_one_message(rla: Rla, options: list[str], option: str, tmp_path: Path) -> None:
    value, words = BAD_VALUES[option]
    message = rla("fit", *options, option.strip(), value).message
    assert all(word in message for word in words), message
    assert len(message) < 400
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {rolout: {group_size: 4}}", ["rolout"]),
        ("data: {adaptor: null}", ["adaptor"]),
        ("trainer: {max_epoch: 3}", ["max_epoch"]),
        ("model: {rollout: {group_size: [4]}}", ["group_size", "[4]"]),
        ("trainer: {callbacks: [{class_path: callbacks.WarmStrat}]}", ["callbacks.WarmStrat"]),
        ("trainer: {callbacks: [{class_path: callbacks.WarmStart, init_args: {episodes: 0}}]}", ["WarmStart.episodes", "got 0"]),
        ("trainer: {callbacks: [{class_path: callbacks.WarmStart, init_args: {epsiodes: 3}}]}", ["epsiodes"]),
        (f"trainer: {{callbacks: [{{class_path: {CHECKPOINT}, init_args: {{every_n_train_steps: 3}}}}]}}", ["every_n_epochs"]),
        ("trainer: [", ["run.yaml"]),
        ("just words", ["run.yaml"]),
    ],
)
def test_a_mistake_in_yaml_is_one_message(rla: Rla, options: list[str], tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "run.yaml").write_text(text)
    message = rla("fit", *options, "--config", tmp_path / "run.yaml").message
    assert all(word in message for word in words), message
    assert not (tmp_path / "runs").exists()


def test_help(rla: Rla) -> None:
    top = rla("--help")
    assert top.code == 0
    assert all(command in top.out for command in ("fit", "validate", "test"))
    assert "predict" not in top.out
    fit = rla("fit", "--help")
    assert fit.code == 0
    assert "--model.rollout.group_size" in fit.out
    assert "rollouts of each task per iteration (G)" in " ".join(fit.out.split())


def test_there_is_no_predict(rla: Rla) -> None:
    assert "predict" in rla("predict").message
    assert "fit" in rla().message


@pytest.fixture(scope="module")
def trained(workspace: Path) -> Path:
    """A finished run of one epoch."""
    from rla_lightning.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["rla"])
        main(["fit", "--config", str(workspace / "run.yaml"), "--runs", str(workspace / "runs"), "--experiment", "cli"])
    return workspace / "runs" / "cli" / "version_0"


def test_every_run_gets_a_folder(rla: Rla, trained: Path, options: list[str], workspace: Path) -> None:
    before = contents(trained)
    assert {"config.yaml", "metrics.csv", "summary.json", "tasks.jsonl"} <= {path.name for path in trained.iterdir()}
    again = [*options[:2], "--runs", workspace / "runs", "--experiment", "cli"]
    assert rla("fit", *again).code == 0
    assert contents(trained) == before
    assert (trained.with_name("version_1") / "summary.json").is_file()


def test_a_saved_config_repeats_its_run(rla: Rla, trained: Path) -> None:
    before = contents(trained)
    runs = set(trained.parent.iterdir())
    assert rla("fit", "--config", trained / "config.yaml").code == 0
    assert contents(trained) == before
    (new,) = set(trained.parent.iterdir()) - runs
    assert (new / "tasks.jsonl").read_text() == (trained / "tasks.jsonl").read_text()


@pytest.mark.parametrize("command", ["validate", "test"])
def test_evaluation_of_a_checkpoint_prints_the_metrics(rla: Rla, trained: Path, workspace: Path, command: str) -> None:
    last = {"validate": "validation", "test": "test"}[command]
    place = ["--config", workspace / "run.yaml", "--runs", workspace / "runs", "--experiment", "cli"]
    ended = rla(command, *place, "--ckpt_path", "last")
    assert ended.code == 0
    for split in ("in_domain", "out_of_distribution"):
        assert f"\n{last}/{split}/rollout/success_rate: " in ended.out


def test_evaluation_needs_no_checkpoint(rla: Rla, options: list[str]) -> None:
    assert "test/in_domain/rollout/success_rate" in rla("test", *options).out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--model.policy.tiny.mlp_width", 16), ["another architecture", "policy.model.model.layers.0.mlp", "(16, 16)"]),
        (("--model.policy.tiny.layers", 2), ["another architecture", "policy.model.model.layers.1."]),
        (("--model.critic.lora.rank", 2), ["another architecture", "critic.encoder"]),
        (("--data.environment.init_args.rooms", 9), ["another architecture", "embed_tokens"]),
        (("--seed_everything", 7), ["a run with seed_everything 0", "this run has 7"]),
        (("--model.policy_optimizer", "null"), ["trained policy, reward_model, critic", "reward_model, critic"]),
    ],
)
def test_a_checkpoint_of_another_architecture(
    rla: Rla, options: list[str], trained: Path, change: tuple[str, object], words: list[str], tmp_path: Path
) -> None:
    message = rla("fit", *options, *change, "--ckpt_path", trained / "checkpoints" / "last.ckpt").message
    assert all(word in message for word in words), message
    assert not (tmp_path / "runs").exists()


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("exploded",)


def damaged(kind: str, sound: bytes) -> bytes:
    return {
        "empty": b"",
        "text": b"no checkpoint at all\n",
        "truncated": sound[: len(sound) // 2],
        "end missing": sound[:-1000],
        "pickle": pickle.dumps({"epoch": 1}),
    }[kind]


@pytest.mark.parametrize("kind", ["empty", "text", "truncated", "end missing", "pickle"])
def test_a_damaged_checkpoint(rla: Rla, options: list[str], trained: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "bad.ckpt"
    file.write_bytes(damaged(kind, (trained / "checkpoints" / "last.ckpt").read_bytes()))
    for command in ("fit", "test"):
        message = rla(command, *options, "--ckpt_path", file).message
        assert str(file) in message
        assert "cannot be read" in message or "not a checkpoint of a run" in message
    assert not (tmp_path / "runs").exists()


def test_a_file_of_something_else(rla: Rla, options: list[str], tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.ckpt")
    assert "not a checkpoint of a run" in rla("fit", *options, "--ckpt_path", tmp_path / "other.ckpt").message
    torch.save([1], tmp_path / "list.ckpt")
    assert "not a checkpoint of a run" in rla("fit", *options, "--ckpt_path", tmp_path / "list.ckpt").message
    assert "no meta.pt" in rla("fit", *options, "--ckpt_path", tmp_path).message


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
def test_a_pickle_bomb_is_refused(
    rla: Rla, options: list[str], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    checkpoint = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    torch.save({**checkpoint, "callbacks": Bomb()}, tmp_path / "bomb.ckpt")
    monkeypatch.chdir(tmp_path)
    message = rla(command, *options, "--ckpt_path", tmp_path / "bomb.ckpt").message
    assert "may run any code: posix.mkdir" in message
    assert not (tmp_path / "exploded").exists()


def test_our_checkpoints_hold_no_objects(trained: Path) -> None:
    for file in (trained / "checkpoints").iterdir():
        torch.load(file, weights_only=True)
    assert yaml.safe_load((trained / "config.yaml").read_text())["weights_only"] is True


def test_a_fast_run_leaves_nothing(rla: Rla, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rla("fit", *options, "--trainer.fast_dev_run", "true").code == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_without_loggers_files_still_go_to_the_run_folder(
    rla: Rla, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rla("fit", *options, "--trainer.logger", "false").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert (tmp_path / "runs" / "default" / "version_0" / "tasks.jsonl").is_file()


def test_more_loggers_join_ours(rla: Rla, options: list[str], tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(
        f"trainer: {{logger: [{{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: {tmp_path}/more}}}}]}}"
    )
    assert rla("fit", *options, "--config", tmp_path / "more.yaml").code == 0
    assert (tmp_path / "runs" / "default" / "version_0" / "metrics.csv").is_file()
    assert len(list((tmp_path / "more").rglob("metrics.csv"))) == 1


@pytest.mark.parametrize(
    ("devices", "accelerator", "expected"),
    [(1, "cpu", 1), (3, "cpu", 3), ("2", "gpu", 2), ([0, 2], "gpu", 2), ("0,3,", "gpu", 2), ("auto", "cpu", 1), (-1, "auto", 4),
     ("auto", "gpu", 4), ("-1", "cuda", 4)],
)  # fmt: skip
def test_processes_on_this_machine(devices, accelerator, expected, monkeypatch):
    monkeypatch.setattr(cli.torch.cuda, "device_count", lambda: 4)
    assert cli._processes(Namespace(devices=devices, accelerator=accelerator)) == expected
