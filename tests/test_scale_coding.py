"""The coding configs' whole code path on the CPU: random Qwen2.5 models, eight problems, real programs, two iterations."""

import csv
import json
from pathlib import Path

import pytest
import torch

CONFIGS = Path(__file__).parent.parent / "configs"
RIGHT, WRONG = "print(sum(map(int, input().split())))", "print(input().split()[0])"
PROGRAMS = [f"```python\n{program}\n```\n" for program in (RIGHT, WRONG)]
INPUTS = {"1 2": "3", "4 0": "4", "1 1": "3"}  # the last output is wrong
TESTS = [f"**Input**\n```\n{given}\n```\n**Output**\n```\n{printed}\n```\n" for given, printed in INPUTS.items()]
LAYOUT = "### Test {0} input\n```\n{1}\n```\n### Test {0} output\n```\n{2}\n```\n"
PRODUCTS = {"2 3": 6, "4": 4, "0 7": 0, "5 5": 25}
REWRITE = (
    "### Question\nRead numbers on one line and print their product, which is below a million.\n"
    "### Solution\n```python\nimport math\nprint(math.prod(map(int, input().split())))\n```\n"
    + "".join(LAYOUT.format(i, given, printed) for i, (given, printed) in enumerate(PRODUCTS.items(), 1))
)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums of two, three, ... numbers; four of them are easy, so one is for testing and one for tuning."""
    file = tmp_path_factory.mktemp("problems") / "sums.jsonl"
    rows = []
    for number in range(2, 10):
        inputs = [list(range(start, start + number)) for start in (1, 4, 0)]
        tests = [{"stdin": " ".join(map(str, xs)) + "\n", "stdout": f"{sum(xs)}\n"} for xs in inputs]
        question = f"Read {number} numbers on one line and print their sum."
        rows.append({"name": f"sum-{number}", "question": question, "tests": tests, "solution": RIGHT, "wrong_solutions": [WRONG],
                     "level": "easy", "difficulty": number / 100})  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, problems: Path, random_qwen) -> dict[str, Path]:
    """A model that mostly writes one of two programs, one that writes one of three tests, one that rewrites."""
    corpus = problems.read_text().splitlines()
    answers = {"policy": PROGRAMS, "reward_model": TESTS, "critic": PROGRAMS, "rewriter": [REWRITE]}
    return {name: random_qwen(tmp_path_factory.mktemp(name), corpus, likely) for name, likely in answers.items()}


def small(models: dict[str, Path], problems: Path, runs: Path) -> list[object]:
    """What differs from the file: the models' weights, the problems, and how much of everything."""
    source = "rla_lightning.environments.coding.sources.JsonProblems"
    environment = "--data.environment.init_args"
    return [
        *(word for name in ("policy", "reward_model", "critic") for word in (f"--model.{name}.path", models[name])),
        *("--data.adapter.init_args.model.path", models["rewriter"], "--data.adapter.init_args.attempts", 3),
        *("--data.adapter.init_args.max_new_tokens", 4),
        *(f"{environment}.train", source, f"{environment}.train.path", problems),
        *(f"{environment}.test", "null", f"{environment}.out_of_distribution", "null"),
        *("--trainer.accelerator", "cpu", "--trainer.max_epochs", 2, "--trainer.check_val_every_n_epoch", 2),
        *("--data.tasks_per_iteration", 2, "--data.pool_size", 4, "--data.validation_tasks", 1, "--data.test_tasks", 1),
        *("--model.rollout.group_size", 6, "--model.rollout.num_judgments", 6, "--model.rollout.max_new_tokens", 2),
        *("--model.rollout.max_judge_tokens", 2, "--model.acceptance.low", 0.0, "--model.acceptance.high", 0.01),
        *("--data.adapter.init_args.low", 0.0, "--data.adapter.init_args.high", 0.01, "--data.adapter.init_args.target", 0.005),
        *("--runs", runs),
    ]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_iterations_of_the_papers_setting(rla, models: dict[str, Path], problems: Path, tmp_path: Path, kind: str) -> None:
    config = ("--config", CONFIGS / "scale" / f"coding_qwen2.5-7b_{kind}.yaml")
    ended = rla("fit", *config, *small(models, problems, tmp_path))
    assert ended.code == 0, ended.err
    folder = tmp_path / f"coding_qwen2.5-7b_{kind}" / "version_0"
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    trained = [row for row in rows if "rollout/mean_turns" in row]
    assert len(trained) == 2
    for row in trained:
        assert row["rollout/env_error_rate"] == 0.0
        assert 0 < row["rollout/success_rate"] < 1
        assert 0 < row["reward_model/ut"] < 1
        assert row["policy/samples"] > 0
        assert row["reward_model/samples"] > 0
    # all problems are solved by some, so harder ones are asked for; the first readable rewrite is the same for all of them
    adapted = [row for row in rows if "env/rewrite_answers" in row]
    assert sum(row["env/rewrite_usable"] for row in adapted) >= 1
    assert sum(row["env/rewrite_resembling"] + row["env/rewrite_known"] + row["env/rewrite_repeated"] for row in adapted) >= 1
    summary = json.loads((folder / "summary.json").read_text())
    assert 0 <= summary["after"]["ut"] <= 1
    assert summary["after"]["success_ood"] is None
    proposed = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
    rewritten = [row for row in proposed if "product" in json.dumps(row)]
    assert rewritten
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(weights.any() for name, weights in saved.items() if "lora_B" in name and name.startswith("policy."))
    ended = rla("test", *config, *small(models, problems, tmp_path), "--ckpt_path", folder / "checkpoints" / "last.ckpt")
    assert ended.code == 0, ended.err
    assert "UT" in ended.out
