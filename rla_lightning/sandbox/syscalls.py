"""The system calls that a confined Python program may make, as a seccomp filter in the kernel's BPF format.

Everything that is not listed fails with EPERM: sockets, other processes, signals, mounts, ptrace, keys, new kernel interfaces.
"""

from __future__ import annotations

import struct

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH value, column of the table
ALLOWED = {  # name: number on x86_64, on aarch64; None where there is none (linux/arch/*/unistd.h)
    # files, inside a jail that is read-only but for /tmp
    "read": (0, 63), "write": (1, 64), "open": (2, None), "openat": (257, 56), "close": (3, 57), "lseek": (8, 62),
    "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "getdents64": (217, 61),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe2": (293, 59), "fsync": (74, 82),
    "truncate": (76, 45), "ftruncate": (77, 46), "getcwd": (79, 17), "chdir": (80, 49), "umask": (95, 166),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "symlink": (88, None), "symlinkat": (266, 36),
    "readlink": (89, None), "readlinkat": (267, 78),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216), "madvise": (28, 233),
    # waiting and time
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "times": (100, 153), "setitimer": (38, 103), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    # about oneself
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "getrusage": (98, 165), "getrlimit": (97, 163),
    "uname": (63, 160), "sysinfo": (99, 179), "getrandom": (318, 278),
    # threads, own signal handlers, the end
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "set_tid_address": (218, 96), "membarrier": (324, 283),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
CLONE, CLONE3, IOCTL, PRLIMIT64, FCNTL = (56, 220), (435, 435), (16, 29), (302, 261), (72, 25)
# duplicates and flags; not F_SETOWN and F_SETSIG, with which the kernel sends any signal to another process, nor locks, which
# programs in different namespaces could see of each other
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)

CLONE_THREAD = 0x10000
EPERM, ENOTTY, ENOSYS = 1, 25, 38
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JSET|K, BPF_RET|K
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = (
    0,
    4,
    16,
    24,
)  # in struct seccomp_data (little-endian low words)


def seccomp_filter(machine: str) -> bytes:
    """The filter as an array of `struct sock_filter`.

    Args:
        machine: as `platform.machine()` says it.

    Raises:
        ValueError: a machine without a table.
    """
    if machine not in ARCHITECTURES:
        raise ValueError(f"there is no table of system calls for {machine!r}, only for {', '.join(ARCHITECTURES)}")
    architecture, column = ARCHITECTURES[machine]
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
    ]
    for numbers in ALLOWED.values():
        number = numbers[column]
        if number is not None:
            program += [_instruction(_JUMP_EQUAL, number, 0, 1), _instruction(_RETURN, _ALLOW)]
    for numbers, code in ((CLONE3, ENOSYS), (IOCTL, ENOTTY)):  # the C library falls back to clone; nothing is a terminal
        program += [_instruction(_JUMP_EQUAL, numbers[column], 0, 1), _instruction(_RETURN, _ERRNO | code)]
    program += [  # new threads, but no new processes
        _instruction(_JUMP_EQUAL, CLONE[column], 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_JUMP_SET, CLONE_THREAD, 0, 1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _ERRNO | EPERM),
    ]
    left = len(FCNTL_COMMANDS)
    program += [_instruction(_JUMP_EQUAL, FCNTL[column], 0, left + 3), _instruction(_LOAD, _SECOND_ARGUMENT)]
    program += [_instruction(_JUMP_EQUAL, command, left - place, 0) for place, command in enumerate(FCNTL_COMMANDS)]
    program += [_instruction(_RETURN, _ERRNO | EPERM), _instruction(_RETURN, _ALLOW)]
    program += [  # limits of oneself (process 0), not of others
        _instruction(_JUMP_EQUAL, PRLIMIT64[column], 0, 3),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_JUMP_EQUAL, 0, 0, 1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _ERRNO | EPERM),
    ]
    return b"".join(program)


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
