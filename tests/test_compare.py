"""The table of finished runs, on hand-made ones of a problem set that has nothing out of distribution."""

import csv
import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "compare.py")
COLUMNS = ("epoch", "rollout/groups_with_signal", "reward_model/samples", "rollout/invalid_action_rate")


def write(experiment: Path, version: int, seed: int, before: float, after: float, brier: float | None) -> Path:
    """A run as the callbacks leave it: what is undefined is null or absent, and rows of metrics have gaps."""
    folder = experiment / f"version_{version}"
    folder.mkdir(parents=True)
    test = {
        "in_domain/critic/brier": brier,
        "in_domain/critic/brier_constant": 0.24,
        "in_domain/rollout/success_rate": after,
        "in_domain/rollout/success_rate/easy": 0.75,
    }
    summary: dict[str, Any] = {"seed": seed, "seconds": 60.0, "accepted_tasks": 3, "proposed_tasks": 4, "test": {"after": test}}
    for when, success, ut in (("before", before, None), ("after", after, 0.5)):
        summary[when] = {"success_in_domain": success, "success_ood": None, "ut": ut, "ut_ood": None, "detect_ood": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([COLUMNS, (0, 0.5, 12, 0.1), (0, "", "", ""), (1, 1.0, 20, 0.0)])
    return folder


@pytest.fixture(autouse=True)
def _beside_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks for modules there when it starts a script."""
    monkeypatch.syspath_prepend(str(Path(SCRIPT).parent))


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*experiments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["compare.py", *(str(tmp_path / name) for name in experiments)])
        runpy.run_path(SCRIPT, run_name="__main__")
        return capsys.readouterr().out

    return run


def cells(table: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in table.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in rows}


def test_a_run_without_an_out_of_distribution_set(tmp_path: Path) -> None:
    numbers = runpy.run_path(SCRIPT)["read"](write(tmp_path / "whole", 0, seed=1, before=0.25, after=0.5, brier=0.125))
    defined = {name: value for name, value in numbers.items() if not math.isnan(value)}
    assert defined == {
        "seconds": 60.0,
        "success in domain, before": 0.25,
        "success in domain, after": 0.5,
        "success in domain, gain": 0.25,
        "UT in domain, after": 0.5,
        "critic brier, in_domain": 0.125,
        "critic brier below the best constant, in_domain": pytest.approx(0.115),
        "success of easy, in_domain": 0.75,
        "groups with a signal (training mean)": 0.75,
        "judge samples (training mean)": 16.0,
        "invalid actions (training mean)": 0.05,
        "accepted": 3,
        "proposed": 4,
    }


def test_two_experiments_side_by_side(tmp_path: Path, compared: Callable[..., str]) -> None:
    write(tmp_path / "whole", 0, seed=1, before=0.9, after=0.9, brier=0.9)  # run anew as version_2
    write(tmp_path / "whole", 1, seed=2, before=0.4, after=0.6, brier=0.1)
    write(tmp_path / "whole", 2, seed=1, before=0.2, after=0.5, brier=0.2)
    write(tmp_path / "policy", 0, seed=1, before=0.125, after=0.25, brier=None)
    write(tmp_path / "policy", 1, seed=2, before=0.375, after=0.25, brier=None)
    (tmp_path / "policy" / "version_2").mkdir()  # not finished
    out = compared("whole", "policy")
    assert "seeds 1, 2" in out
    assert "OOD" not in out
    assert "out_of_distribution" not in out
    rows = cells(out)
    # Two values d apart: 12.706 * (d / sqrt 2) / sqrt 2 is 6.353 d to either side of their mean.
    assert rows["success in domain, after"] == ["0.550 ± 0.635 (least 0.500)", "0.250 ± 0.000 (least 0.250)"]
    assert rows["success in domain, gain"] == ["0.250 ± 0.635 (least 0.200)", "0.000 ± 1.588 (least -0.125)"]
    assert rows["critic brier, in_domain"] == ["0.150 ± 0.635 (least 0.100)", "nan ± nan (least nan)"]
    assert rows["success in domain, after, minus whole"] == ["", "-0.300 ± 0.635 (least -0.350)"]  # .25 - .5, .25 - .6
    assert [name for name in rows if "minus" in name] == [
        "success in domain, after, minus whole",
        "UT in domain, after, minus whole",
    ]


def test_experiments_without_a_finished_run_are_named(
    tmp_path: Path, compared: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "whole", 0, seed=1, before=0.2, after=0.5, brier=0.2)
    (tmp_path / "policy" / "version_0").mkdir(parents=True)
    with pytest.raises(SystemExit):
        compared("whole", "policy")
    assert "no finished run in policy" in capsys.readouterr().err
