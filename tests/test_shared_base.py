"""Real runs with policy, reward model and critic on one base: the numbers of three separate models, resume, a bare rewriter."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rla_lightning.models.language_model import load_language_model
from rla_lightning.models.specs import LanguageModelSpec, TinySpec

MODELS = ("policy", "reward_model", "critic")


@pytest.fixture(scope="module")
def options(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The corridor with adapters on a pretrained model, of random weights, that mostly says what counts."""
    place = tmp_path_factory.mktemp("pretrained")
    words = ("you", "are", "in", "go", "to", "left", "right", *(f"n{room}" for room in range(8)))
    loaded = load_language_model(LanguageModelSpec(tiny=TinySpec(width=16, layers=2, heads=2, mlp_width=32)), words, "a")
    embedding = loaded.model.get_input_embeddings().weight.data
    embedding += 1  # all hidden states are about (1, ..., 1), and the output layer is the embedding
    embedding[loaded.tokenizer.convert_tokens_to_ids(["left", "right", "+1", "-1"])] += 0.15
    loaded.model.save_pretrained(place)
    loaded.tokenizer.save_pretrained(place)
    paths = [word for name in MODELS for word in (f"--model.{name}.path", place, f"--model.{name}.lora.rank", 2)]
    small = ["--trainer.max_epochs", 2, "--data.validation_tasks", 1, "--data.test_tasks", 1]
    return ["fit", "--config", workspace / "run.yaml", *paths, "--runs", workspace / "runs", *small]


def shared(options: Sequence[object]) -> list[object]:
    return [*options, "--model.reward_model.base", "policy", "--model.critic.base", "policy"]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if value and name[:5] != "time/"} for row in csv.DictReader(file)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def fit(rla: Callable[..., Any], workspace: Path, experiment: str, *args: object) -> Path:
    ended = rla(*args, "--experiment", experiment)
    assert ended.code == 0, ended.err
    return max((workspace / "runs" / experiment).iterdir())


def test_a_run_on_one_base_is_that_of_separate_models(rla: Callable[..., Any], workspace: Path, options: list[object]) -> None:
    """Even if it is interrupted and resumed."""
    separate = fit(rla, workspace, "separate", *options)
    fit(rla, workspace, "together", *shared(options), "--trainer.max_epochs", 1)
    together = fit(rla, workspace, "together", *shared(options), "--ckpt_path", "last")
    trained = [row for row in rows(together) if "policy/loss" in row]
    assert all(float(row[f"{name}/grad_norm"]) > 0 for row in trained for name in MODELS)
    assert rows(separate) == rows(together)
    ours, theirs = weights(separate), weights(together)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    sizes = [json.loads((folder / "summary.json").read_text())["parameters"] for folder in (separate, together)]
    assert [sizes[0][name]["trained"] for name in MODELS] == [sizes[1][name]["trained"] for name in MODELS]
    assert sizes[1]["reward_model"]["shared"] == sizes[0]["reward_model"]["frozen"] == sizes[1]["policy"]["frozen"] > 0
    assert sizes[1]["reward_model"]["frozen"] == sizes[1]["critic"]["frozen"] == 0


def test_the_rewriter_and_a_frozen_judge_are_the_bare_base(
    rla: Callable[..., Any], workspace: Path, options: list[object]
) -> None:
    (workspace / "written.py").write_text(
        "from corridor import CorridorEnvironment\n\n\nclass Written(CorridorEnvironment):\n"
        "    def rewrite_prompt(self, task, direction, critique, successes, rollouts):\n        return 'go to n1'\n\n"
        "    def apply_rewrite(self, task, text):\n        return 'is no task: ' + text\n"
    )
    bare = ["--model.reward_model.base", "policy", "--model.reward_model_optimizer", "null"]
    rewriter = ["--data.adapter", "rla_lightning.curriculum.rewriter.RewriterAdapter", "--data.adapter.max_new_tokens", "4"]
    world = ["--data.environment.class_path", "written.Written"]
    judge = options.index("--model.reward_model.path")  # with its adapter, four words
    args = [*options[:judge], *options[judge + 4 :], *bare, *rewriter, *world]
    folder = fit(rla, workspace, "bare", *args, "--trainer.max_epochs", "1")
    (row,) = [row for row in rows(folder) if "env/rewrite_answers" in row]
    assert float(row["env/rewrite_answers"]) > 0
    assert not [name for name in weights(folder) if name.startswith("reward_model")]


def test_a_rewriter_without_a_frozen_base_is_refused(rla: Callable[..., Any], workspace: Path) -> None:
    rewriter = ["--data.adapter", "rla_lightning.curriculum.rewriter.RewriterAdapter"]
    world = ["--data.environment.class_path", "written.Written"]
    ended = rla("fit", "--config", workspace / "run.yaml", "--runs", workspace / "runs", *rewriter, *world)
    assert "the rewriter's model is null, but the policy has no pretrained base that stays frozen" in ended.message
