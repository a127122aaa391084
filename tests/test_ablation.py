"""Studies: what they refuse, which runs they start and when, and one that is interrupted and goes on."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import yaml

from rla_lightning import cli
from rla_lightning.types import ConfigError

SCRIPTS = Path(__file__).parent.parent / "scripts"
STUDY: dict[str, Any] = {"config": "run.yaml", "seeds": [3, 4], "runs": "runs", "variants": {"full": [], "fixed": []}}
HOLDING = """
import time
from pathlib import Path

from lightning.pytorch.callbacks import Checkpoint


class Hold(Checkpoint):  # behind ModelCheckpoint, the last of the list
    def on_train_epoch_end(self, *_):
        while Path("hold").exists():
            time.sleep(0.02)
"""
HOLD = """
trainer: {max_epochs: 2, callbacks+: [{class_path: holding.Hold}]}
data: {adapter: {class_path: rla_lightning.curriculum.adapters.FreshTasks}}
"""
FAKE = """
import json, sys, time
from pathlib import Path

options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
variant, seed, root = options["--experiment"], options["--seed_everything"], Path(options["--runs"])


def note(what):
    with (root / "events").open("a") as file:
        file.write(f"{what} {variant} {seed}\\n")


note("resumes" if "--ckpt_path" in options else "begins")
folder = root / variant / f"version_{len(list((root / variant).glob('version_*')))}"
folder.mkdir(parents=True)
(folder / "config.yaml").write_text(f"seed_everything: {seed}\\n")
if variant == "fails":
    print("\\n".join(f"line {number}" for number in range(40)))
    sys.exit(3)
time.sleep(0.4)
note("logs")
(folder / "metrics.csv").write_text("step\\n0\\n")
try:
    time.sleep(60 if variant == "long" else 0.4)
except KeyboardInterrupt:
    note("interrupted")
    sys.exit(1)
note("ends")
if variant != "silent":
    (folder / "summary.json").write_text(json.dumps({"seed": int(seed)}))
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of the script, and the signal handlers afterwards as before."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    import ablation
    import ablation_runs
    import ablation_study

    yield SimpleNamespace(main=ablation.main, runs=ablation_runs, study=ablation_study)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(STUDY | changes, sort_keys=False))
    return file


def version(root: Path, number: int, settings: dict[str, Any], seed: int, ends: bool) -> Path:
    """A run that was made with these settings and is finished, or left a checkpoint."""
    folder = root / f"version_{number}"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, "seed_everything": seed, "ckpt_path": "somewhere"}))
    (folder / "checkpoints" / "last.ckpt").touch()
    if ends:
        (folder / "summary.json").write_text("{}")
    return folder


# --- what a study refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tuning_seeds": [0, 4]}, "seed 4 is in tuning_seeds and in seeds"),
        ({"seeds": [3, 3]}, "seeds has 3 twice"),
        ({"seeds": [3, "4"]}, "seeds must be a list of whole numbers, got [3, '4']"),
        ({"sedes": [3]}, "unknown key 'sedes'"),
        ({"parallel": 0}, "parallel must be at least 1, got 0"),
        ({"variants": {}}, "at least one config, one variant and one seed"),
        ({"variants": {"../full": []}}, "variant '../full' cannot be the name of a folder"),
        ({"variants": {"full": {"overlays": []}}}, "variant 'full' has the unknown key 'overlays'"),
        ({"contrasts": [["full", "fresh"]]}, "contrasts name 'fresh', which is no variant"),
        ({"contrasts": [["full"]]}, "a contrast is two variants, got ['full']"),
        ({"measures": {"success": "in_domain/rollout/success_rate"}}, "got 'in_domain/rollout/success_rate'"),
        ({"measures": {"success": "after:in_domain/*"}}, "must both have a *"),
    ],
)
def test_a_bad_study_is_refused(scripts: SimpleNamespace, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        scripts.study.read_study(written(tmp_path, **changes))
    assert message in str(error.value)


def test_both_forms_of_a_variant(scripts: SimpleNamespace, tmp_path: Path) -> None:
    arguments = {"model.reward.score_weight": 4.0, "data.adapter": None, "trainer.precision": "bf16-true"}
    variants = {"plain": ["a.yaml"], "both": {"configs": ["b.yaml"], "arguments": arguments}}
    study = scripts.study.read_study(written(tmp_path, overlays=["over.yaml"], variants=variants))
    plain, both = (study.arguments(variant, 4) for variant in study.variants)
    place = ["--runs", "runs", "--experiment"]
    configs = ["--config", "run.yaml", "--config", "over.yaml", "--config"]
    assert plain == [*configs, "a.yaml", *place, "plain", "--seed_everything", "4"]
    given = ["--model.reward.score_weight=4.0", "--data.adapter=null", "--trainer.precision=bf16-true"]
    assert both == [*configs, "b.yaml", *given, *place, "both", "--seed_everything", "4"]


def test_what_cannot_be_compared_is_refused_before_any_run(
    scripts: SimpleNamespace, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "argv", ["ablation.py"])
    before = sorted(workspace.rglob("*.ckpt")), sorted(workspace.rglob("version_*"))
    longer = {"full": [], "longer": {"arguments": {"trainer.max_epochs": 3}}}
    for short in ({"trainer.max_steps": 1}, {"trainer.limit_train_batches": 0.5}, {"trainer.max_epochs": -1}):
        assert scripts.main([str(written(workspace, variants={"short": {"arguments": short}}))]) == 2
        (key,) = short
        assert f"variant 'short': {key} must be" in capsys.readouterr().err
    assert scripts.main([str(written(workspace, variants=longer))]) == 2
    assert "variant 'longer' has 48 rollouts and 'full' has 16 (" in capsys.readouterr().err  # 4 tasks x 4 rollouts an epoch
    settings = scripts.study.resolve(scripts.study.read_study(written(workspace, variants=longer, unequal_rollouts=True)))
    assert [found["trainer"]["max_epochs"] for found in settings.values()] == [1, 3]
    typo = {"typo": {"arguments": {"model.reward.score_wait": 4.0}}}
    assert scripts.main([str(written(workspace, variants=typo))]) == 2
    message = capsys.readouterr().err
    assert message.startswith("ablation: error: variant 'typo': ")
    assert "score_wait" in message
    assert scripts.main([str(written(workspace)), "--only", "fresh"]) == 2
    assert scripts.main([str(written(workspace)), "--seeds", "3", "5"]) == 2
    message = capsys.readouterr().err
    assert "--only fresh is no variant; there are full, fixed" in message
    assert "--seeds 5 is not among the study's seeds 3, 4" in message
    assert (sorted(workspace.rglob("*.ckpt")), sorted(workspace.rglob("version_*"))) == before


# --- what is there and what is missing --------------------------------------------------------------------------------


def test_finished_interrupted_missing_and_stale_runs(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    study = scripts.study.read_study(written(tmp_path))
    settings = {
        "full": {"model": {"reward": {"score_weight": 1.0}}, "data": {"adapter": {"class_path": "A"}}},
        "fixed": {"model": {"reward": {"score_weight": 1.0}}, "data": {"adapter": None}},
    }
    runs = tmp_path / "runs"
    version(runs / "full", 0, settings["full"], seed=3, ends=True)
    version(runs / "full", 1, settings["full"], seed=9, ends=True)  # another study's seed
    version(runs / "full", 2, settings["full"], seed=3, ends=True)
    version(runs / "fixed", 0, settings["fixed"], seed=4, ends=False)
    version(runs / "fixed", 1, settings["fixed"], seed=4, ends=False)
    (runs / "fixed" / "version_2").mkdir()  # failed before its first checkpoint
    found = scripts.runs.usable(scripts.runs.attempts(study, settings), ignore_stale=False)
    assert scripts.runs.finished(found) == {"full": {3: Path("runs/full/version_2")}}
    missing = scripts.runs.missing(study, found, ["full", "fixed"], [3, 4])
    checkpoint = Path("runs/fixed/version_1/checkpoints/last.ckpt")
    assert [(run.variant.name, run.seed, run.checkpoint) for run in missing] == [
        ("fixed", 3, None),
        ("full", 4, None),
        ("fixed", 4, checkpoint),
    ]
    assert [str(run) for run in scripts.runs.missing(study, found, ["full"], [3, 4])] == ["full, seed 4"]

    settings["full"]["model"]["reward"]["score_weight"] = 4.0
    found = scripts.runs.attempts(study, settings)
    with pytest.raises(ConfigError) as error:
        scripts.runs.usable(found, ignore_stale=False)
    assert "version_0 was made with other settings: model.reward.score_weight was 1.0 and is 4.0 (and 1 more)" in str(error.value)
    left = scripts.runs.missing(study, scripts.runs.usable(found, ignore_stale=True), ["full"], [3])
    assert [str(run) for run in left] == ["full, seed 3"]
    assert capsys.readouterr().out.count("ignored: runs/full/version_") == 2


# --- playing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def played(scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[str]]]:
    """Plays all runs of a study with a stand-in for `rla fit`: the sitting and what the runs noted, in order."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fake.py").write_text(FAKE)

    def play(hours: float | None = None, **changes: Any) -> tuple[Any, list[str]]:
        study = scripts.study.read_study(written(tmp_path, **changes))
        with scripts.runs.locked(study.runs) as lock:
            sitting = scripts.runs.Sitting(study, lock, (sys.executable, "fake.py"), hours)
            sitting.play(scripts.runs.missing(study, [], [variant.name for variant in study.variants], study.seeds))
        return sitting, (tmp_path / "runs" / "events").read_text().splitlines() if (tmp_path / "runs" / "events").exists() else []

    return play


def test_runs_of_a_seed_wait_for_its_warm_start(played: Callable[..., Any]) -> None:
    sitting, events = played(variants={"a": [], "b": [], "c": []}, seeds=[3, 4], parallel=3)
    assert not sitting.failed
    assert len(events) == 3 * 6
    for seed in ("3", "4"):
        (first, *others) = [event for event in events if event.endswith(seed) and not event.startswith("ends")]
        assert first == f"begins a {seed}"
        assert others[0] == f"logs a {seed}"
    assert events.index("begins a 4") < events.index("begins b 3")  # the free place makes the next seed's warm start


def test_no_more_at_a_time_than_wanted_and_seeds_in_order(played: Callable[..., Any]) -> None:
    _, events = played(variants={"a": [], "b": []}, seeds=[4, 3], parallel=1)
    assert [event for event in events if not event.startswith("logs")] == [
        f"{what} {variant} {seed}" for seed in (4, 3) for variant in ("a", "b") for what in ("begins", "ends")
    ]


def test_a_run_that_fails_does_not_stop_the_others(played: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    sitting, events = played(variants={"fails": [], "silent": [], "a": []}, seeds=[3])
    assert [str(run) for run in sitting.failed] == ["fails, seed 3", "silent, seed 3"]
    assert "ends a 3" in events
    out = capsys.readouterr().out
    assert "FAILED: fails, seed 3: exit code 3; the end of runs/logs/fails_seed3.log:\n    line 25\n" in out
    assert "    line 39\n" in out
    assert "FAILED: silent, seed 3: it left no summary.json" in out


def test_nothing_starts_when_the_time_is_over(played: Callable[..., Any]) -> None:
    _, events = played(hours=0.0)
    assert events == []
    _, events = played(hours=0.3 / 3600)  # the first one is started at once and takes longer
    assert [event for event in events if event.startswith("begins")] == ["begins full 3"]
    assert "ends full 3" in events


def test_ctrl_c_stops_the_runs(played: Callable[..., Any], tmp_path: Path) -> None:
    thread = interrupt_when(lambda: "logs long 3" in (tmp_path / "runs" / "events").read_text())
    with pytest.raises(KeyboardInterrupt):
        played(variants={"long": []}, seeds=[3])
    thread.join()
    assert (tmp_path / "runs" / "events").read_text().splitlines() == ["begins long 3", "logs long 3", "interrupted long 3"]


def test_a_study_is_played_once_at_a_time(scripts: SimpleNamespace, tmp_path: Path) -> None:
    with (
        scripts.runs.locked(tmp_path / "runs"),
        pytest.raises(ConfigError, match="is in use"),
        scripts.runs.locked(tmp_path / "runs"),
    ):
        pass
    with scripts.runs.locked(tmp_path / "runs"):
        pass


def interrupt_when(condition: Callable[[], bool]) -> threading.Thread:
    """Presses Ctrl-C in this process as soon as the condition holds."""

    def wait() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with suppress(FileNotFoundError):
                if condition():
                    os.kill(os.getpid(), signal.SIGINT)
                    return
            time.sleep(0.05)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


# --- all of it --------------------------------------------------------------------------------------------------------


class Forked:
    """A run in a copy of this process, much faster than a new one."""

    def __init__(self, command: Sequence[str], log: IO[str], lock: IO[str]) -> None:
        del lock
        self.process = multiprocessing.get_context("fork").Process(target=self._main, args=(command[3:], log.fileno()))
        self.process.start()

    @staticmethod
    def _main(arguments: list[str], log: int) -> None:
        os.dup2(log, 1)
        sys.stdout = sys.stderr = os.fdopen(1, "w")
        cli.main(arguments)

    def poll(self) -> int | None:
        return self.returncode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode


def test_a_study_that_is_interrupted_goes_on(
    scripts: SimpleNamespace, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ablation.py"])
    (tmp_path / "corridor.py").write_text((workspace / "corridor.py").read_text())
    (tmp_path / "holding.py").write_text(HOLDING)
    (tmp_path / "run.yaml").write_text((workspace / "run.yaml").read_text())
    (tmp_path / "hold.yaml").write_text(HOLD)
    (tmp_path / "fixed.yaml").write_text("data: {adapter: null}\n")
    variants = {"full": [], "fixed": ["fixed.yaml"]}
    changes = {"overlays": ["hold.yaml"], "variants": variants, "parallel": 2, "contrasts": [["full", "fixed"]]}
    study = str(written(tmp_path, **changes))

    (tmp_path / "hold").touch()  # the first run stays after its first checkpoint
    thread = interrupt_when(lambda: (tmp_path / "runs/full/version_0/checkpoints/last.ckpt").stat().st_size > 0)
    assert scripts.main([study, "--only", "full", "--seeds", "3"]) == 130
    thread.join()
    assert not (tmp_path / "runs/full/version_0/summary.json").exists()

    (tmp_path / "hold").unlink()
    monkeypatch.setattr(scripts.runs, "launch", Forked)  # the first sitting had a real process
    assert scripts.main([study]) == 0, capsys.readouterr().out
    assert "resumed: full, seed 3" in capsys.readouterr().out
    summaries = [json.loads(file.read_text()) for file in (tmp_path / "runs").rglob("summary.json")]
    found = sorted((summary["experiment"], summary["seed"], summary["epochs"]) for summary in summaries)
    assert found == [("fixed", 3, 2), ("fixed", 4, 2), ("full", 3, 2), ("full", 4, 2)]
    table = (tmp_path / "runs/table.md").read_text()
    assert "| | full (seeds 3, 4) | fixed (seeds 3, 4) |" in table
    assert "### full minus fixed" in table

    before = sorted((tmp_path / "runs").rglob("*"))
    assert scripts.main([study]) == 0  # nothing is left to run
    assert sorted((tmp_path / "runs").rglob("*")) == before
    changes["variants"] = {**variants, "fixed": {"configs": ["fixed.yaml"], "arguments": {"model.reward.score_weight": 4.0}}}
    assert scripts.main([str(written(tmp_path, **changes)), "--table"]) == 2
    assert "model.reward.score_weight was 1.0 and is 4.0 (and 1 more)" in capsys.readouterr().err
