from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec, ValueModelSpec
from rla_lightning.types import ConfigError


@pytest.mark.parametrize("path", ["nowhere", "/no/such/dir", "./org/name", "a/b/c", "org/"])
def test_a_path_that_is_neither_directory_nor_hub_name_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        LanguageModelSpec(path=path)
    with pytest.raises(ConfigError, match=path):
        ValueModelSpec(path=path)


def test_hub_names_are_accepted_without_network() -> None:
    assert LanguageModelSpec(path="Qwen/Qwen2.5-7B-Instruct").path == "Qwen/Qwen2.5-7B-Instruct"


def test_directory_without_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        LanguageModelSpec(path=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    LanguageModelSpec(path=str(tmp_path))


def test_gguf_file_needs_a_path() -> None:
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        LanguageModelSpec(gguf_file="model.gguf")


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (TinySpec, {"architecture": "qwen99"}, "qwen99"),
        (TinySpec, {"layers": 0}, "layers.*0"),
        (TinySpec, {"width": 60, "heads": 8}, "60.*8"),
        (TinySpec, {"context_length": -5}, "-5"),
        (LoraSpec, {"rank": 0}, "rank.*0"),
        (LoraSpec, {"alpha": -1.0}, "alpha.*-1"),
        (LoraSpec, {"dropout": 1.0}, "dropout.*1.0"),
        (LoraSpec, {"target_modules": []}, "target_modules"),
    ],
)
def test_bad_values_are_named(kind: type, values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        kind(**values)


def test_jsonargparse_builds_specs_from_yaml_and_command_line(tmp_path: Path) -> None:
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--policy", type=LanguageModelSpec, default=LanguageModelSpec())
    parser.add_argument("--critic", type=ValueModelSpec, default=ValueModelSpec())
    file = tmp_path / "x.yaml"
    file.write_text("policy:\n  tiny: {width: 32, heads: 2}\n  lora: {rank: 4, target_modules: [q_proj]}\n")
    values = parser.instantiate(parser.parse_args([f"--config={file}", "--policy.path=org/name", "--policy.lora.alpha=8"]))
    assert values.policy == LanguageModelSpec(
        path="org/name", tiny=TinySpec(width=32, heads=2), lora=LoraSpec(rank=4, alpha=8, target_modules=["q_proj"])
    )
    assert values.critic == ValueModelSpec(tiny=TinySpec(width=48, layers=2, mlp_width=144))
