"""Every YAML file under configs/ parses, instantiates, and runs where its devices exist."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rla_lightning.cli import FIXED_SETTINGS, RlaCLI, RlaParser
from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.models.sharding import ShardedStrategy
from rla_lightning.module import MODELS, ClosedLoop

CONFIGS = Path(__file__).parent.parent / "configs"
BASE = CONFIGS / "household.yaml"
SHARED = CONFIGS / "scale" / "alfworld_qwen2.5-7b_shared.yaml"
SCALE = sorted(CONFIGS.glob("scale/*.yaml"))  # run in test_scale.py: their models and games are not here
EXPERIMENTS = sorted(CONFIGS.glob("*.yaml"))
OVERLAYS = sorted(file for file in CONFIGS.glob("*/*.yaml") if file not in SCALE)
NOT_HERE = ("trainer/gpu.yaml", "trainer/fsdp2.yaml", "trainer/fsdp2_multinode.yaml")  # their devices
SMALL = """
trainer: {max_epochs: 1, callbacks: [{class_path: callbacks.RunSummary}]}
model:
  policy: &tiny {tiny: {width: 16, layers: 1, heads: 2, mlp_width: 32}}
  reward_model: *tiny
  critic: *tiny
  rollout: {group_size: 2, max_turns: 2, eval_max_turns: 2}
data: {tasks_per_iteration: 2, pool_size: 4, validation_tasks: 2, test_tasks: 2}
"""


def configs_of(file: Path) -> list[str]:
    """The options that use a file: an overlay goes on top of the main experiment, or of another one."""
    below = {SHARED: SHARED.with_name("alfworld_qwen2.5-7b_lora.yaml"), **dict.fromkeys(OVERLAYS, BASE)}
    files = [below[file], file] if file in below else [file]
    return [word for path in files for word in ("--config", str(path))]


def local_data(file: Path, folder: Path) -> list[str]:
    """Where the experiment builds games: fewer, and not in the user's folder. Where it needs weights: tiny random ones."""
    if "smollm2" in file.name:
        names = ("--model.policy", "--model.reward_model")
        settings = {"path": "null", "gguf_file": "null", "tiny.context_length": "4096"}
        return [word for name in names for key, value in settings.items() for word in (f"{name}.{key}", value)]
    if "alfworld" not in file.name:
        return []
    options = {"data": folder / "games", "build.number": 64, "build.evaluation_games": 6}
    words = [word for name, value in options.items() for word in (f"--data.environment.init_args.{name}", str(value))]
    return [*words, "--data.pool_size", "48"]


def by_name(file: Path) -> str:
    return str(file.relative_to(CONFIGS))


class Instantiated(RlaCLI):
    """Builds everything and runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def instantiate(monkeypatch: pytest.MonkeyPatch, *options: str) -> Instantiated:
    monkeypatch.setattr("sys.argv", ["rla"])
    return Instantiated(
        ClosedLoop,
        EnvironmentDataModule,
        parser_class=RlaParser,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        trainer_defaults={name: value for name, (value, _) in FIXED_SETTINGS.items()},
        args=["fit", *options],
    )


def test_there_are_configs() -> None:
    experiments = ["alfworld_tiny.yaml", "coding_smollm2.yaml", "coding_tiny.yaml", "household.yaml", "reasoning_gym_tiny.yaml"]
    assert [by_name(file) for file in EXPERIMENTS] == experiments
    scales = [f"scale/{name}_qwen2.5-7b_{kind}.yaml" for name in ("alfworld", "coding") for kind in ("full", "lora")]
    assert [by_name(file) for file in SCALE] == sorted([*scales, by_name(SHARED)])
    trainers = {"trainer/cpu.yaml", *NOT_HERE}
    assert trainers <= {by_name(file) for file in OVERLAYS}


@pytest.mark.parametrize("file", EXPERIMENTS + OVERLAYS + SCALE, ids=by_name)
def test_it_parses(rla: Callable[..., Any], file: Path) -> None:
    printed = rla("fit", *configs_of(file), "--print_config")
    assert printed.code == 0, printed.err
    config = yaml.safe_load(printed.out)
    for section, keys in (yaml.safe_load(file.read_text()) or {}).items():
        if section in ("trainer", "model", "data"):
            assert keys.keys() <= config[section].keys()


@pytest.mark.parametrize("file", [f for f in EXPERIMENTS + OVERLAYS if by_name(f) not in NOT_HERE], ids=by_name)
def test_it_instantiates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path) -> None:
    cli = instantiate(monkeypatch, *configs_of(file), *local_data(file, tmp_path), "--runs", str(tmp_path))
    assert isinstance(cli.model, ClosedLoop)
    assert cli.datamodule.pool.slots
    cli.model.configure_model()
    cli.model.players.check_context(cli.datamodule.tasks)
    written = yaml.safe_load(file.read_text())
    for name in MODELS:
        if f"{name}_optimizer" in (written.get("model") or {}):
            assert (cli.model.optimizer_factories[name] is None) == (written["model"][f"{name}_optimizer"] is None)


@pytest.mark.parametrize(("name", "nodes"), [("fsdp2", 1), ("fsdp2_multinode", 2)])
def test_sharded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, nodes: int) -> None:
    overlay = configs_of(CONFIGS / "trainer" / f"{name}.yaml")
    for devices in (1, 2, 8):
        place = ["--trainer.accelerator", "cpu", "--trainer.devices", str(devices), "--runs", str(tmp_path)]
        strategy = instantiate(monkeypatch, *overlay, *place).trainer.strategy
        assert isinstance(strategy, ShardedStrategy)
        assert (strategy.num_nodes, strategy.num_processes) == (nodes, devices)
        assert strategy.shard_size == ("node" if nodes > 1 else None)


@pytest.mark.parametrize("file", EXPERIMENTS[:1] + [f for f in OVERLAYS if f.parent.name != "trainer"], ids=by_name)
def test_it_runs(rla: Callable[..., Any], tmp_path: Path, file: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    small = ["--config", tmp_path / "small.yaml", *local_data(file, tmp_path), "--data.pool_size", "4"]
    ended = rla("fit", *configs_of(file), *small, "--runs", tmp_path / "runs")
    assert ended.code == 0, ended.err
    assert len(list((tmp_path / "runs").rglob("summary.json"))) == 1
