"""The seccomp filter, run by a small interpreter of BPF."""

import re
import struct
from pathlib import Path

import pytest

from rla_lightning.sandbox.syscalls import ALLOWED, seccomp_filter

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOTTY, ENOSYS = 0x50001, 0x50019, 0x50026  # SECCOMP_RET_ERRNO with the error's number
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
THREAD_FLAGS = 0x3D0F00  # what the C library passes to clone for a new thread
# name: number on x86_64, on aarch64, as in the kernel's headers
REFUSED = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "socketpair": (53, 199), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "setuid": (105, 146), "setgid": (106, 144), "setgroups": (116, 159), "capset": (126, 91), "prctl": (157, 167),
    "seccomp": (317, 277), "personality": (135, 92), "keyctl": (250, 219), "add_key": (248, 217), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "memfd_create": (319, 279),
    "shmget": (29, 194), "mknodat": (259, 33), "linkat": (265, 37), "open_by_handle_at": (304, 265),
    "init_module": (175, 105), "reboot": (169, 142), "setpriority": (141, 140),
}  # fmt: skip
HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}


def answer(machine: str, number: int, arguments: tuple[int, ...] = (), audit: int | None = None) -> int:
    """What the filter says to a system call."""
    data = struct.pack("<iIQ6Q", number, AUDIT[machine] if audit is None else audit, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    program = list(struct.iter_unpack("=HBBI", seccomp_filter(machine)))
    place, accumulator = 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x15:
            place += if_true if accumulator == operand else if_false
        elif code == 0x45:
            place += if_true if accumulator & operand else if_false
        elif code == 0x06:
            return operand
        else:
            raise AssertionError(f"unknown instruction {code:#x}")


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def column(machine: str) -> int:
    return ("x86_64", "aarch64").index(machine)


def test_reading_and_writing_are_allowed() -> None:
    for number in (0, 1, 3, 257, 9, 202, 231):  # read write close openat mmap futex exit_group
        assert answer("x86_64", number) == ALLOW
    for number in (63, 64, 57, 56, 222, 98, 94):
        assert answer("aarch64", number) == ALLOW


@pytest.mark.parametrize("name", REFUSED)
def test_what_reaches_others_is_refused(machine: str, name: str) -> None:
    assert answer(machine, REFUSED[name][column(machine)]) == EPERM


def test_numbers_of_the_other_machine_mean_something_else() -> None:
    assert answer("aarch64", 41) == EPERM  # pivot_root; socket on x86_64
    assert answer("x86_64", 198) == EPERM  # lremovexattr; socket on aarch64
    assert answer("aarch64", 2) == EPERM  # io_submit; open on x86_64


def test_threads_but_no_processes(machine: str) -> None:
    clone = (56, 220)[column(machine)]
    assert answer(machine, clone, (THREAD_FLAGS,)) == ALLOW
    assert answer(machine, clone, (17,)) == EPERM  # SIGCHLD: fork
    assert answer(machine, clone, (0x4111,)) == EPERM  # CLONE_VFORK | CLONE_VM | SIGCHLD
    assert answer(machine, clone, (0x10000000,)) == EPERM  # a user namespace
    for flags in range(1100):  # small numbers are commands elsewhere in the filter
        assert answer(machine, clone, (flags, flags)) == EPERM
    assert answer(machine, 435, (0, 88)) == ENOSYS  # clone3 hides its flags; the C library then uses clone


def test_nothing_is_a_terminal(machine: str) -> None:
    for request in (0x5401, 0x5412, 0x5421):  # TCGETS TIOCSTI FIONBIO
        assert answer(machine, (16, 29)[column(machine)], (0, request)) == ENOTTY


def test_only_own_limits(machine: str) -> None:
    prlimit = (302, 261)[column(machine)]
    assert answer(machine, prlimit, (0, 7)) == ALLOW
    assert answer(machine, prlimit, (1, 7)) == EPERM
    assert answer(machine, prlimit, (4711, 7)) == EPERM


def test_files_send_no_signals(machine: str) -> None:
    fcntl = (72, 25)[column(machine)]
    for command in (0, 1, 2, 3, 4, 1030):  # F_DUPFD to F_SETFL, F_DUPFD_CLOEXEC
        assert answer(machine, fcntl, (5, command)) == ALLOW
    for command in (8, 10, 15, 302, 261, 1024, 1026, 1031, 1033):  # F_SETOWN F_SETSIG F_SETOWN_EX - - F_SETLEASE F_NOTIFY ...
        assert answer(machine, fcntl, (0, command)) == EPERM


def test_files_have_no_locks(machine: str) -> None:
    fcntl, flock = (72, 25)[column(machine)], (73, 32)[column(machine)]
    for command in (5, 6, 7, 36, 37, 38):  # F_GETLK F_SETLK F_SETLKW, and those of open file descriptions
        assert answer(machine, fcntl, (5, command)) == EPERM
    assert answer(machine, flock, (5, 2)) == EPERM


def test_other_entries_to_the_kernel() -> None:
    assert answer("x86_64", 20, audit=0x40000003) == KILL  # 32-bit getpid
    assert answer("aarch64", 20, audit=0x40000028) == KILL
    assert answer("x86_64", 0, audit=AUDIT["aarch64"]) == KILL
    for number in (0, 1, 39, 56, 57, 72, 302):
        assert answer("x86_64", number | 0x40000000, (THREAD_FLAGS,)) == EPERM  # x32


def test_everything_else_is_refused(machine: str) -> None:
    numbers = [pair[column(machine)] for pair in ALLOWED.values()]
    special = {(56, 220), (435, 435), (16, 29), (302, 261), (72, 25)}
    known = {number for number in numbers if number is not None} | {pair[column(machine)] for pair in special}
    for number in range(-1, 600):
        if number not in known:
            assert answer(machine, number) == EPERM, number
    assert len(known) == sum(number is not None for number in numbers) + 5, "a number stands twice in the table"


def test_a_machine_without_a_table() -> None:
    with pytest.raises(ValueError, match=r"'riscv64', only for x86_64, aarch64"):
        seccomp_filter("riscv64")


def test_numbers_are_those_of_the_kernel_headers(machine: str) -> None:
    file = next((Path(path) for path in HEADERS[machine] if Path(path).exists()), None)
    if file is None:
        pytest.skip(f"no kernel headers for {machine} here")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", file.read_text())
    numbers = {name: int(number) for name, number in found}
    numbers.setdefault("newfstatat", numbers.get("fstatat", -1))  # its name in the generic header
    place = column(machine)
    extra = {"clone": (56, 220), "clone3": (435, 435), "ioctl": (16, 29), "prlimit64": (302, 261), "fcntl": (72, 25)}
    for name, pair in {**ALLOWED, **REFUSED, **extra}.items():
        if pair[place] is not None:
            assert numbers.get(name) == pair[place], name
