"""Servers that are scripts of a few lines: how they are started, watched and ended."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rla_lightning.rollout.servers import guard
from rla_lightning.rollout.servers.process import ServerProcess
from rla_lightning.types import ServerError

SLEEPS = "import time; time.sleep(60)"
# Tells its own id and that of a child, which would outlive it.
WITH_CHILD = f"import os, subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', '{SLEEPS}'])\n" + (
    "open('ids', 'w').write(f'{os.getpid()} {c.pid}'); os.rename('ids', 'ready'); time.sleep(60)"
)


def process(folder: Path, code: str, **environment: str) -> ServerProcess:
    folder.mkdir()
    return ServerProcess("server", [sys.executable, "-c", code], environment, folder)


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_stopping_ends_the_whole_group_and_removes_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = process(tmp_path / "served", WITH_CHILD)
    server.wait_until(Path("ready").exists, 10)
    numbers = [int(number) for number in Path("ready").read_text().split()]
    server.check()
    assert all(is_running(number) for number in numbers)
    server.stop()
    assert not any(is_running(number) for number in numbers)
    assert not (tmp_path / "served").exists()
    server.stop()  # a second time does nothing


def test_a_server_that_ignores_the_request_to_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("rla_lightning.rollout.servers.process.GRACE_S", 0.3)
    monkeypatch.chdir(tmp_path)
    server = process(tmp_path / "served", f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WITH_CHILD}")
    server.wait_until(Path("ready").exists, 10)
    server.stop()
    assert not any(is_running(int(number)) for number in Path("ready").read_text().split())


def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    (tmp_path / "served").mkdir()
    command = [sys.executable, "-I", "-S", guard.__file__]
    code = f"""
        import os, subprocess, sys, time
        rest = [str(os.getpid()), "served", sys.executable, "-c", {WITH_CHILD!r}]
        subprocess.Popen([*{command!r}, *rest], start_new_session=True)
        time.sleep(60)
    """
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path)
    wait_for((tmp_path / "ready").exists, 60)
    numbers = [int(number) for number in (tmp_path / "ready").read_text().split()]
    os.kill(trainer.pid, signal.SIGKILL)  # without a chance to clean up
    trainer.wait()
    wait_for(lambda: not any(is_running(number) for number in numbers))
    wait_for(lambda: not (tmp_path / "served").exists())


def test_the_end_of_a_server_is_an_error_with_the_causes_and_the_tail_of_its_log(tmp_path):
    code = "print('ValueError: the cause'); print('\\n'.join(f'line {i}' for i in range(50))); raise SystemExit(3)"
    server = process(tmp_path / "served", code)
    with pytest.raises(ServerError) as caught:
        server.wait_until(lambda: False, 10)
    lines = str(caught.value).splitlines()
    assert lines[:3] == ["server ended with exit code 3; its log:", "ValueError: the cause", "..."]
    assert lines[3:] == [f"line {i}" for i in range(30, 50)]
    with pytest.raises(ServerError, match="exit code 3"):
        server.check()


def test_a_server_that_is_never_ready_is_given_up(tmp_path):
    server = process(tmp_path / "served", SLEEPS)
    with pytest.raises(ServerError, match=r"server was not ready after 0\.3 s; its log:\n\(empty\)"):
        server.wait_until(lambda: False, 0.3)
    server.stop()


def test_its_environment_is_ours_without_what_a_launcher_of_processes_sets(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTHONPATH", "KEPT"):
        monkeypatch.setenv(name, "1")
    server = process(tmp_path / "served", "import os; print(sorted(os.environ)); print(os.environ['MORE'])", MORE="more")
    with pytest.raises(ServerError, match="exit code 0") as caught:
        server.wait_until(lambda: False, 10)
    assert "'KEPT'" in str(caught.value)
    assert str(caught.value).endswith("\nmore")
    assert not any(f"'{name}'" in str(caught.value) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "PYTHONPATH"))
