"""Sample from a transformers model in this process, with continuous batching and what was read kept between turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rla_lightning.models.language_model import evaluating
from rla_lightning.models.sharding import sync_replica
from rla_lightning.rollout.drawing import draw
from rla_lightning.rollout.key_values import KeyValues, can_regroup, gather
from rla_lightning.rollout.randomness import sample_seeds, uniforms
from rla_lightning.rollout.sampler import Sampler, Session, check_request
from rla_lightning.types import Completion, ConfigError, SamplingParams

REFILL = 0.5  # answers are handed out, and others begun, when this share of the batch has ended


class TransformersSampler(Sampler):
    """Samples from a causal language model of transformers, or one with adapters; whatever its weights are at the time.

    Args:
        model: the one that is trained, or a whole copy of it. Its training flags are as before after each call.
        tokenizer: for padding, the end token and decoding.
        max_batch_tokens: padded tokens (prompt plus new) that are decoded at a time; as many again may be kept of
            conversations that wait for their turn.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, max_batch_tokens: int = 16384) -> None:
        if max_batch_tokens < 1:
            raise ConfigError(f"max_batch_tokens must be positive, got {max_batch_tokens}")
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch_tokens = max_batch_tokens

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, keys: Sequence[str]
    ) -> list[list[Completion]]:
        check_request(prompts, n, params, keys)
        session = _Session(self, params, goes_on=False)
        for i, (prompt, seeds) in enumerate(zip(map(tuple, prompts), sample_seeds(keys, n), strict=True)):
            session.waiting += [_Request(i * n + j, prompt, seed) for j, seed in enumerate(seeds)]
        answers: dict[int, Completion] = {}
        while ended := session.completed():
            answers.update(ended)
        return [[answers[i * n + j] for j in range(n)] for i in range(len(prompts))]

    @contextmanager
    def session(self, params: SamplingParams) -> Iterator[Session]:
        check_request([], 1, params, [])
        yield _Session(self, params)

    def update_weights(self, model: nn.Module) -> None:
        """Copy the weights of `model`, sharded or of another dtype, unless it is the one that is sampled from."""
        if model is not self.model:
            sync_replica(self.model.to(next(model.parameters()).device), model)

    def end_ids(self) -> list[int]:
        generation = getattr(self.model, "generation_config", None)
        configured = getattr(generation, "eos_token_id", None)
        ids = configured if isinstance(configured, (list, tuple)) else [configured]
        return sorted({int(i) for i in (*ids, self.tokenizer.eos_token_id) if i is not None})


@dataclass(frozen=True)
class _Read:
    """Where the tokens that a conversation begins with have been read."""

    tokens: tuple[int, ...]
    source: KeyValues
    row: int


@dataclass(frozen=True)
class _Request:
    ticket: int
    prompt: tuple[int, ...]
    seed: np.uint64
    read: _Read | None = None


@dataclass
class _Batch:
    """R answers that are being written; N tokens at most."""

    requests: list[_Request]
    known: KeyValues
    logits: Tensor  # [R, V] of the next token
    lengths: Tensor  # [R] tokens read
    draws: Tensor  # [R, N]
    tokens: Tensor  # [R, N]
    logprobs: Tensor  # [R, N]
    written: Tensor  # [R]
    is_open: Tensor = field(init=False)  # [R]

    def __post_init__(self) -> None:
        self.is_open = torch.ones_like(self.written, dtype=torch.bool)

    def take(self, rows: Tensor, known: KeyValues) -> _Batch:
        kept = {name: getattr(self, name)[rows] for name in _ROWS}
        return _Batch(requests=[self.requests[row] for row in rows.tolist()], known=known, **kept)


_ROWS = ("logits", "lengths", "draws", "tokens", "logprobs", "written")


class _Session(Session):
    """One batch is decoded; when enough of it has ended, its places are given to those that wait."""

    def __init__(self, sampler: TransformersSampler, params: SamplingParams, goes_on: bool = True) -> None:
        self.model, self.tokenizer, self.params = sampler.model, sampler.tokenizer, params
        self.config: Any = sampler.model.config
        self.max_batch_tokens = sampler.max_batch_tokens
        self.device = next(sampler.model.parameters()).device
        self.pad_id = int(sampler.tokenizer.pad_token_id or 0)  # masked everywhere, so any id will do
        self.end_ids = torch.tensor(sampler.end_ids(), dtype=torch.long, device=self.device)
        self.regroups = can_regroup(sampler.model)
        self.keeps = goes_on and self.regroups
        self.waiting: list[_Request] = []
        self.running: _Batch | None = None
        self.parked: KeyValues | None = None  # what was read of those that wait
        self.ended: dict[int, _Read] = {}  # since `completed` was last called

    def submit(self, ticket: int, prompt: Sequence[int], key: str) -> None:
        check_request([prompt], 1, self.params, [key])
        read = self.ended.pop(ticket, None)
        if read is not None and (len(prompt) <= len(read.tokens) or tuple(prompt[: len(read.tokens)]) != read.tokens):
            read = None
        self.waiting.append(_Request(ticket, tuple(prompt), sample_seeds([key], 1)[0, 0], read))

    @torch.no_grad()  # not inference_mode: its tensors raise in a later loss
    def completed(self) -> list[tuple[int, Completion]]:
        self.ended = {}
        if not self.waiting and self.running is None:
            return []
        with evaluating(self.model):
            self._admit()
            return self._decode()

    # Whose turn it is

    def _admit(self) -> None:
        """Move requests from the queue into the batch, as many as there is room for."""
        running = self.running
        if not self.waiting or (running is not None and not self.regroups):
            return
        # Conversations that go on come first: what was read of them is in memory. Then by length, so that little is padding.
        self.waiting.sort(key=lambda request: (request.read is None, len(request.prompt), request.prompt, request.ticket))
        rows, width = (0, 0) if running is None else (running.known.rows, running.known.width)
        number = read = new = 0
        for request in self.waiting:
            if request.read is not None:  # what is new of each row follows the longest that was read
                read, new = max(read, len(request.read.tokens)), max(new, len(request.prompt) - len(request.read.tokens))
            width = max(width, len(request.prompt), read + new)
            if rows + number > 0 and (rows + number + 1) * (width + self.params.max_new_tokens) > self.max_batch_tokens:
                break
            number += 1
        chosen, self.waiting = self.waiting[:number], self.waiting[number:]
        going_on = [request for request in chosen if request.read is not None]
        fresh = [request for request in chosen if request.read is None]
        batches = [] if running is None else [running]
        batches += [self._continue(going_on)] if going_on else []
        batches += [self._begin(fresh)] if fresh else []
        del chosen, going_on  # and with them the batches in which they were read
        self.running = self._join(batches)
        self._park()

    def _park(self) -> None:
        """Copy what was read of conversations that wait, so that the batches they were in can go; forget what is too much."""
        kept: list[_Request] = []
        longest = 0
        for index, request in enumerate(self.waiting):
            if request.read is None:
                break  # those that go on come first
            longest = max(longest, len(request.read.tokens))
            if (len(kept) + 1) * longest <= self.max_batch_tokens:
                kept.append(request)
            else:
                self.waiting[index] = replace(request, read=None)
        reads = [request.read for request in kept if request.read is not None]
        if all(read.source is self.parked for read in reads):
            self.parked = self.parked if reads else None
            return
        self.parked = gather(_sources(kept, self.device), room=0)
        for row, (request, read) in enumerate(zip(kept, reads, strict=True)):
            self.waiting[row] = replace(request, read=replace(read, source=self.parked, row=row))

    def _begin(self, requests: list[_Request]) -> _Batch:
        """Read prompts; equal ones once."""
        prompts = [request.prompt for request in requests]
        if self.regroups:
            prompts = list(dict.fromkeys(prompts))
        room = self.params.max_new_tokens if self.regroups else None
        known = KeyValues.empty(self.config, len(prompts), room, self.device)
        lengths = torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        logits, known = self._feed(known, prompts, lengths)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        if len(prompts) < len(requests):
            number_of = {prompt: number for number, prompt in enumerate(prompts)}
            rows = torch.tensor([number_of[request.prompt] for request in requests], device=self.device)
            known, logits, lengths = gather([(known, rows)], self.params.max_new_tokens), logits[rows], lengths[rows]
        return self._batch(requests, known, logits, lengths)

    def _continue(self, requests: list[_Request]) -> _Batch:
        """Read only what is new in conversations that go on."""
        seen = [len(request.read.tokens) for request in requests if request.read is not None]
        new = [request.prompt[length:] for request, length in zip(requests, seen, strict=True)]
        room = max(map(len, new)) + self.params.max_new_tokens
        known = gather(_sources(requests, self.device), room)
        logits, known = self._feed(known, new, torch.tensor(seen, device=self.device))
        lengths = torch.tensor([len(request.prompt) for request in requests], device=self.device)
        return self._batch(requests, known, logits, lengths)

    def _batch(self, requests: list[_Request], known: KeyValues, logits: Tensor, lengths: Tensor) -> _Batch:
        number = self.params.max_new_tokens
        draws = uniforms(np.array([request.seed for request in requests], dtype=np.uint64), number)
        return _Batch(
            requests=[replace(request, read=None) for request in requests],
            known=known,
            logits=logits,
            lengths=lengths,
            draws=torch.from_numpy(draws).to(self.device),
            tokens=torch.zeros((len(requests), number), dtype=torch.long, device=self.device),
            logprobs=torch.zeros((len(requests), number), dtype=torch.float32, device=self.device),
            written=torch.zeros(len(requests), dtype=torch.long, device=self.device),
        )

    def _join(self, batches: list[_Batch]) -> _Batch:
        if len(batches) == 1:
            return batches[0]
        parts = [(batch.known, torch.arange(batch.known.rows, device=self.device)) for batch in batches]
        columns = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in _ROWS}
        requests = [request for batch in batches for request in batch.requests]
        return _Batch(requests=requests, known=gather(parts, self.params.max_new_tokens), **columns)

    # Decoding

    def _feed(self, known: KeyValues, texts: Sequence[Sequence[int]], lengths: Tensor) -> tuple[Tensor, KeyValues]:
        """Logits [R, V] after texts that follow what is known, `lengths` [R] tokens of each row."""
        ids, mask = left_pad(texts, self.pad_id, self.device)
        positions = (lengths[:, None] + mask.cumsum(1) - 1).clamp_min(0)
        return self._forward(known, ids, mask, positions)

    def _forward(self, known: KeyValues, ids: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, KeyValues]:
        valid = torch.cat([known.valid, mask], dim=1)
        output = self.model(
            input_ids=ids,
            attention_mask=valid.long(),
            position_ids=positions,
            cache=known.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1], KeyValues(output.cache, valid)

    def _decode(self) -> list[tuple[int, Completion]]:
        """Write until enough answers have ended; those that have not stay in the batch, with the logits of their next token."""
        batch = self.running
        assert batch is not None
        rows = torch.arange(len(batch.requests), device=self.device)
        enough = len(rows) if not self.regroups else max(1, int(REFILL * len(rows)))
        while True:
            token, logprob = draw(batch.logits, batch.draws[rows, batch.written.clamp_max(batch.draws.shape[1] - 1)], self.params)
            writing = batch.is_open.nonzero().squeeze(1)
            batch.tokens[writing, batch.written[writing]] = token[writing]
            batch.logprobs[writing, batch.written[writing]] = logprob[writing]
            batch.written[writing] += 1
            batch.is_open &= ~torch.isin(token, self.end_ids) & (batch.written < self.params.max_new_tokens)
            if len(rows) - int(batch.is_open.sum()) >= enough:
                break
            self._read_on(batch, token)
        answers = self._hand_out(batch)
        kept = batch.is_open.nonzero().squeeze(1)
        self.running = None
        if len(kept):
            self.running = batch.take(kept, gather([(batch.known, kept)], self.params.max_new_tokens))
            self._read_on(self.running, token[kept])
        return answers

    def _read_on(self, batch: _Batch, token: Tensor) -> None:
        """Feed the tokens [R] that were just written; those of ended answers are not part of them."""
        batch.logits, batch.known = self._forward(batch.known, token[:, None], batch.is_open[:, None], batch.lengths[:, None])
        batch.lengths = batch.lengths + batch.is_open

    def _hand_out(self, batch: _Batch) -> list[tuple[int, Completion]]:
        """The answers that have ended, by ticket."""
        ended = (~batch.is_open).nonzero().squeeze(1)
        is_end = torch.isin(batch.tokens[ended, batch.written[ended] - 1], self.end_ids).tolist()
        written = batch.written[ended].tolist()
        ids = [tuple(row[:stop]) for row, stop in zip(batch.tokens[ended].tolist(), written, strict=True)]
        distinct = list(dict.fromkeys(ids))  # tiny models repeat themselves; decoding is slow
        decoded = self.tokenizer.batch_decode(
            [list(answer) for answer in distinct], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        text_of = dict(zip(distinct, decoded, strict=True))
        answers = []
        for row, answer, logprobs, end in zip(ended.tolist(), ids, batch.logprobs[ended].tolist(), is_end, strict=True):
            request = batch.requests[row]
            if self.keeps:  # the last token has not been read
                self.ended[request.ticket] = _Read((*request.prompt, *answer[:-1]), batch.known, row)
            stop_reason = "EOS" if end else "TRUNCATED"
            completion = Completion(answer, tuple(logprobs[: len(answer)]), text_of[answer], stop_reason)  # type: ignore[arg-type]
            answers.append((request.ticket, completion))
        return sorted(answers, key=lambda answer: answer[0])


def left_pad(texts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [B, T] and their mask [B, T]; the mask comes from lengths, never from token ids."""
    lengths = np.array([len(text) for text in texts])
    width = int(lengths.max())
    mask = np.arange(width) >= (width - lengths)[:, None]
    ids = np.full((len(texts), width), pad_id, dtype=np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(texts), dtype=np.int64, count=int(lengths.sum()))
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def _sources(requests: Sequence[_Request], device: torch.device) -> list[tuple[KeyValues, Tensor]]:
    """What was read of each request, in their order: neighbours of one source together."""
    parts: list[tuple[KeyValues, list[int]]] = []
    for request in requests:
        assert request.read is not None
        if not parts or parts[-1][0] is not request.read.source:
            parts.append((request.read.source, []))
        parts[-1][1].append(request.read.row)
    return [(source, torch.tensor(rows, device=device)) for source, rows in parts]
