"""A language model as it is trained: from a micro-batch to the log-probs of its response tokens.

Only places that predict a response token reach the head, in chunks that are computed again in the backward pass, so that
the logits of the whole batch are never in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rla_lightning.algorithm.losses import token_logprobs
from rla_lightning.models.language_model import evaluating
from rla_lightning.rollout.batching import MicroBatch
from rla_lightning.rollout.key_values import can_regroup

CHUNK = 2**25  # logits that are in memory at a time; half of it takes a tenth to a fifth more time


class Scorer(nn.Module):
    """Wraps a causal language model, or one with adapters; this is what FSDP2 shards and optimizers see.

    Args:
        model: of transformers, on the CPU with whole weights.
        compile: the forward pass of its body with torch.compile.
    """

    def __init__(self, model: nn.Module, compile: bool = False) -> None:
        super().__init__()
        self.model = model
        causal = _causal(model)
        with evaluating(model):
            self.splits = _splits(causal)  # hidden states and head apart
            shares = _shares(causal)
        self.width: int | None = causal.config.get_text_config().hidden_size if shares else None  # where prefixes are shared
        self._body: Callable[..., Tensor] = _hidden_states
        if compile:
            self._body = torch.compile(_hidden_states, dynamic=True)

    def forward(
        self, batch: MicroBatch, temperature: float, with_entropy: bool = False, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [N, R] of the response tokens and, if asked, the entropy [N, R] at each of them.

        Values at padded places are finite and meaningless: multiply by `response_mask`.

        Args:
            batch: of samples.
            temperature: that of sampling; top_p and top_k are not applied.
            with_entropy: also return the entropy.
            entropy_gradient: let a gradient flow into it.
        """
        causal = _causal(self.model)
        inputs = {"input_ids": batch.input_ids}
        if batch.subtree_ends is not None:
            inputs |= {"attention_mask": tree_mask(batch.subtree_ends), "position_ids": batch.position_ids}
        if self.splits:
            states = self._body(causal, inputs).flatten(0, 1)[batch.places]  # [P, D]
            head: Callable[[Tensor], Tensor] = causal.get_output_embeddings()
            size = max(1, CHUNK // causal.get_output_embeddings().weight.shape[0])
        else:  # the model does more to its logits than its head
            states = causal(**inputs, use_cache=False).logits.flatten(0, 1)[batch.places]  # [P, V]
            head, size = nn.Identity(), max(1, CHUNK // states.shape[1])

        def score(chunk: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
            return token_logprobs(
                head(chunk), targets, temperature=temperature, with_entropy=with_entropy, entropy_gradient=entropy_gradient
            )

        parts: list[tuple[Tensor, Tensor | None]] = []
        for chunk, targets in zip(states.split(size), batch.targets.split(size), strict=True):
            again = torch.is_grad_enabled() and len(states) > size
            parts.append(checkpoint(score, chunk, targets, use_reentrant=False) if again else score(chunk, targets))
        logprobs = torch.cat([logprobs for logprobs, _ in parts])[batch.predictions]
        if not with_entropy:
            return logprobs, None
        return logprobs, torch.cat([entropy for _, entropy in parts if entropy is not None])[batch.predictions]


def tree_mask(subtree_ends: Tensor) -> Tensor:
    """Which tokens [B, 1, T, T] each token sees: itself and those before it whose subtree it is in."""
    index = torch.arange(subtree_ends.shape[1], device=subtree_ends.device)
    seen = (index[:, None] >= index) & (index[:, None] < subtree_ends[:, None, :])  # [B, T, T], the first is who sees
    return seen[:, None]


def _causal(model: nn.Module) -> PreTrainedModel:
    """The causal language model, its adapters in place."""
    return model.get_base_model() if isinstance(model, PeftModel) else model  # type: ignore[return-value]


def _hidden_states(causal: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    return causal.get_decoder()(**inputs, use_cache=False).last_hidden_state


@torch.no_grad()
def _splits(causal: PreTrainedModel) -> bool:
    """Whether the logits are the head of the body's last hidden states; some models cap or scale them."""
    ids = torch.arange(3, device=causal.device)[None]
    head = causal.get_output_embeddings()
    if head is None:
        return False
    states = _hidden_states(causal, {"input_ids": ids})
    if states.dtype != head.weight.dtype:
        return False
    return torch.allclose(head(states).float(), causal(input_ids=ids, use_cache=False).logits.float())


@torch.no_grad()
def _shares(causal: PreTrainedModel) -> bool:
    """Whether it computes the branches of a tree as if each stood alone."""
    if causal.config.get_text_config()._attn_implementation != "sdpa" or not can_regroup(causal):
        return False

    def tensor(*values: int) -> Tensor:
        return torch.tensor([values], device=causal.device)  # Lightning builds models under another default device

    alone = _hidden_states(causal, {"input_ids": tensor(0, 2)})
    tree = {"input_ids": tensor(0, 1, 2), "attention_mask": tree_mask(tensor(3, 2, 3)), "position_ids": tensor(0, 1, 1)}
    try:
        together = _hidden_states(causal, tree)
    except (ValueError, RuntimeError, TypeError, IndexError):  # it wants a mask of another shape
        return False
    return torch.allclose(alone[0, 1].float(), together[0, 2].float(), rtol=1e-2, atol=1e-2)
