"""Plays a study's runs: what is there, what is missing, and several processes at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import yaml
from ablation_study import Settings, Study, Variant, first_difference

from rla_lightning.runs import versions
from rla_lightning.types import ConfigError

RLA = (sys.executable, "-m", "rla_lightning.cli")
SEED = re.compile(r"^seed_everything: (\d+)$", re.MULTILINE)
TAIL = 15  # lines of a failed run's log that are shown
PATIENCE = 60.0  # seconds that an interrupted run may take to end


@dataclass(frozen=True)
class Attempt:
    """A run folder of one variant that holds something worth keeping."""

    folder: Path
    variant: str
    seed: int
    finished: bool  # or it can be resumed
    changed: str  # how its settings differ from the study's; empty: not at all


@dataclass(frozen=True)
class Run:
    """A run to start, or to go on with."""

    variant: Variant
    seed: int
    checkpoint: Path | None

    def __str__(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"


def attempts(study: Study, settings: Mapping[str, Settings]) -> list[Attempt]:
    """All of the study's seeds, oldest first within a variant."""
    found = []
    for variant in study.variants:
        for _, folder in versions(study.runs / variant.name):
            finished = (folder / "summary.json").is_file()
            if not (finished or (folder / "checkpoints" / "last.ckpt").exists()) or _seed(folder) not in study.seeds:
                continue
            changed = first_difference(settings[variant.name], yaml.safe_load((folder / "config.yaml").read_text()))
            found.append(Attempt(folder, variant.name, _seed(folder), finished, changed))
    return found


def _seed(folder: Path) -> int:
    """-1 when the run has not written it yet."""
    file = folder / "config.yaml"
    match = SEED.search(file.read_text()) if file.is_file() else None
    return int(match[1]) if match else -1


def usable(found: Sequence[Attempt], ignore_stale: bool) -> list[Attempt]:
    """Those with the study's settings; refuses others unless they are to be ignored."""
    stale = [attempt for attempt in found if attempt.changed]
    if stale and not ignore_stale:
        (first, *more) = stale
        raise ConfigError(
            f"{first.folder} was made with other settings: {first.changed}"
            + (f" (and {len(more)} more)" if more else "")
            + "; --stale lists and ignores such runs, another `runs` keeps both"
        )
    for attempt in stale:
        print(f"ignored: {attempt.folder} (seed {attempt.seed}): {attempt.changed}")
    return unchanged(found)


def unchanged(found: Sequence[Attempt]) -> list[Attempt]:
    return [attempt for attempt in found if not attempt.changed]


def finished(found: Sequence[Attempt]) -> dict[str, dict[int, Path]]:
    """By variant and seed, the newest."""
    folders: dict[str, dict[int, Path]] = {}
    for attempt in found:
        if attempt.finished:
            folders.setdefault(attempt.variant, {})[attempt.seed] = attempt.folder
    return folders


def missing(study: Study, found: Sequence[Attempt], variants: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """What is left to run, all variants of a seed before the next seed, so that a study that is stopped is balanced."""
    done = {(attempt.variant, attempt.seed) for attempt in found if attempt.finished}
    resumable = {(a.variant, a.seed): a.folder / "checkpoints" / "last.ckpt" for a in found if not a.finished}
    return [
        Run(variant, seed, resumable.get((variant.name, seed)))
        for seed in study.seeds
        for variant in study.variants
        if seed in seeds and variant.name in variants and (variant.name, seed) not in done
    ]


@contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """Only one process at a time starts runs of a study.

    The runs hold the lock, too: those of a sitting that was killed may still be at work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder} is in use: this study, or a run that it started, is still at work") from None
        yield lock


def launch(command: Sequence[str], log: IO[str], lock: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # so that Ctrl-C reaches a run once, from here
        pass_fds=(lock.fileno(),),
    )


class Sitting:
    """Starts runs, several at a time, until all have ended or the time is over.

    Args:
        study: whose runs they are.
        lock: held by every run.
        program: the command `rla`.
        hours: after which nothing new is started.
    """

    def __init__(self, study: Study, lock: IO[str], program: Sequence[str] = RLA, hours: float | None = None) -> None:
        self.study = study
        self.lock = lock
        self.program = program
        self.end = time.monotonic() + 3600 * hours if hours is not None else float("inf")
        self.running: dict[Run, subprocess.Popen[bytes]] = {}
        self.begun: dict[Run, float] = {}
        self.failed: list[Run] = []
        self.warm: set[int] = set()

    def play(self, waiting: Sequence[Run]) -> list[Run]:
        """Runs what is waiting, in this order as far as warm starts allow it; returns what was not started."""
        left = list(waiting)
        try:
            while self.running or (left and time.monotonic() < self.end):
                while time.monotonic() < self.end and (run := self._next(left)) is not None:
                    left.remove(run)
                    self._start(run)
                time.sleep(0.2)
                for run in [run for run, process in self.running.items() if process.poll() is not None]:
                    self._ended(run, len(left))
        finally:
            self._stop()
        return left

    def _next(self, left: Sequence[Run]) -> Run | None:
        """The first that may start: runs of a seed share a warm start, which its first one makes for all of them."""
        if len(self.running) >= self.study.parallel:
            return None
        for run in left:
            if all(other.seed != run.seed for other in self.running) or self._is_warm(run.seed):
                return run
        return None

    def _is_warm(self, seed: int) -> bool:
        """Whether a run of this seed has logged anything, which it does after its warm start."""
        if seed not in self.warm:
            folders = (folder for variant in self.study.variants for _, folder in versions(self.study.runs / variant.name))
            if any(_seed(folder) == seed for folder in folders if (folder / "metrics.csv").is_file()):
                self.warm.add(seed)
        return seed in self.warm

    def _log(self, run: Run) -> Path:
        return self.study.runs / "logs" / f"{run.variant.name}_seed{run.seed}.log"

    def _start(self, run: Run) -> None:
        command = [*self.program, "fit", *self.study.arguments(run.variant, run.seed)]
        if run.checkpoint is not None:  # not `last`: other seeds have their folders beside this one's
            command += ["--ckpt_path", str(run.checkpoint)]
        log = self._log(run)
        log.parent.mkdir(exist_ok=True)
        print(f"{'resumed' if run.checkpoint else 'started'}: {run} ({log})", flush=True)
        self.begun[run] = time.monotonic()
        with log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            self.running[run] = launch(command, file, self.lock)

    def _ended(self, run: Run, left: int) -> None:
        code, seconds = self.running.pop(run).returncode, time.monotonic() - self.begun[run]
        folders = [folder for _, folder in versions(self.study.runs / run.variant.name) if _seed(folder) == run.seed]
        if code == 0 and folders and (folders[-1] / "summary.json").is_file():
            print(f"finished: {run}, {seconds:.0f} s ({len(self.running)} running, {left} to start)", flush=True)
            return
        self.failed.append(run)
        reason = f"exit code {code}" if code else "it left no summary.json"
        print(f"FAILED: {run}: {reason}; the end of {self._log(run)}:")
        for line in self._log(run).read_text(errors="replace").splitlines()[-TAIL:]:
            print(f"    {line}", flush=True)

    def _stop(self) -> None:
        """Interrupt what still runs and wait for it: each can be resumed from its last checkpoint."""
        try:
            for process in self.running.values():
                process.send_signal(signal.SIGINT)
            until = time.monotonic() + PATIENCE
            for run, process in self.running.items():
                print(f"interrupted: {run}", flush=True)
                process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"still running after {PATIENCE:.0f} s, killed", flush=True)
        finally:
            for process in self.running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it started
                process.wait()
            self.running.clear()
