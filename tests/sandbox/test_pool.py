"""The trainer's side: what each kind of program comes back as, and what becomes of workers."""

import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rla_lightning.sandbox import Run, RunResult, Sandbox, SandboxSettings, pool
from rla_lightning.types import ConfigError

ROOT = Path(__file__).parents[2]
LONG = 20.0  # seconds that no program of these tests takes
TRAINER = """
import sys, time
from rla_lightning.sandbox import Run, Sandbox, SandboxSettings
sandbox = Sandbox(SandboxSettings(isolation=sys.argv[1], workers=2))
sandbox.run([Run("1", ("",))])
print(*(worker.process.pid for worker in sandbox._workers), flush=True)
sandbox.run([Run("while True: pass", ("",), 60.0), Run("import time; time.sleep(60)", ("",), 60.0)])
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """Two workers; without namespaces these tests fail in continuous integration and are skipped elsewhere."""
    sandbox = Sandbox(SandboxSettings(workers=2, memory_mb=64, output_kb=16))
    try:
        sandbox.start()
    except ConfigError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    yield sandbox
    sandbox.close()


def only(sandbox: Sandbox, program: str, stdin: str = "", seconds: float = LONG) -> RunResult:
    ((result,),) = sandbox.run([Run(program, (stdin,), seconds)])
    return result


def family(process: int) -> list[int]:
    """A process and all below it; nothing when it has ended."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [process, *(below for child in children for below in family(int(child)))]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = LONG) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def processes(sandbox: Sandbox) -> list[int]:
    """Process ids of the workers, by slot."""
    found = [worker.process.pid for worker in sandbox._workers if worker.process is not None]
    assert len(found) == len(sandbox._workers)
    return found


def test_ok(sandbox: Sandbox) -> None:
    result = only(sandbox, "a, b = map(int, input().split())\nprint(a * b)", "6 7\n")
    assert (result.status, result.stdout, result.stderr) == ("ok", "42\n", "")
    assert 0 < result.seconds < LONG


def test_programs_end_as_under_an_interpreter(sandbox: Sandbox) -> None:
    assert only(sandbox, "if __name__ == '__main__': print('main')").stdout == "main\n"
    assert only(sandbox, "import sys; print(1); sys.exit()").status == "ok"
    assert only(sandbox, "import sys; sys.exit(0)").status == "ok"
    assert only(sandbox, "import sys; sys.exit(3)").status == "runtime_error"
    text = only(sandbox, "import sys; sys.exit('no solution')")
    assert (text.status, text.stderr) == ("runtime_error", "no solution\n")
    threads = (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\nprint('main')"
    )
    assert only(sandbox, threads).stdout == "main\nthread\n"
    assert only(sandbox, "import atexit\natexit.register(print, 'last')\nprint('first')").stdout == "first\nlast\n"


def test_runtime_error_has_a_traceback_of_the_program_only(sandbox: Sandbox) -> None:
    result = only(sandbox, "def f(x):\n    return 1 // x\nprint('before')\nf(0)\n")
    assert (result.status, result.stdout) == ("runtime_error", "")  # what it printed before does not count
    lines = [line.strip() for line in result.stderr.splitlines() if "~" not in line and "^" not in line]
    assert lines == [
        "Traceback (most recent call last):",
        'File "<program>", line 4, in <module>',
        'File "<program>", line 2, in f',
        "ZeroDivisionError: integer division or modulo by zero",
    ]


def test_end_of_input_is_a_runtime_error(sandbox: Sandbox) -> None:
    result = only(sandbox, "input()")
    assert result.status == "runtime_error"
    assert result.stderr.endswith("EOFError: EOF when reading a line\n")


def test_timeout(sandbox: Sandbox) -> None:
    result = only(sandbox, "print('early', flush=True)\nwhile True: pass", seconds=0.2)
    assert (result.status, result.stdout) == ("timeout", "")
    assert 0.2 <= result.seconds < 3


def test_seconds_are_of_cpu_and_more_than_twice_as_many_pass_on_the_clock(sandbox: Sandbox) -> None:
    """A machine that is busy with others does not make a program wrong."""
    assert [Run("", (), seconds).longest for seconds in (0.2, 2.0)] == [pytest.approx(1.4), 5.0]
    result = only(sandbox, "import time; time.sleep(0.6); print('slept')", seconds=0.3)
    assert (result.status, result.stdout) == ("ok", "slept\n")
    busy = "import time\nwhile time.process_time() < 0.6: pass\nprint('done')"
    assert only(sandbox, busy, seconds=0.3).status == "timeout"  # though it ends by itself, within 1.6 seconds
    assert only(sandbox, busy, seconds=6.0).stdout == "done\n"


def test_the_parent_keeps_the_wall_clock(sandbox: Sandbox) -> None:
    """A program that sleeps, and so uses no CPU, and that ignores every signal it can, is ended in time."""
    program = "import signal, time\nfor n in (1, 2, 3, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)"
    start = time.monotonic()
    assert only(sandbox, program, seconds=0.2).status == "timeout"
    assert time.monotonic() - start < 5


def test_memory(sandbox: Sandbox) -> None:
    result = only(sandbox, "x = bytearray(200 << 20)")
    assert result.status == "memory"
    assert result.stderr.endswith("MemoryError\n")
    assert only(sandbox, "x = bytearray(40 << 20); print(len(x))").stdout == "41943040\n"


def test_output_limit(sandbox: Sandbox) -> None:
    assert only(sandbox, "print('x' * 16383)").status == "ok"  # and a newline: 16 KiB
    assert only(sandbox, "print('x' * 16384)").status == "output_limit"
    assert only(sandbox, "import sys\nprint('x' * 9000)\nprint('x' * 9000, file=sys.stderr)").status == "output_limit"
    assert only(sandbox, "open('/tmp/file', 'wb').write(bytes(17 << 20))").status == "runtime_error"  # a file that is too large


def test_the_end_of_stderr_is_kept(sandbox: Sandbox) -> None:
    result = only(sandbox, "import sys\nsys.stderr.write('a' * 5000 + 'b' * 1999 + 'c')")
    assert result.stderr == "b" * 1999 + "c"


def test_three_megabytes_of_input(sandbox: Sandbox) -> None:
    numbers = "7 " * 1_500_000
    assert (
        only(sandbox, "print(sum(map(int, iter(lambda: __import__('sys').stdin.read(2).strip(), ''))))", numbers).stdout
        == "10500000\n"
    )
    assert only(sandbox, "import sys\nprint(len(sys.stdin.read()))", numbers).stdout == "3000000\n"
    assert only(sandbox, "import sys\nprint(sum(1 for _ in sys.stdin))", "line\n" * 600_000).stdout == "600000\n"


def test_text_in_all_scripts(sandbox: Sandbox) -> None:
    assert only(sandbox, "print(input()[::-1])", "añ😀").stdout == "😀ña\n"


def test_results_stand_where_their_runs_stood(sandbox: Sandbox) -> None:
    runs = [
        Run(f"import time; time.sleep({0.05 if i == 0 else 0}); print({i} + int(input()))", ("1", "2", "1"), LONG)
        for i in range(4)
    ]
    runs.insert(2, Run("print('none')", (), LONG))
    outputs = [[result.stdout for result in results] for results in sandbox.run(runs)]
    assert outputs == [["1\n", "2\n", "1\n"], ["2\n", "3\n", "2\n"], [], ["3\n", "4\n", "3\n"], ["4\n", "5\n", "4\n"]]


def test_equal_runs_are_made_once(sandbox: Sandbox) -> None:
    clock = "import time; print(time.monotonic_ns())"
    ((first, same), (again, _), (other,)) = sandbox.run(
        [Run(clock, ("", ""), LONG), Run(clock, ("", ""), LONG), Run(clock, ("",), LONG)]
    )
    assert first == same == again
    assert other.stdout != first.stdout  # not the same inputs, so another run
    assert only(sandbox, clock).stdout != other.stdout  # nothing is kept between calls


def test_no_runs(sandbox: Sandbox) -> None:
    assert sandbox.run([]) == []


def test_a_program_that_is_too_slow_is_given_up(sandbox: Sandbox) -> None:
    program = "import time\nif input() == 'slow': time.sleep(60)\nprint('done')"
    (results,) = sandbox.run([Run(program, ("slow", "fast", "slow 1", "slow", "slow 2", "fast", "more"), 0.2)])
    assert [result.status for result in results] == ["timeout", "ok", "ok", "timeout", "ok", "ok", "ok"]
    (results,) = sandbox.run([Run("while True: input", ("a", "b", "c", "a"), 0.2)])  # max_timeouts is 2
    assert [result.status for result in results] == ["timeout", "timeout", "not_run", "timeout"]  # the last is the first
    assert [result.seconds >= 0.2 for result in results] == [True, True, False, True]
    assert (results[2].stderr, results[2].seconds) == ("2 inputs before took too long", 0.0)


def test_sets_hashes_and_random_numbers_are_the_same_everywhere(sandbox: Sandbox) -> None:
    program = (
        "import random, time\ntime.sleep(0.1)\nprint({'a', 'b', 'c', 'd', 'e'}, hash('text'), random.random(), random.random())"
    )
    results = sandbox.run([Run(program + f"\n# {i}", ("",), LONG) for i in range(4)])  # both workers are busy at once
    outputs = {result.stdout for (result,) in results}
    assert len(outputs) == 1
    assert outputs.pop().split()[-2:] == ["0.8444218515250481", "0.7579544029403025"]  # random.seed(0)


def test_an_early_run_leaves_nothing(sandbox: Sandbox) -> None:
    (first, second) = [only(sandbox, "import os\nprint(os.listdir('/tmp'))\nopen('/tmp/x', 'w').close()") for _ in range(2)]
    assert (first.stdout, second.stdout) == ("[]\n", "[]\n")


def test_a_killed_worker_is_replaced(sandbox: Sandbox) -> None:
    before = processes(sandbox)
    for process in before:
        os.kill(process, signal.SIGKILL)
    runs = [Run(f"import time; time.sleep(0.1); print({i})", ("",), LONG) for i in range(6)]
    statuses = [result.status for (result,) in sandbox.run(runs)]
    assert sorted(statuses) == ["ok"] * 4 + ["sandbox_error"] * 2  # once for each worker
    assert not set(processes(sandbox)) & set(before)
    assert [result.status for (result,) in sandbox.run(runs)] == ["ok"] * 6


def test_a_worker_whose_inside_dies_is_replaced(sandbox: Sandbox) -> None:
    for process in processes(sandbox):
        os.kill(family(process)[1], signal.SIGKILL)  # process 1 of the namespace
    statuses = [result.status for (result,) in sandbox.run([Run(f"print({i})", ("",), LONG) for i in range(20)])]
    assert set(statuses) <= {"ok", "sandbox_error"}
    assert 1 <= statuses.count("sandbox_error") <= 2
    assert only(sandbox, "print(42)").stdout == "42\n"


def test_a_pickled_sandbox_starts_its_own_workers(sandbox: Sandbox) -> None:
    copy = pickle.loads(pickle.dumps(sandbox))
    assert copy.settings == sandbox.settings
    try:
        assert only(copy, "print(42)").stdout == "42\n"
        assert not set(processes(copy)) & set(processes(sandbox))
    finally:
        copy.close()


def test_a_worker_does_not_grow(sandbox: Sandbox) -> None:
    """What one program costs must not depend on how many there were; a fork copies all that the worker holds."""

    def resident() -> list[int]:
        insides = [family(process)[1] for process in processes(sandbox)]
        return [int(Path(f"/proc/{process}/statm").read_text().split()[1]) for process in insides]

    sandbox.run([Run(f"print({i})", ("", "1"), LONG) for i in range(20)])
    before = resident()
    sandbox.run([Run(f"print({i})", ("", "1"), LONG) for i in range(600)])
    assert all(after - earlier < 100 for after, earlier in zip(resident(), before, strict=True))  # pages


def test_close_leaves_no_process(sandbox: Sandbox) -> None:
    own = Sandbox(sandbox.settings)
    own.start()
    wait_until(lambda: [len(family(process)) for process in processes(own)] == [3, 3])
    members = [member for process in processes(own) for member in family(process)]
    own.close()
    wait_until(lambda: not any(map(is_running, members)))
    assert only(own, "print(42)").stdout == "42\n"  # it starts again
    own.close()


@pytest.mark.parametrize("isolation", ["namespaces", "none"])
def test_a_killed_trainer_leaves_no_process(sandbox: Sandbox, isolation: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAINER, isolation]
    variables = {**os.environ, "TMPDIR": str(tmp_path)}  # it cannot remove its folders
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=variables
    ) as trainer:
        assert trainer.stdout is not None
        workers = [int(process) for process in trainer.stdout.readline().split()]
        size = 4 if isolation == "namespaces" else 3
        wait_until(lambda: [len(family(worker)) for worker in workers] == [size, size])  # with the program of each
        members = [member for worker in workers for member in family(worker)]
        trainer.kill()
    wait_until(lambda: not any(map(is_running, members)))


@pytest.mark.parametrize("python", [None, os.path.realpath(sys.executable)], ids=["default", "running"])
def test_installed_packages_are_not_there(python: str | None) -> None:
    """What is installed on one machine must not decide what is right; only the standard library is the same everywhere."""
    host = "import site, sysconfig; print(*site.getsitepackages(), *sysconfig.get_paths().values())"
    default = pool.SYSTEM_PYTHON if os.access(pool.SYSTEM_PYTHON, os.X_OK) else sys.executable
    told = subprocess.run([python or default, "-c", host], capture_output=True, text=True, check=True).stdout.split()
    installed = {folder for folder in told if folder.endswith("-packages") and os.path.isdir(folder)}
    if not any(os.listdir(folder) for folder in installed):
        pytest.skip("nothing is installed")
    program = f"""
import os, sys
print([entry for folder in {sorted(installed)} if os.path.isdir(folder) for entry in os.listdir(folder)])
print([folder for folder in sys.path if "-packages" in folder])
"""
    sandbox = Sandbox(SandboxSettings(workers=1, python=python))
    try:
        sandbox.start()
    except ConfigError as error:
        pytest.skip(str(error))  # such as an interpreter in a folder that is closed to other users
    try:
        assert only(sandbox, program).stdout == "[]\n[]\n"
    finally:
        sandbox.close()


@pytest.mark.parametrize(
    ("processes", "rank", "workers", "expected"),
    [
        (None, None, None, range(8)),
        ("1", "0", None, range(8)),
        ("3", "1", None, range(2, 4)),
        ("16", "3", None, range(3, 4)),
        ("3", "2", 5, range(10, 15)),
    ],
)
def test_the_processes_of_a_distributed_run_share_the_cpus(
    processes: str | None, rank: str | None, workers: int | None, expected: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOCAL_WORLD_SIZE", processes), ("LOCAL_RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(pool._Worker, "start", lambda _: None)
    sandbox = Sandbox(SandboxSettings(workers=workers))
    sandbox.start()
    assert [worker.slot for worker in sandbox._workers] == list(expected)  # each slot has a user of its own


def test_tasks_of_a_slurm_job_have_users_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("SLURM_LOCALID", "2")
    monkeypatch.setattr(pool._Worker, "start", lambda _: None)
    sandbox = Sandbox(SandboxSettings(workers=4))
    sandbox.start()
    assert [worker.slot for worker in sandbox._workers] == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"isolation": "docker"}, "sandbox.isolation must be namespaces or none, got 'docker'"),
        ({"workers": 0}, "sandbox.workers must be at least 1, got 0"),
        ({"memory_mb": 0}, "sandbox.memory_mb must be at least 1, got 0"),
        ({"output_kb": -1}, "sandbox.output_kb must be at least 1, got -1"),
        ({"first_uid": 0}, "sandbox.first_uid must be at least 1, got 0"),
        ({"max_timeouts": 0}, "sandbox.max_timeouts must be at least 1, got 0"),
        ({"python": "/no/python"}, "sandbox.python '/no/python' is no program that can be run"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SandboxSettings(**settings)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_without_isolation_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = Sandbox(SandboxSettings(isolation="none", workers=1, memory_mb=64, output_kb=16))
    try:
        with caplog.at_level(logging.WARNING):
            assert only(sandbox, "print(6 * 7)").stdout == "42\n"
        assert caplog.messages == ["isolation is none: model-written programs can read and change whatever this user can"]
        assert only(sandbox, "x = bytearray(200 << 20)").status == "memory"
        assert only(sandbox, "print('x' * 16384)").status == "output_limit"
        assert only(sandbox, "while True: pass", seconds=0.2).status == "timeout"
        child = only(sandbox, "import os, time\nchild = os.fork()\nif child == 0: time.sleep(60)\nprint(child)")
        wait_until(lambda: not is_running(int(child.stdout)))
    finally:
        sandbox.close()


def test_folders_too_deep_to_remove_do_not_stop_the_trainer(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = Sandbox(SandboxSettings(isolation="none", workers=1))
    sandbox.start()
    temporary = sandbox._workers[0].folder
    assert temporary is not None
    try:
        program = "import os\nfor _ in range(1500):\n    os.mkdir('x')\n    os.chdir('x')\nprint('deep')"
        assert only(sandbox, program).stdout == "deep\n"
        sandbox.close()
        assert caplog.messages[-1] == f"{temporary.name} could not be removed"
    finally:
        subprocess.run(["rm", "-rf", temporary.name], check=True)


def test_a_machine_that_refuses_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = pool.WORKER.replace('call("unshare", NAMESPACES)', 'raise OSError(1, "unshare: Operation not permitted")')
    assert refusing != pool.WORKER
    monkeypatch.setattr(pool, "WORKER", refusing)
    sandbox = Sandbox(SandboxSettings(workers=2))
    with pytest.raises(ConfigError, match=r"this machine cannot isolate programs .*unshare: Operation not permitted") as error:
        sandbox.run([Run("print(1)", ("",))])
    assert "--data.environment.init_args.sandbox.isolation none" in str(error.value)
    assert sandbox._workers == []


def test_other_machines_and_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pool.platform, "machine", lambda: "riscv64")
        with pytest.raises(
            ConfigError, match="programs cannot be isolated here: there is no table of system calls for 'riscv64'"
        ):
            Sandbox().start()
    with monkeypatch.context() as patch:
        patch.setattr(pool.sys, "platform", "darwin")
        with pytest.raises(ConfigError, match="programs can be isolated on Linux only, not on darwin"):
            Sandbox().start()


def test_an_interpreter_that_does_not_start() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own lie in folders that are closed to other users
        Path(folder).chmod(0o711)
        python = Path(folder) / "python"
        for text, message in (("#!/bin/sh\nexit 1\n", "python did not start"), ("no program", "cannot be run as user")):
            python.write_text(text)
            python.chmod(0o755)
            with pytest.raises(ConfigError, match=message):
                Sandbox(SandboxSettings(workers=1, python=str(python))).start()


def test_every_input_finds_an_empty_folder(sandbox: Sandbox) -> None:
    program = (
        "import os\nprint(sorted(os.listdir('/tmp')), os.getcwd())\nos.mkdir('a'); open('/tmp/a/' + input(), 'w').write('x')"
    )
    results = sandbox.run([Run(program, ("1", "2", "3"))])[0]
    assert [(result.status, result.stdout) for result in results] == [("ok", "[] /tmp\n")] * 3
