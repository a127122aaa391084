"""Programs per second in the sandbox against other ways to run them, as JSON lines: `python scripts/benchmark_sandbox.py`.

All run the same short programs with the same standard library, on as many workers, one way after the other; compare lines of
one run, not of two. Only `sandbox` is safe, and `bubblewrap` (where it is installed) comes close.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from rla_lightning.sandbox import Run, Sandbox, SandboxSettings
from rla_lightning.sandbox.pool import SYSTEM_PYTHON

PROGRAM = "import sys, math, collections\nn = int(sys.stdin.readline())\nprint(sum(range(n)), {})\n"
PYTHON = SYSTEM_PYTHON if os.access(SYSTEM_PYTHON, os.X_OK) else sys.executable
BARE = [PYTHON, "-I", "-S", "-c"]
BUBBLEWRAP = shlex.split(
    "bwrap --unshare-user --disable-userns --unshare-all --die-with-parent --new-session --clearenv --ro-bind /usr /usr "
    "--symlink usr/lib64 /lib64 --symlink usr/lib /lib --symlink usr/bin /bin --proc /proc --dev /dev --size 16777216 "
    "--tmpfs /tmp --chdir /tmp"
)


def expected(index: int) -> str:
    return f"{sum(range(1000 + index))} {index}"


def by_command(command: Sequence[str], index: int) -> str:
    words = [*command, PROGRAM.format(index)]
    return subprocess.run(words, input=f"{1000 + index}\n", capture_output=True, text=True, check=True).stdout


def by_exec(index: int) -> str:
    """In a forked process of this interpreter, as the paper's release does it: nothing keeps a program from anything."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_execute, args=(sender, index))
    process.start()
    printed: str = receiver.recv()
    process.join()
    return printed


def _execute(sender: multiprocessing.connection.Connection, index: int) -> None:
    sys.stdin = io.StringIO(f"{1000 + index}\n")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(PROGRAM.format(index), {"__name__": "__main__"})
    sender.send(printed.getvalue())


def in_threads(run: Callable[[int], str], number: int, workers: int) -> list[str]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, range(number)))


def in_sandbox(sandbox: Sandbox, number: int) -> list[str]:
    results = sandbox.run([Run(PROGRAM.format(index), (f"{1000 + index}\n",)) for index in range(number)])
    return [result[0].stdout for result in results]


def in_sandbox_often(sandbox: Sandbox, number: int, inputs: int = 10) -> list[str]:
    """As hidden tests are run: every program on several inputs."""
    runs = [Run(PROGRAM.format(0), tuple(f"{1000 + start + i}\n" for i in range(inputs))) for start in range(0, number, inputs)]
    printed = [result.stdout for results in sandbox.run(runs) for result in results][:number]
    return [f"{text.split()[0]} {index}" for index, text in enumerate(printed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--programs", type=int, default=600)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    arguments = parser.parse_args()
    sandbox = Sandbox(SandboxSettings(workers=arguments.workers))
    open_sandbox = Sandbox(SandboxSettings(workers=arguments.workers, isolation="none"))
    ways: dict[str, Callable[[int], list[str]]] = {
        "sandbox": partial(in_sandbox, sandbox),
        "sandbox, 10 inputs per program": partial(in_sandbox_often, sandbox),
        "the same workers without isolation": partial(in_sandbox, open_sandbox),
        "subprocess": lambda number: in_threads(partial(by_command, BARE), number, arguments.workers),
        "exec in a forked process": lambda number: in_threads(by_exec, number, arguments.workers),
    }
    if shutil.which("bwrap"):
        ways["bubblewrap"] = lambda number: in_threads(partial(by_command, [*BUBBLEWRAP, *BARE]), number, arguments.workers)
    seconds = dict.fromkeys(ways, float("inf"))
    for way in ways.values():
        way(2 * arguments.workers)  # start and warm up
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            printed = way(arguments.programs)
            seconds[name] = min(seconds[name], time.perf_counter() - start)
            wrong = [index for index, text in enumerate(printed) if text.strip() != expected(index)]
            if wrong:
                raise RuntimeError(f"{name}: program {wrong[0]} printed {printed[wrong[0]]!r}")
    for name, best in seconds.items():
        numbers = {
            "programs_per_second": round(arguments.programs / best),
            "sandbox_speedup": round(best / seconds["sandbox"], 2),
        }
        print(json.dumps({"stage": name, "workers": arguments.workers, **numbers}), flush=True)
    sandbox.close()
    open_sandbox.close()


if __name__ == "__main__":
    main()
