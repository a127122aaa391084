"""The critic: predicts from a state's prompt how likely the task will be solved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from rla_lightning.models.language_model import (
    LoadedModel,
    build_backbone,
    context_length,
    load_tokenizer,
    local_seed,
    same_weights,
    to_train,
)
from rla_lightning.models.specs import ValueModelSpec


class ValueModel(nn.Module):
    """A decoder-only encoder, pooled over all positions, with a linear head.

    Pooling concatenates the mean over the prompt with its last token: the last token alone makes a
    tiny causal encoder route every fact through attention first. The head starts at zero, so that an
    untrained model predicts 0.5 everywhere.
    """

    def __init__(self, encoder: PreTrainedModel | PeftModel, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(2 * width, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The logit of the success probability.

        Args:
            input_ids: [B, T], padded on either side.
            attention_mask: [B, T], 1 on real tokens, at least one in every row.
        """
        positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)  # [B, T], equal for either padding side
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False)
        states = hidden.last_hidden_state.float()  # [B, T, D]
        mask = attention_mask.to(states.dtype).unsqueeze(-1)  # [B, T, 1]
        mean = (states * mask).sum(1) / mask.sum(1)
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = (attention_mask.long() * (index + 1)).argmax(-1)  # [B]
        final = states[torch.arange(len(states), device=states.device), last]
        pooled = torch.cat([mean, final], dim=-1).to(self.head.weight.dtype)  # [B, 2 D]; sharding may compute in bfloat16
        return self.head(pooled).squeeze(-1).float()  # [B]

    @torch.no_grad()
    def success_probability(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Predicted probability of success, [B], without a gradient."""
        return torch.sigmoid(self(input_ids, attention_mask))


@dataclass(frozen=True)
class LoadedValueModel:
    """A value model ready to predict and to train."""

    model: ValueModel
    tokenizer: PreTrainedTokenizerBase
    context_length: int


def load_value_model(spec: ValueModelSpec, words: Sequence[str], seed_key: str) -> LoadedValueModel:
    """The value model that the spec describes, on the CPU and in training mode.

    Args:
        words: the environment's vocabulary, for the tokenizer of a tiny model.
        seed_key: random weights are a function of this string alone; torch's global generator is left as it was.
    """
    tokenizer = load_tokenizer(spec, words)
    with local_seed(seed_key), torch.device("cpu"):
        model = _with_head(build_backbone(spec, tokenizer, AutoModel), spec)
    return LoadedValueModel(model, tokenizer, context_length(model.encoder.config))


def share_value_model(policy: LoadedModel, spec: ValueModelSpec, seed_key: str) -> LoadedValueModel:
    """A value model with adapters and a head of its own on the policy's frozen base."""
    assert policy.bare is not None
    with local_seed(seed_key), torch.device("cpu"):
        model = _with_head(same_weights(policy.bare).get_decoder(), spec)
    return LoadedValueModel(model, policy.tokenizer, policy.context_length)


def _with_head(backbone: PreTrainedModel, spec: ValueModelSpec) -> ValueModel:
    width = backbone.config.get_text_config().hidden_size
    return ValueModel(to_train(backbone, spec, "FEATURE_EXTRACTION"), width).train()
