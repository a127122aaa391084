"""What a study found: intervals, paired differences and exact tests by hand, and the table of hand-made runs."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import ablation_study
    import ablation_table
    import statistics_of_runs

    return SimpleNamespace(study=ablation_study, table=ablation_table, statistics=statistics_of_runs)


def test_the_interval_of_students_t(scripts: SimpleNamespace) -> None:
    assert scripts.statistics.interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.303 / math.sqrt(3)))  # their deviation is 1
    mean, half_width = scripts.statistics.interval([0.5])
    assert mean == 0.5
    assert math.isnan(half_width)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1.0, 2.0, 3.0], 2 / 8),  # only +++ and --- reach a sum of 6
        ([3.0, 1.0, -1.0], 6 / 8),  # 3 1 1, 3 1 -1, 3 -1 1 and their opposites reach 3, which 3 -1 -1 does not
        ([1.0, 2.0, -3.0], 1.0),  # a sum of 0 is reached by all
        ([0.1] * 5, 2 / 32),
        ([0.1, 0.2, -0.3, 0.0], 1.0),  # although they do not add up to 0 in floats
    ],
)
def test_the_sign_flip_test_by_hand(scripts: SimpleNamespace, differences: list[float], p: float) -> None:
    assert scripts.statistics.sign_flip_p(differences) == p


def test_differences_are_paired_by_seed(scripts: SimpleNamespace) -> None:
    found = scripts.statistics.paired_difference({10: 0.5, 11: 0.6, 12: 0.7, 14: math.nan}, {11: 0.4, 10: 0.4, 13: 0.1, 14: 0.0})
    assert found.mean == pytest.approx(0.15)  # of .1 and .2, whose deviation is .1 / sqrt 2
    assert found.half_width == pytest.approx(12.706 * 0.05)
    assert (found.seeds, found.same_sign, found.p) == (2, 2, 0.5)
    one_against = scripts.statistics.paired_difference({1: 0.3, 2: 0.1, 3: 0.0}, {1: 0.0, 2: 0.0, 3: 0.1})
    assert (one_against.seeds, one_against.same_sign, one_against.p) == (3, 2, 6 / 8)
    equal = scripts.statistics.paired_difference({1: 0.5, 2: 0.5}, {1: 0.5, 2: 0.5})
    assert (equal.mean, equal.half_width, equal.same_sign, equal.p) == (0.0, 0.0, 0, 1.0)
    assert scripts.statistics.paired_difference({1: 0.5}, {2: 0.5}) is None
    assert scripts.statistics.paired_difference({1: math.nan}, {1: 0.5}) is None


def finished_run(folder: Path, after: float, mu: float | None, easy: float, accepts: tuple[float, float]) -> Path:
    folder.mkdir(parents=True)
    test = {
        "before": {"in_domain/rollout/success_rate": 0.25},
        "after": {
            "in_domain/rollout/success_rate": after,
            "in_domain/rollout/success_rate_at/0.0-0.2": easy,
            "in_domain/rollout/success_rate_at/0.2-0.4": 0.5,
            "in_domain/reward_model/mu": mu,
        },
    }
    summary = {"seconds": 600.0, "accepted_tasks": 3, "proposed_tasks": 4, "test": test}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = ["env/false_accept_rate,rollout/groups_with_signal,validation/in_domain/rollout/success_rate,step"]
    rows += [f"{accepts[0]},8,,1", ",,0.5,1", f"{accepts[1]},10,,2", "nan,nan,nan,3"]  # the mean and the last are of defined ones
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    return folder


def test_the_table_by_hand(scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sides = tuple(scripts.study.Variant(name, (), ()) for name in ("full", "fixed", "later"))
    contrasts = (("full", "fixed"), ("full", "later"))
    study = scripts.study.Study(("run.yaml",), (), (3, 4), Path("runs"), sides, contrasts=contrasts)
    folders = {
        "full": {
            3: finished_run(tmp_path / "runs/full/version_0", 0.5, 1.5, 0.75, (0.4, 0.1)),
            4: finished_run(tmp_path / "runs/full/version_1", 0.75, None, 1.0, (0.4, 0.1)),
        },
        "fixed": {
            4: finished_run(tmp_path / "runs/fixed/version_0", 0.5, None, 1.0, (0.4, 0.3)),
            3: finished_run(tmp_path / "runs/fixed/version_1", 0.375, None, 0.5, (0.4, 0.3)),
        },
    }
    table = scripts.table.write_table(study, folders)
    assert table == Path("runs/table.md")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.read_text().splitlines() if line[:1] == "|"]
    head, _, *rows = rows
    split = rows.index(["", "difference", "same sign", "p"])
    values, differences = ({row[0]: row[1:] for row in part} for part in (rows[:split], rows[split + 2 :]))
    assert head == ["", "full (seeds 3, 4)", "fixed (seeds 3, 4)"]
    # Two values d apart: 12.706 * (d / sqrt 2) / sqrt 2 is 6.353 d to either side of their mean.
    assert values == {
        "success in domain, before": ["0.250 ± 0.000", "0.250 ± 0.000"],
        "success in domain, after": ["0.625 ± 1.588", "0.438 ± 0.794"],
        "success in domain, gain": ["0.375 ± 1.588", "0.188 ± 0.794"],
        "success in domain at difficulty 0.0-0.2": ["0.875 ± 1.588", "0.750 ± 3.176"],
        "success in domain at difficulty 0.2-0.4": ["0.500 ± 0.000", "0.500 ± 0.000"],
        "groups with a signal (training mean)": ["9.000 ± 0.000", "9.000 ± 0.000"],
        "judge mu": ["1.500 (n=1)", "-"],
        "accepted": ["3.000 ± 0.000", "3.000 ± 0.000"],
        "proposed": ["4.000 ± 0.000", "4.000 ± 0.000"],
        "false accept rate (last)": ["0.100 ± 0.000", "0.300 ± 0.000"],
        "seconds": ["600 ± 0", "600 ± 0"],
    }
    assert differences["success in domain, after"] == ["+0.188 ± 0.794", "2 of 2", "0.500"]  # .125 and .25
    assert differences["success in domain at difficulty 0.0-0.2"] == ["+0.125 ± 1.588", "1 of 2", "1.000"]  # .25 and 0
    assert differences["false accept rate (last)"] == ["-0.200 ± 0.000", "2 of 2", "0.500"]
    assert "success in domain, before" not in differences  # equal
    assert "judge mu" not in differences
    assert "minus later" not in table.read_text()

    content = json.loads((tmp_path / "runs/study.json").read_text())
    assert content["variants"]["full"]["runs"]["4"]["numbers"]["judge mu"] is None
    assert content["variants"]["full"]["measures"]["judge mu"] == {"mean": 1.5, "half_width": None, "runs": 1}
    (contrast,) = content["contrasts"]
    assert (contrast["of"], contrast["minus"]) == ("full", "fixed")
    assert contrast["measures"]["success in domain, after"] == {
        "mean": 0.1875, "half_width": pytest.approx(0.794125), "seeds": 2, "same_sign": 2, "p": 0.5
    }  # fmt: skip
    for name in ("success_curves", "success_by_difficulty", "difficulty", "judge"):
        assert (tmp_path / "runs" / f"{name}.png").read_bytes()[1:4] == b"PNG"
