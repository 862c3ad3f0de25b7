"""Moving arrays between the ranks of one communicator: the only primitive that algorithms are written in.

`exchange` posts all receives and sends of one step and waits for them together. Algorithms written in it run
on MPI, and on threads in a unit test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from shoal.backend import Array, Backend
from shoal.comm.wait import Waiter

Message = tuple[int, Array]
"""(peer, contiguous array): the peer's rank in the transport, and what to send it or where to receive."""

_TAG = 7
_PIECE_BYTES = 1 << 30
"""MPI counts are 32-bit in most libraries, so a longer message goes in pieces."""


class Transport(Protocol):
    """Ranks 0..size-1 that can exchange arrays."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive all of these; returns when all are complete. Between two ranks messages match in
        the order given. Empty arrays are not sent. Raises DeadlineError naming the ranks that are missing."""


class MpiTransport:
    """A Transport over an mpi4py communicator of its own; `names` are the world ranks, for messages."""

    def __init__(self, comm: Any, names: Sequence[int], waiter: Waiter, backend: Backend) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.names = tuple(names)
        self._waiter = waiter
        self._abandoned: list[Any] = []
        self._backend = backend

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._backend.synchronize()
        incoming = [(peer, self.comm.Irecv(piece, peer, _TAG)) for peer, array in receives for piece in _pieces(array)]
        outgoing = [(peer, self.comm.Isend(piece, peer, _TAG)) for peer, array in sends for piece in _pieces(array)]
        self.wait(incoming + outgoing)

    def sum(self, array: Array) -> None:
        """In place, the MPI library's own allreduce: fast to have, but in no fixed order. Collective."""
        from mpi4py import MPI

        self._backend.synchronize()
        request = self.comm.Iallreduce(MPI.IN_PLACE, array, MPI.SUM)
        others = ", ".join(str(name) for peer, name in enumerate(self.names) if peer != self.rank)
        self._waiter.until(request.Test, lambda: f"one or more of world rank {others}")

    def wait(self, requests: Sequence[tuple[int, Any]]) -> None:
        """Wait for (peer, request) pairs to complete."""
        pending = [request for _, request in requests]
        test = type(pending[0]).Testall if pending else (lambda _: True)

        def missing() -> str:
            self._abandoned.extend(pending)  # MPI may still write to their arrays: keep these alive
            late = {self.names[peer] for peer, request in requests if not request.Test()}
            return f"world rank {', '.join(map(str, sorted(late)))}"

        self._waiter.until(lambda: test(pending), missing)

    def close(self) -> None:
        """Free the communicator. Collective."""
        self.comm.Free()


class Subset:
    """Some ranks of a transport, renumbered in the order of `members` (ranks of `parent`)."""

    def __init__(self, parent: Transport, members: Sequence[int]) -> None:
        self._parent = parent
        self._members = tuple(members)
        self.rank = self._members.index(parent.rank)
        self.size = len(self._members)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._parent.exchange(
            [(self._members[peer], array) for peer, array in sends],
            [(self._members[peer], array) for peer, array in receives],
        )


def _pieces(array: Array) -> Iterator[Array]:
    flat = array.reshape(-1).view(np.uint8)
    for start in range(0, flat.size, _PIECE_BYTES):
        yield flat[start : start + _PIECE_BYTES]
