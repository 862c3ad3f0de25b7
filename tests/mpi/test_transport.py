"""The transport on MPI: what arrives, in which order, and what a wait says that nobody ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shoal.backend import numpy_backend
from shoal.comm.collectives import broadcast, broadcast_bytes, gather
from shoal.comm.transport import Members, MpiTransport, Subset
from shoal.comm.wait import Waiter
from shoal.errors import DeadlineError

pytestmark = pytest.mark.mpi

SHORT_S = 0.3
FIRST_NAME = 40
"""world ranks of the transport under test are 40, 41, ...: its errors must use these, not its own ranks"""


def _transport(comm: Any, timeout_s: float) -> MpiTransport:
    names = range(FIRST_NAME, FIRST_NAME + comm.size)
    return MpiTransport(comm.Dup(), names, Waiter(timeout_s, crowded=True), numpy_backend())


@pytest.fixture
def transport(comm: Any) -> Iterator[MpiTransport]:
    transport = _transport(comm, 10.0)
    yield transport
    transport.close()


@pytest.fixture
def impatient(comm: Any) -> Iterator[MpiTransport]:
    transport = _transport(comm, SHORT_S)
    yield transport
    transport.close()


def _until(done: Callable[[], Any], transport: MpiTransport) -> None:
    """Drive MPI's progress until `done()`; fails after 10 s."""
    end = time.monotonic() + 10
    while not done():
        transport.comm.Iprobe()
        assert time.monotonic() < end


@pytest.mark.parametrize("items", [1, 1000, 300_000])
def test_all_to_all_in_order(transport: MpiTransport, items: int) -> None:
    """Three arrays to each rank, itself too, an empty one among them; small ones and ones beyond eager sizes."""
    rank, size = transport.rank, transport.size
    lengths = (items, 0, items + 1)

    def content(sender: int, receiver: int, n: int, length: int) -> np.ndarray:
        return np.arange(length, dtype=np.float32) + 1000 * sender + 100 * receiver + 10 * n

    sends = [(peer, content(rank, peer, n, length)) for peer in range(size) for n, length in enumerate(lengths)]
    receives = [(peer, np.zeros(length, np.float32)) for peer in range(size) for length in lengths]
    transport.exchange(sends, receives)
    arrived = iter(receives)
    for peer in range(size):
        for n, length in enumerate(lengths):
            assert np.array_equal(next(arrived)[1], content(peer, rank, n, length))


def test_any_dtype_and_shape(transport: MpiTransport) -> None:
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    for dtype in (np.uint8, np.int64, np.float64):
        array = np.full((2, 3), transport.rank, dtype)
        received = np.zeros((2, 3), dtype)
        transport.exchange([(right, array)], [(left, received)])
        assert np.array_equal(received, np.full((2, 3), left))


@pytest.mark.parametrize("items", [10, 300_000])
def test_several_at_once(transport: MpiTransport, items: int) -> None:
    """Begun in the same order on all ranks, waited for in another one."""
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    received = [np.zeros(items) for _ in range(3)]
    waits = [
        transport.begin([(right, np.full(items, 10.0 * transport.rank + n))], [(left, array)])
        for n, array in enumerate(received)
    ]
    for n in (1, 2, 0):
        waits[n]()
        assert (received[n] == 10 * left + n).all()


def test_collectives(transport: MpiTransport) -> None:
    rank, size = transport.rank, transport.size
    array = np.full(50_000, rank, np.float32)
    broadcast(transport, array)
    assert not array.any()
    for length in (0, 1, 1016, 1017, 100_000):
        data = bytes(i % 251 for i in range(length))
        assert broadcast_bytes(transport, data if rank == 0 else b"") == data
    rows = gather(transport, np.array([rank, 7.0]))
    if rank == 0:
        assert np.array_equal(rows, [[r, 7.0] for r in range(size)])


def test_a_subset(transport: MpiTransport) -> None:
    members = [transport.size - 1, *range(0, transport.size - 1, 2)]
    if transport.rank in members:
        subset = Subset(transport, members)
        rows = gather(subset, np.array([float(transport.rank)]))
        broadcast(subset, rows)
        assert rows[:, 0].tolist() == members


def test_native_sum(transport: MpiTransport) -> None:
    array = np.arange(1000, dtype=np.float32) + transport.rank
    size = transport.size
    everybody = Members(transport, range(size))
    everybody.sum(array)
    everybody.close()
    assert np.array_equal(array, np.arange(1000) * size + size * (size - 1) / 2)


def test_a_rank_that_never_sends_is_named(impatient: MpiTransport) -> None:
    """On each rank that waits for it, and only it, at the deadline. Then it sends after all, to leave nothing."""
    rank, size = impatient.rank, impatient.size
    silent, others = size - 1, range(size - 1)
    received = {peer: np.zeros(4) for peer in range(size)}
    if rank != silent:
        for peer in others:
            received[peer] += 1
        start = time.monotonic()
        with pytest.raises(DeadlineError) as caught:
            impatient.exchange(
                [(peer, np.full(4, 2.0)) for peer in others if peer != rank],
                [(peer, array) for peer, array in received.items() if peer != rank],
            )
        assert f"world rank {FIRST_NAME + silent}, which did not come" in str(caught.value)
        assert SHORT_S <= time.monotonic() - start < SHORT_S + 5
        assert all(received[peer][0] == 2 for peer in others if peer != rank)
    impatient.comm.Barrier()
    if rank == silent:
        impatient.exchange([(peer, np.full(4, 3.0)) for peer in others], [])
    else:
        _until(lambda: received[silent][-1] == 3, impatient)
    impatient.comm.Barrier()


def test_a_rank_that_never_receives_is_named(impatient: MpiTransport) -> None:
    """A message too large to be sent without a receiver. Rank 0 waits for the last one."""
    rank, last = impatient.rank, impatient.size - 1
    message = np.ones(1 << 20)
    if rank == 0 and last:
        with pytest.raises(DeadlineError, match=f"world rank {FIRST_NAME + last}, which did not come"):
            impatient.exchange([(last, message)], [])
    impatient.comm.Barrier()
    if rank == last and last:
        received = np.zeros(1 << 20)
        _until(impatient.comm.Irecv(received.view(np.uint8), 0).Test, impatient)
        assert received.all()
    _until(impatient.comm.Ibarrier().Test, impatient)
    assert message.all()


def test_a_rank_that_does_not_join_a_native_sum_is_named(impatient: MpiTransport) -> None:
    rank, late = impatient.rank, impatient.size - 1
    everybody = Members(impatient, range(impatient.size))
    array = np.ones(8)
    everybody.sum(array)
    array.fill(1)
    if rank != late:
        with pytest.raises(DeadlineError) as caught:
            everybody.sum(array)
        assert str(FIRST_NAME + late) in str(caught.value)
    impatient.comm.Barrier()
    if rank == late:
        everybody.sum(array)
    _until(lambda: array[-1] == impatient.size, impatient)
    impatient.comm.Barrier()
