"""Runs untrusted Python programs in forked children. This file is the main part of a sandbox worker's program.

It is started by `pool.py` as a bare interpreter with an empty environment and imports nothing of the project but `lockup.py` and
`traces.py`, which came along. It locks itself up first: new user, mount, network, IPC, UTS and PID namespaces, and a root
directory that holds the standard library and little else, all of it read-only. Then it forks once per program: that child reads
its inputs from the standard input and forks the program's process, which gives up what is left: a private /tmp, resource
limits, no capabilities, a seccomp filter. The worker never executes a program itself; nothing of what is expected comes here,
and nothing of a program stays in the memory that the next one inherits.

Messages in both directions are JSON after a length of four bytes.
"""

from __future__ import annotations

import _sitebuiltins
import atexit
import builtins
import contextlib
import ctypes
import errno
import gc
import json
import os
import select
import signal
import struct
import sys
import threading
import time
import traceback
from types import ModuleType
from typing import Any

from rla_lightning.sandbox.lockup import NEW_MOUNTS, PR_SET_PDEATHSIG, call, confine, fresh_tmp, libc, lock_up
from rla_lightning.sandbox.traces import leaves_no_traces

PRELOADED = (  # what programs often import is there when a child starts
    *("array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools"),
    *("heapq", "io", "itertools", "math", "operator", "random", "re", "statistics", "string", "typing"),
)
CHUNK = 1 << 16
KEPT_STDERR = 2000
RECURSION = sys.getrecursionlimit()
C_LIBRARY: Any = None if libc is None else ctypes.PyDLL(None, use_errno=True)  # once: each would stay in memory
PROCESS_CLOCK = 2  # CPUCLOCK_SCHED of a whole process, in the lowest bits of a clock's id (linux/posix-timers.h)
TURN, READY = 3, 4  # handles of a program's process besides the usual three


def fork() -> int:
    """The C function: the interpreter's own runs handlers of modules in the child, which touch more memory than a small program.

    There is one thread, and what the handlers would renew (locks, random numbers) is not used or is renewed in `perform`.
    """
    if libc is None:
        return os.fork()
    process: int = C_LIBRARY.fork()
    if process < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"fork: {os.strerror(code)}")
    return process


# The program's process


def become(run: dict[str, Any], rules: bytes, ends: list[int]) -> None:
    """What the child does; never returns.

    Args:
        run: the program and its limits.
        rules: the filter of system calls.
        ends: handles that become its stdin, stdout, stderr, that where it hears of another input, and that where it says
            that it is ready for one.
    """
    status = 1
    try:
        os.setsid()
        for place, end in enumerate(ends):
            os.dup2(end, place)
        os.closerange(len(ends), 4096)
        confine(run, rules)
        os.write(READY, b"1")
        run["stays"] = run["stays"] and leaves_no_traces(run["program"])
        if not run["stays"]:
            os.closerange(TURN, READY + 1)
        gc.enable()
        status = perform(run.pop("program"), run.pop("stays"))
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, f"\n{type(error).__name__}: {error}".encode("utf-8", "replace"))
    os._exit(status)


def perform(program: str, stays: bool) -> int:
    """Run a program as if it were started by an interpreter, again and again if it stays; its exit status."""
    while True:
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        sys.modules["random"].seed(0)
        sys.setrecursionlimit(RECURSION)
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stdout = stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stderr = stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        status = 0
        try:
            exec(compile(program, "<program>", "exec", dont_inherit=True), vars(main))
        except SystemExit as end:
            status = 0 if end.code is None else end.code & 255 if isinstance(end.code, int) else 1
            if status and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
        except BaseException as error:
            status = 1
            trace = error.__traceback__.tb_next if error.__traceback__ else None  # without this function
            traceback.print_exception(type(error), error, trace)
        if status or not stays:
            break
        finish(main, stdout, stderr)
        os.write(READY, b"1")
        if not os.read(TURN, 1):
            os._exit(0)  # there are no more inputs
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, as at an interpreter's end
    atexit._run_exitfuncs()
    finish(main, stdout, stderr)
    return status


def finish(main: ModuleType, *streams: Any) -> None:
    """End a program's objects, then write what is left of its output, also where it has put streams of its own in place."""
    vars(main).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr, *streams):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


# The process that knows the program


class Child:
    """A confined process, from its fork to its end; it runs one program on one input after the other while that goes well."""

    def __init__(self, run: dict[str, Any], rules: bytes) -> None:
        self.stdin = open_input()  # a file: read from its start again for each input
        pipes = [os.pipe() for _ in range(4)]  # stdout, stderr, another input, ready
        ends = [self.stdin, pipes[0][1], pipes[1][1], pipes[2][0], pipes[3][1]]
        self.stdout, self.stderr, self.turn, self.ready = pipes[0][0], pipes[1][0], pipes[2][1], pipes[3][0]
        self.feed(run["stdin"])
        self.process = fork()
        if self.process == 0:
            become(run, rules, ends)
        for end in ends[1:]:
            os.close(end)
        self.handle = os.pidfd_open(self.process) if hasattr(os, "pidfd_open") else None
        self.kept = {self.stdout: bytearray(), self.stderr: bytearray()}
        self.program, self.stays = run["program"], run["stays"]
        self.written, self.most = 0, run["output"]
        self.has_ended = False
        self.used = 0.0  # seconds of CPU before the current input
        self.poll = select.poll()
        self.poll.register(0, 0)  # hangs up when the trainer is gone
        for pipe in (self.stdout, self.stderr, self.ready, self.handle):
            if pipe is not None:
                self.poll.register(pipe, select.POLLIN)
        self.is_confined = bool(os.read(self.ready, 1))  # what a program writes there comes too late

    def again(self, run: dict[str, Any]) -> bool:
        """Hand it another input; False when it cannot take one, or has another program."""
        if run["program"] != self.program:
            return False
        self.written = 0
        for text in self.kept.values():
            text.clear()
        try:
            self.used = self.clock()
            self.feed(run["stdin"])
            os.write(self.turn, b"1")
        except OSError:  # it is gone, or has closed its handles
            return False
        return True

    def feed(self, text: str) -> None:
        data = memoryview(text.encode("utf-8", "replace"))
        os.ftruncate(self.stdin, 0)
        done = 0
        while done < len(data):  # by position: the place in the file is the child's, too, and it could move that far away
            done += os.pwrite(self.stdin, data[done:], done)
        os.lseek(self.stdin, 0, os.SEEK_SET)

    def clock(self) -> float:
        """Seconds of CPU that it has used so far."""
        return time.clock_gettime(~self.process << 3 | PROCESS_CLOCK)

    def wait(self, cpu: float, longest: float) -> str:
        """Listen until the input is done; "" when the child ended, or "ready", "timeout", "output_limit", "sandbox_error".

        Args:
            cpu: seconds of CPU after which a child that stays is stopped; the kernel stops the others.
            longest: seconds of wall clock.
        """
        if not self.is_confined:
            self.drain()
            return "sandbox_error"
        deadline = time.monotonic() + longest
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or (self.stays and self.clock() - self.used > cpu):
                return "timeout"
            pause = 0.01 if self.handle is None else 0.25 if self.stays else 60.0
            events = dict(self.poll.poll(min(left, pause) * 1000))
            if events.get(0):
                os._exit(1)  # then the worker ends, and with process 1 all others
            for pipe in self.kept:
                if events.get(pipe) and not self.listen(pipe):
                    self.poll.unregister(pipe)
            is_ready = self.ready in events and bool(os.read(self.ready, 1))
            if self.ready in events and not is_ready:
                self.poll.unregister(self.ready)
            if is_ready or self.handle in events or (self.handle is None and self.is_over()):
                self.drain()
                if self.written <= self.most:
                    return "ready" if is_ready else ""
            if self.written > self.most:
                return "output_limit"

    def listen(self, pipe: int) -> bool:
        """Read once; False at the end of the stream."""
        data = os.read(pipe, CHUNK)
        self.written += len(data)
        self.kept[pipe] += data
        if pipe == self.stderr:
            del self.kept[pipe][:-KEPT_STDERR]
        return bool(data)

    def drain(self) -> None:
        """Take what a child left in the pipes before it said that it was done, or ended."""
        for pipe in self.kept:
            os.set_blocking(pipe, False)
            try:
                while self.written <= self.most and self.listen(pipe):
                    pass
            except BlockingIOError:
                pass  # all of it is read
            os.set_blocking(pipe, True)

    def is_over(self) -> bool:
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self, isolated: bool) -> tuple[int, float]:
        """Kill what is left and tidy up; the exit code (negative: a signal) and the seconds of CPU for the last input."""
        for kill in (os.kill,) if isolated else (os.killpg, os.kill):
            try:
                kill(self.process, signal.SIGKILL)
            except OSError as error:
                if error.errno not in (errno.ESRCH, errno.EPERM):
                    raise
        _, status, usage = os.wait4(self.process, 0)
        self.has_ended = True
        for end in (self.stdin, self.stdout, self.stderr, self.turn, self.ready, self.handle):
            if end is not None:
                os.close(end)
        return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime - self.used

    def texts(self) -> tuple[str, str]:
        stdout, stderr = (bytes(self.kept[pipe]).decode("utf-8", "replace") for pipe in (self.stdout, self.stderr))
        return stdout, stderr


def open_input() -> int:
    """A file without a name, in memory where that is possible."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stdin")
    path = f"stdin-{os.getpid()}"  # in the folder of programs that are not isolated
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return handle


def serve_program(isolated: bool, rules: bytes) -> None:
    """Run one program on one input after the other, until there are no more; never returns."""
    if libc is not None:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if isolated:
        call("unshare", NEW_MOUNTS)
    child: Child | None = None
    is_first = True
    while True:
        run = json.loads(read(*struct.unpack("!I", read(4))))
        start = time.monotonic()
        is_dirty = isolated and not is_first and bool(os.listdir("/tmp"))
        if child is not None and (not run or is_dirty or not child.again(run)):
            child.end(isolated)
            child = None
        if not run:
            os._exit(0)
        if isolated and (is_first or is_dirty):
            fresh_tmp(run["disk"], is_first)
        is_first = False
        if child is None:
            child = Child(run | {"isolated": isolated}, rules)
        reply = serve(child, run, isolated)
        if child.has_ended:
            child = None
        write(reply | {"seconds": time.monotonic() - start})


def serve(child: Child, run: dict[str, Any], isolated: bool) -> dict[str, Any]:
    """What a child does with the input that it has just got; it is ended unless it is ready for another."""
    how = child.wait(run["seconds"] + 1, run["longest"])
    if how == "ready" and child.clock() - child.used <= run["seconds"]:
        status, stdout, stderr = "ok", *child.texts()
    else:
        code, cpu = child.end(isolated)
        stdout, stderr = child.texts()
        status = verdict(code, cpu, stderr, run["seconds"]) if how in ("", "ready") else how
    return {"status": status, "stdout": stdout if status == "ok" else "", "stderr": stderr}


def verdict(code: int, cpu: float, stderr: str, seconds: float) -> str:
    """How a program ended that was not stopped from here."""
    if cpu > seconds or code == -signal.SIGXCPU:
        return "timeout"
    if code == 0:
        return "ok"
    if code == -signal.SIGXFSZ:
        return "output_limit"
    last = stderr.rstrip().rpartition("\n")[2]
    return "memory" if code == -signal.SIGKILL or last.startswith("MemoryError") else "runtime_error"


def read(number: int) -> bytes:
    data = bytearray()
    while len(data) < number:
        part = os.read(0, number - len(data))
        if not part:
            os._exit(1)  # the trainer is gone
        data += part
    return bytes(data)


def write(message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    left = memoryview(struct.pack("!I", len(data)) + data)
    while left:
        left = left[os.write(1, left) :]


def main() -> None:
    settings = json.loads(read(*struct.unpack("!I", read(4))))
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    sys.argv[:] = ["program.py"]
    for name in PRELOADED:
        __import__(name)
    for name in ("exit", "quit"):  # of the module `site`, which is left out
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    try:
        if settings["isolated"]:
            lock_up()
    except OSError as error:
        write({"error": str(error)})
        os._exit(1)
    gc.disable()
    gc.freeze()  # children touch less memory
    write({"error": ""})
    while True:
        child = fork()  # waits for the next program; what it reads and hears ends with it
        if child == 0:
            serve_program(settings["isolated"], bytes.fromhex(settings["filter"]))
        _, status = os.waitpid(child, 0)
        if status:
            os._exit(1)


if __name__ == "__main__":
    main()
