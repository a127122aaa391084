import math
import sys
from types import SimpleNamespace

import pytest

from callbacks import LoopProgress
from rla_lightning.types import IterationResult

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers.*")


def trainer_of(rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(is_global_zero=rank == 0, max_epochs=3)


def result_of(iteration: int) -> dict[str, IterationResult]:
    metrics = {"rollout/success_rate": 0.25, "reward_model/mu": 1.0625, "critic/brier": 0.2}
    return {"result": IterationResult(iteration, (), (), (), (), (), metrics)}


def test_one_plain_line_per_iteration_where_there_is_no_terminal(make_loop, train, tmp_path, capsys):
    train(make_loop(), tmp_path, [LoopProgress()], epochs=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration ")]
    assert [line.split(":")[0] for line in lines] == ["iteration 1/2", "iteration 2/2"]
    assert all("success " in line and "critic brier " in line for line in lines)


def test_the_line_shows_the_numbers(make_loop, capsys):
    progress, loop = LoopProgress(), make_loop()
    progress.setup(trainer_of(), loop, "fit")
    progress.on_train_batch_end(trainer_of(), loop, result_of(2), None, 0)
    for update in (0, 20):
        loop.progress("warm start: policy", update, 40, math.nan)
    loop.progress("rollout turn 1", 0, 8, 0.5)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "iteration 2/3: success 0.250, judge mu 1.062, critic brier 0.200 (0 s)",
        "warm start: policy (0 s)",  # once, not for every update
    ]
    assert "\x1b" not in "".join(printed)


def test_other_processes_print_nothing(make_loop, capsys):
    progress, loop = LoopProgress(), make_loop()
    progress.setup(trainer_of(rank=1), loop, "fit")
    loop.progress("warm start: policy", 0, 40, math.nan)
    progress.on_train_batch_end(trainer_of(rank=1), loop, result_of(1), None, 0)
    assert capsys.readouterr().out == ""


def test_a_live_bar_in_a_terminal_says_what_happens_now(make_loop, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    progress, loop = LoopProgress(), make_loop()
    progress.setup(trainer_of(), loop, "fit")
    bar = progress._bar
    loop.progress("rollout turn 3", 4, 16, 0.5)
    progress.on_train_batch_end(trainer_of(), loop, result_of(1), None, 0)
    assert [(task.description, task.completed, task.total) for task in bar.tasks] == [
        ("iterations", 1, 3),
        ("rollout turn 3 | success 0.50", 4, 16),
    ]
    loop.progress("updating policy", 0, 1, math.nan)
    assert bar.tasks[1].description == "updating policy | success 0.25"
    progress.on_exception(trainer_of(), loop, RuntimeError())  # Lightning calls no teardown then
    assert bar.live.is_started is False
    progress.teardown(trainer_of(), loop, "fit")
    assert "iteration 1/3" not in capsys.readouterr().out
