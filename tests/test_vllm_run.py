"""A training run whose policy acts through a real vLLM server, which is killed in the middle."""

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
CALLBACKS = """
import os
import signal

import lightning as L


class KillServer(L.Callback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            os.killpg(pl_module.players.policy_sampler.process.group, signal.SIGKILL)
"""
SERVED = f"""
model:
  policy: {{tiny: {{width: 64, layers: 1, heads: 2, mlp_width: 64}}}}
  policy_sampler:
    class_path: rla_lightning.rollout.servers.VllmServer
    init_args:
      python: {PYTHON}
      arguments:
        - --enforce-eager
        - --kv-cache-memory-bytes
        - "67108864"
        - --max-num-seqs
        - "64"
        - --max-num-batched-tokens
        - "2048"
"""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open(newline="") as file:
        found = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in found if "policy/sampler_gap" in row]


def test_rollouts_by_vllm_follow_the_weights_and_a_killed_server_costs_one_iteration(
    workspace: Path, rla: Callable[..., Any], tmp_path: Path
) -> None:
    if not PYTHON.exists():
        assert os.environ.get("CI") != "true", "no .venv-vllm: run `make vllm`"
        pytest.skip("no .venv-vllm: run `make vllm`")
    (workspace / "killing_callbacks.py").write_text(CALLBACKS)
    served, kill = tmp_path / "served.yaml", tmp_path / "kill.yaml"
    served.write_text(SERVED)
    kill.write_text("trainer: {callbacks+: [{class_path: killing_callbacks.KillServer, init_args: {epoch: 2}}]}")
    run = ["fit", "--config", workspace / "run.yaml", "--config", served, "--runs", tmp_path / "runs", "--experiment", "served"]
    run += ["--trainer.max_epochs", "4"]
    ended = rla(*run, "--config", kill)
    assert ended.code == 2, ended.err
    (line,) = [line for line in ended.err.splitlines() if line.startswith("rla: error")]
    assert "vLLM" in line
    folder = tmp_path / "runs" / "served"
    first = rows(folder / "version_0")
    assert [row["step"] for row in first] == [1, 2]

    ended = rla(*run, "--ckpt_path", "last")
    assert ended.code == 0, ended.err
    resumed = rows(folder / "version_1")
    assert [row["step"] for row in resumed] == [1, 2, 3, 4]
    for row in resumed:  # the policy changes by more than this in every iteration, so the server has the new weights
        assert row["policy/sampler_gap"] < 1e-3
        assert row["policy/optimizer_steps"] == 2
    assert max(row["policy/max_kl"] for row in resumed) > 1e-3
