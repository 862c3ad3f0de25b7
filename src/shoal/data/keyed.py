"""Randomness as a function: the same key gives the same bits, whatever was drawn before.

Every random choice of a run is a pure function of (seed, purpose, a, b), computed from raw
Philox-4x64 words.  There is no generator state to carry, to checkpoint or to get out of step between
processes, and nothing depends on NumPy's distributions, whose streams may change between releases.
"""

from __future__ import annotations

import zlib

import numpy as np

from shoal.errors import InputError

_WORD = 2**64
_BLOCK = 4
"""Philox gives so many words for each value of its counter."""


def raw(seed: int, purpose: str, a: int, b: int, count: int, first: int = 0) -> np.ndarray:
    """Return `count` Philox words, uint64 (count,), of the stream (seed, purpose, a, b), from its block `first` on.

    The purpose enters as its CRC-32; `a` and `b` are counter words, so that streams of different
    keys never overlap.  Raises InputError when seed, a, b or first does not fit an unsigned 64-bit word.
    """
    for name, value in (("seed", seed), ("a", a), ("b", b), ("first", first)):
        if not 0 <= value < _WORD:
            raise InputError(f"{name} is {value}, but must lie in 0 ... 2**64 - 1; choose another {name}.")
    key = np.array([seed, zlib.crc32(purpose.encode())], dtype=np.uint64)
    counter = np.array([first, 0, a, b], dtype=np.uint64)
    return np.asarray(np.random.Philox(key=key, counter=counter).random_raw(count), dtype=np.uint64)


def rows(seed: int, purpose: str, first: int, count: int, width: int) -> np.ndarray:
    """Return uint64 (count, width) of which row i depends on (seed, purpose, first + i) and `width` alone.

    So one call gives the randomness of a batch, whose samples have consecutive positions.
    """
    blocks = -(-width // _BLOCK)
    words = raw(seed, purpose, 0, 0, count * blocks * _BLOCK, first * blocks)
    return words.reshape(count, blocks * _BLOCK)[:, :width]


def uniform(seed: int, purpose: str, a: int, b: int, count: int) -> np.ndarray:
    """Return `count` numbers in [0, 1), float64 (count,): the top 53 bits of each word, times 2**-53."""
    return (raw(seed, purpose, a, b, count) >> np.uint64(11)) * 2.0**-53


def permutation(seed: int, purpose: str, a: int, count: int) -> np.ndarray:
    """Return a permutation of 0 ... count-1, int64 (count,): the stable order of `count` raw words."""
    return np.argsort(raw(seed, purpose, a, 0, count), kind="stable").astype(np.int64, copy=False)
