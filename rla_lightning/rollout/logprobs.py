"""Log-probs of responses under a model, by the one forward pass that training uses."""

from __future__ import annotations

from torch import Tensor, nn

from rla_lightning.algorithm.losses import token_logprobs
from rla_lightning.rollout.batching import MicroBatch


def response_logprobs(
    model: nn.Module, micro_batch: MicroBatch, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [B, R] of the response tokens and, if asked, the entropy [B, R] at each of them.

    `temperature` is that of sampling; top_p and top_k are not applied. Values at padded positions are
    finite and meaningless: multiply by `response_mask`.
    """
    width = micro_batch.response_ids.shape[1]
    output = model(
        input_ids=micro_batch.input_ids,
        attention_mask=micro_batch.attention_mask,
        position_ids=micro_batch.position_ids,
        use_cache=False,
        logits_to_keep=width + 1,  # the last prompt token predicts the first response token
    )
    logits = output.logits[:, -width - 1 : -1]  # [B, R, V]
    return token_logprobs(logits, micro_batch.response_ids, temperature=temperature, with_entropy=with_entropy)
