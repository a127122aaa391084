"""Speed and memory on this machine, as JSON lines: `python scripts/benchmark.py`.

Without a mode: every stage of the loop, one after the other in one process. Modes, each with a --help of its own:
  --compare trl   an iteration of ours against TRL's GRPOTrainer
  --memory        the update's peak memory with a large vocabulary, against one with all logits at once
  --turns         tokens fed to the model for each one there is, in conversations of many turns
  --gpu           Qwen2.5 shapes on one card, five minutes: sampling, update and what each trick saves
Compare lines of one run, not of two.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

import torch
from benchmark_report import report


def every_stage(arguments: Sequence[str]) -> None:
    from benchmark_environments import alfworld, household  # noqa: PLC0415
    from benchmark_loop import loop_stages  # noqa: PLC0415

    from rla_lightning.environments.household import HouseholdEnvironment  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--engine-steps", type=int, default=200, help="of stock TextWorld, about 20 per second")
    parser.add_argument("--engine-loads", type=int, default=30, help="of games in a TextWorld worker, about 1 per second")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    report("machine", 0, threads=options.threads, torch=torch.__version__)
    environment = HouseholdEnvironment()
    household(environment)
    alfworld(options.engine_steps, options.engine_loads)
    loop_stages(environment, options.tasks, options.group_size, options.updates)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--compare", dest="mode", choices=["trl"])
    for name in ("memory", "turns", "gpu"):
        modes.add_argument(f"--{name}", dest="mode", action="store_const", const=name)
    options, others = parser.parse_known_args(arguments)
    if options.mode is None:
        every_stage(others)
    else:
        import_module(f"benchmark_{options.mode}").main(others)


if __name__ == "__main__":
    main()
