"""Several inputs of a program in one process: the same results as with a process for each, and no gain from abusing it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rla_lightning.environments.coding.environment import OFFLINE
from rla_lightning.sandbox import Run, RunResult, Sandbox, SandboxSettings
from rla_lightning.sandbox.traces import leaves_no_traces

LONG = 20.0  # seconds that no program of these tests takes
SETTINGS = {"workers": 1, "memory_mb": 64, "output_kb": 16}
NUMBERS = ("1 2 3\n", "4\n", "", "0\n", "7 8\n", "x\n", "9\n")
PROGRAMS = {  # each reads what is there in its own way, and most would differ if something stayed from the input before
    "sum": "print(sum(map(int, input().split())))",
    "counts": "from collections import Counter\nseen = Counter()\nseen.update(input().split())\nprint(dict(seen))",
    "cache": "import functools\n@functools.lru_cache\ndef f(x): return x * x\nprint(f(int(input())), f.cache_info())",
    "default argument": "def f(x, xs=[]):\n    xs.append(x)\n    return xs\nprint(f(input()))",
    "class attribute": "class A: n = 0\nA.n += 1\nprint(A.n, input())",
    "does not read": "print(1)",
    "reads a part": "import sys\nprint(sys.stdin.read(1))",
    "reads lines": "import sys\nfor line in sys.stdin: print(line, end='|')",
    "reads bytes": "import sys\nprint(sys.stdin.buffer.read())",
    "stdin is replaced": "import io, sys\nsys.stdin = io.StringIO(input() + '!')\nprint(input())",
    "stdout is replaced": "import io, sys\nprint('a')\nsys.stdout = io.StringIO()\nprint(input())",
    "stdout is wrapped": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, write_through=False)\nprint(input())",
    "stdout is closed": "import sys\nprint(input())\nsys.stdout.close()",
    "no newline": "print(input(), end='')",
    "stderr": "import sys\nprint(input(), file=sys.stderr)\nprint('done')",
    "random": "import random\nprint(random.random(), random.sample(range(99), 3), input())",
    "recursion limit": "import sys\nprint(sys.getrecursionlimit())\nsys.setrecursionlimit(5000)\nprint(input())",
    "deep recursion": "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(900 + 50 * len(input())))",
    "exit codes": "import sys\nsys.exit(0 if input() == '4' else int(input()))",
    "exit with a text": "import sys\nline = input()\nprint(line)\nsys.exit(None if line == '4' else line)",
    "an error now and then": "n = int(input())\nprint(10 // n)",
    "keeps a lot": "xs = [input()] * 3_000_000\nprint(len(xs))",
    "keeps a lot in a circle": "xs = [bytearray(20 << 20)]\nxs.append(xs)\nprint(input())",
    "too much memory": "print(len(bytearray(int(input().split()[0]) * (30 << 20))))",
    "too much output": "print('x' * 5000 * int(input().split()[0]))",
    "syntax error": "print(",
    "a generator that is left": "def g():\n    yield input()\n    yield 2\nit = g()\nprint(next(it))",
    "a destructor": "class A:\n    def __del__(self): print('gone')\na = A()\nprint(input())",
    "a destructor in a circle": "class A:\n    def __del__(self): print('gone')\na = A()\na.me = a\nprint(input())",
    "a stream of its own": (
        "import sys\nclass T:\n    def __init__(self, out): self.out = out\n"
        "    def write(self, text): self.out.write(text.upper())\n    def flush(self): self.out.flush()\n"
        "sys.stdout = T(sys.stdout)\nprint('a', input())"
    ),
    "no stdout": "import sys\nline = input()\nsys.stdout = None",
    "a warning": "x = int(input())\nif x is 1: pass\nprint(x)",
    "exit": "print(input())\nexit()",
    "quit": "print(input())\nquit(0)",
    "fileinput": "import fileinput\nlines = fileinput.input()\nprint(next(lines))",
    "logging": (
        "import logging, sys\nlog = logging.getLogger()\nlog.addHandler(logging.StreamHandler(sys.stdout))\nlog.warning(input())"
    ),
    "closes the handle": "import io\nprint(io.FileIO(0).readall())",
    "stops by the clock": "import time\nn = 0\nwhile time.process_time() < 0.05: n = 1\nprint(n)",
    "long numbers": "import sys\nn = int(input())\ntry: print(len(str(10 ** (5000 + n))))\nexcept ValueError: print('long')\n"
    "sys.set_int_max_str_digits(0)",
    "wraps a function": "import heapq\nf = heapq.heappush\nheapq.heappush = lambda h, x: f(h, -x)\nh = []\n"
    "heapq.heappush(h, int(input()))\nprint(h)",
    "warnings": "import warnings\nwarnings.warn('a')\nwarnings.simplefilter('error')\nprint(input())",
    "a module's attribute": "import math\nmath.n = getattr(math, 'n', 0) + 1\nprint(math.n)",
    "a type's attribute": (
        "from fractions import Fraction\nFraction.n = 1 + (Fraction.n if 'n' in dir(Fraction) else 0)\nprint(Fraction.n)"
    ),
    "arguments": "import sys\nsys.argv.append('x')\nprint(sys.argv)",
    "annotations": "def f(x: Nothing): return x\nprint(f(input()))",
    "pickle": "import pickle\nclass A: pass\nprint(len(pickle.dumps(A())))",
    "names": "print(sorted(n for n in dir() if not n.startswith('__')))\nprint(__name__, input())\nfirst = 1",
}
HIDDEN = """import collections, operator
modules = operator.attrgetter("_sys.modules")(collections)
operator.attrgetter("exec")(modules["builtins"])(bytes.fromhex("{}").decode())"""


def hidden(program: str) -> str:
    """The program in a form whose process is used again, whatever it does."""
    text = HIDDEN.format(program.encode().hex())
    assert leaves_no_traces(text)
    assert not leaves_no_traces(program)
    return text


class Patient(Run):
    """More wall clock than its seconds of CPU would give it: a busy machine does not end it before they are used up."""

    longest = 9.0


@pytest.fixture(scope="module")
def sandboxes(needs_isolation: None) -> Iterator[tuple[Sandbox, Sandbox]]:
    """One that reuses processes, and one that does not."""
    both = tuple(Sandbox(SandboxSettings(**SETTINGS, reuse=reuse)) for reuse in (True, False))
    yield both
    for sandbox in both:
        sandbox.close()


def without_time(results: list[RunResult]) -> list[tuple[str, str, str]]:
    return [(result.status, result.stdout, re.sub(r"0x[0-9a-f]+", "0x", result.stderr)) for result in results]


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_results_are_those_of_a_process_per_input(program: str, sandboxes: tuple[Sandbox, Sandbox]) -> None:
    reused, separate = (sandbox.run([Run(program, NUMBERS, LONG)])[0] for sandbox in sandboxes)
    assert without_time(reused) == without_time(separate)
    alone = [sandboxes[0].run([Run(program, (text,), LONG)])[0][0] for text in NUMBERS]
    assert without_time(reused) == without_time(alone)


def test_results_of_our_own_problems_are_the_same(sandboxes: tuple[Sandbox, Sandbox]) -> None:
    problems = [json.loads(line) for line in Path(OFFLINE).read_text().splitlines()]
    runs = [
        Run(program, tuple(test["stdin"] for test in problem["tests"]), LONG)
        for problem in problems[::2]
        for program in (problem["solution"], *problem["wrong_solutions"])
    ]
    reused, separate = (sandbox.run(runs) for sandbox in sandboxes)
    assert len(runs) > 150
    assert [without_time(results) for results in reused] == [without_time(results) for results in separate]


def test_one_process_for_all_inputs_unless_a_program_could_leave_traces(sandboxes: tuple[Sandbox, Sandbox]) -> None:
    number = hidden("import builtins\nn = builtins.n = getattr(builtins, 'n', 0) + 1\nprint(n)")
    named = "import builtins\nn = builtins.n = getattr(builtins, 'n', 0) + 1\nprint(n)"
    told = [
        [result.stdout for result in sandbox.run([Run(p, ("1", "2", "3"))])[0]] for p in (number, named) for sandbox in sandboxes
    ]
    assert told == [["1\n", "2\n", "3\n"], ["1\n"] * 3, ["1\n"] * 3, ["1\n"] * 3]
    failing = "m = int(input())\n" + number + "\n1 // m"  # a process that fails is not used again
    (results,) = sandboxes[0].run([Run(failing, ("1", "2", "0", "3"))])
    assert [result.stdout for result in results] == ["1\n", "2\n", "", "1\n"]


def test_each_input_has_its_own_time(sandboxes: tuple[Sandbox, Sandbox]) -> None:
    """Together they take longer than one of them may, and longer than the limit that the kernel keeps."""
    program = "import time\nstart = time.process_time()\nwhile time.process_time() - start < float(input()): pass\nprint('done')"
    program = program.replace("float(input())", "seconds").replace("start =", "seconds = float(input())\nstart =", 1)
    (results,) = sandboxes[0].run([Run(program, ("0.5", "0.6", "0.55", "0.7", "9", "0.4"), 0.9)])
    assert [result.status for result in results] == ["ok", "ok", "ok", "ok", "timeout", "ok"]


ABUSES = {
    "says that it is done, and goes on": "import os\nprint(1, flush=True)\nos.write(4, b'1')\nwhile True: pass",
    "says often that it is done": "import os\nfor _ in range(100): os.write(4, b'1')\nprint(input())",
    "closes its handles": "import os\nos.closerange(3, 64)\nprint(input())",
    "closes stdin": "import os\nos.close(0)\nprint(1)",
    "takes its turn itself": "import os\nprint(input(), flush=True)\nos.write(4, b'1')\nos.read(3, 1)\nprint(input())",
    "turns stdin into something that only grows": "import fcntl\nprint(input())\nfcntl.fcntl(0, 4, 0o2000)",
    "writes to its stdin": "import os\nprint(input())\nos.lseek(0, 0, 0)\nos.write(0, b'forged' * 100)",
    "lowers its limits": "import resource\nprint(input())\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
    "leaves a thread": (
        "import threading, time\nprint(input())\n"
        "late = lambda: [print('late', flush=True) or time.sleep(0.001) for _ in range(9999)]\n"
        "threading.Thread(target=late, daemon=True).start()"
    ),
    "leaves an alarm": "import signal\nprint(input())\nsignal.setitimer(signal.ITIMER_REAL, 0.001)",
    "ends at once": "import os\nprint(input(), flush=True)\nos._exit(0)",
    "leaves files": "import os\nprint(input(), os.listdir('/tmp'))\nopen('/tmp/x', 'w').write('left')",
    "moves in its stdin": "import os\nprint(input(), flush=True)\nos.write(4, b'1')\nwhile True: os.lseek(0, 1 << 40, 0)",
    "raises its limit": (
        "import resource\nprint(input())\nhard = resource.getrlimit(resource.RLIMIT_CPU)[1]\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))\nwhile True: pass"
    ),
    "fills its stdin": "import os\nprint(input())\nos.ftruncate(0, 15 << 20)",
}


@pytest.mark.parametrize("program", ABUSES.values(), ids=ABUSES)
def test_abuse_spoils_no_more_than_the_program_s_own_results(program: str, sandboxes: tuple[Sandbox, Sandbox]) -> None:
    sandbox = sandboxes[0]
    before = sandbox.run([Run("print(input())", ("a", "b"))])
    workers = [worker.process.pid for worker in sandbox._workers if worker.process is not None]
    (results,) = sandbox.run([Run(hidden(program), ("5", "6", "7", "8"), 0.3)])
    assert len(results) == 4
    assert results[0].stdout.startswith(("5\n", "5 []\n", "1\n")) or results[0].stdout == ""
    assert "sandbox_error" not in [result.status for result in results]
    assert all("left" not in result.stdout and "[]" in result.stdout for result in results if "[" in result.stdout)
    after = sandbox.run([Run("print(input())", ("a", "b"))])
    assert without_time(before[0]) == without_time(after[0]) == [("ok", "a\n", ""), ("ok", "b\n", "")]
    assert workers == [worker.process.pid for worker in sandbox._workers if worker.process is not None]


def test_what_an_interpreter_does(sandboxes: tuple[Sandbox, Sandbox]) -> None:
    """With a process per input, results are those of a plain interpreter; the cases that a bare worker gets wrong easily."""
    for name in ("a destructor", "a destructor in a circle", "a stream of its own", "no stdout", "exit", "quit", "annotations"):
        program = PROGRAMS[name]
        done = subprocess.run([sys.executable, "-I", "-c", program], input="4\n", capture_output=True, text=True, check=False)
        for sandbox in sandboxes:
            ((result, _),) = sandbox.run([Run(program, ("4\n", "5\n"), LONG)])
            assert (result.status == "ok", result.stdout) == (
                done.returncode == 0,
                done.stdout if done.returncode == 0 else "",
            ), name


def test_a_place_in_stdin_makes_no_huge_file(sandboxes: tuple[Sandbox, Sandbox]) -> None:
    """The handle's place is shared with the process that writes the next input; a file of a terabyte would hold any memory."""
    moves = (
        "import os, time\nos.write(4, b'1')\nend = time.monotonic() + 0.3\nwhile time.monotonic() < end: os.lseek(0, 1 << 40, 0)"
    )
    (results,) = sandboxes[0].run([Run(hidden(moves + "\nprint(os.fstat(0).st_size < 1 << 20)"), ("5", "6", "7"), 5.0)])
    assert [result.stdout for result in results if result.status == "ok" and result.stdout] in (
        ["True\n"] * n for n in range(1, 4)
    )


def test_the_worker_keeps_the_limit_of_cpu(sandboxes: tuple[Sandbox, Sandbox]) -> None:
    """A process that is used again has a kernel's limit for all inputs, and may ignore its signal."""
    run = Patient("if input() == 'long':\n    while True: pass", ("short", "long"), 1.0)
    (results,) = sandboxes[0].run([run])
    assert [result.status for result in results] == ["ok", "timeout"]
    assert results[1].seconds < run.longest - 0.5


def test_an_error_between_inputs_does_not_mix_programs_up(sandboxes: tuple[Sandbox, Sandbox]) -> None:
    with pytest.raises(TypeError):
        sandboxes[0].run([Run("print('old', input())", ("1", b"2"))])  # type: ignore[arg-type]
    (results,) = sandboxes[0].run([Run("print('new', input())", ("5", "6"))])
    assert [result.stdout for result in results] == ["new 5\n", "new 6\n"]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import sys\nfrom collections import Counter\nprint(Counter(sys.stdin.read().split()))", True),
        (
            "class A:\n    def __init__(self): self.x = 1\n    def __lt__(self, a): return self.x < a.x\nprint(A() < A())",
            True,
        ),
        ("if __name__ == '__main__': print(1)", True),
        ("import os\nprint(os.read(0, 9))", False),
        ("import sys as s\ns.argv.append(1)", True),  # not seen; what is hidden is the program's own loss
        ("from sys import argv", False),
        ("from io import FileIO", False),
        ("import math\nmath.pi = 3", False),
        ("import math\ndel math.pi", False),
        ("print(().__class__)", False),
        ("print(open(0).read())", False),
        ("import collections.abc", False),
        ("from . import x", False),
        ("print(", False),
        ("x = '\\0'", True),
        ("\0", False),
    ],
)
def test_what_could_leave_traces(program: str, expected: bool) -> None:
    assert leaves_no_traces(program) is expected
