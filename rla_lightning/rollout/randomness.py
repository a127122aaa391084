"""Counter-based randomness: a uniform number is a hash of (key, sample, position) and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(state: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014): uint64 to well-mixed uint64."""
    z = state + GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample_seeds(keys: Sequence[str], n: int) -> np.ndarray:
    """uint64 seeds [len(keys), n]: sample j of key i depends on (keys[i], j) only."""
    digests = b"".join(blake2b(key.encode(), digest_size=8).digest() for key in keys)
    of_key = np.frombuffer(digests, dtype="<u8").astype(np.uint64)
    return splitmix64(of_key[:, None] ^ splitmix64(np.arange(n, dtype=np.uint64)))


def uniforms(seeds: np.ndarray, number: int) -> np.ndarray:
    """float32 [len(seeds), number] in [0, 1), a stream per seed."""
    positions = splitmix64(np.arange(number, dtype=np.uint64))
    bits = splitmix64(seeds[:, None] ^ positions)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
