"""All processes of the job (or of one run of a sweep): who they are, where they sit, and how reserves sleep.

Node identity comes from MPI's shared-memory split, never from host names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.backend import Backend
from shoal.comm.bell import Bell
from shoal.comm.collectives import FRAME_BYTES, broadcast, gather
from shoal.comm.group import Group
from shoal.comm.transport import MpiTransport, Transport
from shoal.comm.wait import Waiter
from shoal.errors import InputError

_ORDER, _STOP = 1, 2


class World:
    """The ranks of an mpi4py communicator, duplicated. Creating and closing it is collective.

    nodes: for tests, a number for each rank that stands for its node, instead of where it really sits."""

    def __init__(
        self, comm: Any, backend: Backend, timeout_s: float = 300.0, nodes: Sequence[int] | None = None
    ) -> None:
        from mpi4py import MPI

        self.library = " ".join(MPI.Get_library_version().split("\0")[0].split(",")[0].split())[:80]
        first = Waiter(timeout_s, crowded=True)
        _meet(MpiTransport(comm, range(comm.Get_size()), first, backend))  # what follows has no deadline
        self.comm = comm.Dup()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.backend = backend
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED) if nodes is None else self.comm.Split(nodes[self.rank])
        ranks_here = node.allgather(self.rank)
        cores = node.allgather(_cores())  # each rank may be bound to its own
        node.Free()
        self.node_ranks = tuple(sorted(ranks_here))
        """world ranks of this node"""
        self.ranks_on_node = len(ranks_here)
        self.cores_on_node = len(set[int]().union(*cores))
        self.waiter = Waiter(timeout_s, crowded=self.ranks_on_node > self.cores_on_node)
        self.node_of = node_of = tuple(self.comm.allgather(min(ranks_here)))
        """of each world rank, the lowest rank of its node"""
        self.nodes = len(set(node_of))
        self.order = sorted(range(self.size), key=lambda rank: (node_of[rank], rank))
        """world ranks by (node, local rank): the order in which learners are dealt"""
        self.transport = MpiTransport(self.comm, range(self.size), self.waiter, backend)
        job = self.comm.bcast(f"shoal-{os.getpid()}-{os.urandom(6).hex()}")
        self._names = [f"{job}-{rank}" for rank in range(self.size)]
        self._bell = Bell(self._names[self.rank])
        self.comm.Barrier()

    @property
    def is_master(self) -> bool:
        """Whether this is the lowest living world rank."""
        return self.rank == 0

    def split(self, ranks: Sequence[int]) -> Group | None:
        """The group of these world ranks, in this order (MPI_Comm_split); None on the others. Collective.

        Everybody is awaited with a deadline first, since MPI_Comm_split itself has none.
        """
        from mpi4py import MPI

        self.meet()
        member = self.rank in ranks
        comm = self.comm.Split(0 if member else MPI.UNDEFINED, ranks.index(self.rank) if member else 0)
        if not member:
            return None
        return Group(tuple(ranks), MpiTransport(comm, ranks, self.waiter, self.backend))

    def meet(self) -> None:
        """Wait until all ranks are here; at a deadline the master names those that are not. Collective."""
        _meet(self.transport)

    def order_reserve(self, rank: int, order: bytes) -> None:
        """Master: send an order (shorter than a frame) to a sleeping rank, and wake it."""
        frame = np.zeros(FRAME_BYTES, np.uint8)
        frame[:8].view(np.int64)[0] = len(order)
        frame[8 : 8 + len(order)] = np.frombuffer(order, np.uint8)
        request = self.comm.Isend(frame, rank, _ORDER)
        self._bell.ring(self._names[rank])
        self.transport.wait([(rank, request)])

    def sleep_until_order(self, stop_requested: Any) -> bytes:
        """Reserve: sleep, at next to no cost, until the master sends an order. A stop request that reaches
        this rank (`stop_requested()`) is passed on to the master once.

        A reserve may sleep for hours, so it has no deadline: its job's launcher and master end it (lifeline).
        """
        frame = np.zeros(FRAME_BYTES, np.uint8)
        request = self.comm.Irecv(frame, 0, _ORDER)
        told = False
        while not request.Test():
            if not told and stop_requested():
                self.comm.Isend(np.zeros(1, np.uint8), 0, _STOP).Wait()
                told = True
            self._bell.sleep()
        return frame[8 : 8 + int(frame[:8].view(np.int64)[0])].tobytes()

    def stop_from_reserve(self) -> bool:
        """Master: whether a reserve passed on a stop request since the last call."""
        seen = False
        while self.comm.Iprobe(tag=_STOP):
            self.comm.Recv(np.zeros(1, np.uint8), tag=_STOP)
            seen = True
        return seen

    def agree(self, problem: str | None) -> None:
        """All go on, or all raise the same InputError: `problem` is what is wrong on this rank. Collective."""
        self.meet()
        problems = self.comm.allgather(problem)
        found = {text: [r for r, other in enumerate(problems) if other == text] for text in problems if text}
        if found:
            everywhere = len(next(iter(found.values()))) == self.size
            where = ["" if everywhere else f"on world rank {', '.join(map(str, r))}: " for r in found.values()]
            raise InputError("; ".join(map("".join, zip(where, found, strict=True))), agreed=True)

    def agree_same(self, what: str, value: bytes) -> None:
        """Raise on all ranks if `value` differs between them. Collective."""
        self.meet()
        values = self.comm.allgather(value)
        odd = [rank for rank, other in enumerate(values) if other != values[0]]
        if odd:
            raise InputError(
                f"{what} on world rank {', '.join(map(str, odd))} differs from that on rank 0; start all ranks "
                "with the same file, options and code",
                agreed=True,
            )

    def close(self) -> None:
        """Meet, then free what this world holds. Collective."""
        self.meet()
        self._bell.close()
        self.comm.Free()


def _cores() -> set[int]:
    """The cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _meet(transport: Transport) -> None:
    here = np.zeros(1, np.uint8)
    gather(transport, here)
    broadcast(transport, here)
