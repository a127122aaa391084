"""Two processes with every model sharded (FSDP2 on gloo) are one run: same tasks, same numbers, same checkpoints."""

import csv
import json
import math
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from rla_lightning.cli import main

ROOT = Path(__file__).parent.parent
FSDP2 = ["--config", str(ROOT / "configs" / "trainer" / "fsdp2.yaml"), "--trainer.accelerator", "cpu", "--trainer.devices", "2"]
CALLBACKS = '''
import json
from pathlib import Path

import lightning as L
from torch.distributed.tensor import DTensor

from rla_lightning.distributed import rank, world_size


class DumpPool(L.Callback):
    """Writes what each process thinks the tasks and the shards are."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_epoch_start(self, trainer, pl_module):
        sharded = [isinstance(p, DTensor) for p in pl_module.parameters()]
        content = {
            "pool": trainer.datamodule.state_dict(), "sharded": sum(sharded), "of": len(sharded), "processes": world_size()
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{trainer.current_epoch}-{rank()}.json").write_text(json.dumps(content))
'''
ENVIRONMENTS = '''
from dataclasses import replace

from corridor import CorridorEnvironment, Walk

from rla_lightning.distributed import rank
from rla_lightning.rollout.formats import CompactPolicyFormat
from rla_lightning.types import ConfigError, Observation, Transition


class FailsOnRank1(CorridorEnvironment):
    def start(self, task):
        if rank() == 1:
            raise OSError("the disk of process 1 is full")
        return super().start(task)


class Kinds(CorridorEnvironment):
    """Every task is of a kind of its own, so no two processes play the same ones."""

    def sample(self, rng, difficulty, split="in_domain"):
        task = super().sample(rng, difficulty, split)
        return replace(task, kind=task.id)


class TooLongOnRank1(CorridorEnvironment):
    """Its prompts outgrow the context, after the first turn, in one process."""

    def start(self, task):
        episode = super().start(task)
        if rank() == 1:
            episode.step = self._long
        return episode

    def _long(self, action):
        return Transition(Observation("you are in " * 200), done=False)


class UnreadableOnRank1(CompactPolicyFormat):
    def parse(self, text: str, observation: Observation) -> str | None:
        if rank() == 1:
            raise ConfigError(f"process 1 cannot read {text!r}")
        return super().parse(text, observation)
'''

Rla = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def base(workspace: Path) -> Iterator[Path]:
    """run.yaml without Muon, whose bfloat16 iterations differ between one process and two: the first run fills a cache."""
    (workspace / "ranks_of_tests.py").write_text(CALLBACKS + ENVIRONMENTS)
    text = (workspace / "run.yaml").read_text().replace("cache: null", f"cache: {workspace}/warm")
    file = workspace / "sharded.yaml"
    file.write_text(text.replace("save_top_k: 1", "save_top_k: -1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["rla"])
        yield file


def start(base: Path, experiment: str, epochs: int, *more: str) -> list[str]:
    pools = base.parent / "pools" / experiment
    dump = base.with_name(f"{experiment}.yaml")
    dump.write_text(f"trainer: {{callbacks+: [{{class_path: ranks_of_tests.DumpPool, init_args: {{folder: {pools}}}}}]}}")
    place = ["--config", str(dump), "--runs", str(base.parent / "runs"), "--experiment", experiment]
    return ["fit", "--config", str(base), *place, "--trainer.max_epochs", str(epochs), *more]


def folder(base: Path, experiment: str, version: int = 0) -> Path:
    return base.parent / "runs" / experiment / f"version_{version}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, port: int, args: list[str], log: str) -> None:
    environment = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})
    rank_zero_only.rank = rank
    sys.stdout = sys.stderr = open(f"{log}-{rank}", "w", buffering=1)  # noqa: SIM115
    main(args)


def two_processes(args: list[str], log: Path, timeout: float = 90) -> list[tuple[int, str]]:
    """Exit codes and output of two copies of this process that run the command line as one run, like a launcher's."""
    port, fork = free_port(), multiprocessing.get_context("fork")
    workers = [fork.Process(target=_rank, args=(rank, port, [*args, *FSDP2], str(log))) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    assert None not in codes, f"a process hangs: {codes}"
    return [(code or 0, Path(f"{log}-{rank}").read_text()) for rank, code in enumerate(codes)]


def numbers(run: Path, until: int = 99) -> list[dict[str, float]]:
    with (run / "metrics.csv").open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    noise = ("time/", "policy/sampler_gap", "reward_model/sampler_gap")  # differences of equal numbers
    return [{n: v for n, v in row.items() if not n.startswith(noise)} for row in rows if row["step"] <= until]


def assert_close(a: list[dict[str, float]], b: list[dict[str, float]]) -> None:
    assert [row.keys() for row in a] == [row.keys() for row in b]
    for ours, theirs in zip(a, b, strict=True):
        for name, value in ours.items():
            same = math.isnan(value) and math.isnan(theirs[name])
            assert same or math.isclose(value, theirs[name], rel_tol=1e-4, abs_tol=1e-6), (
                name,
                ours["step"],
                value,
                theirs[name],
            )


def pools(base: Path, experiment: str, rank: int) -> list[Any]:
    files = sorted((base.parent / "pools" / experiment).glob(f"*-{rank}.json"))
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def one(base: Path) -> Path:
    main(start(base, "one", 3))
    return folder(base, "one")


@pytest.fixture(scope="module")
def two(base: Path, one: Path, rla_process: Rla) -> Path:
    """Two epochs, started by Lightning's own launcher from one command."""
    ended = rla_process(*start(base, "two", 2, *FSDP2), cwd=base.parent)
    assert ended.code == 0, ended.err
    assert "Starting with 2 processes" in ended.err
    assert "Traceback" not in ended.err
    return folder(base, "two")


def test_two_processes_are_one_run(base: Path, one: Path, two: Path) -> None:
    first = numbers(one, until=2)
    assert {"policy/loss", "reward_model/loss", "critic/loss"} <= set().union(*first)
    assert_close(first, numbers(two))
    assert (two / "tasks.jsonl").is_file()
    assert [run.name for run in two.parent.iterdir()] == ["version_0"]


def test_every_process_has_the_same_tasks(base: Path, one: Path, two: Path) -> None:
    ours, theirs, alone = (pools(base, *key) for key in (("two", 0), ("two", 1), ("one", 0)))
    assert [pool["pool"] for pool in ours] == [pool["pool"] for pool in theirs]
    assert len(ours) == 2
    assert ours[1]["pool"]["pool"]["pending"] == alone[1]["pool"]["pool"]["pending"] != []
    assert all(pool["sharded"] == pool["of"] > 30 and pool["processes"] == 2 for pool in ours + theirs)
    assert alone[0]["sharded"] == 0


def test_summaries_agree(one: Path, two: Path) -> None:
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (one, two))
    assert repr(ours["before"]) == repr(theirs["before"])


def test_resumed_on_two_processes(base: Path, one: Path, two: Path, tmp_path: Path) -> None:
    (code, out), (other_code, other) = two_processes(start(base, "two", 3, "--ckpt_path", "last"), tmp_path / "log")
    assert (code, other_code) == (0, 0), out + other
    assert_close(numbers(one), numbers(folder(base, "two", 1)))
    assert [pool["pool"] for pool in pools(base, "two", 0)] == [pool["pool"] for pool in pools(base, "two", 1)]
    assert len(pools(base, "two", 1)) == 3
    assert sorted(run.name for run in two.parent.iterdir()) == ["version_0", "version_1"]


def test_checkpoints_have_one_format(one: Path, two: Path) -> None:
    ours, theirs = (torch.load(run / "checkpoints" / "epoch=1.ckpt", weights_only=True) for run in (one, two))
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for alone, gathered in zip(ours["optimizer_states"], theirs["optimizer_states"], strict=True):
        assert [group["params"] for group in alone["param_groups"]] == [group["params"] for group in gathered["param_groups"]]
        assert alone["state"].keys() == gathered["state"].keys()
        for index, state in alone["state"].items():
            for name, value in state.items():
                torch.testing.assert_close(gathered["state"][index][name], value, rtol=1e-3, atol=1e-6)


def test_from_two_processes_to_one(base: Path, one: Path, two: Path) -> None:
    main(start(base, "merged", 3, "--ckpt_path", str(two / "checkpoints" / "epoch=1.ckpt")))
    assert_close(numbers(one), numbers(folder(base, "merged")))
    ours, theirs = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (one, folder(base, "merged")))
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for name, weights in ours["state_dict"].items():
        torch.testing.assert_close(weights, theirs["state_dict"][name], rtol=1e-3, atol=1e-5)


def test_from_one_process_to_two(base: Path, one: Path, tmp_path: Path) -> None:
    args = start(base, "split", 3, "--ckpt_path", str(one / "checkpoints" / "epoch=1.ckpt"))
    (code, out), _ = two_processes(args, tmp_path / "log")
    assert code == 0, out
    assert_close(numbers(one), numbers(folder(base, "split")))


def test_more_processes_than_micro_batches_and_tasks(base: Path, tmp_path: Path) -> None:
    """Odd numbers of micro-batches, one test task for two processes, other kinds in each, an update that stops early."""
    kinds = ["--data.environment.class_path", "ranks_of_tests.Kinds", "--model.rollout.eval_samples", "3"]
    odd = [*kinds, "--data.tasks_per_iteration", "3", "--data.test_tasks", "1", "--model.policy_update.token_budget", "100"]
    stops = ["--model.policy_update.target_kl", "1e-9", "--model.policy_update.update_epochs", "2"]
    main(start(base, "odd-1", 1, *odd, *stops))
    (code, out), _ = two_processes(start(base, "odd-2", 1, *odd, *stops), tmp_path / "log")
    assert code == 0, out
    (stopped,) = [row["policy/stopped_early"] for row in numbers(folder(base, "odd-1")) if "policy/stopped_early" in row]
    assert stopped == 1
    assert_close(numbers(folder(base, "odd-1")), numbers(folder(base, "odd-2")))
    success = "validation/in_domain/rollout/success_rate"
    assert len({name for row in numbers(folder(base, "odd-2")) for name in row if name.startswith(success)}) == 2 + 2


def with_environment(base: Path, tmp_path: Path, environment: str) -> list[str]:
    callback = "{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {save_last: true}}"
    (tmp_path / "no_warm_start.yaml").write_text(f"trainer: {{callbacks: [{callback}]}}")  # nor RunSummary
    args = ["fit", "--config", str(base), "--config", str(tmp_path / "no_warm_start.yaml"), "--runs", str(tmp_path / "runs")]
    return [*args, "--experiment", "ranks", "--data.environment.class_path", f"ranks_of_tests.{environment}"]


def test_an_error_in_one_process_ends_both(base: Path, tmp_path: Path) -> None:
    args = with_environment(base, tmp_path, "CorridorEnvironment")
    args += ["--model.policy_format", "ranks_of_tests.UnreadableOnRank1"]
    (code, out), (other_code, other) = two_processes(args, tmp_path / "log", timeout=30)
    assert (code, other_code) == (2, 2)
    assert "process 1 cannot read" in other
    assert "process 1 failed" in out
    assert "process 1 cannot read" in out
    assert "Traceback" not in out + other


def test_rollouts_that_outgrow_the_context_in_one_process_are_lost_only(base: Path, tmp_path: Path) -> None:
    args = with_environment(base, tmp_path, "TooLongOnRank1")
    codes = [code for code, _ in two_processes([*args, "--trainer.max_epochs", "1"], tmp_path / "log", timeout=60)]
    assert codes == [0, 0]
    rows = numbers(tmp_path / "runs" / "ranks" / "version_0")
    assert [row["rollout/truncated_rate"] for row in rows if "rollout/truncated_rate" in row] == [0.5]


def test_an_environment_that_fails_in_one_process_costs_its_rollouts_only(base: Path, tmp_path: Path) -> None:
    args = with_environment(base, tmp_path, "FailsOnRank1")
    codes = [code for code, _ in two_processes([*args, "--trainer.max_epochs", "1"], tmp_path / "log", timeout=60)]
    assert codes == [0, 0]
    rows = numbers(tmp_path / "runs" / "ranks" / "version_0")
    assert [row["rollout/env_error_rate"] for row in rows if "rollout/env_error_rate" in row] == [0.5]


def test_a_checkpoint_of_another_architecture(base: Path, two: Path, tmp_path: Path) -> None:
    checkpoint = str(two / "checkpoints" / "last.ckpt")
    args = start(base, "mismatch", 3, "--model.policy.tiny.mlp_width", "16", "--ckpt_path", checkpoint)
    warm = set((base.parent / "warm").iterdir())
    (code, out), (other_code, _) = two_processes(args, tmp_path / "log")
    assert (code, other_code) == (2, 2), out
    assert set((base.parent / "warm").iterdir()) == warm  # a resumed run has no warm start, nor one that cannot resume
    assert "rla: error: the checkpoint is of another architecture: policy." in out
    assert not folder(base, "mismatch").exists()
