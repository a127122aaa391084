"""A server in a process group of its own: started, watched, and ended with this process."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rla_lightning.rollout.servers import guard
from rla_lightning.types import ServerError

logger = logging.getLogger(__name__)

TAIL = 20  # lines of the log in an error
CAUSES = 5  # lines of the log that name an error, from anywhere in it
CAUSE = re.compile(r"(?!.*WARNING).*\b\w+Error: ")
NOISE = ("nanobind: ", " - ")  # of vLLM's libraries as they end
REPORT_S = 15.0  # between signs of life while it starts
GRACE_S = 10.0  # to end in peace
# What a launcher of processes sets for the trainer; the server makes process groups of its own.
LAUNCHER = re.compile(r"(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|LOCAL_WORLD_SIZE|TORCHELASTIC_.*|PYTHONPATH")


class ServerProcess:
    """The running command; its output goes to a log in the folder, which is removed at the end.

    Args:
        name: for messages.
        environment: variables added to this process's own.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.log = folder / "server.log"
        inherited = {key: value for key, value in os.environ.items() if not LAUNCHER.fullmatch(key)}
        guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(folder), *command]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                guarded,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited | dict(environment),
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, self._process, folder, os.getpid())  # also when the interpreter exits

    @property
    def group(self) -> int:
        """The id of the process group."""
        return self._process.pid

    def check(self, patience_s: float = 0.0) -> None:
        """Raise what the log says if the command has ended, or ends within so many seconds."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return
        raise ServerError(f"{self.name} ended with exit code {self._process.returncode}; its log:\n{self.tail()}")

    def wait_until(self, is_ready: Callable[[], bool], limit_s: float) -> None:
        """Wait for the command to be ready, with a sign of life every now and then."""
        started = reported = time.monotonic()
        while not is_ready():
            self.check()
            now = time.monotonic()
            if now - started > limit_s:
                raise ServerError(f"{self.name} was not ready after {limit_s:g} s; its log:\n{self.tail()}")
            if now - reported > REPORT_S:
                reported = now
                logger.info("%s is starting, %.0f s: %s", self.name, now - started, self.tail().splitlines()[-1][:200])
            time.sleep(0.2)
        self.check()
        logger.info("%s is ready after %.0f s", self.name, time.monotonic() - started)

    def tail(self) -> str:
        """Lines that name an error, wherever they stand, and the log's last ones."""
        lines = [
            line for line in self.log.read_text(errors="replace").splitlines() if line.strip() and not line.startswith(NOISE)
        ]
        causes = list(dict.fromkeys(line for line in lines[:-TAIL] if CAUSE.match(line)))
        return "\n".join([*causes[:CAUSES], *(["..."] if causes else []), *lines[-TAIL:]]) or "(empty)"

    def stop(self) -> None:
        self._end()


def free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end(process: subprocess.Popen[bytes], folder: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked copy of this process
    deadline = time.monotonic() + GRACE_S
    number: int = signal.SIGTERM if process.poll() is None else signal.SIGKILL  # what is left of it has nobody to end it
    try:
        while True:  # until the whole group is gone, of which the process is only the first
            os.killpg(process.pid, number)
            process.poll()
            time.sleep(0.05)
            number = signal.SIGKILL if time.monotonic() > deadline else 0
    except ProcessLookupError:
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
