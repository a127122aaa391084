"""Hostile programs, one technique each: every one says ESCAPED when its technique worked and "contained" when not.

None of them harms a machine on which it works: sizes are bounded, signals are probes, files are canaries. Words between
@ signs are filled in by `test_attacks.py`: the port and names of its sockets, its canary folder, its process, its secrets.
"""

# ruff: noqa: E501 - a line is an attempt; broken ones are harder to compare
from dataclasses import dataclass

PRELUDE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
ARM = os.uname().machine == "aarch64"
escaped = 0

def attempt(name, action):
    global escaped
    try:
        evidence = action()
    except (Exception, SystemExit):
        return
    if evidence:
        escaped += 1
        for stream in (sys.stdout, sys.stderr):  # the first is lost where the program does not end well
            print("ESCAPED", name, repr(evidence)[:100], file=stream, flush=True)

def call(function, *arguments):
    if function(*arguments) == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return "worked"

def syscall(x86, arm, *arguments):
    return call(libc.syscall, arm if ARM else x86, *arguments)
"""
VERDICT = """
if not escaped:
    print("contained")
"""
SEARCH = """
def found(data, secret):
    start = data.find(secret[0])
    while start >= 0:
        after = start + len(secret[0])
        if data[after : after + len(secret[1])] == secret[1]:
            return True
        start = data.find(secret[0], start + 1)
    return False

def memory():
    # pages of this process that can be read, of all heaps; a write from an unmapped page fails, it does not crash
    import gc
    reader, writer = os.pipe()
    libc.sbrk.restype = ctypes.c_void_p
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    libc.write.restype = ctypes.c_ssize_t
    near = {(id(item) >> 20) + step for item in [*gc.get_objects(), *sys.modules] for step in range(-3, 4)}
    near |= {(libc.sbrk(0) >> 20) - step for step in range(24)}
    near |= {(ctypes.cast(libc.environ, ctypes.c_void_p).value or 0) >> 20}
    for mebibyte in sorted(near):
        data = b""
        for page in range(mebibyte << 20, (mebibyte + 1) << 20, 4096):
            if libc.write(writer, page, 4096) == 4096:
                data += os.read(reader, 4096)
        yield data
"""


@dataclass(frozen=True)
class Attack:
    """One technique, and how a sandbox that holds answers it."""

    name: str
    program: str
    statuses: tuple[str, ...] = ("ok",)
    stdout: str | None = "contained\n"  # None: anything but ESCAPED
    stdin: str = ""
    seconds: float = 10.0
    before: str = ""  # a program that the same worker runs before


def tries(name: str, *lines: str, setup: str = "", before: str = "", seconds: float = 10.0) -> Attack:
    """An attack that makes several attempts: each line is an expression, true when it worked."""
    attempts = "\n".join(f"attempt({line!r}, lambda: {line})" for line in lines)
    return Attack(name, f"{PRELUDE}\n{setup}\n{attempts}\n{VERDICT}", before=before, seconds=seconds)


def hangs(name: str, program: str) -> Attack:
    """An attack that tries not to end."""
    return Attack(name, PRELUDE + program, ("timeout",), stdout=None, seconds=0.3)


def refused(name: str, program: str, *statuses: str) -> Attack:
    """An attack whose program ends early by an error or a crash."""
    return Attack(name, program, statuses or ("runtime_error",), stdout=None)


NETWORK = [
    tries("tcp", 'socket.create_connection(("127.0.0.1", @PORT@), 1)', setup="import socket"),
    tries("tcp6", 'socket.socket(socket.AF_INET6).connect_ex(("::1", @PORT@)) == 0', setup="import socket"),
    tries("tcp-listen", 'socket.create_server(("127.0.0.1", 0))', setup="import socket"),
    tries("udp", 'socket.socket(type=socket.SOCK_DGRAM).sendto(b"hello", ("127.0.0.1", @PORT@))', setup="import socket"),
    tries("unix-abstract", 'socket.socket(socket.AF_UNIX).connect_ex("\\0@ABSTRACT@") == 0', setup="import socket"),
    tries("unix-path", 'socket.socket(socket.AF_UNIX).connect_ex("@CANARY@/socket") == 0', setup="import socket"),
    tries("socketpair", "socket.socketpair()", setup="import socket"),
    tries("netlink", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)", setup="import socket"),
    tries(
        "raw", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", "socket.socket(17, socket.SOCK_RAW)", setup="import socket"
    ),
    tries("vsock", "socket.socket(40, socket.SOCK_STREAM)", setup="import socket"),
    tries(
        "libc-socket",
        "call(libc.socket, 2, 1, 0)",
        "syscall(41, 198, 2, 1, 0)",
        "syscall(53, 199, 1, 1, 0, (ctypes.c_int * 2)())",
    ),
    tries("dns", 'socket.getaddrinfo("localhost", 80)', 'socket.gethostbyname("localhost")', setup="import socket"),
    tries("http", 'urllib.request.urlopen("http://127.0.0.1:@PORT@/", timeout=1)', setup="import urllib.request"),
    tries("event-loop", 'asyncio.run(asyncio.open_connection("127.0.0.1", @PORT@))', setup="import asyncio"),
]
FILES = [
    tries(
        "host-files",
        *(
            f"open({path!r}, 'rb').read(1)"
            for path in ("/etc/passwd", "/etc/hostname", "@CANARY@/canary", "@REPOSITORY@/pyproject.toml")
        ),
        *(
            f"os.listdir({path!r})"
            for path in ("/etc", "/root", "/home", "/var", "/run", "/sys", "@CANARY@", "@REPOSITORY@", "/usr/bin")
        ),
        'os.path.expanduser("~") != "~" and os.listdir(os.path.expanduser("~"))',
    ),
    tries("folders-of-the-root", 'set(os.listdir("/")) - {"dev", "lib", "lib64", "opt", "root", "tmp", "usr"}'),
    tries(
        "proc",
        *(f"os.listdir({path!r})" for path in ("/proc", "/proc/self", "/proc/self/fd", "/proc/self/root", "/proc/1/root")),
        *(
            f"open({path!r}, 'rb').read(1)"
            for path in ("/proc/self/environ", "/proc/1/environ", "/proc/self/mem", "/proc/self/maps")
        ),
        'open("/proc/1/root/etc/passwd").read()',
        'call(libc.mount, b"proc", b"/tmp", b"proc", 0, None)',
    ),
    tries("parent-paths", 'open("../" * 40 + "etc/passwd").read()', 'open("../" * 40 + "@CANARY@/canary").read()'),
    tries(
        "symlinks",
        *(f"link({path!r}, 'canary')" for path in ("@CANARY@", "../" * 40 + "@CANARY@", "/tmp/../@CANARY@")),
        'os.listdir(os.readlink("/lib64") + "/../../etc")',
        setup="""
def link(target, name):
    place = f"/tmp/{time.monotonic_ns()}"
    os.symlink(target, place)
    return open(f"{place}/{name}").read()
""",
    ),
    tries(
        "hard-link", 'os.link(os.__file__, "/tmp/linked") or "linked"', 'os.link("@CANARY@/canary", "/tmp/canary") or "linked"'
    ),
    tries(
        "folder-handles",
        'os.open("etc/passwd", os.O_RDONLY, dir_fd=os.open("/", os.O_PATH | os.O_DIRECTORY))',
        'os.open("@CANARY@/canary".lstrip("/"), os.O_RDONLY, dir_fd=os.open("/..", os.O_PATH))',
        'os.fchdir(os.open("/", os.O_PATH)) or open("etc/passwd")',
        "[os.listdir(f) for f in range(3, 64) if f not in opened(f)]",
        setup="""
def opened(handle):
    try:
        os.fstat(handle)
    except OSError:
        return [handle]
    return []
""",
    ),
    tries(
        "chroot-twice",
        'os.mkdir("/tmp/jail") or os.chroot("/tmp/jail") or "changed"',
        'call(libc.chroot, b"/tmp")',
        'syscall(155, 41, b"/tmp", b"/tmp")',
    ),
    tries(
        "file-by-number",
        "syscall(303, 264, -100, b'/', (ctypes.c_uint32 * 40)(128), ctypes.byref(ctypes.c_int()), 0)",
        "syscall(304, 265, os.open('/tmp', os.O_RDONLY), (ctypes.c_uint32 * 4)(8, 1, 2, 0), 0)",
    ),
    tries(
        "devices",
        *(
            f"os.open('/dev/{name}', os.O_RDONLY)"
            for name in ("mem", "kmem", "sda", "vda", "nvme0n1", "kvm", "fuse", "tty", "ptmx", "kmsg")
        ),
        'set(os.listdir("/dev")) - {"null", "zero", "full", "random", "urandom"}',
    ),
    tries("make-device", 'os.mknod("/tmp/null", 0o20666, os.makedev(1, 3)) or "made"', 'os.mkfifo("/tmp/pipe") or "made"'),
    tries(
        "write-outside",
        *(f"write({path!r})" for path in ("/escaped", "/dev/escaped", "/usr/escaped", "/usr/lib/escaped", "@CANARY@/escaped")),
        "write(os.path.join(os.path.dirname(os.__file__), 'escaped.py'))",
        "open(os.__file__, 'a')",
        "os.truncate(os.__file__, os.path.getsize(os.__file__)) or 'truncated'",
        "os.rename(os.__file__, os.__file__ + '.old') or 'renamed'",
        "os.mkdir('/escaped') or 'made'",
        "os.unlink('/dev/null') or 'removed'",
        setup="def write(path): return open(path, 'w').write('escaped')",
    ),
    tries(
        "file-attributes",
        "os.chmod('/dev/null', 0o600) or 'changed'",
        "os.chown('/dev/null', os.getuid(), os.getgid()) or 'changed'",
        "os.setxattr('/dev/null', 'user.x', b'1') or 'changed'",
        "os.utime('/dev/null', (0, 0)) or 'changed'",
    ),
]
SECRETS = [
    tries(
        "environment",
        'set(os.environ) - {"PYTHONHASHSEED", "PYTHONUTF8", "LC_CTYPE"}',
        "any(found(value, SECRET) for value in os.environ.values())",
        setup=f'{SEARCH}\nSECRET = ("@ENVIRONMENT_A@", "@ENVIRONMENT_B@")',
    ),
    tries(
        "objects-and-frames",
        "any(found(repr(item), SECRET) for item in values())",
        setup=SEARCH
        + """
import gc, inspect
SECRET = ("@EXPECTED_A@", "@EXPECTED_B@")
def values():
    frame = inspect.currentframe()
    while frame:
        yield from list(frame.f_locals.values())
        yield from list(frame.f_globals.values())
        frame = frame.f_back
    for module in list(sys.modules.values()):
        yield from list(vars(module).values())
    yield from (item for item in gc.get_objects() if isinstance(item, (str, bytes, list, tuple, dict)) and len(item) < 1000)
""",
    ),
    tries(
        "memory-for-what-is-expected",
        "any(found(data, EXPECTED) or found(data, ENVIRONMENT) for data in memory())",
        setup=f'{SEARCH}\nEXPECTED = (b"@EXPECTED_A@", b"@EXPECTED_B@")\nENVIRONMENT = (b"@ENVIRONMENT_A@", b"@ENVIRONMENT_B@")',
    ),
    tries(
        "memory-for-an-earlier-output",
        "any(found(data, SECRET) for data in memory())",
        setup=f'{SEARCH}\nSECRET = (b"@EARLIER_A@", b"@EARLIER_B@")',
        before='print("@EARLIER_A@" + "@EARLIER_B@")\nprint("@EARLIER_A@" + "@EARLIER_B@" * 300)',
    ),
    tries(
        "memory-for-an-earlier-program",
        "any(found(data, SECRET) for data in memory())",
        setup=f'{SEARCH}\nSECRET = (b"@PROGRAM_A@", b"@PROGRAM_B@")',
        before="text = '@PROGRAM_A@@PROGRAM_B@'\n" + "#" * 5000,
    ),
    tries(
        "memory-of-the-parent",
        "call(libc.process_vm_readv, os.getppid(), here, 1, there, 1, 0)",
        "call(libc.process_vm_readv, 1, here, 1, there, 1, 0)",
        "call(libc.process_vm_writev, os.getppid(), here, 1, there, 1, 0)",
        setup="""
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
here = ctypes.byref(Part(ctypes.addressof(buffer), 8))
there = ctypes.byref(Part(id(os), 8))
""",
    ),
    tries(
        "ptrace",
        "call(libc.ptrace, 0, 0, 0, 0)",
        "call(libc.ptrace, 16, os.getppid(), 0, 0)",
        "call(libc.ptrace, 0x4206, 1, 0, 0)",
    ),
    tries(
        "handles-of-others",
        "syscall(434, 434, os.getppid(), 0)",
        "syscall(438, 438, 3, 1, 0)",
        "syscall(312, 272, 1, os.getpid(), 0, 0, 0)",
    ),
    tries("process-number", "os.getppid() == @TRAINER@", "os.getpid() > 100000", "os.getuid() in (0, @USER@) and @USER@ != 1000"),
]
PROCESSES = [
    tries("fork", "os.fork() + 1", "os.forkpty()"),
    tries("vfork", "call(libc.vfork) and libc._exit(0)"),
    tries("clone", "syscall(56, 220, 17, 0, 0, 0, 0)", "syscall(56, 220, 17 | 0x100, 0, 0, 0, 0)"),
    tries("clone3", "syscall(435, 435, (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17), 88)"),
    tries(
        "exec",
        "os.execv(LOADER, [LOADER, '--version'])",
        "os.posix_spawn(LOADER, [LOADER, '--version'], {})",
        "subprocess.run([LOADER, '--version'])",
        "subprocess.run('echo', shell=True)",
        "os.system('true') == 0",
        "os.popen('echo here').read()",
        setup="import glob, subprocess\nLOADER = [*glob.glob('/lib*/ld-linux*'), *glob.glob('/usr/lib*/*/ld-linux*'), sys.executable][0]",
    ),
    tries(
        "exec-memory",
        "os.memfd_create('program')",
        "syscall(319, 279, b'program', 0)",
        "syscall(322, 281, os.open(os.__file__, os.O_RDONLY), b'', 0, 0, 0x1000)",
    ),
    tries(
        "exec-from-tmp",
        "os.execv('/tmp/program', ['program'])",
        "ctypes.CDLL('/tmp/library.so')",
        setup="""
import _ctypes, shutil
shutil.copyfile(getattr(_ctypes, "__file__", os.__file__), "/tmp/library.so")
shutil.copyfile("/tmp/library.so", "/tmp/program")
""",
    ),
    tries(
        "multiprocessing",
        "multiprocessing.get_context('fork').Process(target=print, args=('ESCAPED',)).start() or 'started'",
        "multiprocessing.get_context('spawn').Process(target=print, args=('ESCAPED',)).start() or 'started'",
        "list(concurrent.futures.ProcessPoolExecutor(1).map(abs, [1]))",
        setup="import concurrent.futures, multiprocessing",
    ),
    tries(
        "thread-bomb",
        "start() > 40",
        setup="""
import threading
def start():
    end, number = threading.Event(), 0
    try:
        for number in range(500):
            threading.Thread(target=end.wait, daemon=True).start()
    except RuntimeError:
        pass
    end.set()
    return number
""",
    ),
]
MEMORY = [
    tries("one-big-block", "bytearray(1 << 30)", "'a' * 10**12"),
    tries("mapping", "mmap.mmap(-1, 1 << 30)", "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 30)", setup="import mmap"),
    tries(
        "many-blocks",
        "sum(len(libc_block()) for _ in range(1000)) > 600 << 20",
        setup="kept = []\ndef libc_block(): kept.append(bytearray(1 << 20)); return kept[-1]",
    ),
    Attack("list-growth", "a = [0]\nwhile len(a) < 1 << 30: a += a\nprint('ESCAPED')", ("memory",), stdout=""),
    Attack("dict-growth", "a = {}\nfor i in range(10**8): a[i] = str(i)\nprint('ESCAPED')", ("memory",), stdout=""),
    Attack("decompression", "import zlib\nd = zlib.compressobj()\nc = b''.join(d.compress(bytes(1 << 20)) for _ in range(200)) + d.flush()\n"
           "zlib.decompress(c)\nprint('ESCAPED')", ("memory",), stdout=""),
    hangs("big-number", "10**10**8\n"),
    hangs("regular-expression", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')\n"),
    hangs("endless-loop", "while True: pass\n"),
    hangs("long-sleep", "time.sleep(3600)\n"),
]  # fmt: skip
DISK = [
    tries(
        "fill-the-disk",
        "fill() > 16 << 20",
        setup="""
def fill():
    total = 0
    try:
        for number in range(64):
            with open(f"/tmp/{number}", "wb", buffering=0) as file:
                total += file.write(bytes(1 << 20))
    except OSError:
        pass
    return total
""",
    ),
    tries(
        "many-files",
        "make() > 256",
        setup="""
def make():
    number = 0
    try:
        for number in range(2000):
            os.close(os.open(f"/tmp/{number}", os.O_CREAT | os.O_WRONLY))
    except OSError:
        pass
    return number
""",
    ),
    tries(
        "many-folders",
        "make() > 256",
        setup="""
def make():
    number = 0
    try:
        for number in range(2000):
            os.mkdir("folder")
            os.chdir("folder")
    except OSError:
        pass
    return number
""",
    ),
    tries(
        "sparse-file",
        "os.truncate(os.open('/tmp/sparse', os.O_CREAT | os.O_RDWR), 1 << 40) or 'made'",
        "os.posix_fallocate(os.open('/tmp/full', os.O_CREAT | os.O_RDWR), 0, 1 << 28) or 'made'",
    ),
    tries("many-open-files", "len([os.open('/dev/null', os.O_RDONLY) for _ in range(1000)])"),
    tries("many-pipes", "len([os.pipe() for _ in range(1000)])"),
]
OUTPUT = [
    Attack("flood-stdout", "for _ in range(64): print('x' * (1 << 20))", ("output_limit",), stdout=None),
    Attack("flood-stderr", "import os\nfor _ in range(64): os.write(2, b'x' * (1 << 20))", ("output_limit",), stdout=""),
    Attack(
        "flood-both",
        "import os\nfor _ in range(1 << 14):\n    os.write(1, b'o' * 4096)\n    os.write(2, b'e' * 4096)",
        ("output_limit",),
        stdout=None,
    ),
    Attack("flood-and-exit", "import os\nos.write(1, b'x' * 60000)\n" * 5 + "os._exit(0)", ("output_limit",), stdout=None),
    Attack("largest-output", "print('y' * ((256 << 10) - 1))", stdout="y" * ((256 << 10) - 1) + "\n"),
    Attack("one-byte-more", "print('y' * (256 << 10))", ("output_limit",), stdout=None),
    Attack(
        "bytes-that-are-no-text",
        r"import os; os.write(1, b'a\xff\xfe\x00b\xed\xa0\x80')",
        stdout="a\ufffd\ufffd\x00b\ufffd\ufffd\ufffd",
    ),
    Attack("lone-surrogates", r"print('\udc80\udcff')", stdout="\ufffd\ufffd\n"),
]
SIGNALS = [
    tries("kill", "os.kill(1, 0) or 'may'", "os.kill(-1, 0) or 'may'", "os.kill(0, 0) or 'may'", "os.killpg(0, 0) or 'may'"),
    tries("kill-the-parent", "os.kill(os.getppid(), signal.SIGUSR1) or 'sent'", setup="import signal"),
    tries("kill-the-trainer", "os.kill(@TRAINER@, signal.SIGUSR1) or 'sent'", setup="import signal"),
    tries(
        "other-ways-to-signal",
        "syscall(234, 131, 1, 1, 0)",
        "syscall(200, 130, 1, 0)",
        "syscall(129, 138, 1, 10, ctypes.create_string_buffer(128))",
        "syscall(424, 424, 0, 0, 0, 0)",
        "call(libc.sigqueue, os.getppid(), 10, 0)",
    ),
    tries("stop-itself", "os.kill(os.getpid(), 19) or 'stopped'", "signal.raise_signal(19) or 'stopped'", setup="import signal"),
    *(
        tries(
            f"signal-by-file-{name}",
            f"fcntl.fcntl(reader, 8, {owner})",
            f"fcntl.fcntl(reader, 10, {number}) == 0 and fcntl.fcntl(reader, 11) == {number}",
            "syscall(72, 25, reader, 15, (ctypes.c_int * 2)(1, 1))",
            "fcntl.fcntl(0, 1026, 1) == 0",
            "bool(fire()) and 0",
            setup="""
import fcntl
reader, writer = os.pipe()
def fire():
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK | 0o20000)
    for _ in range(20):
        os.write(writer, b"x")
        os.read(reader, 1)
        time.sleep(0.001)
    return 1
""",
        )
        for name, owner, number in (("interrupt", 1, 2), ("kill", "os.getppid()", 9))
    ),
]
PRIVILEGES = [
    tries("limits-of-others", "resource.prlimit(1, resource.RLIMIT_NOFILE)", "resource.prlimit(os.getppid(), 7, (9, 9))", setup="import resource"),
    tries(
        "raise-own-limits",
        *(f"resource.setrlimit(resource.{name}, (1 << 40, 1 << 40)) or 'raised'" for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NOFILE", "RLIMIT_NPROC")),
        "[n for n in ('AS', 'CPU', 'FSIZE', 'NOFILE', 'NPROC') if resource.getrlimit(getattr(resource, 'RLIMIT_' + n))[1] == -1]",
        setup="import resource",
    ),
    tries("change-user", "os.setuid(0) or 1", "os.setgid(0) or 1", "os.setgroups([0]) or 1", "os.setresuid(0, 0, 0) or 1", "os.setreuid(0, 0) or 1"),
    tries("capabilities", "call(libc.capset, (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6))",
          "call(libc.prctl, 47, 2, 21, 0, 0)", "call(libc.prctl, 4, 1, 0, 0, 0)"),
    tries("new-namespace", *(f"call(libc.unshare, {flag:#x})" for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x2000000)),
          "call(libc.setns, 0, 0)", "syscall(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
          "syscall(56, 220, 0x10000 | 0x800 | 0x100 | 0x10000000, 0, 0, 0, 0)"),
    tries("mount", "call(libc.mount, b'none', b'/tmp', b'tmpfs', 0, None)", "call(libc.mount, None, b'/', None, 32 | 4096, None)",
          "call(libc.umount2, b'/tmp', 2)", "call(libc.umount2, b'/dev/null', 2)"),
    tries("mount-anew", "syscall(430, 430, b'tmpfs', 0)", "syscall(428, 428, -100, b'/', 1)", "syscall(429, 429, -100, b'/', -100, b'/tmp', 0)",
          "syscall(442, 442, -100, b'/', 0, (ctypes.c_uint64 * 4)(0, 1, 0, 0), 32)"),
    tries("keys", "syscall(250, 219, 0, -3, 0)", "syscall(248, 217, b'user', b'name', b'value', 5, -3)", "syscall(249, 218, b'user', b'name', 0, -3)"),
    tries("bpf", "syscall(321, 280, 0, (ctypes.c_uint32 * 12)(2, 4, 4, 1), 48)"),
    tries("performance-events", "syscall(298, 241, (ctypes.c_uint32 * 30)(1, 120), 0, -1, -1, 0)"),
    tries("page-fault-handler", "syscall(323, 282, 1)", "syscall(323, 282, 0)"),
    tries("io-uring", "syscall(425, 425, 4, (ctypes.c_uint32 * 30)())"),
    tries("kernel-log", "call(libc.klogctl, 10, None, 0)"),
    tries("kernel-module", "syscall(175, 105, 0, 0, b'')", "syscall(313, 273, -1, b'', 0)"),
    tries("another-filter", "call(libc.prctl, 22, 2, 0, 0, 0)", "syscall(317, 277, 2, 0, (ctypes.c_uint32 * 1)(0x7FFF0000))"),
    tries("personality", "call(libc.personality, 0x0040000)"),
    tries("terminal", "fcntl.ioctl(0, 0x5412, b'x') == 0 or 1", "os.ttyname(0)", "os.openpty()", "os.isatty(1)", setup="import fcntl"),
    tries("priority", "os.nice(-1) or 1", "os.setpriority(0, 0, -20) or 1", "os.sched_setscheduler(0, 1, os.sched_param(1)) or 1",
          "os.sched_setaffinity(1, {0}) or 1"),
    tries("host-name", "call(libc.sethostname, b'escaped', 7)", "os.uname().nodename != 'sandbox'"),
    tries("x32-numbers", *(f"syscall({number:#x} | 0x40000000, {number:#x} | 0x40000000)" for number in (39, 57, 41, 59, 101))),
    Attack(
        "32-bit-entry",
        f"{PRELUDE}\nimport mmap\nif not ARM:\n    code = mmap.mmap(-1, 4096, prot=7)\n"
        r"    code.write(b'\xb8\x14\x00\x00\x00\xcd\x80\xc3')" + "\n"
        "    print('ESCAPED', ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())\n",
        ("ok", "runtime_error"),
        stdout="",
    ),
]  # fmt: skip
SHARED = [
    tries("shared-memory", "call(libc.shmget, 1234, 4096, 0o1666)", "os.open('/dev/shm/x', os.O_CREAT | os.O_RDWR)",
          "multiprocessing.shared_memory.SharedMemory(create=True, size=4096)", setup="import multiprocessing.shared_memory"),
    tries("semaphores", "multiprocessing.Semaphore(1)", "call(libc.semget, 1234, 1, 0o1666)", setup="import multiprocessing"),
    tries("message-queues", "call(libc.msgget, 1234, 0o1666)", "syscall(240, 180, b'escaped', 0o102, 0o666, 0)"),
    tries("timers", "syscall(222, 107, 0, 0, ctypes.byref(ctypes.c_int()))", "syscall(283, 85, 0, 0)"),
    tries("watching-files", "syscall(294, 26, 0)", "syscall(300, 262, 0, 0)"),
    tries("locks-on-host-files", "fcntl.flock(os.open(os.__file__, os.O_RDONLY), 2) or 1",
          "fcntl.lockf(os.open(os.__file__, os.O_RDWR), 2) or 1", "fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), 1024, 0) == 0",
          "fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), 5, bytes(32))", "fcntl.lockf(os.open('/tmp/lock', os.O_CREAT | os.O_RDWR), 2) or 1",
          setup="import fcntl"),
    tries(
        "left-for-the-next-run",
        "os.listdir('/tmp')", "os.path.exists('/dev/shm/left')", "os.getcwd() != '/tmp'", "os.umask(0o22) != 0o22",
        "signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0)", "signal.getsignal(10) != signal.SIG_DFL", "'left' in os.environ",
        "threading.active_count() > 1", "os.left", "__builtins__.left", "sys.getrecursionlimit() != 1000", "'/tmp' in sys.path",
        setup="import signal, threading",
        before="import os, signal, sys, threading, time\nopen('/tmp/left', 'w').write('left')\nos.mkdir('/tmp/folder')\nos.chdir('/tmp/folder')\n"
        "os.umask(0)\nsignal.signal(10, print)\nsignal.setitimer(signal.ITIMER_REAL, 5)\nos.environ['left'] = '1'\nos.left = True\n"
        "__builtins__.left = True\nsys.setrecursionlimit(5000)\nsys.path.insert(0, '/tmp')\n"
        "threading.Thread(target=time.sleep, args=(5,), daemon=True).start()",
    ),
    tries("random-numbers-of-the-next-run", "random.random() != 0.8444218515250481", setup="import random", before="import random\nrandom.seed(5)"),
]  # fmt: skip
ENDINGS = [
    hangs("catches-everything", "while True:\n    try:\n        while True: sys.exit(0)\n    except BaseException: pass\n"),
    hangs("ignores-signals", "import signal\nfor number in range(1, 32):\n    attempt('', lambda: signal.signal(number, signal.SIG_IGN) and 0)\nwhile True: pass\n"),
    hangs("closes-its-output", "for handle in (0, 1, 2): os.close(handle)\nwhile True: pass\n"),
    hangs("thread-that-stays", "import threading\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"),
    hangs("exit-function-that-stays", "import atexit\natexit.register(time.sleep, 60)\n"),
    hangs("main-thread-gone", "import threading\nthreading.Thread(target=time.sleep, args=(60,)).start()\nsyscall(60, 93, 0)\n"),
    hangs("error-that-takes-long", "class Slow(Exception):\n    def __str__(self):\n        while True: pass\nraise Slow()\n"),
    Attack("daemon-thread", "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('contained')"),
    Attack("leaves-at-once", "import os\nprint('42', flush=True)\nos._exit(0)", stdout="42\n"),
    Attack("right-answer-then-error", "print('42')\nraise ValueError", ("runtime_error",), stdout=""),
    refused("deep-recursion", "import sys\nsys.setrecursionlimit(10**9)\nf = lambda n: f(n + 1)\nf(0)", "runtime_error", "memory"),
    refused("deep-c-recursion", "import sys\nsys.setrecursionlimit(10**9)\na = ()\nfor _ in range(10**6): a = (a,)\nhash(a)",
            "runtime_error", "memory", "ok"),
    refused("crash", "import ctypes\nctypes.string_at(1)"),
    refused("abort", "import os\nos.abort()"),
    Attack(
        "forged-reply",
        PRELUDE + "import json, struct\nreply = json.dumps({'status': 'ok', 'stdout': '42', 'stderr': '', 'seconds': 0.0}).encode()\n"
        "for handle in [0, 2, *range(3, 1024)]:\n    attempt(handle, lambda: os.write(handle, struct.pack('!I', len(reply)) + reply) and handle > 2)\n"
        "print('wrong')",
        stdout="wrong\n",
    ),
    tries("inherited-handles", "[handle for handle in range(3, 1024) if is_open(handle)]",
          setup="def is_open(handle):\n    try: return os.fstat(handle)\n    except OSError: return None"),
    Attack(
        "patched-comparison",
        "import builtins, io, json, sys\n"
        "class Equal(str):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = str.__hash__\n"
        "builtins.str = Equal\njson.dumps = lambda *_, **__: '{}'\nbuiltins.bytes = None\nwrite = sys.stdout.write\n"
        "sys.stdout.write = lambda text: write(Equal(text))\nprint(Equal('wrong'))",
        stdout="wrong\n",
    ),
    Attack(
        "patched-worker",
        "import sys\nmain = sys.modules['__main__']\nmain.verdict = lambda *_: 'ok'\nmain.serve = lambda *_: {'status': 'ok', 'stdout': '42'}\n"
        "main.write = main.read = main.Watch = None\nmain.FILTER = b''\nprint('wrong')\nraise ValueError",
        ("runtime_error",),
        stdout="",
    ),
    Attack(
        "patched-exit",
        "import os\nos._exit = lambda code, leave=os._exit: leave(0)\nprint('wrong')\nraise ValueError",
        ("ok", "runtime_error"),
        stdout="wrong\n",
    ),
]  # fmt: skip
TEXTS = [
    refused("syntax-error", "print('ESCAPED'"),
    refused("null-bytes", "print('ESCAPED')\0"),
    refused("lone-surrogate-in-the-program", "print('\udc80')", "ok", "runtime_error"),
    Attack("large-program", ("x = 1  #" + " " * 91 + "\n") * 10_000 + "print('contained')"),
    refused("nested-brackets", "(" * 100_000 + ")" * 100_000, "runtime_error", "memory"),
    refused("nested-signs", "-" * 1_000_000 + "1", "runtime_error", "memory", "ok"),
    refused("nested-attributes", "x = 1\nx" + ".a" * 100_000, "runtime_error", "memory"),
    refused("constant-that-grows", "x = ((1 << 20000) ** 2000) ** 2000", "runtime_error", "memory", "timeout"),
    Attack("huge-input", "print(len(input()))", stdin="z" * 2_000_000, stdout="2000000\n"),
    Attack("input-never-read", "print('contained')", stdin="z" * 2_000_000),
    Attack(
        "input-that-looks-like-a-message",
        "print(input())",
        stdin='\x00\x00\x00\x10{"program": ""}\n',
        stdout='\x00\x00\x00\x10{"program": ""}\n',
    ),
    Attack("no-program", "", stdout=""),
]
ATTACKS = [*NETWORK, *FILES, *SECRETS, *PROCESSES, *MEMORY, *DISK, *OUTPUT, *SIGNALS, *PRIVILEGES, *SHARED, *ENDINGS, *TEXTS]
