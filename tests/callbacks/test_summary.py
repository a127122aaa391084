import json
import math
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks import LoopProgress, RunSummary, TrajectoryLog, WarmStart
from callbacks.summary import KEYS, _print_table, draw_curves

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers.*")

MEASURES = {
    "success_in_domain": "in_domain/rollout/success_rate",
    "success_ood": "out_of_distribution/rollout/success_rate",
    "process_accuracy": "in_domain/reward_model/process_accuracy",
    "outcome_accuracy": "in_domain/reward_model/outcome_accuracy",
    "mu": "in_domain/reward_model/mu",
}


@pytest.fixture(scope="module")
def run(make_loop, train, tmp_path_factory):
    warm_start = WarmStart(episodes=2, policy_updates=1, judge_updates=1, batch_size=2, cache=None)
    loop = make_loop()
    callbacks = [LoopProgress(), warm_start, RunSummary(), TrajectoryLog(every_n_epochs=1, max_groups=2)]
    trainer = train(loop, tmp_path_factory.mktemp("runs"), callbacks)
    folder = tmp_path_factory.getbasetemp() / trainer.log_dir
    return SimpleNamespace(loop=loop, trainer=trainer, folder=folder, summary=json.loads((folder / "summary.json").read_text()))


def test_the_summary_has_the_keys_that_scripts_rely_on(run):
    assert run.summary.keys() >= {
        *("experiment", "seed", "seconds", "epochs", "before", "after"),
        *("accepted_tasks", "proposed_tasks", "tokens_generated", "tokens_trained"),
    }
    assert run.summary["before"].keys() == run.summary["after"].keys() >= MEASURES.keys()
    assert (run.summary["experiment"], run.summary["seed"], run.summary["epochs"]) == ("toy", 0, 2)
    assert (run.summary["accepted_tasks"], run.summary["proposed_tasks"]) == (0, 0)
    assert run.summary["tokens_generated"] == int(run.loop.tokens_generated) > 0
    assert run.summary["tokens_trained"] == int(run.loop.tokens_trained)
    assert 0 < run.summary["seconds"] < 60


def test_before_and_after_are_measured_on_the_test_sets(run):
    for when in ("before", "after"):
        for key, metric in MEASURES.items():
            assert run.summary[when][key] == run.summary["test"][when][metric]
    in_domain = run.trainer.datamodule.evaluation_sets("test")[0]
    now = run.loop.evaluate(in_domain, "test")  # the same draws as at the end of the run
    for name, value in now.items():
        written = run.summary["test"]["after"][f"in_domain/{name}"]
        assert written is None if math.isnan(value) else written == pytest.approx(value), name
    assert run.summary["test"]["before"]["in_domain/critic/brier"] != run.summary["test"]["after"]["in_domain/critic/brier"]


def test_the_critic_says_one_half_before(run):
    # untrained it predicts .5 everywhere, so every squared error is .25
    assert run.summary["before"]["critic_brier"] == pytest.approx(0.25)


def test_the_run_folder_is_complete(run):
    names = {path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file()}
    assert names >= {
        *("summary.json", "curves.png", "metrics.csv", "tasks.jsonl"),
        *("trajectories/epoch=000.jsonl", "trajectories/epoch=001.jsonl"),
    }
    assert (run.folder / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    rows = [json.loads(line) for line in (run.folder / "trajectories" / "epoch=001.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2  # max_groups tasks, group_size rollouts
    assert {row["iteration"] for row in rows} == {2}
    tasks = [json.loads(line) for line in (run.folder / "tasks.jsonl").read_text().splitlines()]
    assert [task["status"] for task in tasks] == ["active"] * 4
    assert sum(task["rolls"] for task in tasks) == 2 * 3


def test_a_resumed_run_keeps_what_it_measured_before(monkeypatch):
    first = RunSummary()
    first.before, first.seconds = {"in_domain/reward_model/mu": 1.5}, 40.0
    second = RunSummary()
    second.load_state_dict(first.state_dict())
    monkeypatch.setattr("callbacks.summary._evaluate", lambda *_: pytest.fail("measured again"))
    second.on_train_start(None, None)
    assert second.before == {"in_domain/reward_model/mu": 1.5}
    assert 40.0 <= second.state_dict()["seconds"] < 50.0


def test_a_run_without_metrics_csv_still_gets_its_summary(make_loop, train, tmp_path):
    logger = TensorBoardLogger(tmp_path, name="toy", version="v")
    trainer = train(make_loop(), tmp_path, [RunSummary(), TrajectoryLog()], epochs=1, logger=logger)
    folder = tmp_path / "toy" / "v"
    assert str(folder) == trainer.log_dir
    assert json.loads((folder / "summary.json").read_text())["epochs"] == 1
    assert not (folder / "curves.png").exists()


def test_the_table_has_a_row_per_kind_of_task(capsys, tmp_path):
    when = dict.fromkeys(KEYS, 0.25)
    of_kinds = {"in_domain/rollout/success_rate/heat": 0.5, "in_domain/rollout/success_rate/clean": 0.75, "in_domain/other": 9.0}
    _print_table(
        {
            **{"experiment": "toy", "seed": 3, "epochs": 2, "seconds": 7.0, "accepted_tasks": 1, "proposed_tasks": 4},
            **{"before": when, "after": when, "test": {"before": of_kinds, "after": {**of_kinds, "in_domain/other": 8.0}}},
        },
        tmp_path,
    )
    rows = [" ".join(line.replace("│", "|").split()) for line in capsys.readouterr().out.splitlines()]
    assert "| success_in_domain | 0.250 | 0.250 |" in rows
    first = rows.index("| in_domain, clean | 0.750 | 0.750 |")
    assert rows[first + 1] == "| in_domain, heat | 0.500 | 0.500 |"
    assert "accepted 1 of 4 proposed tasks" in rows
    assert not any("other" in row for row in rows)


def test_curves_take_the_rows_that_have_a_value(monkeypatch, tmp_path):
    drawn = {}

    def plot(axes, x, y, label):
        drawn[label] = (list(x), list(y))

    monkeypatch.setattr("matplotlib.axes.Axes.plot", plot)
    (tmp_path / "metrics.csv").write_text(
        "step,env/difficulty,rollout/success_rate,validation/in_domain/critic/brier\n"
        "1.0,,0.25,\n1.0,0.5,,\n2.0,,nan,\n2.0,,,0.125\n"
    )
    draw_curves(tmp_path / "metrics.csv", tmp_path / "curves.png")
    assert drawn["env/difficulty"] == ([1.0], [0.5])
    assert drawn["in_domain/critic/brier"] == ([2.0], [0.125])
    assert drawn["rollout/success_rate"][0] == [1.0, 2.0]
    assert math.isnan(drawn["rollout/success_rate"][1][1])
    assert len(drawn) == 3
