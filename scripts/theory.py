"""Check the method's theory and draw it: `python scripts/theory.py --out runs/theory --only precision zscore`.

One table and one picture per claim, theory.json with all numbers. Each claim ends with HOLDS or FAILS; the exit status is
1 if any fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from theory_claims import CLAIMS, Claim


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/theory"), help="folder of theory.json and the pictures")
    parser.add_argument("--only", nargs="+", choices=CLAIMS, default=list(CLAIMS), metavar="NAME", help=", ".join(CLAIMS))
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=130)
    records = {}
    for name in dict.fromkeys(arguments.only):
        start = time.perf_counter()
        claim = CLAIMS[name]()
        records[name] = record(claim)
        show(console, name, claim)
        draw(claim, arguments.out / f"{name}.png")
        console.print(f"{time.perf_counter() - start:.1f} s, {arguments.out / f'{name}.png'}\n", style="dim")
    # NaN and infinity are not JSON: a claim that has one does not end in a file that others cannot read.
    (arguments.out / "theory.json").write_text(json.dumps(records, indent=2, allow_nan=False) + "\n")
    failed = [name for name, content in records.items() if not content["holds"]]
    console.print(f"{len(records) - len(failed)} of {len(records)} claims hold" + "".join(f", {name} FAILS" for name in failed))
    return 1 if failed else 0


def record(claim: Claim) -> dict[str, object]:
    """The numbers of a claim as JSON values."""
    return {
        "statement": claim.statement,
        "holds": claim.holds,
        "checks": [{"text": check.text, "holds": check.holds} for check in claim.checks],
        "limits": claim.limits,
        "rows": [dict(zip(claim.columns, row, strict=True)) for row in claim.rows],
        "curves": [{"label": curve.label, "x": list(curve.x), "y": list(curve.y)} for curve in claim.curves],
    }


def show(console: Console, name: str, claim: Claim) -> None:
    console.print(f"{name}: {claim.statement}", highlight=False, style="bold")
    table = Table()
    for column in claim.columns:
        table.add_column(column, justify="right")
    for row in claim.rows:
        table.add_row(*(cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row))
    console.print(table)
    for check in claim.checks:
        console.print(f"  {word(check.holds)}  {check.text}", highlight=False)
    console.print(f"  What this does not show: {claim.limits}", highlight=False, style="dim")
    console.print(f"{name} {word(claim.holds)}", highlight=False)


def word(holds: bool) -> str:
    return "[green]HOLDS[/]" if holds else "[bold red]FAILS[/]"


def draw(claim: Claim, picture: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  # imported late: half a second that --help does not need

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for curve in claim.curves:
        axes.plot(curve.x, curve.y, label=curve.label, linestyle=curve.style, color=curve.color)
    axes.set_title(claim.statement, fontsize="medium", wrap=True)
    axes.set_xlabel(claim.x_label)
    axes.set_ylabel(claim.y_label)
    axes.set_xscale(claim.x_scale)
    axes.set_yscale(claim.y_scale)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
