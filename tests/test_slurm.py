"""scripts/slurm.sh with stand-ins for srun and scontrol."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "slurm.sh"
JOB = {
    "SLURM_JOB_ID": "70123",
    "SLURM_JOB_NODELIST": "node[3-4]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_CPUS_PER_TASK": "6",
}
SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then printf "node3\\nnode4\\n"; else echo "scontrol $*"; fi
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which srun prints what it would run and where the processes would meet."""
    (tmp_path / "bin").mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", '#!/bin/bash\necho "$MASTER_ADDR:$MASTER_PORT $*"\n')):
        file = tmp_path / "bin" / name
        file.write_text(text)
        file.chmod(0o755)
    return {**os.environ, **JOB, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def sbatch(environment: dict[str, str], folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *args]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=20, check=False)


def test_what_is_started(environment: dict[str, str], tmp_path: Path) -> None:
    ended = sbatch(environment, tmp_path, "judge", "big.yaml", "--seed_everything", "1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [
        *("node3:15123", "--cpus-per-task=6", "--cpu-bind=none", "--kill-on-bad-exit=1", ".venv/bin/rla", "fit"),
        *("--config", "big.yaml", "--config", "configs/trainer/fsdp2_multinode.yaml", "--experiment", "judge"),
        *("--trainer.num_nodes", "2", "--trainer.devices", "8", "--seed_everything", "1"),
    ]


def test_an_experiment_with_a_checkpoint_is_resumed(environment: dict[str, str], tmp_path: Path) -> None:
    checkpoints = tmp_path / "runs" / "judge" / "version_3" / "checkpoints"
    checkpoints.mkdir(parents=True)
    assert "--ckpt_path" not in sbatch(environment, tmp_path, "judge", "big.yaml").stdout
    (checkpoints / "last.ckpt").touch()
    assert sbatch(environment, tmp_path, "judge", "big.yaml").stdout.endswith(" --ckpt_path last\n")
    assert "--ckpt_path" not in sbatch(environment, tmp_path, "other", "big.yaml").stdout


def test_out_of_time(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\necho started; sleep 2; exit 9\n")
    job = subprocess.Popen(
        ["bash", str(SCRIPT), "judge", "big.yaml"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "started\n"
    job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate(timeout=20)
    assert out.splitlines()[-1] == "scontrol requeue 70123"
    assert job.returncode == 9  # that of the processes


def test_arguments_that_are_missing(environment: dict[str, str], tmp_path: Path) -> None:
    ended = sbatch(environment, tmp_path, "judge")
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: sbatch")
