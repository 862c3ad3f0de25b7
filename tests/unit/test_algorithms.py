"""Allreduce and collectives on threads: for 1 to 9 ranks, bit for bit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from test_tree import random_vectors, tree_sum
from threads import ThreadTransport, on_ranks

from shoal.backend import ALIGNMENT_BYTES, numpy_backend
from shoal.comm.algorithms import Exchange, slices
from shoal.comm.collectives import broadcast, broadcast_bytes, gather
from shoal.comm.transport import Subset
from shoal.comm.tree import SubtreeSums, blocks
from shoal.errors import DeadlineError

SIZES = range(1, 10)
BACKEND = numpy_backend()


def _reduce(transport: ThreadTransport, values: list[np.ndarray], rounds: int = 1) -> np.ndarray:
    """The mean by Exchange, this rank adding its block of learners; `rounds` times with one work memory."""
    learners, size, dtype = len(values), values[0].size, values[0].dtype
    exchange = Exchange(transport, learners, size, BACKEND, dtype)
    sums, out = SubtreeSums(np, lambda _: BACKEND.empty(size, dtype)), BACKEND.empty(size, dtype)
    for _ in range(rounds):
        out.fill(np.nan)
        sums.start()
        for learner in blocks(learners, transport.size)[transport.rank]:
            sums.slot()[...] = values[learner]
            sums.add((0, learner))
        exchange(sums.parts, out, 1 / learners)
    return out


def _group_sizes(learners: int) -> list[int]:
    """The sizes that a group of so many learners can have, up to 9."""
    return sorted({len(blocks(learners, ranks)) for ranks in SIZES})


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
def test_exchange_is_the_tree_bit_for_bit(size: int) -> None:
    for learners in (1, 2, 3, 5, 7, 8, 9, 12, 17):
        values = random_vectors(learners, size)
        expected = (tree_sum(values) * np.float32(1 / learners)).tobytes()
        for ranks in _group_sizes(learners):
            results = on_ranks(ranks, partial(_reduce, values=values))
            assert [result.tobytes() for result in results] == [expected] * ranks, (learners, ranks)


def test_exchange_in_float64() -> None:
    values = [value.astype(np.float64) / 3 for value in random_vectors(7, 50)]
    (result, *_) = on_ranks(4, partial(_reduce, values=values))
    assert result.tobytes() == (tree_sum(values) * (1 / 7)).tobytes()


def test_exchange_can_be_used_again() -> None:
    values = random_vectors(12, 100)
    once = on_ranks(6, partial(_reduce, values=values))
    assert np.array_equal(on_ranks(6, partial(_reduce, values=values, rounds=4)), once)


def test_exchange_of_whole_numbers_is_their_mean() -> None:
    """8 learners, so that the mean is exact too."""
    values = [np.arange(40, dtype=np.float32) * learner for learner in range(8)]
    for ranks in (1, 2, 3, 4, 8):
        for result in on_ranks(ranks, partial(_reduce, values=values)):
            assert np.array_equal(result, np.arange(40) * 3.5)


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
def test_slices_cut_the_whole_on_cache_lines(size: int, ranks: int) -> None:
    cut = slices(size, ranks)
    assert len(cut) == ranks
    assert [i for part in cut for i in range(part.start, part.stop)] == list(range(size))
    assert all(part.start == size or part.start * 4 % ALIGNMENT_BYTES == 0 for part in cut)


@pytest.mark.parametrize("ranks", SIZES)
def test_broadcast(ranks: int) -> None:
    def work(transport: ThreadTransport) -> list[np.ndarray]:
        arrays = [np.full(3, transport.rank), np.full((2, 5), transport.rank + 0.5, np.float32), np.zeros(0)]
        for array in arrays:
            broadcast(transport, array)
        return arrays

    for whole, floats, empty in on_ranks(ranks, work):
        assert np.array_equal(whole, [0, 0, 0]) and np.array_equal(floats, np.full((2, 5), 0.5))
        assert empty.size == 0


@pytest.mark.parametrize("length", [0, 1, 7, 1015, 1016, 1017, 1024, 100_000])
def test_broadcast_bytes(length: int) -> None:
    data = bytes(i * i % 251 for i in range(length))

    def work(transport: ThreadTransport) -> list[bytes]:
        return [broadcast_bytes(transport, data if transport.rank == 0 else b"mine"), broadcast_bytes(transport, b"")]

    for ranks in SIZES:
        assert on_ranks(ranks, work) == [[data, b""]] * ranks


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
def test_gather(ranks: int, dtype: type) -> None:
    def work(transport: ThreadTransport) -> np.ndarray:
        return gather(transport, np.array([transport.rank, 10 * transport.rank, 7], dtype))

    rows = on_ranks(ranks, work)[0]
    assert rows.dtype == dtype
    assert np.array_equal(rows, [[rank, 10 * rank, 7] for rank in range(ranks)])


@pytest.mark.parametrize("ranks", range(2, 10))
def test_a_subset_talks_among_itself(ranks: int) -> None:
    """The last, then every other rank; the rest does nothing."""
    members = [ranks - 1, *range(0, ranks - 1, 2)]

    def work(transport: ThreadTransport) -> np.ndarray | None:
        if transport.rank not in members:
            return None
        subset = Subset(transport, members)
        array = np.array([float(subset.rank), 5.0])
        rows = gather(subset, array)
        broadcast(subset, rows)
        return rows

    results = on_ranks(ranks, work)
    expected = [[float(rank), 5.0] for rank in range(len(members))]
    for rank, result in enumerate(results):
        assert np.array_equal(result, expected) if rank in members else result is None


def test_a_rank_that_never_sends_is_named() -> None:
    def work(transport: ThreadTransport) -> None:
        if transport.rank != 2:
            gather(transport, np.zeros(1))

    with pytest.raises(DeadlineError, match="rank 0 waited in vain for rank 2"):
        on_ranks(4, work, deadline_s=0.2)
