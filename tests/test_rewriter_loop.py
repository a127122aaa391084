"""Closed loops in which the rewriter is trained on the verdicts on its proposals: killed and resumed, and by the command line."""

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from rla_lightning.curriculum.rewriter import RewriterAdapter
from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.environments.base import Environment, Episode
from rla_lightning.models.language_model import load_language_model
from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec, ValueModelSpec
from rla_lightning.module import ClosedLoop
from rla_lightning.settings import AcceptanceSettings, RolloutSettings
from rla_lightning.types import LOST, WON, Observation, Task, Transition

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers.*")

TINY = TinySpec(width=16, layers=1, heads=2, mlp_width=32, context_length=32)
DOORS = ("wall", "some", "open")
LEARNED = [f"env/rewrite_{name}" for name in ("reward", "samples", "loss", "grad_norm")]


def door(kind: str, tag: str, parent: Task | None = None) -> Task:
    task_id = f"{kind}-{tag}"
    root, parent_id, version = (parent.root_id, parent.id, parent.version + 1) if parent else (task_id, None, 0)
    return Task(task_id, "doors", {"kind": kind}, 0.5, root, parent_id, version)


class Doors(Environment):
    """An open door lets everybody pass, a wall nobody, some doors those who say the right word; one word makes another one."""

    name = "doors"

    def vocabulary(self):
        return (*"abcdef", "n1")

    def sample(self, rng, difficulty, split="in_domain"):
        return door(rng.choice(("open", "wall")), f"{split}-{rng.randrange(10**6)}")

    def start(self, task):
        return Visit(task)

    def describe(self, task):
        return "n1"

    def rewrite_prompt(self, task, direction, critique, successes, rollouts):
        return f"make it {direction}"

    def apply_rewrite(self, task, answer):
        words = answer.split()
        return door(words[0], f"{task.id}>", task) if words and words[0] in DOORS else "no door"


class Visit(Episode):
    max_turns = 1

    def __init__(self, task):
        self.kind = task.spec["kind"]
        self.observation = Observation("n1")

    def step(self, action):
        passes = self.kind == "open" or (self.kind == "some" and action[:1] in tuple("abc"))
        return Transition(self.observation, True, WON if passes else LOST, action[:1] in tuple("abcdef"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that mostly names a door or ends."""
    place = tmp_path_factory.mktemp("model")
    loaded = load_language_model(LanguageModelSpec(tiny=TINY), (*DOORS, "make", "it", "harder", "easier", "Answer:"), "a")
    embedding = loaded.model.get_input_embeddings().weight.data
    embedding += 1  # all hidden states are about (1, ..., 1), and the output layer is the embedding
    embedding[loaded.tokenizer.convert_tokens_to_ids([*DOORS, loaded.tokenizer.eos_token])] += 0.15
    loaded.model.save_pretrained(place)
    loaded.tokenizer.save_pretrained(place)
    return place


def built(model: Path, lora: LoraSpec | None = None, optimizer: Any = None) -> tuple[ClosedLoop, EnvironmentDataModule]:
    environment = Doors()
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    loop = ClosedLoop(
        environment,
        policy=LanguageModelSpec(tiny=TINY),
        reward_model=LanguageModelSpec(tiny=TINY),
        critic=ValueModelSpec(tiny=TINY),
        policy_optimizer=adamw,
        reward_model_optimizer=None,
        critic_optimizer=adamw,
        rollout=RolloutSettings(group_size=4, max_new_tokens=1, max_judge_tokens=1, num_judgments=2),
        acceptance=AcceptanceSettings(rule="threshold"),
    )
    adapter = RewriterAdapter(
        LanguageModelSpec(path=str(model), lora=lora), attempts=4, temperature=1.0, top_p=1.0, max_new_tokens=3, ranking="first",
        control_share=0.2, device="cpu", optimizer=optimizer,
    )  # fmt: skip
    data = EnvironmentDataModule(environment, adapter, tasks_per_iteration=4, pool_size=8, validation_tasks=1, test_tasks=1)
    return loop, data


def fit(loop: ClosedLoop, data: EnvironmentDataModule, folder: Path, epochs: int, resumed: Path | None = None) -> None:
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=CSVLogger(folder, name="", version=""), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, reload_dataloaders_every_n_epochs=1,
        log_every_n_steps=1, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(loop, data, ckpt_path=resumed, weights_only=True)
    trainer.save_checkpoint(folder / f"{epochs}.ckpt")


def rows(folder: Path, columns: list[str]) -> list[list[str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [[row[name] for name in columns] for row in csv.DictReader(file) if row.get(columns[0])]


def adapter_state(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True)["EnvironmentDataModule"]["adapter"]


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
def test_a_resumed_run_goes_on_as_if_nothing_happened(model: Path, tmp_path: Path, lora: LoraSpec | None) -> None:
    epochs, adam = 6, partial(torch.optim.AdamW, lr=1e-2)
    whole, half, again = tmp_path / "whole", tmp_path / "half", tmp_path / "again"
    loop, data = built(model, lora, adam)
    fit(loop, data, whole, epochs)
    fit(*built(model, lora, adam), half, 3)
    resumed_loop, resumed = built(model, lora, adam)
    fit(resumed_loop, resumed, again, epochs, half / "3.ckpt")

    found = rows(whole, LEARNED)
    assert len(found) == epochs  # under the same names every iteration
    assert found[0][0] == "nan"
    assert sum(float(samples) for _, samples, _, _ in found[3:]) > 0
    assert all((float(samples) == 0) == (norm == "nan") for _, samples, _, norm in found)
    assert rows(half, LEARNED) == found[:3]
    assert rows(again, LEARNED) == found[3:]

    assert data.pool.state() == resumed.pool.state()
    assert int(loop.tokens_generated) == int(resumed_loop.tokens_generated)
    ours, theirs = adapter_state(whole / f"{epochs}.ckpt"), adapter_state(again / f"{epochs}.ckpt")
    assert (ours["waiting"], ours["acceptance"], ours["verdicts"]) == (
        theirs["waiting"],
        theirs["acceptance"],
        theirs["verdicts"],
    )
    assert ours["verdicts"] > 0
    weights, restored = ours["model"]["weights"], theirs["model"]["weights"]
    assert weights.keys() == restored.keys()
    assert all(torch.equal(weights[name], restored[name]) for name in weights)
    assert all(("lora_" in name) == (lora is not None) for name in weights)  # the base stays out
    first = adapter_state(half / "3.ckpt")["model"]["weights"]
    assert any(not torch.equal(weights[name], first[name]) for name in weights)


def test_a_frozen_rewriter_leaves_nothing_in_checkpoints(model: Path, tmp_path: Path) -> None:
    loop, data = built(model)
    fit(loop, data, tmp_path, 2)
    assert adapter_state(tmp_path / "2.ckpt") == {}
    with (tmp_path / "metrics.csv").open(newline="") as file:
        columns = next(csv.reader(file))
    assert "env/rewrite_answers" in columns
    assert not set(LEARNED) & set(columns)


def test_a_run_of_the_command_line(rla: Callable[..., Any], workspace: Path, model: Path) -> None:
    (workspace / "rewritable.py").write_text(
        "from corridor import CorridorEnvironment\n\n\nclass Rewritable(CorridorEnvironment):\n"
        "    def rewrite_prompt(self, task, direction, critique, successes, rollouts):\n        return 'make it ' + direction\n\n"
        "    def apply_rewrite(self, task, text):\n        return 'is no task: ' + text\n"
    )
    adapter = ["--data.adapter", "rla_lightning.curriculum.rewriter.RewriterAdapter", "--data.adapter.max_new_tokens", "4"]
    adapter += ["--data.adapter.model.path", model, "--data.adapter.model.lora.rank", 2, "--data.adapter.attempts", 1]
    adapter += ["--data.adapter.optimizer", "torch.optim.AdamW", "--data.adapter.optimizer.lr", "1e-3"]
    world = ["--data.environment.class_path", "rewritable.Rewritable", "--runs", workspace / "runs", "--experiment", "trained"]
    command = ["fit", "--config", workspace / "run.yaml", *world, *adapter]
    ended = rla(*command, "--trainer.max_epochs", 2)
    assert ended.code == 0, ended.err
    ended = rla(*command, "--trainer.max_epochs", 3, "--ckpt_path", "last")
    assert ended.code == 0, ended.err
    folder = max((workspace / "runs" / "trained").iterdir())
    found = [(float(reward), float(samples) > 0) for reward, samples, _, _ in rows(folder, LEARNED)]
    assert found[1:] == [(0.0, True)] * (len(found) - 1)  # a lone answer that is refused is below the mean
    assert len(found) == 3
