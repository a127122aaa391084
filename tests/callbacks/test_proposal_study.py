import json
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from callbacks import ProposalStudy
from callbacks.proposal_study import Chosen, read_study, study_table
from rla_lightning.types import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers.*")
FILE = "proposals.jsonl"


def chosen(way: str, direction: str, parent: float, success: float) -> Chosen:
    return Chosen(10, way, direction, "parent", parent, "child", success, 0.5, 0.2, 0.8)


def test_a_hit_moved_the_right_way_and_into_the_band():
    cases = [("easier", 0.0, 0.5), ("easier", 0.0, 0.9), ("easier", 0.3, 0.25), ("harder", 1.0, 0.8), ("harder", 1.0, 0.1)]
    found = [(item.moved, item.is_hit) for item in (chosen("critic", *case) for case in cases)]
    assert found == [(True, True), (True, False), (False, False), (True, True), (True, False)]
    unmoved = chosen("critic", "easier", 0.5, 0.5)
    assert (unmoved.moved, unmoved.is_hit) == (False, False)


def test_the_table_has_a_row_per_way_and_a_column_per_direction():
    items = [chosen("random", "easier", 0.0, 0.0), chosen("random", "easier", 0.0, 0.9), chosen("critic", "easier", 0.0, 0.5)]
    console = Console(width=100, record=True, file=StringIO())
    console.print(study_table([*items, chosen("critic", "harder", 1.0, 0.9)]))
    lines = [" ".join(line.replace("│", "|").split()) for line in console.export_text().splitlines()]
    assert "| random | 0.50 / 0.00 of 2 | - |" in lines
    assert "| critic | 1.00 / 1.00 of 1 | 1.00 / 0.00 of 1 |" in lines


def curves(folder: Path) -> list[str]:
    header, *rows = (folder / "toy" / "v" / "metrics.csv").read_text().splitlines()
    kept = [i for i, name in enumerate(header.split(",")) if not name.startswith("time/")]
    return [",".join(row.split(",")[i] for i in kept) for row in rows]


def test_it_measures_all_ways_on_the_same_parents_and_leaves_the_run_alone(make_loop, train, tmp_path, capsys):
    study = ProposalStudy(every_n_epochs=2, parents=3, rollouts=4, candidates=6)
    trainer = train(make_loop(), tmp_path / "with", [study], epochs=3)
    rows = read_study(Path(trainer.log_dir) / FILE)
    assert {row.epoch for row in rows} == {2}  # not before the first booking, and every second epoch
    parents = {way: [row.parent_id for row in rows if row.way == way] for way in study.ways}
    assert parents["random"]  # untrained policies lose nearly everything
    assert all(ids == parents["random"] for ids in parents.values())
    assert all(row.predicted is None for row in rows if row.way == "random")
    assert all(0 <= row.predicted <= 1 for row in rows if row.way != "random")
    assert {row.success * 4 for row in rows} <= {0, 1, 2, 3, 4}
    assert "both, near the root" in capsys.readouterr().out
    assert [json.loads(line) for line in (Path(trainer.log_dir) / FILE).read_text().splitlines()] == [asdict(r) for r in rows]
    train(make_loop(), tmp_path / "without", [], epochs=3)
    assert curves(tmp_path / "with") == curves(tmp_path / "without")


@pytest.mark.parametrize("setting", [{"parents": 0}, {"every_n_epochs": 0}, {"rollouts": 0}, {"low": 0.9}])
def test_settings_that_cannot_work_are_refused(setting):
    with pytest.raises(ConfigError, match=str(next(iter(setting.values())))):
        ProposalStudy(**setting)
