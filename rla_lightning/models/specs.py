"""What the command line says about a model: small frozen specs, checked before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar

from transformers import CONFIG_MAPPING

from rla_lightning.types import ConfigError

DType = Literal["float32", "bfloat16"]
Base = Literal["own", "policy"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class TinySpec:
    """A decoder-only model with random weights, its vocabulary made for the environment.

    Args:
        architecture: a model type that transformers knows, e.g. qwen2, qwen3, llama, gemma.
        width: of the residual stream.
        layers: number of transformer blocks.
        heads: number of attention heads; divides the width.
        mlp_width: of the hidden layer in each block's MLP.
        context_length: longest prompt plus completion, in tokens.
    """

    architecture: str = "qwen2"
    width: int = 64
    layers: int = 3
    heads: int = 4
    mlp_width: int = 192
    context_length: int = 256

    def __post_init__(self) -> None:
        if self.architecture not in CONFIG_MAPPING:
            raise ConfigError(f"tiny.architecture {self.architecture!r} is not a model type that transformers knows")
        for name in ("width", "layers", "heads", "mlp_width", "context_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"tiny.{name} must be at least 1, got {getattr(self, name)}")
        if self.width % (2 * self.heads):  # rotary embeddings rotate pairs
            raise ConfigError(f"tiny.width {self.width} is not an even multiple of tiny.heads {self.heads}")


@dataclass(frozen=True)
class LoraSpec:
    """Low-rank adapters on a frozen base (arXiv 2106.09685).

    Args:
        rank: of the adapters.
        alpha: their output is scaled by alpha / rank.
        dropout: on the adapters' input; anything but 0 makes the ratio differ from 1 before anything is learned.
        target_modules: peft's choice of layers: all-linear, a regular expression, or a list of name endings.
    """

    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora.rank must be at least 1, got {self.rank}")
        if self.alpha <= 0:
            raise ConfigError(f"lora.alpha must be positive, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout must be in [0, 1), got {self.dropout}")
        if not self.target_modules:
            raise ConfigError(f"lora.target_modules names no module: {self.target_modules!r}")


@dataclass(frozen=True)
class LanguageModelSpec:
    """A causal language model: pretrained (path) or tiny and random.

    Args:
        path: a local directory or a hub name (org/name); null for a tiny model.
        tiny: used when path is null.
        lora: train adapters only; null trains every weight.
        dtype: of the weights.
        sampling_dtype: of the copy to sample from; null: that of the weights. Sharded models always have that copy, on
            each process whole; another model has it only if this differs from dtype.
        gguf_file: the file inside `path` when its weights are in the GGUF format.
        trust_remote_code: run Python code that comes with the weights.
        gradient_checkpointing: recompute activations in the backward pass, less memory for more time.
        weights: false loads the tokenizer and the configuration only, for a model that a server samples from.
        compile: the training forward pass with torch.compile; takes a minute, then needs less time (not with FSDP2).
        base: policy: adapters of its own on the policy's frozen base, which is in memory once; path, tiny and dtype are
            the policy's. A frozen reward model without lora is the bare base.
    """

    path: str | None = None
    tiny: TinySpec = field(default_factory=TinySpec)
    lora: LoraSpec | None = None
    dtype: DType = "float32"
    sampling_dtype: DType | None = None
    gguf_file: str | None = None
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    weights: bool = True
    compile: bool = False
    base: Base = "own"

    def __post_init__(self) -> None:
        _check_source(self.path, self.gguf_file)
        if not self.weights and (self.path is None or self.lora is not None):
            raise ConfigError(f"weights: false needs the path of a tokenizer, got {self.path!r}, and no lora, got {self.lora}")


@dataclass(frozen=True)
class ValueModelSpec:
    """The encoder of the value model: pretrained (path) or tiny and random.

    Args:
        path: a local directory or a hub name (org/name) of a decoder-only model; null for a tiny one.
        tiny: used when path is null.
        lora: train adapters and the head only; null trains every weight.
        dtype: of the encoder's weights; the head is always float32.
        trust_remote_code: run Python code that comes with the weights.
        gradient_checkpointing: recompute activations in the backward pass, less memory for more time.
        base: policy: adapters and a head of its own on the policy's frozen base, which is in memory once; path, tiny and
            dtype are the policy's.
    """

    path: str | None = None
    tiny: TinySpec = field(default_factory=lambda: TinySpec(width=48, layers=2, mlp_width=144))
    lora: LoraSpec | None = None
    dtype: DType = "float32"
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    base: Base = "own"

    def __post_init__(self) -> None:
        _check_source(self.path, None)


AnySpec = TypeVar("AnySpec", LanguageModelSpec, ValueModelSpec)


def on_policy_base(name: str, spec: AnySpec, policy: LanguageModelSpec, may_be_bare: bool = False) -> AnySpec:
    """The spec with all that it takes from the policy if it shares its base, else as it is.

    Args:
        name: of the model, for messages.
        may_be_bare: it needs no adapter.

    Raises:
        ConfigError: the policy's base is not frozen, or the model needs an adapter or other weights.
    """
    if spec.base == "own":
        return spec
    if policy.lora is None:
        raise ConfigError(f"model.{name}.base policy needs a base that stays frozen: set model.policy.lora")
    if spec.lora is None and not may_be_bare:
        raise ConfigError(f"model.{name}.base policy needs an adapter to train: set model.{name}.lora")
    defaults, taken = type(spec)(), {}
    for option in ("path", "tiny", "dtype", "trust_remote_code", "sampling_dtype", "gguf_file", "weights"):
        if option not in vars(spec):
            continue
        given, taken[option] = getattr(spec, option), getattr(policy, option)
        if given not in (taken[option], getattr(defaults, option)):
            raise ConfigError(f"model.{name}.{option} is {given}, but with base policy it is the policy's, {taken[option]}")
    return replace(spec, **taken)


def _check_source(path: str | None, gguf_file: str | None) -> None:
    if path is None:
        if gguf_file is not None:
            raise ConfigError(f"gguf_file {gguf_file!r} needs the path of the model that contains it")
        return
    if gguf_file is not None and find_spec("gguf") is None:
        raise ConfigError(f"gguf_file {gguf_file!r} needs the gguf package: pip install 'rla_lightning[gguf]'")
    directory = Path(path).expanduser()
    if not directory.is_dir():
        if directory.exists() or not _HUB_NAME.fullmatch(path):
            raise ConfigError(f"model path {path!r} is neither a directory nor a hub name of the form org/name")
        return
    needed = gguf_file or "config.json"
    if not (directory / needed).is_file():
        raise ConfigError(f"model path {path!r} has no file {needed!r}")
