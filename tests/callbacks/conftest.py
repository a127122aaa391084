from collections.abc import Callable
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.environments.household import HouseholdEnvironment
from rla_lightning.models.specs import LanguageModelSpec, TinySpec, ValueModelSpec
from rla_lightning.module import ClosedLoop
from rla_lightning.settings import RolloutSettings

TINY = TinySpec(width=16, layers=1, heads=2, mlp_width=32)


def build_loop(tiny: TinySpec = TINY, **options) -> ClosedLoop:
    """A ClosedLoop on the household, its models built."""
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    defaults = {
        "environment": HouseholdEnvironment(),
        "policy": LanguageModelSpec(tiny=tiny),
        "reward_model": LanguageModelSpec(tiny=tiny),
        "critic": ValueModelSpec(tiny=tiny),
        **{f"{name}_optimizer": adamw for name in ("policy", "reward_model", "critic")},
        "rollout": RolloutSettings(group_size=2, max_turns=4, eval_max_turns=3, max_new_tokens=4, max_judge_tokens=3),
    }
    loop = ClosedLoop(**{**defaults, **options})
    loop.configure_model()
    return loop


def build_data() -> EnvironmentDataModule:
    return EnvironmentDataModule(
        HouseholdEnvironment(), None, tasks_per_iteration=3, pool_size=4, validation_tasks=2, test_tasks=4
    )


def fit(loop: ClosedLoop, folder: Path, callbacks: list[L.Callback], epochs: int = 2, logger=None) -> L.Trainer:
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=callbacks, logger=logger or CSVLogger(folder, name="toy", version="v"),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1, log_every_n_steps=1, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(loop, build_data())
    return trainer


@pytest.fixture(scope="session")
def make_loop() -> Callable[..., ClosedLoop]:
    return build_loop


@pytest.fixture(scope="session")
def train() -> Callable[..., L.Trainer]:
    return fit
