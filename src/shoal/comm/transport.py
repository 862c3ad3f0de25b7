"""Moving arrays between the ranks of one communicator: the only primitive that algorithms are written in.

`exchange` posts all receives and sends of one step and waits for them together; `begin` lets other work be done
meanwhile. Algorithms written in them run on MPI, and on threads in a unit test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from shoal.backend import Array, Backend
from shoal.comm.wait import Waiter
from shoal.errors import RankLost

Message = tuple[int, Array]
"""(peer, contiguous array): the peer's rank in the transport, and what to send it or where to receive."""

_TAG = 7
_PIECE_BYTES = 1 << 30
"""MPI counts are 32-bit in most libraries, so a longer message goes in pieces."""
_SMALL_BYTES = 4096
"""What is no longer than this is sent from a copy. (Open MPI takes up to 256 bytes off the sender's hands at once; for
more it waits until the receiver looks, and a rank that sleeps looks late.)"""


class Transport(Protocol):
    """Ranks 0..size-1 that can exchange arrays."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive all of these; returns when all arrays may be used again, which for small sends is at once.
        Between two ranks messages match in the order given. Empty arrays are not sent. Raises DeadlineError naming the
        ranks that are missing."""

    def begin(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """As `exchange`, but returns at once, with the call that waits. Until then what is sent must not be written,
        and what is received neither read nor written."""


class MpiTransport:
    """A Transport over an mpi4py communicator of its own; `names` are the world ranks, for messages."""

    def __init__(self, comm: Any, names: Sequence[int], waiter: Waiter, backend: Backend) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.names = tuple(names)
        self._waiter = waiter
        self._unfinished: dict[int, Any] = {}
        self._posted: list[tuple[Any, np.ndarray]] = []
        self._backend = backend

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.begin(sends, receives)()

    def begin(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        self._backend.synchronize()
        requests: list[tuple[int, Any]] = []
        self.keep(requests)
        with lost_ranks(self.comm, self.keep, requests):
            requests += [(peer, self.comm.Irecv(p, peer, _TAG)) for peer, array in receives for p in _pieces(array)]
            for peer, array in sends:
                if array.nbytes <= _SMALL_BYTES:
                    self.post(peer, array)
                else:
                    requests += [(peer, self.comm.Isend(p, peer, _TAG)) for p in _pieces(array)]

        def finish() -> None:
            with lost_ranks(self.comm, self.keep, requests):
                self._wait(requests)
            del self._unfinished[id(requests)]

        return finish

    def post(self, peer: int, array: Array, tag: int = _TAG) -> None:
        """Send a copy of a small array, and wait for nobody."""
        with lost_ranks(self.comm, self.keep, self._posted):
            self._posted = [(request, sent) for request, sent in self._posted if not request.Test()]
            if array.size:
                copy = np.array(self._backend.to_host(array))
                self._posted.append((self.comm.Isend(copy, peer, tag), copy))

    def sum_over(self, comm: Any, array: Array) -> None:
        """In place, the MPI library's own allreduce over `comm`, of ranks of this transport. Collective over it."""
        from mpi4py import MPI

        self._backend.synchronize()
        request = comm.Iallreduce(MPI.IN_PLACE, array, MPI.SUM)
        others = ", ".join(str(name) for peer, name in enumerate(self.names) if peer != self.rank)
        with lost_ranks(self.comm, self.keep, (request, array)):
            self._waiter.until(request.Test, lambda: f"one or more of world rank {others}")

    def keep(self, unfinished: Any) -> None:
        """MPI may still write to the arrays of what did not complete: keep them alive."""
        self._unfinished[id(unfinished)] = unfinished

    def _wait(self, requests: Sequence[tuple[int, Any]]) -> None:
        pending = [request for _, request in requests]
        test = type(pending[0]).Testall if pending else (lambda _: True)

        def missing() -> str:
            late = {self.names[peer] for peer, request in requests if not request.Test()}
            return f"world rank {', '.join(map(str, sorted(late)))}"

        self._waiter.until(lambda: test(pending), missing)

    def close(self) -> None:
        """Free the communicator. Collective."""
        self.comm.Free()


@contextlib.contextmanager
def lost_ranks(comm: Any, keep: Callable[[Any], object], unfinished: Any) -> Iterator[None]:
    """What MPI says of dead ranks, as RankLost; `keep` takes what may then never complete."""
    from mpi4py import MPI

    try:
        yield
    except RankLost:
        keep(unfinished)
        raise
    except MPI.Exception as error:
        kind = error.Get_error_class()
        told = kind in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
        if not told and not (kind == MPI.ERR_IN_STATUS and knows_of_a_loss(comm)):
            raise
        keep(unfinished)
        raise RankLost("a rank was lost, MPI says") from error


def knows_of_a_loss(comm: Any) -> bool:
    """Whether MPI has seen a rank die, or another rank has told that it goes on without one. Not for every MPI."""
    return bool(comm.Is_revoked()) or comm.Get_failed().Get_size() > 0


class Subset:
    """Some ranks of a transport, renumbered in the order of `members` (ranks of `parent`)."""

    def __init__(self, parent: Transport, members: Sequence[int]) -> None:
        self._parent = parent
        self._members = tuple(members)
        self.rank = self._members.index(parent.rank)
        self.size = len(self._members)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.begin(sends, receives)()

    def begin(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        return self._parent.begin(
            [(self._members[peer], array) for peer, array in sends],
            [(self._members[peer], array) for peer, array in receives],
        )


class Members(Subset):
    """The ranks of a group as a transport over the world's communicator: making one costs nothing."""

    def __init__(self, parent: MpiTransport, members: Sequence[int]) -> None:
        super().__init__(parent, members)
        self._world = parent
        self._comm: Any = None

    def sum(self, array: Array) -> None:
        """In place, the MPI library's own allreduce: fast to have, but in no fixed order. Collective.

        The communicator that it needs is made at the first call."""
        if self._comm is None:
            others = [peer for peer in range(self.size) if peer != self.rank]
            here = np.zeros((2, self.size), np.uint8)  # whoever is late is named: what follows has no deadline
            self.exchange([(peer, here[0, :1]) for peer in others], [(peer, here[1, peer:][:1]) for peer in others])
            everybody = self._world.comm.Get_group()
            self._comm = self._world.comm.Create_group(everybody.Incl(list(self._members)))
        self._world.sum_over(self._comm, array)

    def close(self) -> None:
        """Free the communicator, if there is one. Collective."""
        if self._comm is not None:
            self._comm.Free()
            self._comm = None


def _pieces(array: Array) -> Iterator[Array]:
    flat = array.reshape(-1).view(np.uint8)
    for start in range(0, flat.size, _PIECE_BYTES):
        yield flat[start : start + _PIECE_BYTES]
