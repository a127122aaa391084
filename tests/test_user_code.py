"""What people bring along: an environment and callbacks in a folder of their own, and environments that fail."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Rla = Callable[..., Any]
GUIDE = Path(__file__).parent.parent / "rla_lightning" / "environments" / "README.md"
MY_CALLBACKS = '''
import lightning as L

from rla_lightning.types import IterationResult


class Foo(L.Callback):
    """Notes what an iteration hands out."""

    def __init__(self, file: str = "foo.txt") -> None:
        self.file = file

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        result = outputs["result"]
        assert isinstance(result, IterationResult)
        tasks = {group.task.environment for group in result.groups}
        with open(self.file, "a") as file:
            print(result.iteration, *tasks, len(result.groups), len(result.feedback), len(batch.tasks), file=file)
'''
SHADOWS = ("callbacks", "types", "rla_lightning", "torch", "module")  # modules that a user may well have, too
FAILING = '''
from corridor import CorridorEnvironment, Walk


class Breaks(Walk):
    def step(self, action):
        raise KeyError("a bug in the second turn")


class SomeFail(CorridorEnvironment):
    """Odd starts fail at once, starts at n4 in the first turn."""

    def start(self, task):
        here = task.spec["here"]
        if here % 2 == 1:
            raise OSError(f"no corridor at n{here}")
        walk = super().start(task)
        return Breaks(walk.here, walk.goal, walk.rooms, walk.max_turns) if here == 4 else walk


class AllFail(CorridorEnvironment):
    def start(self, task):
        raise OSError("the corridor is closed")
'''


def guide_block(language: str) -> str:
    return GUIDE.read_text().split(f"```{language}\n")[1].split("```\n")[0]


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_guide_and_a_callback_work_in_a_folder_outside_the_project(rla_process: Rla, tmp_path: Path) -> None:
    (tmp_path / "corridor.py").write_text(guide_block("python"))
    config = yaml.safe_load(guide_block("yaml"))
    config["trainer"]["callbacks"].append({"class_path": "my_callbacks.Foo", "init_args": {"file": "notes.txt"}})
    (tmp_path / "corridor.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "my_callbacks.py").write_text(MY_CALLBACKS)
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user was imported')")
    ended = rla_process("fit", "--config", "corridor.yaml", cwd=tmp_path)
    assert ended.code == 0, ended
    assert "<rla_lightning" not in ended.out + ended.err
    assert (tmp_path / "notes.txt").read_text() == "".join(f"{i} corridor 4 4 4\n" for i in (1, 2, 3))
    run = tmp_path / "runs" / "corridor" / "version_0"
    assert json.loads((run / "summary.json").read_text())["epochs"] == 3
    assert {"config.yaml", "metrics.csv", "tasks.jsonl", "trajectories", "curves.png"} <= {path.name for path in run.iterdir()}
    assert "success" in ended.out


def test_the_guide_is_short_and_lints(tmp_path: Path) -> None:
    code = guide_block("python")
    minimal = code.split("    # Rewritten tasks")[0]
    assert len(minimal.splitlines()) < 60
    compile(code, "corridor.py", "exec")
    assert max(map(len, code.splitlines())) <= 130


@pytest.fixture
def failing(workspace: Path, tmp_path: Path) -> Callable[[str], list[str]]:
    (workspace / "failing_environments.py").write_text(FAILING)

    def options(name: str) -> list[str]:
        overlay = {
            "trainer": {"max_epochs": 2, "callbacks": [{"class_path": "callbacks.TrajectoryLog"}]},
            "data": {"environment": {"class_path": f"failing_environments.{name}"}},
        }
        (tmp_path / "failing.yaml").write_text(yaml.safe_dump(overlay))
        return ["fit", "--config", f"{workspace}/run.yaml", "--config", f"{tmp_path}/failing.yaml", "--runs", f"{tmp_path}/runs"]

    return options


def test_some_failing_episodes_are_counted_and_the_run_goes_on(
    rla: Rla, failing: Callable[[str], list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = rla(*failing("SomeFail"))
    assert ended.code == 0, ended
    run = tmp_path / "runs" / "default" / "version_0"
    rates = [float(row["rollout/env_error_rate"]) for row in rows(run) if row["rollout/env_error_rate"]]
    assert len(rates) == 2
    assert 0 < rates[0] < 1
    stops = [json.loads(line) for line in (run / "trajectories" / "epoch=000.jsonl").read_text().splitlines()]
    failed = [row for row in stops if row["stop_reason"] == "ENV_ERROR"]
    assert len(failed) / len(stops) == pytest.approx(rates[0])
    for row in failed:
        here = int(row["task_id"].split("-")[1])
        assert row["error"] == ("KeyError: 'a bug in the second turn'" if here == 4 else f"OSError: no corridor at n{here}")
    assert any(f"task {failed[0]['task_id']}, rollout 0: the environment failed" in message for message in caplog.messages)
    tasks = [json.loads(line) for line in (run / "tasks.jsonl").read_text().splitlines()]
    (broken,) = [task for task in tasks if task["task"]["id"] == failed[0]["task_id"]]
    assert (broken["rollouts"], broken["rolls"]) == (0, 1)


def test_the_run_stops_with_the_first_error_when_all_fail(rla: Rla, failing: Callable[[str], list[str]]) -> None:
    outcome = rla(*failing("AllFail"))
    assert outcome.code == 2
    assert outcome.message == "every episode failed, first error: OSError: the corridor is closed"
