"""The benchmark's modes at toy size: what their lines hold, and that the tricks pay."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
Lines = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lines:
    """Runs the benchmark in this process; each of its lines is JSON with a stage, its seconds and the commit."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def run(*arguments: str) -> list[dict[str, Any]]:
        import_module("benchmark").main(arguments)
        answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert all(answer.keys() >= {"stage", "seconds", "commit"} for answer in answers)
        return answers

    return run


def test_the_chunked_head_needs_less_memory_and_gives_the_same_gradients(lines: Lines) -> None:
    sizes = {"vocabulary": 20000, "tokens": 2400, "samples": 3, "width": 16, "layers": 1, "chunk": 500_000, "threads": 1}
    (answer,) = lines("--memory", *(word for name, value in sizes.items() for word in (f"--{name}", str(value))))
    assert answer["stage"] == "memory of the head"
    assert answer.items() >= sizes.items()
    assert answer["full_mb"] >= 3 * 2400 * 20000 * 4 / 2**20  # logits, their log-softmax and a gradient
    assert answer["ratio"] == pytest.approx(answer["ours_mb"] / answer["full_mb"], abs=1e-3)
    assert answer["ratio"] <= 0.35
    assert 0 < answer["gradient_difference"] <= 1e-5


def test_tokens_of_conversations_are_fed_once(lines: Lines) -> None:
    few, many = lines("--turns", "--lengths", "3", "6", "--groups", "4", "--new-tokens", "8", "--widths", "896")
    assert [few["turns"], many["turns"]] == [3, 6]
    assert few["trajectories"] == many["trajectories"] == 4 * 8
    for answer in (few, many):
        assert 1 <= answer["sampling"] <= 1.1
        assert 1 <= answer["training"]["896"] <= 1.1
        assert answer["padding_fraction"]["896"] < 0.5
        assert answer["new_tokens_per_second"] > 0
    assert many["one_sequence_per_turn"] > few["one_sequence_per_turn"] > 2


def test_nodes_of_a_tree_of_sequences(lines: Lines) -> None:
    unique_tokens = import_module("benchmark_turns").unique_tokens
    assert unique_tokens([(1, 2, 3), (1, 2), (1, 2, 4, 5), (2, 2)]) == 7  # 1 2 3, 4 5, 2 2
    assert unique_tokens([(1, 2), (1, 2)]) == 2


def test_the_preset_for_a_card(lines: Lines) -> None:
    card, size, *measured, compiled = lines("--gpu", "--sizes", "toy")
    assert card["stage"] == "card"
    assert card["name"]
    assert size["parameters"] == 4000 * 64 + 2 * (64 * (64 + 64 + 32 + 32) + 3 * 64 * 128)  # two of four heads have keys
    assert [answer["stage"] for answer in measured] == ["sampling", "session", *5 * ["update"]]
    assert not any({"error", "skipped"} & answer.keys() for answer in measured)
    assert measured[0]["new_tokens"] == 16 * 16  # sequences of new tokens
    assert measured[1]["new_tokens"] == 16 * 8 * 4  # of turns of tokens
    assert [answer["tokens"] for answer in measured[2:]] == [304, 304, 752, 304, 304]  # 2 (32 + 8 * 15), 2 * 8 (32 + 15)
    assert compiled["compile"]


def test_a_measurement_that_fails_is_a_line(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = import_module("benchmark_gpu")

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(gpu.Preset, "build", fail)
    for answer in lines("--gpu", "--sizes", "toy")[2:-1]:
        assert answer["error"] == "RuntimeError: CUDA out of memory. Tried to allocate"
    assert all(answer["skipped"] for answer in lines("--gpu", "--sizes", "toy", "--seconds", "0")[2:])


def test_operations_of_training(lines: Lines) -> None:
    gpu = import_module("benchmark_gpu")
    shape = gpu.Shape(width=8, layers=2, heads=4, kv_heads=2, mlp_width=16, vocabulary=100)
    body = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)  # queries, keys and values, output, MLP
    attention = 12 * 30 * 2 * 8
    assert gpu.training_flops(shape, fed=10, places=3, pairs=30, frozen=False) == 6 * (10 * body + 3 * 800) + attention
    assert gpu.training_flops(shape, fed=10, places=3, pairs=30, frozen=True) == 4 * (10 * body + 3 * 800) + attention


def test_another_library_is_compared_with(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setitem(import_module("sys").modules, "benchmark_trl", SimpleNamespace(main=given.append))
    assert lines("--compare", "trl", "--sizes", "7M") == []
    assert given == [["--sizes", "7M"]]
