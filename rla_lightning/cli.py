"""The command `rla`: `fit`, `validate` and `test` of LightningCLI on ClosedLoop and EnvironmentDataModule, and `games`."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.environments.alfworld.builder import build_games
from rla_lightning.evaluation import evaluation_table
from rla_lightning.module import ClosedLoop
from rla_lightning.runs import ReplayMetrics, check_checkpoint, discard_unused, last_checkpoint, new_run_folder, process_rank
from rla_lightning.types import ConfigError, EpisodesFailedError, Purpose, ServerError

HARMLESS_WARNINGS = (
    ".*Experiment logs directory .* exists and is not empty",  # the run folder is ours and new
    ".*does not have many workers",  # a loader's one item is plain data
    ".*isinstance\\(treespec, LeafSpec\\)",  # inside Lightning
    ".*sync_dist=True",  # every process computes the same numbers
    ".*returned a view tensor",  # nobody changes the critic's logits in place
    ".*The dirpath has changed from",  # a resumed run has a folder of its own
)
COMMANDS = {"games": build_games}
UNUSABLE_STRATEGIES = ("ddp", "fsdp", "deepspeed")  # prefixes of Lightning's names
FIXED_SETTINGS = {
    "reload_dataloaders_every_n_epochs": (1, "tasks are regenerated every epoch"),
    "use_distributed_sampler": (False, "every process draws the same tasks and plays its share"),
}
NOISE = re.compile(  # of jsonargparse's reports on a value: what else it could have been
    r"Does not validate against|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>|Expected a path but|"
    r"Not a valid subclass|Subclass types expect|a class path|a dict |Expected a typing\.(?!.*Got value)|Expected a list|$"
)


class RlaParser(LightningArgumentParser):
    """Reports a mistake in one line."""

    reading = ""  # the file that is parsed now

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Namespace:
        self.reading = f"{cfg_path}: "
        try:
            return super().parse_path(cfg_path, *args, **kwargs)
        finally:
            self.reading = ""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        known = _config_error(ex)
        _fail(str(known) if known else self.reading + _one_line(message))


class CommandParser(ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        known = _config_error(ex)
        _fail(str(known) if known else _one_line(message))


class RlaCLI(LightningCLI):
    """LightningCLI with one environment for data and model, one seed, and one run folder per run."""

    run_folder: Path | None = None

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = super().init_parser(**kwargs)
        parser.epilog = "More commands: " + ", ".join(f"rla {name} --help" for name in COMMANDS)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--experiment", type=str, default="default", help="Runs go to runs/<experiment>/version_N.")
        parser.add_argument("--runs", type=Path, default=Path("runs"), help="Folder of all experiments.")
        parser.link_arguments("data.environment", "model.environment", apply_on="instantiate")
        parser.link_arguments("seed_everything", "model.seed", compute_fn=_seed)
        parser.link_arguments("seed_everything", "data.seed", compute_fn=_seed)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        skipped = LightningCLI.subcommands()
        return {"fit": skipped["fit"], "validate": skipped["validate"] | {"verbose"}, "test": skipped["test"] | {"verbose"}}

    def _parse_ckpt_path(self) -> None:
        """Instead of Lightning's look for hyper-parameters, which ours has not: resolve and check the checkpoint."""
        config = self.config[self.config.subcommand]
        if config.weights_only is None:
            config.weights_only = True
        if config.ckpt_path == "last":
            config.ckpt_path = str(last_checkpoint(config.runs / config.experiment))
        if config.ckpt_path is not None:
            check_checkpoint(Path(config.ckpt_path), config.weights_only)

    def before_instantiate_classes(self) -> None:
        _check_trainer(self.config[self.subcommand].trainer)
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun has said it
            os.environ["LOCAL_WORLD_SIZE"] = str(_processes(self.config[self.subcommand].trainer))

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """The trainer, with a new run folder; `trainer.logger` adds to our loggers, false switches them off."""
        config, given = self.config[self.subcommand], self.config_init[self.subcommand].trainer
        if config.trainer.fast_dev_run:
            return _checked(super().instantiate_trainer(**kwargs))
        self.run_folder = new_run_folder(config.runs / config.experiment)
        kwargs["default_root_dir"] = given.default_root_dir or str(self.run_folder)
        if given.logger is not False:
            place: dict[str, Any] = {"save_dir": config.runs, "name": config.experiment, "version": self.run_folder.name}
            more = given.logger if isinstance(given.logger, list) else [given.logger]
            more = [logger for logger in more if logger not in (None, True)]
            kwargs["logger"] = [TensorBoardLogger(**place), CSVLogger(**place), *more]
        with _unused_folder_discarded(self.run_folder):
            return _checked(super().instantiate_trainer(**kwargs))

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if (checkpoint := kwargs.pop("ckpt_path")) is not None:
            self.trainer.ckpt_path = checkpoint  # known to callbacks from the start, with strategies that load it late, too
        if subcommand != "fit":
            kwargs["verbose"] = False  # Lightning's table cuts names off and has a column per loader
        return kwargs

    def after_validate(self) -> None:
        self._print_metrics("validation")

    def after_test(self) -> None:
        self._print_metrics("test")

    def _print_metrics(self, purpose: Purpose) -> None:
        if self.trainer.is_global_zero:
            metrics = {name: float(value) for name, value in self.trainer.logged_metrics.items()}
            for name, value in sorted(metrics.items()):
                print(f"{name}: {value:.4g}")
            Console().print(evaluation_table(purpose, metrics, self.datamodule.evaluation_sets(purpose)))

    def _run_subcommand(self, subcommand: str) -> None:
        with _unused_folder_discarded(self.run_folder):
            super()._run_subcommand(subcommand)


def main(args: list[str] | None = None) -> None:
    """Run the command line; a `ConfigError` is printed as one line and ends with exit code 2."""
    _find_modules_of_users()
    _keep_freed_memory()
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_no_adverts)
    words = sys.argv[1:] if args is None else args
    try:
        if words and words[0] in COMMANDS:
            print(_run_command(words[0], words[1:]))
            return
        RlaCLI(
            ClosedLoop,
            EnvironmentDataModule,
            parser_class=RlaParser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            seed_everything_default=0,
            trainer_defaults={
                **{name: value for name, (value, _) in FIXED_SETTINGS.items()},
                "num_sanity_val_steps": 0,
                "log_every_n_steps": 1,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "callbacks": [ReplayMetrics()],
            },
            args=args,
        )
    except (EpisodesFailedError, ServerError) as error:
        _fail(str(error))
    except MisconfigurationException as error:
        _fail(_one_line(str(error)))
    except ValueError as error:
        known = _config_error(error)
        if known is None:
            raise
        _fail(str(known))


def _run_command(name: str, args: list[str]) -> object:
    """A command that needs neither models nor a trainer: a function with its arguments as options."""
    about = (COMMANDS[name].__doc__ or "").partition("\n")[0]
    parser = CommandParser(prog=f"rla {name}", description=about)
    parser.add_function_arguments(COMMANDS[name], as_positional=True)
    return COMMANDS[name](**parser.instantiate_classes(parser.parse_args(args)).as_dict())


def _no_adverts(record: logging.LogRecord) -> bool:
    return "💡 Tip" not in record.getMessage()


def _fail(message: str) -> NoReturn:
    rank = process_rank()
    where = f" (process {rank})" if rank else ""
    print(f"rla: error{where}: {message}", file=sys.stderr)
    sys.exit(2)


def _config_error(error: BaseException | None) -> ConfigError | None:
    """The ConfigError that an exception of jsonargparse wraps."""
    if error is None or isinstance(error, ConfigError):
        return error
    return _config_error(error.__cause__) or _config_error(error.__context__)


def _one_line(message: str) -> str:
    lines = [line.strip(" -") for line in message.splitlines()]
    line = " ".join([line for line in lines if not NOISE.match(line)] or lines)
    value = re.search(r"^ *Given value: (.{1,60})$", message, re.MULTILINE)
    return f"{line}. Got value: {value[1]}" if value and f"Got value: {value[1]}" not in line else line


def _seed(seed: int) -> int:
    if isinstance(seed, bool):
        raise ConfigError(f"seed_everything must be a number, got {str(seed).lower()}")
    return seed


@contextmanager
def _unused_folder_discarded(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if folder is not None:
            discard_unused(folder)
        raise


class _WorkingDirectory:
    """Finds the modules of the folder in which a command is run, when nobody else knows their name.

    At the end of sys.path they would come before those of an editable install, e.g. a callbacks.py before ours.
    """

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return None if path is not None else PathFinder.find_spec(name, [os.getcwd()])


def _find_modules_of_users() -> None:
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    if _WorkingDirectory not in sys.meta_path:
        sys.meta_path.append(_WorkingDirectory)


def _keep_freed_memory() -> None:
    """Tell glibc to reuse freed blocks instead of giving them back: 20 to 35 % less CPU time with tiny models."""
    library = ctypes.CDLL(None)
    try:
        mallopt = library.mallopt
    except AttributeError:
        return  # another C library
    mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
    mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def _processes(trainer: Namespace) -> int:
    """How many processes Lightning starts on this machine; what they share, such as its CPUs, is divided by them."""
    devices = trainer.devices
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    if isinstance(devices, str) and devices != "auto":
        devices = devices.strip(",").split(",")
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, int) and devices > 0:
        return devices
    return max(1, torch.cuda.device_count()) if trainer.accelerator in ("auto", "gpu", "cuda") else 1


def _check_trainer(trainer: Namespace) -> None:
    """Refuse settings that cannot work, before anything is built."""
    strategy = trainer.strategy
    name = strategy if isinstance(strategy, str) else strategy.class_path.rsplit(".", 1)[-1]
    if name.lower().startswith(UNUSABLE_STRATEGIES):
        raise ConfigError(_unusable(name))
    for setting in ("gradient_clip_val", "accumulate_grad_batches"):
        value = trainer.get(setting)
        if value not in (None, 0, 1) or (setting == "gradient_clip_val" and value):
            raise ConfigError(f"trainer.{setting} {value} has no effect here; set max_grad_norm or token_budget of each update")
    if trainer.max_steps != -1:
        raise ConfigError(f"trainer.max_steps {trainer.max_steps} would count the steps of all optimizers; set max_epochs")
    if str(trainer.precision).startswith("16"):
        raise ConfigError(f"trainer.precision {trainer.precision} needs scaled gradients, which are clipped here; use bf16-mixed")
    for setting, (value, reason) in FIXED_SETTINGS.items():
        if trainer[setting] != value:
            raise ConfigError(f"trainer.{setting} must be {value}, got {trainer[setting]}: {reason}")


def _unusable(strategy: str) -> str:
    return (
        f"trainer.strategy {strategy!r} cannot train several models with several optimizers by hand; "
        "use --config configs/trainer/fsdp2.yaml (ModelParallelStrategy) for several devices"
    )


def _checked(trainer: L.Trainer) -> L.Trainer:
    """Refuse strategies that Lightning chose by itself; save checkpoints when an epoch is complete.

    By default ModelCheckpoint saves after validation when that is not run in every epoch: rarely, and before the
    tasks were adapted to the epoch's feedback, which a resumed run would then miss.
    """
    if not isinstance(trainer.strategy, SingleDeviceStrategy | ModelParallelStrategy):
        raise ConfigError(_unusable(type(trainer.strategy).__name__))
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            if callback._every_n_train_steps or callback._train_time_interval or callback._save_on_train_epoch_end is False:
                raise ConfigError(
                    "ModelCheckpoint must save at the end of epochs: set every_n_epochs and nothing else about when"
                )
            callback._save_on_train_epoch_end = True
            if trainer.fast_dev_run:  # type: ignore[attr-defined]
                callback.save_last = False
    return trainer


if __name__ == "__main__":
    main()
