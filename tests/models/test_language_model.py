from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from rla_lightning.models.language_model import LoadedModel, load_language_model, load_trainable_state, trainable_state
from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec
from rla_lightning.models.tokenizer import environment_tokenizer
from rla_lightning.types import ConfigError

WORDS = [f"w{index}" for index in range(20)]
TINY = TinySpec(width=16, layers=2, heads=2, mlp_width=32, context_length=40)


def load(seed_key: str = "a", **options: object) -> LoadedModel:
    return load_language_model(LanguageModelSpec(**{"tiny": TINY, **options}), WORDS, seed_key)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gemma", "gemma3_text", "mistral"])
def test_tiny_models_of_many_architectures(architecture: str) -> None:
    loaded = load(tiny=TinySpec(architecture=architecture, width=16, layers=2, heads=2, mlp_width=32, context_length=40))
    assert loaded.context_length == 40
    assert loaded.model.get_input_embeddings().weight.shape == (28, 16)  # 6 special tokens, 2 votes, 20 words
    assert loaded.model.lm_head.weight is loaded.model.get_input_embeddings().weight
    ids = torch.tensor([loaded.tokenizer("w1 w2 <act>").input_ids])
    loaded.model(ids).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.model.parameters())


def test_weights_are_a_function_of_the_seed_key_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = trainable_state(load("a").model)
    assert torch.equal(torch.rand(4), expected)  # the global generator was left alone
    second, other = trainable_state(load("a").model), trainable_state(load("b").model)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_saved_tiny_model_loads_from_its_directory(tmp_path: Path) -> None:
    """AutoTokenizer would replace a word-level tokenizer beside a qwen2 config by a byte-pair one."""
    loaded = load()
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    again = load_language_model(LanguageModelSpec(path=str(tmp_path)), [], "b")
    text = "w1 w2 unheard +1 <act>"
    assert again.tokenizer(text).input_ids == loaded.tokenizer(text).input_ids
    assert again.context_length == 40
    ids = torch.tensor([loaded.tokenizer(text).input_ids])
    assert torch.equal(again.model(ids).logits, loaded.model(ids).logits)


def test_unreadable_weights_raise_one_error_that_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_language_model(LanguageModelSpec(path=str(tmp_path)), WORDS, "a")


def test_lora_freezes_the_base_and_keeps_adapters_only() -> None:
    loaded = load(lora=LoraSpec(rank=2, target_modules=["q_proj", "v_proj"]))
    assert isinstance(loaded.model, PeftModel)
    state = trainable_state(loaded.model)
    assert len(state) == 8  # 2 layers x 2 modules x (A, B)
    assert sum(tensor.numel() for tensor in state.values()) == 8 * 2 * 16
    assert {name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad} == set(state)
    loaded.model.requires_grad_(False)
    assert set(trainable_state(loaded.model)) == set(state)  # frozen later: still in the checkpoint


def test_lora_targets_that_do_not_exist_are_named() -> None:
    with pytest.raises(ConfigError, match="no_such_proj"):
        load(lora=LoraSpec(target_modules=["no_such_proj"]))


def test_bfloat16_and_gradient_checkpointing() -> None:
    loaded = load(dtype="bfloat16", gradient_checkpointing=True)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.model.is_gradient_checkpointing
    loaded.model(torch.tensor([[8, 9, 3]])).logits.float().sum().backward()


def test_state_round_trip_and_the_first_difference_is_named() -> None:
    source, target = load("a").model, load("b").model
    load_trainable_state(target, trainable_state(source))
    ids = torch.tensor([[8, 9, 3]])
    assert torch.equal(source(ids).logits, target(ids).logits)

    before = {name: tensor.clone() for name, tensor in trainable_state(target).items()}
    state = {name: tensor + 1 for name, tensor in trainable_state(source).items()}
    norm = "model.norm.weight"
    with pytest.raises(ConfigError, match=f"another architecture.*{norm}"):
        load_trainable_state(target, {name: tensor for name, tensor in state.items() if name != norm})
    with pytest.raises(ConfigError, match=r"unexpected 'extra'"):
        load_trainable_state(target, {**state, "extra": torch.zeros(1)})
    with pytest.raises(ConfigError, match=rf"{norm}.*\(7,\).*\(16,\)"):
        load_trainable_state(target, {**state, norm: torch.zeros(7)})
    assert all(torch.equal(before[name], tensor) for name, tensor in trainable_state(target).items())


def test_dropout_of_a_pretrained_configuration_is_off(tmp_path: Path) -> None:
    """Otherwise the first ratio would not be 1."""
    config = AutoConfig.for_model("gpt2", vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    assert config.resid_pdrop == 0.1
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    environment_tokenizer(["a", "b"]).save_pretrained(tmp_path)
    model = load_language_model(LanguageModelSpec(path=str(tmp_path)), (), "k").model
    assert model.training
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
