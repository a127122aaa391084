"""Two processes with every model sharded (FSDP2 on gloo) are one run: same tasks, same numbers, same checkpoints."""

import csv
import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from rla_lightning.cli import main
from rla_lightning.metrics import DIFFICULTY_BINS

ROOT = Path(__file__).parent.parent
FSDP2 = ["--config", str(ROOT / "configs" / "trainer" / "fsdp2.yaml"), "--trainer.accelerator", "cpu", "--trainer.devices", "2"]
CALLBACKS = '''
import json
import os
import signal
from pathlib import Path

import lightning as L
from torch.distributed.tensor import DTensor

from rla_lightning.distributed import rank, world_size


class DumpPool(L.Callback):
    """Writes what each process thinks the tasks and the shards are."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_epoch_start(self, trainer, pl_module):
        sharded = [p for p in pl_module.parameters() if isinstance(p, DTensor)]
        content = {
            "pool": trainer.datamodule.state_dict(),
            "sharded": len(sharded),
            "of": len(list(pl_module.parameters())),
            "mesh": list(sharded[0].device_mesh.shape) if sharded else [],
            "processes": world_size(),
            "on_this_machine": os.environ["LOCAL_WORLD_SIZE"],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{trainer.current_epoch}-{rank()}.json").write_text(json.dumps(content))


class KillRank1(L.Callback):
    """A process that is gone between two of the others' messages."""

    def on_train_batch_end(self, trainer, *_):
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
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
    environment = {"LOCAL_RANK": rank, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})
    rank_zero_only.rank = rank
    sys.stdout = sys.stderr = open(f"{log}-{rank}", "w", buffering=1)  # noqa: SIM115
    main(args)


def two_processes(args: list[str], log: Path, timeout: float = 240, processes: int = 2) -> list[tuple[int, str]]:
    """Exit codes and output of two copies of this process that run the command line as one run, like a launcher's."""
    port, fork = free_port(), multiprocessing.get_context("fork")
    args = [args[0], *FSDP2, *args[1:], "--trainer.devices", str(processes)]
    workers = [fork.Process(target=_rank, args=(rank, port, args, str(log))) for rank in range(processes)]
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
    main(start(base, "one", 5))
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
    (code, out), (other_code, other) = two_processes(start(base, "two", 5, "--ckpt_path", "last"), tmp_path / "log")
    assert (code, other_code) == (0, 0), out + other
    assert_close(numbers(one), numbers(folder(base, "two", 1)))
    ours, theirs, alone = ([p["pool"]["pool"] for p in pools(base, *key)] for key in (("two", 0), ("two", 1), ("one", 0)))
    assert ours == theirs
    assert len(ours) == 5
    for part in ("slots", "pending"):
        assert [pool[part] for pool in ours] == [pool[part] for pool in alone]
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
    assert_close(numbers(one, until=3), numbers(folder(base, "merged")))
    ours, theirs = (torch.load(run / "checkpoints" / "epoch=2.ckpt", weights_only=True) for run in (one, folder(base, "merged")))
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for name, weights in ours["state_dict"].items():
        torch.testing.assert_close(weights, theirs["state_dict"][name], rtol=1e-3, atol=1e-5)


def test_from_one_process_to_two_copies(base: Path, one: Path, tmp_path: Path) -> None:
    args = start(base, "split", 3, "--ckpt_path", str(one / "checkpoints" / "epoch=1.ckpt"))
    (code, out), _ = two_processes([*args, "--trainer.strategy.shard_size", "1"], tmp_path / "log")
    assert code == 0, out
    assert_close(numbers(one, until=3), numbers(folder(base, "split")))
    assert pools(base, "split", 0)[-1]["mesh"] == [2, 1]


def test_killed_with_shards_saved_and_resumed(base: Path, one: Path, tmp_path: Path) -> None:
    """SIGKILL of both processes after a checkpoint in shards, then on with as many, then on with one."""
    (tmp_path / "kill.yaml").write_text(
        "trainer: {callbacks+: [{class_path: callbacks_of_tests.KillAfterCheckpoint, init_args: {epoch: 0}}]}"
    )
    shards = ["--trainer.strategy.save_distributed_checkpoint", "true"]
    killed = two_processes(start(base, "shards", 2, "--config", str(tmp_path / "kill.yaml"), *shards), tmp_path / "killed")
    assert [code for code, _ in killed] == [-signal.SIGKILL] * 2, killed
    assert len(list((folder(base, "shards") / "checkpoints" / "epoch=0.ckpt").glob("*.distcp"))) == 2
    resumed = two_processes(start(base, "shards", 2, "--ckpt_path", "last", *shards), tmp_path / "resumed")
    assert [code for code, _ in resumed] == [0, 0], resumed
    assert_close(numbers(one, until=2), numbers(folder(base, "shards", 1)))
    alone = two_processes(start(base, "shards", 3, "--ckpt_path", "last"), tmp_path / "alone", processes=1)
    assert [code for code, _ in alone] == [0], alone
    assert_close(numbers(one, until=3), numbers(folder(base, "shards", 2)))


def test_a_killed_process_ends_the_other(base: Path, tmp_path: Path) -> None:
    (tmp_path / "kill.yaml").write_text("trainer: {callbacks+: [{class_path: ranks_of_tests.KillRank1}]}")
    args = [*with_environment(base, tmp_path, "CorridorEnvironment"), "--config", str(tmp_path / "kill.yaml")]
    (code, out), (other_code, _) = two_processes(args, tmp_path / "log", timeout=60)
    assert (code, other_code) == (1, -signal.SIGKILL), out
    assert "RuntimeError" in out


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "rla", "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
NODES = [
    *("--config", str(ROOT / "configs" / "trainer" / "fsdp2_multinode.yaml"), "--trainer.accelerator", "cpu"),
    *("--trainer.devices", "1", "--trainer.num_nodes", "2"),
]


@pytest.fixture(scope="module")
def nodes(base: Path, one: Path) -> Path:
    """One epoch on two nodes of one process each, a copy of the models on each, in the environment that srun makes."""
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [str(Path(sys.executable).with_name("rla")), *start(base, "nodes", 1, *NODES)],
            cwd=base.parent,
            env={**os.environ, **SLURM, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    return folder(base, "nodes")


def test_two_nodes_of_a_slurm_job_are_one_run(base: Path, one: Path, nodes: Path) -> None:
    assert [run.name for run in nodes.parent.iterdir()] == ["version_0"]
    assert_close(numbers(one, until=1), numbers(nodes))
    for rank in range(2):
        for pool in pools(base, "nodes", rank):
            assert (pool["mesh"], pool["processes"], pool["on_this_machine"]) == ([2, 1], 2, "1")


def test_from_two_nodes_to_one_process(base: Path, one: Path, nodes: Path) -> None:
    ours, theirs = (torch.load(run / "checkpoints" / "epoch=0.ckpt", weights_only=True) for run in (one, nodes))
    assert {name: w.shape for name, w in ours["state_dict"].items()} == {n: w.shape for n, w in theirs["state_dict"].items()}
    main(start(base, "gathered", 2, "--ckpt_path", str(nodes / "checkpoints" / "epoch=0.ckpt")))
    assert_close(numbers(one, until=2), numbers(folder(base, "gathered")))


def test_a_size_that_does_not_divide_the_processes(rla: Rla, base: Path) -> None:
    ended = rla(*start(base, "refused", 1, *FSDP2, "--trainer.devices", "3", "--trainer.strategy.shard_size", "2"))
    assert ended.message == "trainer.strategy shard_size 2 does not divide 3, the number of processes"
    assert not folder(base, "refused").exists()


def test_a_slurm_job_of_another_size_is_refused(rla: Rla, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    ended = rla(*start(base, "refused", 1, *FSDP2))
    assert "devices=2" in ended.message
    assert "--ntasks-per-node=1" in ended.message


def test_sampling_in_bfloat16(base: Path, tmp_path: Path) -> None:
    """Old log-probs are the trained models' own: the ratio is 1 although other weights have sampled."""
    names = ("policy", "reward_model")
    options = [w for n in names for w in (f"--model.{n}.sampling_dtype", "bfloat16", f"--model.{n}_update.minibatches", "1")]
    (code, out), _ = two_processes(start(base, "half", 1, *options), tmp_path / "log")
    assert code == 0, out
    with (folder(base, "half") / "metrics.csv").open(newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if row["policy/loss"]]
    for name in names:
        assert float(row[f"{name}/sampler_gap"]) > 1e-4
        assert float(row[f"{name}/approx_kl"]) == float(row[f"{name}/clip_fraction"]) == 0


def test_three_models_on_one_base(base: Path, tmp_path: Path) -> None:
    """The base's shards are held once, and so is the whole copy that each process samples from; one process goes on."""
    models = ("policy", "reward_model", "critic")
    options = [word for name in models for word in (f"--model.{name}.lora.rank", "2")]
    options += ["--model.reward_model.base", "policy", "--model.critic.base", "policy"]
    options += ["--data.validation_tasks", "1", "--data.test_tasks", "1"]
    main(start(base, "base-1", 2, *options))
    ended = two_processes(start(base, "base-2", 1, *options), tmp_path / "log")
    assert [code for code, _ in ended] == [0, 0], ended
    checkpoint = folder(base, "base-2") / "checkpoints" / "last.ckpt"
    main(start(base, "base-3", 2, *options, "--ckpt_path", str(checkpoint)))
    alone, resumed = numbers(folder(base, "base-1")), numbers(folder(base, "base-3"))
    assert_close(alone, resumed)
    assert all(row[f"{name}/grad_norm"] > 0 for row in alone if "policy/loss" in row for name in models)
    (whole, *_), (sharded, *_) = pools(base, "base-1", 0), pools(base, "base-2", 1)
    assert sharded["sharded"] == sharded["of"] == whole["of"]


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
    assert len({name for row in numbers(folder(base, "odd-2")) for name in row if name.startswith(success)}) == 2 + 2 + len(
        DIFFICULTY_BINS
    )


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
