"""Run a study, variants x seeds of one YAML file, in as many sittings as it takes: `python scripts/ablation.py STUDY.yaml`.

Starts every run that is missing, goes on with those that were interrupted (Ctrl-C is fine) and leaves finished ones alone.
Each run is a folder `<runs>/<variant>/version_N` as `rla fit` makes it. At the end of a sitting `<runs>/table.md`,
`study.json` and figures hold what is finished by then.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ablation_runs import RLA, Sitting, attempts, finished, locked, missing, unchanged, usable
from ablation_study import Study, read_study, resolve
from ablation_table import write_table

from rla_lightning.types import ConfigError


def main(arguments: Sequence[str] | None = None, program: Sequence[str] = RLA) -> int:
    """Exit code: 0, 1 after runs that failed, 2 after a mistake in the study or the options, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the study's YAML file, e.g. scripts/studies/household.yaml")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="run these variants only")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="run these of the study's seeds only")
    parser.add_argument("--hours", type=float, help="start nothing new after so many hours; what runs by then is finished")
    parser.add_argument("--table", action="store_true", help="run nothing, tabulate what is finished")
    parser.add_argument("--stale", action="store_true", help="list and ignore runs made with other settings, else refused")
    options = parser.parse_args(arguments)
    sys.argv = sys.argv[:1]  # Lightning's command line parser warns of others' arguments
    for number in (signal.SIGINT, signal.SIGTERM):  # runs inherit no ignored Ctrl-C, as from a shell's background
        signal.signal(number, signal.default_int_handler)
    try:
        study = read_study(options.study)
        variants, seeds = _chosen(study, options.only, options.seeds)
        settings = resolve(study)
        failed = False
        found = usable(attempts(study, settings), options.stale)
        if not options.table:
            with locked(study.runs) as lock:
                sitting = Sitting(study, lock, program, options.hours)
                not_started = sitting.play(missing(study, found, variants, seeds))
            for run in [*sitting.failed, *not_started]:
                print(f"{'failed' if run in sitting.failed else 'not started'}: {run}")
            failed = bool(sitting.failed)
        done = finished(unchanged(attempts(study, settings)))
    except ConfigError as error:
        print(f"ablation: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    if done:
        print(f"{sum(map(len, done.values()))} finished runs: {write_table(study, done)}")
    else:
        print("no finished run yet")
    return int(failed)


def _chosen(study: Study, only: Sequence[str] | None, seeds: Sequence[int] | None) -> tuple[Sequence[str], Sequence[int]]:
    names = [variant.name for variant in study.variants]
    if unknown := [name for name in only or [] if name not in names]:
        raise ConfigError(f"--only {unknown[0]} is no variant; there are {', '.join(names)}")
    if foreign := [seed for seed in seeds or [] if seed not in study.seeds]:
        raise ConfigError(f"--seeds {foreign[0]} is not among the study's seeds {', '.join(map(str, study.seeds))}")
    return only or names, seeds or study.seeds


if __name__ == "__main__":
    sys.exit(main())
