"""Runs untrusted Python programs, one forked child each. This file is the whole program of a sandbox worker.

It is started by `pool.py` as a bare interpreter with an empty environment and imports nothing of the project. It locks
itself up first: new user, mount, network, IPC, UTS and PID namespaces, and a root directory that holds the standard library
and little else, all of it read-only. Then it forks once per run: that child reads the run from the standard input and forks
the program's process, which gives up what is left: a private /tmp, resource limits, no capabilities, a seccomp filter. The worker
never executes a program itself; nothing of what is expected comes here, and nothing of a run stays in the memory that
the next program inherits.

Messages in both directions are JSON after a length of four bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import sysconfig
import threading
import time
import traceback
from typing import Any

PRELOADED = (  # what programs often import is there when a child starts
    *("array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools"),
    *("heapq", "io", "itertools", "math", "operator", "random", "re", "statistics", "string", "typing"),
)
INSIDE_ID = 1000  # user and group of programs, as they see it
CHUNK = 1 << 16
KEPT_STDERR = 2000
THREADS = 32
NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x20000000  # user mount net ipc uts pid
NEW_MOUNTS = 0x00020000
MNT_DETACH = 2
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
RELATIME, NOATIME, NODIRATIME = 1 << 21, 1024, 2048
KEPT_FLAGS = {2: NOSUID, 4: NODEV, 8: NOEXEC, 1024: NOATIME, 2048: NODIRATIME, 4096: RELATIME}  # statvfs: mount
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38

FILTER = bytearray()  # of system calls
libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def call(name: str, *arguments: Any) -> None:
    """A function of the C library; its failure is an OSError that names it."""
    if getattr(libc, name)(*arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if value is None else value.encode() for value in (source, target, kind, data)]
    try:
        call("mount", encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    except OSError as error:
        raise OSError(error.errno, f"mount {target}: {error.strerror}") from None


def lock_up() -> None:
    """New namespaces with nothing in them; the rest of this worker's life is that of a child, process 1 of its own."""
    user, group = os.getuid(), os.getgid()
    call("unshare", NAMESPACES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{INSIDE_ID} {user} 1"), ("gid_map", f"{INSIDE_ID} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    child = os.fork()
    if child:
        os.close(0)
        os.close(1)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 255)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("sethostname", b"sandbox", 7)
    mount(None, "/", None, REC | PRIVATE)
    move_root()


def move_root() -> None:
    """A root directory with the standard library, the shared libraries and a few devices, read-only."""
    root = "/tmp"
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "size=64k,nr_inodes=200,mode=755")
    for folder in library_folders():
        target = root + folder
        os.makedirs(target)
        mount(folder, target, None, BIND | REC)
        flags = sum(flag for bit, flag in KEPT_FLAGS.items() if os.statvfs(target).f_flag & bit)
        mount(None, target, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV | flags)
        for name in ("site-packages", "dist-packages"):  # not of the standard library
            if os.path.isdir(f"{target}/{name}"):
                mount("tmpfs", f"{target}/{name}", "tmpfs", RDONLY | NOSUID | NODEV, "size=4k,nr_inodes=2")
    os.mkdir(root + "/dev")
    for name in ("null", "zero", "full", "random", "urandom"):
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, BIND)
    for link in ("lib", "lib64"):
        if os.path.islink("/" + link):
            os.symlink(os.readlink("/" + link), f"{root}/{link}")
    os.mkdir(root + "/tmp")
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)  # the old root is gone
    os.chdir("/")
    mount(None, "/", None, REMOUNT | RDONLY | NOSUID | NODEV)


def library_folders() -> list[str]:
    """The standard library, and the shared libraries that its modules load."""
    folders = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    architecture = sysconfig.get_config_var("MULTIARCH")
    places = [f"/usr/lib/{architecture}", f"/lib/{architecture}", "/usr/lib64"] if architecture else ["/usr/lib64", "/usr/lib"]
    folders |= {os.path.realpath(place) for place in places if os.path.isdir(place)}
    inner = {folder for folder in folders for other in folders if folder.startswith(other + "/")}
    return sorted(folders - inner)


def confine(run: dict[str, Any]) -> None:
    """The child gives up whatever a program does not need."""
    limits = {
        resource.RLIMIT_CPU: int(run["seconds"]) + 1,
        resource.RLIMIT_AS: run["memory"],
        resource.RLIMIT_FSIZE: run["disk"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_STACK: min(run["memory"], 256 << 20),
    }
    if run["isolated"]:  # elsewhere all processes of the user would count
        limits[resource.RLIMIT_NPROC] = THREADS
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        lowered = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (lowered, lowered))
    if not run["isolated"]:
        if libc is not None:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # no process 1 whose end would end it
        return
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # there are no more
    call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = ctypes.create_string_buffer(bytes(FILTER), len(FILTER))
    header = struct.pack("@HP", len(FILTER) // 8, ctypes.addressof(program))
    call("prctl", PR_SET_SECCOMP, 2, ctypes.c_char_p(header), 0, 0)


def execute(program: str) -> int:
    """Run a program as if it were started by an interpreter; its exit status."""
    status = 0
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as end:
        status = 0 if end.code is None else end.code & 255 if isinstance(end.code, int) else 1
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # without this function
        traceback.print_exception(type(error), error, trace)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, as at an interpreter's end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return status


def become(run: dict[str, Any], stdin: int, stdout: int, stderr: int, ready: int) -> None:
    """What the child does; never returns."""
    status = 1
    try:
        os.setsid()
        for place, end in enumerate((stdin, stdout, stderr, ready)):
            os.dup2(end, place)
        os.closerange(4, 4096)
        confine(run)
        os.write(3, b"1")
        os.close(3)
        program = run["program"]
        run.clear()
        gc.enable()
        sys.modules["random"].seed(0)
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        status = execute(program)
        sys.stderr.flush()
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, f"\n{type(error).__name__}: {error}".encode("utf-8", "replace"))
    os._exit(status)


class Watch:
    """One child, from its fork to its end."""

    def __init__(self, run: dict[str, Any]) -> None:
        pipes = [os.pipe() for _ in range(4)]  # stdin, stdout, stderr, ready
        ends = [pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][1]]
        self.process = os.fork()
        if self.process == 0:
            become(run, *ends)
        for end in ends:
            os.close(end)
        self.stdin, self.stdout, self.stderr, self.ready = pipes[0][1], pipes[1][0], pipes[2][0], pipes[3][0]
        self.is_fed = False  # its stdin is closed
        self.handle = os.pidfd_open(self.process) if hasattr(os, "pidfd_open") else None
        self.left = memoryview(run["stdin"].encode("utf-8", "replace"))
        self.most = run["output"]
        self.kept = {self.stdout: bytearray(), self.stderr: bytearray()}
        self.written = 0
        os.set_blocking(self.stdin, False)

    def wait(self, seconds: float) -> str:
        """Feed and listen until the child ends; how it ended: "", "timeout", "output_limit" or "sandbox_error"."""
        poll = select.poll()
        poll.register(0, 0)  # hangs up when the trainer is gone
        for pipe in self.kept:
            poll.register(pipe, select.POLLIN)
        if self.handle is not None:
            poll.register(self.handle, select.POLLIN)
        if not os.read(self.ready, 1):  # what a program writes there comes too late
            self.drain()
            return "sandbox_error"
        deadline = time.monotonic() + seconds
        poll.register(self.stdin, select.POLLOUT)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            events = dict(poll.poll(min(left, 60.0 if self.handle is not None else 0.01) * 1000))
            if events.get(0):
                os._exit(1)  # then the worker ends, and with process 1 all others
            self.feed(events.get(self.stdin, 0), poll)
            for pipe in self.kept:
                if events.get(pipe) and not self.listen(pipe):
                    poll.unregister(pipe)
            if self.written > self.most:
                return "output_limit"
            if self.handle in events or (self.handle is None and self.is_over()):
                return "output_limit" if self.drain() > self.most else ""

    def feed(self, event: int, poll: select.poll) -> None:
        if not event:
            return
        try:
            self.left = self.left[os.write(self.stdin, self.left[:CHUNK]) :] if self.left else self.left
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.left = self.left[:0]
        if not self.left:
            poll.unregister(self.stdin)
            os.close(self.stdin)
            self.is_fed = True

    def listen(self, pipe: int) -> bool:
        """Read once; False at the end of the stream."""
        data = os.read(pipe, CHUNK)
        self.written += len(data)
        self.kept[pipe] += data
        if pipe == self.stderr:
            del self.kept[pipe][:-KEPT_STDERR]
        return bool(data)

    def drain(self) -> int:
        """What a child left in the pipes when it ended; how much it wrote in all."""
        for pipe in self.kept:
            os.set_blocking(pipe, False)
            try:
                while self.written <= self.most and self.listen(pipe):
                    pass
            except BlockingIOError:
                pass  # only without isolation: another process holds the pipe
        return self.written

    def is_over(self) -> bool:
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self, isolated: bool) -> tuple[int, float]:
        """Kill what is left and tidy up; the exit code (negative: a signal) and the seconds of CPU."""
        for kill in (os.kill,) if isolated else (os.killpg, os.kill):
            try:
                kill(self.process, signal.SIGKILL)
            except OSError as error:
                if error.errno not in (errno.ESRCH, errno.EPERM):
                    raise
        _, status, usage = os.wait4(self.process, 0)
        if not self.is_fed:
            os.close(self.stdin)
        for end in (self.stdout, self.stderr, self.ready, self.handle):
            if end is not None:
                os.close(end)
        return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def serve_program(settings: dict[str, Any]) -> None:
    """Run one program on one input after the other, until there are no more; never returns."""
    if libc is not None:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if settings["isolated"]:
        call("unshare", NEW_MOUNTS)
    is_first = True
    while True:
        run = json.loads(read(*struct.unpack("!I", read(4))))
        if not run:
            os._exit(0)
        if settings["isolated"] and (is_first or os.listdir("/tmp")):
            fresh_tmp(run["disk"], is_first)
        is_first = False
        write(serve(run | {"isolated": settings["isolated"]}))


def fresh_tmp(size: int, is_first: bool) -> None:
    """An empty /tmp for the next run, and the way there; only where the last one left something, for it takes a while."""
    if not is_first:
        os.chdir("/")
        call("umount2", b"/tmp", MNT_DETACH)
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV | NOEXEC, f"size={size},nr_inodes=256,mode=1777")
    os.chdir("/tmp")


def serve(run: dict[str, Any]) -> dict[str, Any]:
    """Run one program on one input; the reply."""
    start = time.monotonic()
    watch = Watch(run)
    how = watch.wait(run["longest"])
    code, cpu = watch.end(run["isolated"])
    stdout, stderr = (bytes(watch.kept[pipe]).decode("utf-8", "replace") for pipe in (watch.stdout, watch.stderr))
    status = how or verdict(code, cpu, stderr, run["seconds"])
    return {
        "status": status,
        "stdout": stdout if status == "ok" else "",
        "stderr": stderr,
        "seconds": time.monotonic() - start,
    }


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
    FILTER.extend(bytes.fromhex(settings["filter"]))
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    sys.argv[:] = ["program.py"]
    for name in PRELOADED:
        __import__(name)
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
        child = os.fork()  # waits for the next program; what it reads and hears ends with it
        if child == 0:
            serve_program(settings)
        _, status = os.waitpid(child, 0)
        if status:
            os._exit(1)


if __name__ == "__main__":
    main()
