"""Allreduce and collectives on threads: for 1 to 9 ranks, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import get_args, get_type_hints

import numpy as np
import pytest
from test_tree import random_vectors, tree_sum
from threads import ThreadTransport, on_ranks

from shoal.backend import ALIGNMENT_BYTES, numpy_backend
from shoal.comm.algorithms import KEEPS_ORDER, TAKES_WIRE, Setting, cost, make, slices
from shoal.comm.collectives import broadcast, broadcast_bytes, gather
from shoal.comm.transport import Subset
from shoal.comm.tree import SubtreeSums
from shoal.config import Run, from_tree
from shoal.errors import DeadlineError, InputError

SIZES = range(1, 10)
BACKEND = numpy_backend()
CANONICAL = ("exchange", "tree")
ON_THREADS = (*CANONICAL, *TAKES_WIRE)


def _reduce(
    transport: ThreadTransport, values: list[np.ndarray], name: str, rounds: int = 1, wire: str = "float32"
) -> np.ndarray:
    """The mean by an algorithm, this rank adding its block of learners; `rounds` times with one work memory."""
    learners, size, dtype = len(values), values[0].size, values[0].dtype
    setting = Setting(transport, learners, size, BACKEND, dtype, wire)
    allreduce = make(name, setting)
    sums, out = SubtreeSums(np, lambda _: BACKEND.empty(size, dtype)), BACKEND.empty(size, dtype)
    for _ in range(rounds):
        out.fill(np.nan)
        sums.start()
        for learner in setting.dealt[transport.rank]:
            sums.slot()[...] = values[learner]
            sums.add((0, learner))
        allreduce(sums.parts, out, 1 / learners)
    return out


def _whole_numbers(learners: int, size: int, dtype: type) -> list[np.ndarray]:
    """Their sums are exact in any order."""
    draw = np.random.default_rng((learners, size))
    return [draw.integers(-1000, 1000, size).astype(dtype) for _ in range(learners)]


def test_the_config_names_the_algorithms_there_are() -> None:
    choices = get_args(get_type_hints(Run)["algorithm"])
    assert set(choices) == {"auto", *KEEPS_ORDER} - {"none"}


@pytest.mark.parametrize("wire", ["float32", "float16"])
@pytest.mark.parametrize("name", KEEPS_ORDER)
def test_the_config_refuses_what_the_table_says(name: str, wire: str) -> None:
    if name == "none":
        return
    for reproducible in (True, False):
        fits = (KEEPS_ORDER[name] or not reproducible) and (wire == "float32" or name in TAKES_WIRE)
        tree = {"run": {"algorithm": name, "wire": wire, "reproducible": reproducible}}
        if fits:
            assert from_tree(tree, "x").run.algorithm == name
        else:
            with pytest.raises(InputError, match=r"^x: run\.(algorithm|wire) = "):
                from_tree(tree, "x")


@pytest.mark.parametrize("name", CANONICAL)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
def test_the_canonical_ones_are_the_tree_bit_for_bit(size: int, name: str) -> None:
    for learners in range(1, 18) if size == 17 else (1, 2, 3, 5, 7, 12, 17):
        values = random_vectors(learners, size)
        expected = (tree_sum(values) * np.float32(1 / learners)).tobytes()
        for ranks in range(1, learners + 1) if size == 17 else (1, 2, 3, 4, 6, 9):
            results = on_ranks(ranks, partial(_reduce, values=values, name=name))
            assert [result.tobytes() for result in results] == [expected] * ranks, (learners, ranks)


@pytest.mark.parametrize("name", CANONICAL)
def test_the_canonical_ones_in_float64(name: str) -> None:
    values = [value.astype(np.float64) / 3 for value in random_vectors(7, 50)]
    for ranks in (3, 4, 7):
        for result in on_ranks(ranks, partial(_reduce, values=values, name=name)):
            assert result.tobytes() == (tree_sum(values) * (1 / 7)).tobytes()


@pytest.mark.parametrize("name", ON_THREADS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ranks", SIZES)
def test_whole_numbers_have_their_exact_mean(ranks: int, dtype: type, name: str) -> None:
    for size in (0, 1, ranks - 1, ranks, ranks + 1, 16 * ranks - 1, 16 * ranks, 16 * ranks + 1, 500):
        for learners in {ranks, 2 * ranks + 1}:
            values = _whole_numbers(learners, size, dtype)
            expected = (np.sum(values, axis=0, dtype=dtype) * dtype(1 / learners)).tobytes()
            for result in on_ranks(ranks, partial(_reduce, values=values, name=name)):
                assert result.tobytes() == expected, (size, learners)


@pytest.mark.parametrize("name", ON_THREADS)
def test_one_work_memory_serves_all_rounds(name: str) -> None:
    values = random_vectors(12, 100)
    once = on_ranks(6, partial(_reduce, values=values, name=name))
    assert np.array_equal(on_ranks(6, partial(_reduce, values=values, name=name, rounds=4)), once)


@pytest.mark.parametrize("name", ON_THREADS)
def test_all_ranks_have_the_same_bits(name: str) -> None:
    for ranks in SIZES:
        results = on_ranks(ranks, partial(_reduce, values=random_vectors(ranks, 333), name=name))
        assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("name", TAKES_WIRE)
@pytest.mark.parametrize(("wire", "unit", "least"), [("float16", 2.0**-11, 2.0**-25), ("bfloat16", 2.0**-8, 2.0**-134)])
@pytest.mark.parametrize("ranks", SIZES)
def test_a_narrow_wire_rounds_a_little_and_everywhere_alike(
    ranks: int, wire: str, unit: float, least: float, name: str
) -> None:
    """Each number is rounded once a step that adds, and the result once, by at most unit/(1 - unit) of the mean of
    the magnitudes, or by half of the smallest number there is."""
    roundings = 2 if name == "ring" else ranks.bit_length() + 1
    for size in (0, 1, 17, 500):
        values = random_vectors(ranks, size)
        exact = np.mean(values, axis=0, dtype=np.float64)
        most = np.mean(np.abs(values), axis=0, dtype=np.float64)
        results = on_ranks(ranks, partial(_reduce, values=values, name=name, wire=wire))
        assert len({result.tobytes() for result in results}) == 1
        bound = most * ((1 + unit * 1.01) ** roundings - 1 + ranks * 2.0**-23) + (ranks + 1) * least
        assert (np.abs(results[0] - exact) <= bound).all()


@pytest.mark.parametrize("name", TAKES_WIRE)
@pytest.mark.parametrize("ranks", SIZES)
def test_a_mean_of_large_numbers_does_not_overflow_half_precision(ranks: int, name: str) -> None:
    values = [np.full(40, 60_000, np.float32) for _ in range(2 * ranks)]
    for result in on_ranks(ranks, partial(_reduce, values=values, name=name, wire="float16")):
        assert np.abs(result / 60_000 - 1).max() <= 5 * 2.0**-11


@pytest.mark.parametrize("name", TAKES_WIRE)
def test_a_narrow_wire_carries_float32_only(name: str) -> None:
    with pytest.raises(ValueError, match="carries float32 arrays"):
        on_ranks(2, partial(_reduce, values=_whole_numbers(2, 5, np.float64), name=name, wire="float16"))


@pytest.mark.parametrize("name", ON_THREADS)
@pytest.mark.parametrize("ranks", SIZES)
def test_as_much_is_sent_as_declared(ranks: int, name: str) -> None:
    size = 16 * 840 * 3  # cut evenly by 1..8 ranks, and 9 leave a line's rounding
    for learners in (ranks, 2 * ranks, 3 * ranks - 1):
        if learners < 1:
            continue
        values = [np.ones(size, np.float32)] * learners

        def sent(transport: ThreadTransport, values: list[np.ndarray] = values) -> tuple[int, int]:
            _reduce(transport, values, name)
            return len(transport.sent), sum(numbers for _, numbers in transport.sent)

        messages, numbers = map(max, zip(*on_ranks(ranks, sent), strict=True))
        declared = cost(name, learners, [ranks], size)
        assert messages == declared.messages, learners
        assert numbers == pytest.approx(declared.numbers, rel=1e-3), learners


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
