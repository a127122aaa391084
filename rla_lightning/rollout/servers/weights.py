"""Write a model's weights where a server of another process can read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from rla_lightning.distributed import rank
from rla_lightning.models.sharding import full_tensor


@torch.no_grad()
def gathered(model: nn.Module, adapter: bool) -> dict[str, Tensor]:
    """The weights in full on the first rank's CPU, nothing on the others; collective where they are sharded.

    Args:
        adapter: only those of the LoRA adapter.
    """
    state = {}
    for name, tensor in model.state_dict().items():
        if not adapter or "lora_" in name:
            full = full_tensor(tensor)  # one at a time: the whole need not fit in the device's memory
            if rank() == 0:
                state[name] = full.cpu()
    return state


def write_base(model: PreTrainedModel | PeftModel, state: Mapping[str, Tensor], folder: Path) -> None:
    """All weights and the configuration as a checkpoint, without the adapter if there is one.

    Tied embeddings are written twice and called untied: vLLM packs the output layer's weights on the CPU, and does not
    pack them again when it reloads tied ones (vLLM 0.32, `dispatch_cpu_unquantized_gemm`).
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    prefix = "base_model.model." if isinstance(model, PeftModel) else ""
    weights = {
        name.removeprefix(prefix).replace(".base_layer.", "."): tensor for name, tensor in state.items() if "lora_" not in name
    }
    is_tied = base.config.get_text_config().tie_word_embeddings
    if is_tied:
        head = next(name for name, module in base.named_modules() if module is base.get_output_embeddings())
        weights[f"{head}.weight"] = weights[f"{head}.weight"].clone()
    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        base.save_pretrained(folder, state_dict=weights, max_shard_size="100TB")
    finally:
        if shows_progress:
            transformers_logging.enable_progress_bar()
    if is_tied:
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part["tie_word_embeddings"] = False
        file.write_text(json.dumps(config), encoding="utf-8")


def write_adapter(model: PeftModel, state: Mapping[str, Tensor], folder: Path) -> None:
    """The LoRA adapter as PEFT writes it."""
    model.save_pretrained(str(folder), state_dict=dict(state), save_embedding_layers=False)
