"""A run whose frozen judge is served by another process through OpenAI's interface."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rla_lightning.models.language_model import load_language_model
from rla_lightning.models.specs import LanguageModelSpec, TinySpec


@pytest.fixture
def served(completions_server: Callable[..., tuple[str, list[dict]]]) -> tuple[str, list[dict]]:
    """The address of a judge that praises every step to the right, and what it was asked."""
    return completions_server(lambda body: "+1" if body["prompt"].split()[-1] == "right" else "-1")


@pytest.fixture(scope="module")
def tokenizer(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` leaves it, with the environment's words."""
    from corridor import CorridorEnvironment

    loaded = load_language_model(
        LanguageModelSpec(tiny=TinySpec(width=16, layers=1, heads=2, mlp_width=32)), CorridorEnvironment().vocabulary(), "judge"
    )
    folder = tmp_path_factory.mktemp("judge")
    loaded.model.config.save_pretrained(folder)  # no weights: they are the server's
    loaded.tokenizer.save_pretrained(folder)
    return folder


def overlay(folder: Path, tokenizer: Path, url: str, optimizer: str = "null") -> Path:
    file = folder / "judge.yaml"
    file.write_text(f"""
model:
  reward_model: {{path: {tokenizer}, weights: false}}
  reward_model_optimizer: {optimizer}
  judge_sampler:
    class_path: rla_lightning.rollout.servers.OpenAIServer
    init_args: {{base_url: {url}, model: judge, retries: 1}}
trainer:
  callbacks: [{{class_path: callbacks.RunSummary}}]
""")
    return file


def test_votes_come_from_the_server(
    workspace: Path, rla: Callable[..., Any], served: tuple[str, list[dict]], tokenizer: Path, tmp_path: Path
) -> None:
    url, asked = served
    ended = rla("fit", "--config", workspace / "run.yaml", "--config", overlay(tmp_path, tokenizer, url), "--runs", tmp_path)
    assert ended.code == 0, ended.err
    (folder,) = tmp_path.glob("*/version_0")
    with (folder / "metrics.csv").open(newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if row["time/judge"]]
    assert float(row["reward_model/parse_error_rate"]) == 0.0
    assert float(row["policy/optimizer_steps"]) > 0
    assert len(asked) > 100
    assert all(body["model"] == "judge" for body in asked)


def test_a_judge_without_weights_needs_a_server_and_cannot_be_trained(
    workspace: Path, rla: Callable[..., Any], served: tuple[str, list[dict]], tokenizer: Path, tmp_path: Path
) -> None:
    run = ["fit", "--config", workspace / "run.yaml", "--config", overlay(tmp_path, tokenizer, served[0]), "--runs", tmp_path]
    for option in (["--model.judge_sampler", "null"], ["--model.reward_model_optimizer", "torch.optim.AdamW"]):
        message = rla(*run, *option).message
        assert "model.reward_model.weights is false: set model.judge_sampler" in message
    message = rla(*run, "--model.reward_model.path", "null").message
    assert "weights: false needs the path of a tokenizer" in message
    assert served[1] == []


def test_a_judge_that_does_not_answer_ends_the_run_with_its_address(
    workspace: Path, rla: Callable[..., Any], tokenizer: Path, tmp_path: Path
) -> None:
    file = overlay(tmp_path, tokenizer, "http://127.0.0.1:9/v1")
    message = rla("fit", "--config", workspace / "run.yaml", "--config", file, "--runs", tmp_path).message
    assert "http://127.0.0.1:9/v1" in message
