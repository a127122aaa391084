"""Sequences that begin alike, laid out as one: what they share is fed to the model once.

Several samples of one prompt share the prompt; a later turn whose prompt starts with an earlier turn and its answer shares
all of it. Both are paths of one tree of tokens. Laid out depth first, a token sees those before it whose subtree it is in,
at the position of its depth, so that every path is computed as if it stood alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Row:
    """A tree of N tokens, depth first."""

    tokens: np.ndarray  # [N] int64
    depths: np.ndarray  # [N] the position of each token in its own sequence
    ends: np.ndarray  # [N] index after the last token of each one's subtree
    sequences: tuple[int, ...]  # those that are paths in here
    paths: tuple[np.ndarray, ...]  # of each, the index of each of its tokens

    @property
    def is_chain(self) -> bool:
        """Nothing branches: plain causal attention."""
        return bool((self.ends == len(self.tokens)).all())


def prefix_rows(sequences: Sequence[Sequence[int]], width: int | None, budget: int) -> list[Row]:
    """Every sequence is a path in one of the rows; sequences with a common prefix share a row where that is clearly less work.

    The work for a row of n tokens in a transformer of width d is about n + n^2 / (12 d): 24 n d^2 operations in the
    matrices of a block, and half as long as 4 n^2 d of them in its attention, which computes all pairs (measured at widths
    64 and 256). A sequence joins a row where that is less work, and where at least 30% of it is shared: with less to gain,
    padding and the mask cost more.

    Args:
        sequences: token ids; none may be empty.
        width: of the model (d); None for models that cannot share, each sequence then has a row of its own.
        budget: no row is longer, unless a single sequence is.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    keys = [array.astype(">u4").tobytes() for array in arrays]
    rows: list[Row] = []
    tree: _Tree | None = None
    for index in sorted(range(len(arrays)), key=lambda i: (keys[i], i)):  # depth first order of the tree
        sequence = arrays[index]
        shared = 0 if tree is None or width is None else tree.shared(sequence)
        if tree is None or width is None or not _pays(tree.size, len(sequence), shared, width, budget):
            if tree is not None:
                rows.append(tree.row())
            tree, shared = _Tree(), 0
        tree.add(index, sequence, shared)
    if tree is not None:
        rows.append(tree.row())
    return rows


def related(sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> list[list[int]]:
    """Sets of sequences that share work: with the same prompt, or one a continuation of another; depth first.

    Args:
        sequences: prompt and answer of each.
        prompt_lengths: tokens of each prompt.
    """
    keys = [np.asarray(sequence, dtype=">u4").tobytes() for sequence in sequences]
    prompts = [key[: 4 * length] for key, length in zip(keys, prompt_lengths, strict=True)]
    sets: list[list[int]] = []
    open_paths: list[tuple[bytes, int]] = []  # what has to be a prefix of the next to belong to that set
    for index in sorted(range(len(keys)), key=lambda i: (prompts[i], keys[i], i)):
        while open_paths and not prompts[index].startswith(open_paths[-1][0]):
            open_paths.pop()
        if open_paths:
            of = open_paths[-1][1]
            sets[of].append(index)
        else:
            of = len(sets)
            sets.append([index])
        open_paths.append((prompts[index], of))
    return [sorted(members, key=lambda i: (keys[i], i)) for members in sets]


def _pays(size: int, length: int, shared: int, width: int, budget: int) -> bool:
    def work(tokens: int) -> float:
        return tokens + tokens * tokens / (12 * width)

    together = size + length - shared
    if together == length:  # a continuation: the same row
        return True
    return together <= budget and shared >= 0.3 * length and work(together) < work(size) + work(length)


class _Tree:
    """A row that is being put together from sequences in sorted order."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.depths: list[np.ndarray] = []
        self.closed: list[tuple[np.ndarray, int]] = []  # tokens whose subtree is complete, and its end
        self.sequences: list[int] = []
        self.paths: list[np.ndarray] = []
        self.size = 0
        self.last = np.zeros(0, dtype=np.int64)

    def shared(self, sequence: np.ndarray) -> int:
        """Length of the common prefix with the last sequence."""
        length = min(len(self.last), len(sequence))
        different = np.flatnonzero(self.last[:length] != sequence[:length])
        return int(different[0]) if len(different) else length

    def add(self, index: int, sequence: np.ndarray, shared: int) -> None:
        new = np.arange(self.size, self.size + len(sequence) - shared)
        before = self.paths[-1] if self.paths else new[:0]
        self.closed.append((before[shared:], self.size))
        self.tokens.append(sequence[shared:])
        self.depths.append(np.arange(shared, len(sequence)))
        self.sequences.append(index)
        self.paths.append(np.concatenate([before[:shared], new]))
        self.size += len(new)
        self.last = sequence

    def row(self) -> Row:
        ends = np.full(self.size, self.size, dtype=np.int64)
        for nodes, end in self.closed:
            ends[nodes] = end
        return Row(np.concatenate(self.tokens), np.concatenate(self.depths), ends, tuple(self.sequences), tuple(self.paths))
