"""Load a causal language model with its tokenizer; keep and restore its trained weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec, ValueModelSpec
from rla_lightning.models.tokenizer import environment_tokenizer
from rla_lightning.types import ConfigError


@dataclass(frozen=True)
class LoadedModel:
    """A language model ready to sample from and to train."""

    model: PreTrainedModel | PeftModel  # an empty Module where the weights are elsewhere
    tokenizer: PreTrainedTokenizerBase
    context_length: int  # longest prompt plus completion, in tokens
    bare: PreTrainedModel | None = None  # what adapters were added to, around the same weights: frozen


def load_language_model(spec: LanguageModelSpec, words: Sequence[str], seed_key: str) -> LoadedModel:
    """The model that the spec describes, on the CPU and in training mode.

    Args:
        words: the environment's vocabulary, for the tokenizer of a tiny model.
        seed_key: random weights are a function of this string alone; torch's global generator is left as it was.
    """
    tokenizer = load_tokenizer(spec, words)
    if not spec.weights:
        config = _from_pretrained(AutoConfig.from_pretrained, spec)
        return LoadedModel(nn.Module(), tokenizer, context_length(config))  # type: ignore[arg-type]
    with local_seed(seed_key), torch.device("cpu"):
        model = build_backbone(spec, tokenizer, AutoModelForCausalLM)
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        if spec.path is None:  # a pretrained model may list several end tokens of its own
            model.generation_config.eos_token_id = tokenizer.eos_token_id
        bare = same_weights(model) if spec.lora else None
        wrapped = to_train(model, spec, "CAUSAL_LM")
    return LoadedModel(wrapped, tokenizer, context_length(model.config), bare)


def share_language_model(policy: LoadedModel, spec: LanguageModelSpec, seed_key: str) -> LoadedModel:
    """A model on the policy's frozen base: with adapters of its own, or bare."""
    assert policy.bare is not None
    with local_seed(seed_key), torch.device("cpu"):
        model = to_train(same_weights(policy.bare), spec, "CAUSAL_LM")
    return LoadedModel(model, policy.tokenizer, policy.context_length, policy.bare)


def same_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Other modules around the same parameters: adapters added to one are not in the other."""
    return deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def to_train(model: PreTrainedModel, spec: LanguageModelSpec | ValueModelSpec, task_type: str) -> PreTrainedModel | PeftModel:
    """In training mode, with all that the spec adds to its weights."""
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return (add_lora(model, spec.lora, task_type) if spec.lora else model).train()


def load_tokenizer(spec: LanguageModelSpec | ValueModelSpec, words: Sequence[str]) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights, or a word-level one; it always has an end and a pad token."""
    if spec.path is None:
        return environment_tokenizer(words)
    tokenizer_class = PreTrainedTokenizerFast if _is_word_level(spec.path) else AutoTokenizer
    tokenizer = _from_pretrained(tokenizer_class.from_pretrained, spec)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {spec.path!r} has no end-of-text token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # harmless: masks are built from positions, never from ids
    return tokenizer


def build_backbone(
    spec: LanguageModelSpec | ValueModelSpec,
    tokenizer: PreTrainedTokenizerBase,
    auto_class: type[AutoModel] | type[AutoModelForCausalLM],
) -> PreTrainedModel:
    """Pretrained weights, or random ones drawn from torch's current generator."""
    dtype = getattr(torch, spec.dtype)
    if spec.path is None:
        model = auto_class.from_config(tiny_config(spec.tiny, tokenizer), dtype=dtype)
    else:
        model = _from_pretrained(auto_class.from_pretrained, spec, dtype=dtype, use_safetensors=True)
    _without_dropout(model)
    return model


def _without_dropout(model: PreTrainedModel) -> None:
    """Switch off the dropout that comes with pretrained configurations: old and new log-probs must come from one function."""
    for module in model.modules():
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def tiny_config(spec: TinySpec, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """A configuration of the architecture with tied embeddings and full attention heads.

    Weights start at width^-1/2 (keeps the variance of a normalised input): transformers' 0.02 is made for
    widths of thousands. Width 64, key-value recall, 300 updates of batch 64, AdamW 3e-3 / with Muon 0.02:
    loss 2.76 / 2.48 from 0.02, 2.51 / 2.36 from 0.06, 2.47 / 2.29 from 0.125.
    """
    return AutoConfig.for_model(
        spec.architecture,
        vocab_size=len(tokenizer),
        hidden_size=spec.width,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        head_dim=spec.width // spec.heads,
        max_position_embeddings=spec.context_length,
        initializer_range=spec.width**-0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def context_length(config: PretrainedConfig) -> int:
    return int(config.get_text_config().max_position_embeddings)


def add_lora(model: PreTrainedModel, spec: LoraSpec, task_type: str) -> PeftModel:
    """Adapters (float32) on a frozen base."""
    config = LoraConfig(
        task_type=task_type,
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]
        lora_dropout=spec.dropout,
        target_modules=spec.target_modules,
    )
    try:
        return get_peft_model(model, config)  # type: ignore[return-value]
    except ValueError as error:
        raise ConfigError(f"lora.target_modules {spec.target_modules!r}: {error}") from error


@contextmanager
def local_seed(seed_key: str, device: torch.device | None = None) -> Iterator[None]:
    """Draw from a seed made of the string, then put torch's generators of the CPU and the device back."""
    seed = int.from_bytes(sha256(seed_key.encode()).digest()[:8], "big") % 2**63
    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own training flag restored afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights a checkpoint must hold: all of them, or adapters and heads on a LoRA base.

    What counts is how the model was built, not `requires_grad`: a model that was warm-started and
    then frozen still belongs in the checkpoint. Sharded weights stay DTensors.
    """
    bases = [f"{name}." if name else "" for name, module in model.named_modules() if isinstance(module, PeftModel)]
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if "lora_" in name or not any(name.startswith(base) for base in bases)
    }


def load_trainable_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `trainable_state` of an equal model into this one; nothing is copied if anything differs.

    Raises:
        ConfigError: names the first key that is missing, unexpected or of another shape.
    """
    own = trainable_state(model)
    for name, tensor in own.items():
        if name not in state:
            raise ConfigError(f"checkpoint of another architecture: it has no {name!r}")
        if state[name].shape != tensor.shape:
            shapes = f"{tuple(state[name].shape)}, the model needs {tuple(tensor.shape)}"
            raise ConfigError(f"checkpoint of another architecture: {name!r} has shape {shapes}")
    unexpected = next((name for name in state if name not in own), None)
    if unexpected is not None:
        raise ConfigError(f"checkpoint of another architecture: unexpected {unexpected!r}")
    with torch.no_grad():
        for name, tensor in own.items():
            source = state[name]
            if isinstance(tensor, DTensor) and not isinstance(source, DTensor):
                source = distribute_tensor(source.to(tensor.device), tensor.device_mesh, tensor.placements)
            tensor.copy_(source)


def _from_pretrained(load: Callable[..., Any], spec: LanguageModelSpec | ValueModelSpec, **options: Any) -> Any:
    """Call a transformers loader and turn its failures into one message that names the path."""
    if isinstance(spec, LanguageModelSpec) and spec.gguf_file is not None:
        options = {key: value for key, value in options.items() if key != "use_safetensors"} | {"gguf_file": spec.gguf_file}
    try:
        return load(str(_local_or_hub(spec.path or "")), trust_remote_code=spec.trust_remote_code, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(f"cannot load the model {spec.path!r}: {error}") from error


def _is_word_level(path: str) -> bool:
    """Whether the directory holds a tokenizer of ours.

    AutoTokenizer overrides the saved class with the one it expects beside e.g. a qwen2 config (transformers
    5.24, tokenization_auto.py), and then silently reads our words as byte pairs.
    """
    file = Path(path).expanduser() / "tokenizer.json"
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("model", {}).get("type") == "WordLevel"


def _local_or_hub(path: str) -> str:
    expanded = Path(path).expanduser()
    return str(expanded) if expanded.is_dir() else path
