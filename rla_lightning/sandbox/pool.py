"""The trainer's side of the sandbox: a few warm workers, each of which runs one program at a time."""

from __future__ import annotations

import json
import logging
import os
import platform
import select
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from rla_lightning.sandbox.syscalls import seccomp_filter
from rla_lightning.types import ConfigError

logger = logging.getLogger(__name__)


def _worker() -> str:
    """A worker's whole program; read now, for a user that drops rights may not read it later."""
    lines = ["import sys, types"]
    for name in ("lockup", "traces", "zygote"):
        text = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        if name == "zygote":
            lines.append(f"exec({text!r})")
        else:
            lines.append(f"module = sys.modules['{__package__}.{name}'] = types.ModuleType('{name}')")
            lines.append(f"exec({text!r}, vars(module))")
    return "\n".join(lines)


WORKER = _worker()
RunStatus = Literal["ok", "runtime_error", "timeout", "memory", "output_limit", "not_run", "sandbox_error"]
GRACE = 5.0  # seconds that a worker may take on top of a program's own, to start and to answer
START = 30.0  # seconds that a worker may take to start
INTERPRETER_MB = 64  # address space of the bare interpreter, on top of a program's memory
DISK_MB = 16  # of the private /tmp
SYSTEM_PYTHON = "/usr/bin/python3"
OPT_IN = "set isolation to none (--data.environment.init_args.sandbox.isolation none) to run model-written programs without it"


@dataclass(frozen=True)
class SandboxSettings:
    """How untrusted programs are held.

    Args:
        isolation: namespaces locks every program away from the network, files, other processes and the environment, and
            refuses to start where the machine cannot do that; none only limits time, memory and output: programs can
            then read and change whatever the user can.
        workers: programs that run side by side; null: one per CPU that this process may use, shared among the processes of
            a distributed run.
        memory_mb: of one program.
        output_kb: most that one program may write to stdout and stderr.
        python: interpreter of the programs; null: /usr/bin/python3 where there is one, else the running one.
        first_uid: under root, worker i runs as user first_uid + i, counted over the processes of a distributed run.
        max_timeouts: after so many timeouts a program's remaining inputs are not run.
        reuse: a program that ended well on one input, and does nothing that leaves traces, gets the next one in the same
            process; false gives each input a process of its own.
    """

    isolation: Literal["namespaces", "none"] = "namespaces"
    workers: int | None = None
    memory_mb: int = 256
    output_kb: int = 256
    python: str | None = None
    first_uid: int = 60100
    max_timeouts: int = 2
    reuse: bool = True

    def __post_init__(self) -> None:
        if self.isolation not in ("namespaces", "none"):
            raise ConfigError(f"sandbox.isolation must be namespaces or none, got {self.isolation!r}")
        for name in ("workers", "memory_mb", "output_kb", "first_uid", "max_timeouts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"sandbox.{name} must be at least 1, got {value}")
        if self.python is not None and not os.access(self.python, os.X_OK):
            raise ConfigError(f"sandbox.python {self.python!r} is no program that can be run")


@dataclass(frozen=True)
class Run:
    """A program that is to be run once on each of several inputs."""

    program: str
    inputs: tuple[str, ...]
    seconds: float = 2.0  # of CPU, for each input; twice that and one more of wall clock

    @property
    def longest(self) -> float:
        """Seconds of wall clock after which a run is ended; a busy machine must not decide what is right."""
        return 2 * self.seconds + 1


@dataclass(frozen=True)
class RunResult:
    """What one run of a program did."""

    status: RunStatus  # ok: it ended by itself with exit code 0
    stdout: str  # only of runs that are ok
    stderr: str  # its end
    seconds: float


class Sandbox:
    """Warm workers that run untrusted programs; they start with the first run and end with the process.

    Args:
        settings: how programs are held.
    """

    def __init__(self, settings: SandboxSettings = SandboxSettings()) -> None:
        self.settings = settings
        self._workers: list[_Worker] = []
        self._process = 0  # that the workers belong to

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "_workers": [], "_process": 0}  # a copy in another process starts its own

    def start(self) -> None:
        """Start the workers now.

        Raises:
            ConfigError: the machine cannot isolate programs.
        """
        if self._workers and self._process == os.getpid():  # a forked process must not speak to its parent's
            return
        self._process = os.getpid()
        if self.settings.isolation == "none":
            logger.warning("isolation is none: model-written programs can read and change whatever this user can")
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of a distributed run, on this machine
        number = self.settings.workers or max(1, len(os.sched_getaffinity(0)) // processes)
        first = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))) * number
        self._workers = [_Worker(self.settings, slot) for slot in range(first, first + number)]
        try:
            for worker in self._workers:
                worker.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers and whatever they run."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def run(self, runs: Sequence[Run]) -> list[list[RunResult]]:
        """The results of each run, one per input; equal runs are made once.

        The inputs of a program are run in their order by one worker.
        """
        self.start()
        waiting = list(dict.fromkeys(run for run in runs if run.inputs))[::-1]
        results: dict[Run, list[RunResult]] = {}

        def work(worker: _Worker) -> None:
            while waiting:
                try:
                    run = waiting.pop()
                except IndexError:  # another worker was faster
                    return
                results[run] = self._inputs(worker, run)

        with ThreadPoolExecutor(len(self._workers)) as pool:
            list(pool.map(work, self._workers))  # raises what a worker raised
        return [results[run] if run.inputs else [] for run in runs]

    def _inputs(self, worker: _Worker, run: Run) -> list[RunResult]:
        results: list[RunResult] = []
        timeouts = 0
        known: dict[str, RunResult] = {}
        try:
            for stdin in run.inputs:
                if stdin in known:
                    result = known[stdin]
                elif timeouts >= self.settings.max_timeouts:
                    result = RunResult("not_run", "", f"{timeouts} inputs before took too long", 0.0)
                else:
                    result = known[stdin] = worker.run(run, stdin)
                    timeouts += result.status == "timeout"
                results.append(result)
        finally:
            worker.forget()
        return results


class _Worker:
    """One process that runs `zygote.py`; it is started anew when it stops answering."""

    def __init__(self, settings: SandboxSettings, slot: int) -> None:
        self.settings = settings
        self.slot = slot
        self.process: subprocess.Popen[bytes] | None = None
        self.folder: TemporaryDirectory[str] | None = None  # of programs that are not isolated

    def start(self) -> None:
        is_isolated = self.settings.isolation == "namespaces"
        if is_isolated and sys.platform != "linux":
            raise ConfigError(f"programs can be isolated on Linux only, not on {sys.platform}; {OPT_IN}")
        try:
            rules = seccomp_filter(platform.machine()) if is_isolated else b""
        except ValueError as error:
            raise ConfigError(f"programs cannot be isolated here: {error}; {OPT_IN}") from error
        python = self.settings.python or (SYSTEM_PYTHON if os.access(SYSTEM_PYTHON, os.X_OK) else sys.executable)
        drop = os.geteuid() == 0
        user = self.settings.first_uid + self.slot if drop else None
        try:
            if not is_isolated:
                self.folder = TemporaryDirectory(prefix="programs-")
                if user is not None:
                    os.chown(self.folder.name, user, user)
            self.process = subprocess.Popen(
                [python, "-s", "-S", "-B", "-c", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=self.folder.name if self.folder else "/",
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},  # equal programs print equal sets
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=[] if drop else None,
            )
        except OSError as error:  # such as an interpreter in a folder that is closed to the dropped user
            self.stop()
            raise ConfigError(f"sandbox.python {python!r} cannot be run as user {user or os.geteuid()}: {error}") from error
        weakref.finalize(self, _kill, self.process)
        reply = self._exchange({"isolated": is_isolated, "filter": rules.hex()}, START)
        if reply is None or reply["error"]:
            self.stop()
            reason = reply["error"] if reply else f"{python} did not start"
            raise ConfigError(f"this machine cannot isolate programs ({reason}); {OPT_IN}")

    def run(self, run: Run, stdin: str) -> RunResult:
        if self.process is None:
            self.start()
        message = {
            "program": run.program,
            "stdin": stdin,
            "seconds": run.seconds,
            "longest": run.longest,
            "memory": (self.settings.memory_mb + INTERPRETER_MB) << 20,
            "output": self.settings.output_kb << 10,
            "disk": DISK_MB << 20,
            "stays": self.settings.reuse and len(run.inputs) > 1 and sys.platform == "linux",
        }
        reply = self._exchange(message, run.longest + GRACE)
        if reply is None:
            self.stop()  # the next run starts another
            return RunResult("sandbox_error", "", "the worker did not answer", run.longest + GRACE)
        return RunResult(**reply)

    def forget(self) -> None:
        """End the process that knows the last program."""
        if self.process is not None and not self._tell({}, time.monotonic() + GRACE):
            self.stop()

    def stop(self) -> None:
        if self.process is not None:
            _kill(self.process)
            self.process = None
        if self.folder is not None:
            try:
                self.folder.cleanup()
            except RecursionError:  # a program can nest folders deeper than Python removes
                logger.warning("%s could not be removed", self.folder.name)
            self.folder = None

    def _exchange(self, message: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer to a message; None when there is none in time."""
        assert self.process is not None
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        if not self._tell(message, deadline):
            return None
        header = _receive(self.process.stdout.fileno(), 4, deadline)
        body = header and _receive(self.process.stdout.fileno(), int.from_bytes(header, "big"), deadline)
        return json.loads(body) if body else None

    def _tell(self, message: dict[str, Any], deadline: float) -> bool:
        """Whether the message could be sent in time."""
        assert self.process is not None
        assert self.process.stdin is not None
        data = json.dumps(message).encode()
        try:
            return _send(self.process.stdin.fileno(), struct.pack("!I", len(data)) + data, deadline)
        except BrokenPipeError:
            return False


def _send(pipe: int, data: bytes, deadline: float) -> bool:
    os.set_blocking(pipe, False)
    left = memoryview(data)
    while left:
        if not _ready(pipe, select.POLLOUT, deadline):
            return False
        left = left[os.write(pipe, left) :]
    return True


def _receive(pipe: int, number: int, deadline: float) -> bytes | None:
    data = bytearray()
    while len(data) < number:
        if not _ready(pipe, select.POLLIN, deadline):
            return None
        part = os.read(pipe, number - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def _ready(pipe: int, event: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # what it runs dies with it
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
