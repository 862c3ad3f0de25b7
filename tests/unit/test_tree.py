"""The canonical tree: the bits of a sum do not depend on how the learners are dealt to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import kernels
from shoal.backend import numpy_backend
from shoal.comm.group import ranks_for
from shoal.comm.tree import SubtreeSums, blocks, cover, joins, push, sum_scalars

FIXED = settings(derandomize=True, deadline=None)
MOST = 17


def tree_sum(values: Sequence[np.ndarray]) -> np.ndarray:
    """Independent of shoal: split at the largest power of two below the length, as (h, i) = left + right does."""
    if len(values) == 1:
        return values[0]
    half = 1
    while 2 * half < len(values):
        half *= 2
    return tree_sum(values[:half]) + tree_sum(values[half:])


def joined(values: Sequence[np.ndarray], dealt: Sequence[range]) -> np.ndarray:
    """As a round does it: each rank sums its block into subtrees, and these are joined into the root."""
    size, dtype, backend = values[0].size, values[0].dtype, numpy_backend()
    parts, found = list[np.ndarray](), list[tuple[int, int]]()
    for block in dealt:
        rank = SubtreeSums(np, lambda _: backend.empty(size, dtype))
        rank.start()
        for learner in block:
            rank.slot()[...] = values[learner]
            rank.add((0, learner))
        vertices = cover(block)
        assert len(rank.parts) == len(vertices)
        parts += rank.parts
        found += vertices
    out = backend.empty(size, dtype)
    kernels.canonical_sum(np, kernels.Terms(np, parts, joins(found), 1.0), out)
    return out


def random_vectors(learners: int, size: int, seed: int = 0) -> list[np.ndarray]:
    """Of widely different magnitudes, so that nearly every other order of adding gives other bits."""
    draw = np.random.default_rng((seed, learners, size))
    return [
        (draw.standard_normal(size) * 10.0 ** draw.integers(-3, 4, size)).astype(np.float32) for _ in range(learners)
    ]


def test_a_cover_is_what_pushing_learners_one_by_one_leaves() -> None:
    for first in range(40):
        for stop in range(first, 40):
            pushed = list[tuple[int, int]]()
            for learner in range(first, stop):
                push(pushed, (0, learner), lambda left, _: (left[0] + 1, left[1] // 2), lambda vertex: vertex)
            assert cover(range(first, stop)) == pushed


def test_a_cover_of_ever_so_many_learners_takes_no_time() -> None:
    assert cover(range(2**60 - 1, 2**61 + 1)) == [(0, 2**60 - 1), (60, 1), (0, 2**61)]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
def test_the_same_bits_for_all_learners_and_ranks(size: int) -> None:
    for learners in range(1, MOST + 1):
        values = random_vectors(learners, size)
        expected = tree_sum(values).tobytes()
        for ranks in range(1, learners + 1):
            assert joined(values, blocks(learners, ranks)).tobytes() == expected, (learners, ranks)


@FIXED
@given(st.data(), st.integers(1, 40))
def test_the_same_bits_for_any_contiguous_dealing(data: st.DataObject, learners: int) -> None:
    """Not only even blocks: also what is left after any rank has gone."""
    cuts = sorted(data.draw(st.sets(st.integers(1, learners - 1)))) if learners > 1 else []
    ends = [0, *cuts, learners]
    dealt = [range(a, b) for a, b in pairwise(ends)]
    values = random_vectors(learners, 33)
    assert joined(values, dealt).tobytes() == tree_sum(values).tobytes()


def test_the_order_matters_to_these_vectors() -> None:
    """Else the tests above would pass with any order of adding."""
    values = random_vectors(9, 1000)
    left_to_right = values[0]
    for value in values[1:]:
        left_to_right = left_to_right + value
    assert np.sum(left_to_right != tree_sum(values)) > 300


@pytest.mark.parametrize("learners", range(1, MOST + 1))
def test_whole_numbers_have_their_plain_sum(learners: int) -> None:
    values = [np.arange(5, dtype=np.float32) * (learner + 1) + learner**2 for learner in range(learners)]
    for ranks in range(1, learners + 1):
        assert np.array_equal(joined(values, blocks(learners, ranks)), np.sum(values, axis=0))
    assert sum_scalars([float(learner**3) for learner in range(learners)]) == sum(i**3 for i in range(learners))


@pytest.mark.parametrize("learners", range(1, MOST + 1))
def test_sum_scalars_is_the_same_tree(learners: int) -> None:
    values = np.random.default_rng(learners).standard_normal(learners) * 10.0 ** np.arange(learners)
    (expected,) = tree_sum([np.array([value]) for value in values])
    assert sum_scalars([float(value) for value in values]) == expected


def test_cover() -> None:
    assert cover(range(8)) == [(3, 0)]
    assert cover(range(4, 8)) == [(2, 1)]
    assert cover(range(6)) == [(2, 0), (1, 2)]
    assert cover(range(3, 8)) == [(0, 3), (2, 1)]
    assert cover(range(1, 7)) == [(0, 1), (1, 1), (1, 2), (0, 6)]
    assert cover(range(5, 5)) == []


@FIXED
@given(st.integers(0, 200), st.integers(0, 200))
def test_a_cover_is_the_block_and_the_fewest_subtrees(start: int, length: int) -> None:
    block = range(start, start + length)
    vertices = cover(block)
    assert [learner for h, i in vertices for learner in range(i << h, (i + 1) << h)] == list(block)
    for (h, i), (next_h, next_i) in pairwise(vertices):
        assert not (h == next_h and i % 2 == 0 and next_i == i + 1), "two siblings were left unjoined"


@FIXED
@given(st.integers(1, 300), st.integers(1, 300))
def test_blocks(learners: int, ranks: int) -> None:
    dealt = blocks(learners, ranks)
    assert [learner for block in dealt for learner in block] == list(range(learners))
    assert 1 <= len(dealt) <= min(learners, ranks)
    widest = -(-learners // ranks)
    assert all(len(block) == widest for block in dealt[:-1]) and 1 <= len(dealt[-1]) <= widest


@FIXED
@given(st.integers(1, 300), st.integers(1, 300))
def test_a_group_is_as_large_as_its_blocks(learners: int, living: int) -> None:
    """R = ceil(P / ceil(P/W)), so that each rank of the group hosts a learner."""
    group = ranks_for(learners, [7 * rank for rank in range(living)])
    assert len(group) == -(-learners // -(-learners // living))
    assert len(blocks(learners, len(group))) == len(group)
    assert list(group) == [7 * rank for rank in range(len(group))]


def test_the_sums_of_a_round_take_no_new_memory() -> None:
    made = []

    def allocate(number: int) -> np.ndarray:
        made.append(number)
        return np.empty(8, np.float32)

    sums = SubtreeSums(np, allocate)
    for _ in range(5):
        sums.start()
        for learner in range(13):
            sums.slot()[...] = 1
            sums.add((0, learner))
        assert [int(part[0]) for part in sums.parts] == [8, 4, 1]
    assert made == list(range(len(made))) and len(made) <= 5
