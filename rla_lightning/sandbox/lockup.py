"""How a worker of the sandbox locks itself up, and what each process that runs a program gives up besides.

This file becomes part of the program that a bare interpreter runs (`pool.py`): it imports nothing of the project.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import sysconfig
from typing import Any

INSIDE_ID = 1000  # user and group of programs, as they see it
THREADS = 32
NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x20000000  # user mount net ipc uts pid
NEW_MOUNTS = 0x00020000
MNT_DETACH = 2
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
RELATIME, NOATIME, NODIRATIME = 1 << 21, 1024, 2048
KEPT_FLAGS = {2: NOSUID, 4: NODEV, 8: NOEXEC, 1024: NOATIME, 2048: NODIRATIME, 4096: RELATIME}  # statvfs: mount
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
CPU_LIMIT = 3600  # seconds for all inputs of a program that stays; the worker keeps that of each

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


def fresh_tmp(size: int, is_first: bool) -> None:
    """An empty /tmp for the next run, and the way there; only where the last one left something, for it takes a while."""
    if not is_first:
        os.chdir("/")
        call("umount2", b"/tmp", MNT_DETACH)
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV | NOEXEC, f"size={size},nr_inodes=256,mode=1777")
    os.chdir("/tmp")


def confine(run: dict[str, Any], rules: bytes) -> None:
    """The calling process gives up whatever a program does not need.

    Args:
        run: its limits.
        rules: the filter of system calls; unused without isolation.
    """
    lower(resource.RLIMIT_CPU, CPU_LIMIT if run["stays"] else int(run["seconds"]) + 1)
    lower(resource.RLIMIT_AS, run["memory"])
    lower(resource.RLIMIT_FSIZE, run["disk"])
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_NOFILE, 64)
    lower(resource.RLIMIT_STACK, min(run["memory"], 256 << 20))
    if run["isolated"]:  # elsewhere all processes of the user would count
        lower(resource.RLIMIT_NPROC, THREADS)
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
    program = ctypes.create_string_buffer(rules, len(rules))
    header = struct.pack("@HP", len(rules) // 8, ctypes.addressof(program))
    call("prctl", PR_SET_SECCOMP, 2, ctypes.c_char_p(header), 0, 0)


def lower(limit: int, value: int) -> None:
    """Set a limit of this process for good."""
    hard = resource.getrlimit(limit)[1]
    lowered = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (lowered, lowered))
