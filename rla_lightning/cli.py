"""The command `rla`: `fit`, `validate` and `test` of LightningCLI on ClosedLoop and EnvironmentDataModule."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.module import ClosedLoop
from rla_lightning.runs import ReplayMetrics, last_checkpoint, new_run_folder
from rla_lightning.types import ConfigError

HARMLESS_WARNINGS = (
    ".*Experiment logs directory .* exists and is not empty",  # the run folder is ours and new
    ".*does not have many workers",  # a loader's one item is plain data
    ".*isinstance\\(treespec, LeafSpec\\)",  # inside Lightning
)
UNUSABLE_STRATEGIES = ("ddp", "fsdp", "deepspeed")  # prefixes of Lightning's names


class RlaCLI(LightningCLI):
    """LightningCLI with one environment for data and model, one seed, and one run folder per run."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--experiment", type=str, default="default", help="Runs go to runs/<experiment>/version_N.")
        parser.add_argument("--runs", type=Path, default=Path("runs"), help="Folder of all experiments.")
        parser.link_arguments("data.environment", "model.environment", apply_on="instantiate")
        parser.link_arguments("seed_everything", "model.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "predict"}

    def before_instantiate_classes(self) -> None:
        """Refuse what cannot work, resolve `ckpt_path: last`, make the run folder."""
        config = self.config[self.subcommand]
        _check_trainer(config.trainer)
        root = config.runs / config.experiment
        if config.get("ckpt_path") == "last":
            config.ckpt_path = str(last_checkpoint(root))
        if config.get("ckpt_path") is not None:
            _check_checkpoint(Path(config.ckpt_path))
        if config.trainer.logger in (None, True) and not config.trainer.fast_dev_run:
            folder = new_run_folder(root)
            place = {"save_dir": str(config.runs), "name": config.experiment, "version": folder.name}
            config.trainer.logger = [
                _class("lightning.pytorch.loggers.TensorBoardLogger", place),
                _class("lightning.pytorch.loggers.CSVLogger", place),
            ]


def main(args: list[str] | None = None) -> RlaCLI | None:
    """Run the command line; a `ConfigError` is printed as one line and ends with exit code 2."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a user's own modules can be named in YAML and never shadow ours
    _keep_freed_memory()
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    try:
        return RlaCLI(
            ClosedLoop,
            EnvironmentDataModule,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": False},
            trainer_defaults={
                "use_distributed_sampler": False,
                "reload_dataloaders_every_n_epochs": 1,
                "num_sanity_val_steps": 0,
                "log_every_n_steps": 1,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "callbacks": [ReplayMetrics()],
            },
            args=args,
        )
    except ConfigError as error:
        print(f"rla: error: {error}", file=sys.stderr)
        sys.exit(2)


def _keep_freed_memory() -> None:
    """Tell glibc to reuse freed blocks instead of giving them back: 20 to 35 % less CPU time with tiny models."""
    library = ctypes.CDLL(None)
    try:
        mallopt = library.mallopt
    except AttributeError:
        return  # another C library
    mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
    mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def _check_trainer(trainer: Namespace) -> None:
    strategy = trainer.strategy
    name = strategy if isinstance(strategy, str) else strategy.class_path.rsplit(".", 1)[-1].lower() if strategy else ""
    if name.startswith(UNUSABLE_STRATEGIES):
        raise ConfigError(
            f"trainer.strategy {name!r} cannot train several models with several optimizers by hand; "
            "use --config configs/trainer/fsdp2.yaml (ModelParallelStrategy) for several devices"
        )
    for setting in ("gradient_clip_val", "accumulate_grad_batches"):
        value = trainer.get(setting)
        if value not in (None, 1):
            raise ConfigError(f"trainer.{setting} {value} has no effect here; set max_grad_norm or token_budget of each update")
    if trainer.reload_dataloaders_every_n_epochs != 1:
        raise ConfigError("trainer.reload_dataloaders_every_n_epochs must be 1: tasks are regenerated every epoch")


def _check_checkpoint(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"ckpt_path {str(path)!r} does not exist")


def _class(class_path: str, init_args: dict[str, Any]) -> Namespace:
    return Namespace(class_path=class_path, init_args=Namespace(init_args))


if __name__ == "__main__":
    main()
