"""Generate completions: the contract, and a sampler over a transformers model in this process.

Sample j of prompt i is a function of (keys[i], j) and the prompt: which other prompts share the
batch, how they are chunked and when rows leave the batch changes nothing but float noise in logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rla_lightning.rollout.randomness import sample_seeds, uniforms
from rla_lightning.types import Completion, ConfigError, SamplingParams

COMPACT_BELOW = 0.8  # finished rows are dropped once the live share of the batch is below this


class Sampler(Protocol):
    """The only way anything generates text."""

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, keys: Sequence[str]
    ) -> list[list[Completion]]:
        """Draw n completions of every prompt, in order; `keys[i]` seeds those of prompt i."""


class TransformersSampler:
    """Samples from a causal language model of transformers (or one wrapped by PEFT) with a KV cache.

    Args:
        model: the model; its training flags are as before after each call.
        tokenizer: for padding, the end token and decoding.
        max_batch_tokens: padded tokens (prompt plus new) that are in memory at a time.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, max_batch_tokens: int = 16384) -> None:
        if max_batch_tokens < 1:
            raise ConfigError(f"max_batch_tokens must be positive, got {max_batch_tokens}")
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch_tokens = max_batch_tokens

    @torch.no_grad()  # not inference_mode: its tensors raise in a later loss
    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, keys: Sequence[str]
    ) -> list[list[Completion]]:
        _check(prompts, n, params, keys)
        if not prompts:
            return []
        unique: dict[tuple[int, ...], int] = {}
        prompt_of = np.array([unique.setdefault(tuple(prompt), len(unique)) for prompt in prompts])
        texts = list(unique)
        lengths = np.array([len(prompt) for prompt in texts])
        prompt_of_row = np.repeat(prompt_of, n)  # [rows]
        seeds = sample_seeds(keys, n).reshape(-1)  # [rows]
        device = next(self.model.parameters()).device
        end_ids = torch.tensor(self._end_ids(), dtype=torch.long, device=device)

        rows = len(seeds)
        tokens = np.zeros((rows, params.max_new_tokens), dtype=np.int64)
        logprobs = np.zeros((rows, params.max_new_tokens), dtype=np.float32)
        ended = np.zeros(rows, dtype=np.int64)  # tokens up to the end token; 0 when there is none
        with evaluating(self.model):
            for chunk in self._chunks(prompt_of_row, lengths, params.max_new_tokens):
                ids = prompt_of_row[chunk]
                is_first = np.concatenate([[True], ids[1:] != ids[:-1]])  # rows of a prompt are neighbours
                row_prompt = is_first.cumsum() - 1
                batch = left_pad([texts[i] for i in ids[is_first]], self._pad_id(), params.max_new_tokens, device)
                draws = torch.from_numpy(uniforms(seeds[chunk], params.max_new_tokens)).to(device)
                drawn = _decode(self.model, batch, torch.from_numpy(row_prompt).to(device), draws, params, end_ids)
                tokens[chunk], logprobs[chunk], ended[chunk] = (part.cpu().numpy() for part in drawn)
        completions = self._completions(tokens, logprobs, ended)
        return [completions[i : i + n] for i in range(0, rows, n)]

    def _chunks(self, prompt_of_row: np.ndarray, lengths: np.ndarray, max_new_tokens: int) -> Iterator[np.ndarray]:
        """Row indices of one decode each: sorted by length, so that little is padding."""
        order = np.lexsort((prompt_of_row, lengths[prompt_of_row]))
        width = lengths[prompt_of_row][order] + max_new_tokens
        start = 0
        while start < len(order):
            # Widths ascend, so the padded size of order[start:stop] is (stop - start) * width[stop - 1].
            padded = np.arange(1, len(order) - start + 1) * width[start:]
            size = max(1, int(np.searchsorted(padded, self.max_batch_tokens, side="right")))
            yield order[start : start + size]
            start += size

    def _end_ids(self) -> list[int]:
        generation = getattr(self.model, "generation_config", None)
        configured = getattr(generation, "eos_token_id", None)
        ids = configured if isinstance(configured, (list, tuple)) else [configured]
        return sorted({int(i) for i in (*ids, self.tokenizer.eos_token_id) if i is not None})

    def _pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)  # masked everywhere, so any id will do

    def _completions(self, tokens: np.ndarray, logprobs: np.ndarray, ended: np.ndarray) -> list[Completion]:
        stops = np.where(ended > 0, ended, tokens.shape[1]).tolist()
        token_ids = [tuple(row[:stop]) for row, stop in zip(tokens.tolist(), stops, strict=True)]
        distinct = list(dict.fromkeys(token_ids))  # tiny models repeat themselves; decoding is slow
        decoded = self.tokenizer.batch_decode(
            [list(ids) for ids in distinct], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        text_of = dict(zip(distinct, decoded, strict=True))
        return [
            Completion(ids, tuple(row[:stop]), text_of[ids], "EOS" if end else "TRUNCATED")
            for ids, row, stop, end in zip(token_ids, logprobs.tolist(), stops, ended.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class PaddedPrompts:
    input_ids: Tensor  # [B, T] left-padded
    attention_mask: Tensor  # [B, T + new tokens], ones on the right
    lengths: Tensor  # [B]


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int, new_tokens: int, device: torch.device) -> PaddedPrompts:
    """Prompts as one batch; the mask comes from lengths, never from token ids."""
    lengths = np.array([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    mask = np.arange(width) >= (width - lengths)[:, None]
    input_ids = np.full((len(prompts), width), pad_id, dtype=np.int64)
    input_ids[mask] = np.fromiter(chain.from_iterable(prompts), dtype=np.int64, count=int(lengths.sum()))
    full_mask = np.concatenate([mask, np.ones((len(prompts), new_tokens), dtype=bool)], axis=1).astype(np.int64)
    return PaddedPrompts(
        torch.from_numpy(input_ids).to(device), torch.from_numpy(full_mask).to(device), torch.from_numpy(lengths).to(device)
    )


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


def _decode(
    model: nn.Module, batch: PaddedPrompts, row_prompt: Tensor, draws: Tensor, params: SamplingParams, end_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [R, N], their log-probs [R, N] and lengths [R] (0 without an end token) of R rows."""
    rows, width = len(row_prompt), batch.input_ids.shape[1]
    tokens = torch.zeros((rows, params.max_new_tokens), dtype=torch.long, device=draws.device)
    logprobs = torch.zeros((rows, params.max_new_tokens), dtype=torch.float32, device=draws.device)
    ended = torch.zeros(rows, dtype=torch.long, device=draws.device)

    logits, cache = _prefill(model, batch, width)
    mask, lengths = batch.attention_mask, batch.lengths
    if rows > len(mask):  # the samples of a prompt share its prefill
        cache.batch_select_indices(row_prompt)
        logits, mask, lengths = logits[row_prompt], mask[row_prompt], lengths[row_prompt]
    active = torch.arange(rows, device=draws.device)  # the row that each line of the batch belongs to
    alive = torch.ones(rows, dtype=torch.bool, device=draws.device)
    for position in range(params.max_new_tokens):
        token, logprob = draw(logits, draws[active, position], params)
        tokens[active, position] = token
        logprobs[active, position] = logprob
        is_end = torch.isin(token, end_ids) & alive
        ended[active[is_end]] = position + 1
        alive &= ~is_end
        living = int(alive.sum())
        if living == 0 or position + 1 == params.max_new_tokens:
            break
        if living < COMPACT_BELOW * len(alive):
            keep = alive.nonzero().squeeze(1)
            cache.batch_select_indices(keep)
            active, mask, lengths, token, alive = active[keep], mask[keep], lengths[keep], token[keep], alive[keep]
        output = model(
            input_ids=token[:, None],
            attention_mask=mask[:, : width + position + 1],
            position_ids=(lengths + position)[:, None],
            cache=cache,
            use_cache=True,
        )
        logits = output.logits[:, -1]
    return tokens, logprobs, ended


def _prefill(model: nn.Module, batch: PaddedPrompts, width: int) -> tuple[Tensor, Any]:
    """Logits of the first new token [B, V] and the cache of the prompts."""
    mask = batch.attention_mask[:, :width]
    position_ids = (mask.cumsum(1) - 1).clamp_min(0)
    output = model(input_ids=batch.input_ids, attention_mask=mask, position_ids=position_ids, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1], output.cache


def draw(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tokens [B] by inverse CDF of `uniform` [B], and their log-probs [B] after temperature and filters.

    Greedy decoding (temperature 0) is a point mass: its log-probs are 0.
    """
    if params.temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    log_p = filter_logits(logits.float() / params.temperature, params.top_k, params.top_p).log_softmax(-1)
    cdf = log_p.exp().cumsum(-1)  # [B, V]
    total = cdf[:, -1]
    # Strictly below the total, so that the first entry above the target has positive probability.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, target[:, None], right=True)
    return token[:, 0], log_p.gather(1, token)[:, 0]


def filter_logits(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits [B, V] with -inf outside the k likeliest tokens, then outside the nucleus of mass top_p."""
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p < 1:
        p, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        outside = p.cumsum(-1) - p >= top_p  # the mass before a token already reaches top_p
        outside[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(outside).scatter_(1, order, outside), -torch.inf)
    return logits


def _check(prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, keys: Sequence[str]) -> None:
    if n < 1:
        raise ConfigError(f"the number of samples per prompt must be at least 1, got {n}")
    if len(keys) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts need as many keys, got {len(keys)}")
    if params.temperature < 0 or params.max_new_tokens < 1 or params.top_k < 0 or not 0 < params.top_p <= 1:
        raise ConfigError(f"cannot sample with {params}")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"prompt {i} (key {keys[i]!r}) is empty")
