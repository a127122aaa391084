"""What the benchmarks share: JSON lines, seconds and peak memory."""

from __future__ import annotations

import gc
import json
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
PROCESS = Path("/proc/self")


@cache
def commit() -> str | None:
    """Of this checkout, with -dirty where files differ from it; None where it has no history."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def report(stage: str, seconds: float, **numbers: Any) -> None:
    print(json.dumps({"stage": stage, "commit": commit(), "seconds": round(seconds, 4), **numbers}), flush=True)


def timed(action: Callable[[], T], device: str = "cpu") -> tuple[float, T]:
    start = time.perf_counter()
    result = action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def measured(action: Callable[[], T], device: str = "cpu") -> tuple[float, float, T]:
    """Seconds, peak megabytes and result. The peak is that of this process, or of torch's memory on the card."""
    reset_peak(device)
    seconds, result = timed(action, device)
    return seconds, peak_megabytes(device), result


def reset_peak(device: str = "cpu") -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):  # some sandboxes have no such file: then it is the peak since the process began
        (PROCESS / "clear_refs").write_text("5")


def peak_megabytes(device: str = "cpu") -> float:
    return round(torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else status_megabytes(PROCESS, "VmHWM"), 1)


def resident_megabytes(process: int | None = None) -> float:
    gc.collect()
    return status_megabytes(PROCESS if process is None else Path(f"/proc/{process}"), "VmRSS")


def status_megabytes(process: Path, name: str) -> float:
    status = (process / "status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1]) / 1024
