"""The scale configs' whole code path on the CPU: Qwen2.5 models of random weights, a few local games, two iterations."""

import csv
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rla_lightning.environments.alfred.scene import GOAL_KINDS
from rla_lightning.environments.alfworld.builder import build_games

CONFIGS = Path(__file__).parent.parent / "configs"
BOXES = [f"\\boxed{{{number}}}" for number in (-1, 1, 2, 3)]  # single tokens, which the models prefer to all others


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("games") / "built"
    build_games(folder, 48, seed=1, size="small", evaluation_games=6)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, games: Path, random_qwen) -> Path:
    """A tiny random Qwen2.5 whose answers are mostly boxed numbers."""
    commands = [command for file in games.rglob("game.tw-pddl") for command in json.loads(file.read_text())["walkthrough"]]
    return random_qwen(tmp_path_factory.mktemp("qwen"), sorted(commands), BOXES)


def small(model: Path, games: Path, runs: Path) -> list[object]:
    """What differs from the file: the models' weights, the data, and how much of everything."""
    return [
        *("--model.policy.path", model, "--model.reward_model.path", model, "--model.critic.path", model),
        *("--data.environment.init_args.data", games, "--data.environment.init_args.eval_max_turns", 4),
        *("--data.adapter.init_args.model.path", model, "--data.adapter.init_args.attempts", 3),
        *("--data.adapter.init_args.max_new_tokens", 24),
        *("--trainer.accelerator", "cpu", "--trainer.max_epochs", 2, "--trainer.check_val_every_n_epoch", 2),
        *("--data.tasks_per_iteration", 2, "--data.pool_size", 8, "--data.validation_tasks", 1, "--data.test_tasks", 1),
        *("--model.rollout.group_size", 2, "--model.rollout.num_judgments", 2, "--model.rollout.max_new_tokens", 6),
        *("--model.rollout.max_judge_tokens", 6, "--model.rollout.max_turns", 3, "--model.rollout.eval_max_turns", 2),
        *("--model.reward_model_update.success_low", 0, "--model.policy_update.success_low", 0),  # they win nothing
        *("--runs", runs),
    ]


def scale(*kinds: str) -> list[object]:
    return [word for kind in kinds for word in ("--config", CONFIGS / "scale" / f"alfworld_qwen2.5-7b_{kind}.yaml")]


def run_of(runs: Path, kind: str) -> Path:
    return runs / f"alfworld_qwen2.5-7b_{kind}" / "version_0"


def rows(folder: Path, column: str) -> list[dict[str, float]]:
    """The rows of metrics.csv that have a value in the column."""
    with (folder / "metrics.csv").open(newline="") as file:
        table = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in table if column in row]


def checkpoint(folder: Path) -> Path:
    (path,) = (folder / "checkpoints").glob("last.ckpt")
    return path


def changed(saved: dict[str, torch.Tensor], original: dict[str, torch.Tensor]) -> float:
    """Share of the numbers in the policy's linear layers that differ from the file that the run started with."""
    pairs = [(saved[f"policy.model.{name}"], weights) for name, weights in original.items() if "proj.weight" in name]
    return sum(int((a != b.to(a.dtype)).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_iterations_of_the_papers_setting(rla, model: Path, games: Path, tmp_path: Path, kind: str) -> None:
    ended = rla("fit", *scale(kind), *small(model, games, tmp_path))
    assert ended.code == 0, ended.err
    folder = run_of(tmp_path, kind)
    trained = rows(folder, "rollout/mean_turns")
    assert len(trained) == 2
    for row in trained:
        assert row["rollout/env_error_rate"] == 0.0
        assert 0 < row["rollout/invalid_action_rate"] < 1
        assert 0 < row["reward_model/parse_error_rate"] < 1
        assert row["policy/samples"] > 0
        assert row["reward_model/samples"] > 0
        for name in ("policy", "reward_model", "critic"):
            assert row[f"{name}/optimizer_steps"] == 4
    for row in rows(folder, "env/rewrite_answers"):
        # nobody solved the 2 tasks, so 3 easier goals were asked for each; numbers are no objects of the room
        assert row["env/rewrite_answers"] == row["env/rewrite_refused"] + row["env/rewrite_truncated"] == 2 * 3
        assert row["env/rewrite_usable"] == row["env/proposed"] == 0
    assert json.loads((folder / "summary.json").read_text())["after"]["success_in_domain"] == 0.0
    saved = torch.load(checkpoint(folder), weights_only=True)["state_dict"]
    if kind == "full":
        assert changed(saved, load_file(model / "model.safetensors")) > 0.5
    else:
        policy = {name: weights for name, weights in saved.items() if name.startswith("policy.")}
        assert all("lora_" in name for name in policy)
        assert all(weights.any() for name, weights in policy.items() if "lora_B" in name)  # 0 before training
    ended = rla("test", *scale(kind), *small(model, games, tmp_path), "--ckpt_path", checkpoint(folder))
    assert ended.code == 0, ended.err
    assert "pick_heat_then_place_in_recep" in ended.out


def test_a_model_is_evaluated_per_kind_of_task(
    rla, model: Path, games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # the table is as wide as the terminal
    ended = rla("test", *scale("lora"), *small(model, games, tmp_path), "--data.test_tasks", 6, "--model.rollout.eval_samples", 2)
    assert ended.code == 0, ended.err
    table = {cells[1].strip(): cells[2:4] for line in ended.out.splitlines() if len(cells := line.split("│")) == 5}
    assert [cell.strip() for cell in table["tasks (of a kind)"]] == ["6", "6"]
    for kind in GOAL_KINDS:
        assert [cell.strip() for cell in table[kind]] == ["0.000 (1)", "0.000 (1)"]
    assert [cell.strip() for cell in table["success ± deviation of the samples"]] == ["0.000 ± 0.000"] * 2
    assert [cell.strip() for cell in table["mean turns"]] == ["2.000", "2.000"]
    assert "invalid actions" in table


@pytest.mark.parametrize("pad", ["<|endoftext|>", "<|im_end|>"])
def test_the_chat_formats_run_the_same_loop(rla, model: Path, games: Path, tmp_path: Path, pad: str) -> None:
    """Also where the pad token is the end token."""
    place = tmp_path / "model"
    shutil.copytree(model, place)
    settings = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": pad}))
    formats = [
        word
        for name in ("policy", "judge", "critic")
        for word in (f"--model.{name}_format", f"rla_lightning.rollout.formats_chat.Chat{name.title()}Format")
    ]
    ended = rla("fit", *scale("lora"), *small(place, games, tmp_path), *formats, "--trainer.max_epochs", 1)
    assert ended.code == 0, ended.err
    (row,) = rows(run_of(tmp_path, "lora"), "rollout/mean_turns")
    assert row["policy/samples"] > 0
    assert row["reward_model/samples"] > 0


def test_sharded(rla_process, model: Path, games: Path, tmp_path: Path) -> None:
    """The bases are bfloat16 and the adapters float32, in one shard; critic and rewriter are on the policy's base."""
    sharded = ("--config", CONFIGS / "trainer" / "fsdp2.yaml", "--trainer.devices", 1, "--trainer.max_epochs", 1)
    options = small(model, games, tmp_path)
    for name in ("--model.critic.path", "--data.adapter.init_args.model.path"):
        del options[options.index(name) : options.index(name) + 2]
    own = ("--model.reward_model.base", "own")
    ended = rla_process("fit", *scale("lora", "shared"), *options, *own, *sharded, cwd=tmp_path)
    assert ended.code == 0, ended.err
    (row,) = rows(run_of(tmp_path, "shared"), "rollout/mean_turns")
    for name in ("policy", "reward_model", "critic"):
        assert row[f"{name}/optimizer_steps"] == 4


@pytest.mark.skipif(find_spec("textworld") is None, reason="TextWorld is not installed: make engine")
def test_the_real_engine_runs_the_same_loop(rla, model: Path, games: Path, tmp_path: Path) -> None:
    engine = ("--data.environment.init_args.backend", "textworld", "--trainer.max_epochs", 1)
    ended = rla("fit", *scale("lora"), *small(model, games, tmp_path), *engine)
    assert ended.code == 0, ended.err
    (row,) = rows(run_of(tmp_path, "lora"), "rollout/mean_turns")
    assert row["rollout/env_error_rate"] == 0.0
    assert row["rollout/mean_turns"] == 3.0
