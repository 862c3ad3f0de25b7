"""Keyed randomness: pinned bits, purity, and the formulas on top of raw words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.keyed import permutation, raw, uniform
from shoal.errors import InputError

FIXED = settings(derandomize=True, deadline=None)

WORD = 2**64
words = st.integers(0, WORD - 1)


def philox(key: list[int], counter: list[int]) -> list[int]:
    """One block of Philox-4x64-10 (Salmon et al., SC11, doi 10.1145/2063384.2063405), in plain integers."""
    key, c = list(key), list(counter)
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], WORD)
        high1, low1 = divmod(0xCA5A826395121157 * c[2], WORD)
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B97F4A7C15) % WORD, (key[1] + 0xBB67AE8584CAA73B) % WORD]
    return c


def test_raw_words_are_the_pinned_ones() -> None:
    assert raw(1, "order", 0, 0, 4).tolist() == [
        15662577185734967200,
        8799881870247577909,
        2712439042349618450,
        485871063351140561,
    ]
    assert permutation(0, "order", 1, 8).tolist() == [7, 2, 1, 0, 3, 4, 6, 5]


def test_philox_oracle_knows_the_published_vector() -> None:
    # Random123's kat_vectors: philox4x64 10 with key and counter of all ones.
    ones = WORD - 1
    assert philox([ones, ones], [ones] * 4) == [
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    ]


@FIXED
@given(seed=words, a=words, b=words, count=st.integers(0, 9))
def test_raw_is_philox_of_its_key(seed: int, a: int, b: int, count: int) -> None:
    crc_of_order = 0xF5299398
    expected = [word for i in (1, 2, 3) for word in philox([seed, crc_of_order], [i, 0, a, b])]
    assert raw(seed, "order", a, b, count).tolist() == expected[:count]


@FIXED
@given(seed=words, a=words, others=st.lists(st.tuples(words, st.text(max_size=5)), max_size=4))
def test_same_key_gives_same_bits_whatever_is_drawn_between(seed: int, a: int, others: list[tuple[int, str]]) -> None:
    before = raw(seed, "x", a, 3, 20)
    for other, purpose in others:
        raw(other, purpose, a, 3, 7)
    np.random.default_rng(0).random(5)
    assert np.array_equal(raw(seed, "x", a, 3, 20), before)
    assert np.array_equal(raw(seed, "x", a, 3, 8), before[:8])


def test_each_part_of_the_key_matters() -> None:
    keys = [(1, "x", 2, 3), (2, "x", 2, 3), (1, "y", 2, 3), (1, "x", 3, 3), (1, "x", 2, 4), (1, "x", 3, 2)]
    draws = {tuple(raw(*key, 4).tolist()) for key in keys}
    assert len(draws) == len(keys)


@FIXED
@given(seed=words, count=st.integers(0, 300))
def test_permutation_holds_each_index_once(seed: int, count: int) -> None:
    order = permutation(seed, "p", 0, count)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))


def test_uniform_is_the_top_53_bits() -> None:
    values = uniform(7, "u", 1, 2, 5000)
    assert values.dtype == np.float64
    assert [int(v * 2**53) for v in values[:50]] == [w >> 11 for w in raw(7, "u", 1, 2, 50).tolist()]
    assert values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02


@pytest.mark.parametrize("key", [(-1, "x", 0, 0), (WORD, "x", 0, 0), (0, "x", -1, 0), (0, "x", 0, WORD)])
def test_a_key_that_is_no_word_is_refused(key: tuple[int, str, int, int]) -> None:
    with pytest.raises(InputError, match=r"must lie in 0"):
        raw(*key, 1)
