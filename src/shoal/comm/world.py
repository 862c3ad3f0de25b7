"""All living processes of the job (or of one run of a sweep): who they are, where they sit, how reserves sleep.

Node identity comes from MPI's shared-memory split, never from host names. Ranks are renumbered when one is lost
(`recover`) or comes; what a rank is called, its id, stays.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from shoal.backend import Backend
from shoal.comm import library
from shoal.comm.bell import Bell
from shoal.comm.collectives import FRAME_BYTES, broadcast, broadcast_bytes, gather
from shoal.comm.group import Group
from shoal.comm.transport import Members, MpiTransport, Transport, knows_of_a_loss, lost_ranks
from shoal.comm.wait import Waiter
from shoal.comm.watch import Watch
from shoal.errors import InputError, RankLost

Made = TypeVar("Made")

_ORDER, _STOP = 1, 2
_BLOCKED_LIMIT_S, _BLOCKED_LOOK_S = 8.0, 0.05
_FENCE_LIMIT_S = 5.0


@dataclass(frozen=True)
class Seat:
    """Where a rank sits. node: the id of some rank of the same node; bell: the name of its bell."""

    id: int
    node: int
    pid: int
    cores: frozenset[int]
    bell: str


class World:
    """The ranks of an mpi4py communicator, duplicated. Creating and closing it is collective.

    seats: where they sit, if that is known; then the communicator is used as it is, and nothing is collective.
    nodes: for tests, a number for each rank that stands for its node, instead of where it really sits.
    recovers: whether the MPI goes on without ranks that were lost (ULFM)."""

    def __init__(
        self,
        comm: Any,
        backend: Backend,
        timeout_s: float = 300.0,
        nodes: Sequence[int] | None = None,
        recovers: bool = False,
        seats: Sequence[Seat] = (),
    ) -> None:
        from mpi4py import MPI

        self.library = " ".join(MPI.Get_library_version().split("\0")[0].split(",")[0].split())[:80]
        self.backend, self.recovers = backend, recovers
        self.lost = False
        """whether ranks were lost"""
        self._left_behind: list[MpiTransport] = []
        """what was under way at a loss: MPI may still write to its arrays"""
        self.generation = 0
        """how often the world has changed"""
        self.waiter = Waiter(timeout_s, crowded=True)
        self._own: Any = None
        self._parent = comm
        if not seats:
            self._own, seats = self._found(comm, timeout_s, nodes)
        self.seats = tuple(seats)
        self._next_id = 1 + max(seat.id for seat in seats)
        mine = self.seats[comm.Get_rank()]
        self._bell = Bell(mine.bell)
        here_too = {seat.id: seat.pid for seat in self.seats if seat.node == mine.node and seat.id != mine.id}
        self._watch = Watch(here_too, lambda: knows_of_a_loss(self.comm))
        self._adopt(self._own or comm)
        if self._own is not None:
            self._own.Barrier()
        # where MPI cannot go on without a rank, the death of one that stood still ends the job
        self.waiter.watch = self._watch.look if recovers else self._watch.fence_the_still
        library.forget_segments()

    def _found(self, comm: Any, timeout_s: float, nodes: Sequence[int] | None) -> tuple[Any, Sequence[Seat]]:
        """A communicator like this one, and who sits where."""
        from mpi4py import MPI

        first = Waiter(timeout_s, crowded=True)
        _meet(MpiTransport(comm, range(comm.Get_size()), first, self.backend))  # what follows has no deadline
        comm = comm.Dup()
        rank: int = comm.Get_rank()
        node = comm.Split_type(MPI.COMM_TYPE_SHARED) if nodes is None else comm.Split(nodes[rank])
        here = min(node.allgather(rank))
        node.Free()
        job = comm.bcast(f"shoal-{os.getpid()}-{os.urandom(6).hex()}")
        return comm, comm.allgather(Seat(rank, here, os.getpid(), usable_cores(), f"{job}-{rank}"))

    def _adopt(self, comm: Any) -> None:
        """Be the world of this communicator, whose ranks sit on self.seats."""
        from mpi4py import MPI

        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.ids = tuple(seat.id for seat in self.seats)
        """what each world rank is called"""
        node_of = [seat.node for seat in self.seats]
        self.node_of = tuple(node_of.index(node) for node in node_of)
        """of each world rank, the lowest rank of its node"""
        self.nodes = len(set(self.node_of))
        here = self.node_of[self.rank]
        self.node_ranks = tuple(rank for rank in range(self.size) if self.node_of[rank] == here)
        """world ranks of this node"""
        self.ranks_on_node = len(self.node_ranks)
        self.cores_on_node = len(set[int]().union(*(self.seats[rank].cores for rank in self.node_ranks)))
        self.waiter.crowded = self.ranks_on_node > self.cores_on_node
        self.order = sorted(range(self.size), key=lambda rank: (self.node_of[rank], rank))
        """world ranks by (node, local rank): the order in which learners are dealt"""
        self.transport = MpiTransport(comm, self.ids, self.waiter, self.backend)

    @property
    def is_master(self) -> bool:
        """Whether this is the lowest living world rank."""
        return self.rank == 0

    def group(self, ranks: Sequence[int]) -> Group | None:
        """The group of these world ranks, in this order; None on the others. Not collective."""
        if self.rank not in ranks:
            return None
        ids, nodes = tuple(self.ids[rank] for rank in ranks), tuple(self.node_of[rank] for rank in ranks)
        return Group(tuple(ranks), ids, nodes, Members(self.transport, ranks))

    def watch_every(self, heartbeat_s: float) -> None:
        """Ranks of this node that stand still for three heartbeats are killed by those that wait."""
        self._watch.heartbeat_s = heartbeat_s

    def recover(self) -> list[int]:
        """After RankLost: go on as the world of those that live; the ids of those that do not. Collective over them.

        Whoever is excluded on this node has ended when this returns. Raises a final RankLost if MPI cannot."""
        if not self.recovers:
            raise RankLost(
                "the MPI cannot go on without it (that takes Open MPI 5 and `shoal launch --ulfm`)", final=True
            )
        old, seats = self.comm, self.seats
        old.Revoke()
        new = self.outlast(old.Shrink)  # a non-blocking one fails at times
        before = new.Get_group().Translate_ranks(None, old.Get_group())
        self.seats = tuple(seats[rank] for rank in before)
        gone = [seat.id for rank, seat in enumerate(seats) if rank not in set(before)]
        if alive := self._watch.fence(gone, _FENCE_LIMIT_S):
            names = ", ".join(map(str, alive))
            raise RankLost(f"world rank {names} was killed but has not ended, so it may still write", final=True)
        self.generation += 1
        self.lost = True
        self._left_behind.append(self.transport)
        self._adopt(new)
        return gone

    def seat_for(self, pid: int, cores: frozenset[int]) -> Seat:
        """That of a rank that joins, on the node of this one."""
        node, number = self.seats[self.rank].node, self._next_id
        return Seat(number, node, pid, cores, f"{self.seats[self.rank].bell}-{pid}")

    def admit(self, comm: Any, seat: Seat) -> None:
        """Be the world of this communicator, to which a rank has come. All of the world do it between two messages."""
        self.seats = (*self.seats, seat)
        self._next_id = seat.id + 1
        self.generation += 1
        if seat.node == self.seats[self.rank].node:
            self._watch.add(seat.id, seat.pid)
        self._adopt(comm)

    def dismiss_last(self, comm: Any) -> int:
        """Be the world of this communicator, without its last rank; its id."""
        gone, self.seats = self.seats[-1], self.seats[:-1]
        self.generation += 1
        self._watch.forget(gone.id)
        self._adopt(comm)
        return gone.id

    def move_to(self, comm: Any) -> None:
        """Use another communicator of the same ranks."""
        self._adopt(comm)

    def move_home(self) -> None:
        """Use the communicator of the start again, whose ranks are all here and alone."""
        self._adopt(self._own)

    def rebuild(self, make: Callable[[Any], Made]) -> Made:
        """What the survivors of a loss make of their communicator, by calls that are collective and block; RankLost on
        all of them if another loss gets in the way on any. Collective."""
        from mpi4py import MPI

        made, agreed = list[Made](), list[int]()

        def work() -> None:
            try:
                made.append(make(self.comm))
            except MPI.Exception:
                self.comm.Revoke()  # the others may wait in `make` for this rank
            with contextlib.suppress(MPI.Exception):
                agreed.append(self.comm.Agree(len(made)))

        self.outlast(work)
        if not (agreed and agreed[0]):
            raise RankLost("a rank was lost while the others came together")
        return made[0]

    def outlast(self, work: Callable[[], Made]) -> Made:
        """Do what is collective and blocks in MPI on a thread, so that others that stop meanwhile are seen and it has a
        deadline. Raises a final RankLost at that, or if MPI cannot do it."""
        from mpi4py import MPI

        made, problems = list[Made](), list[str]()

        def run() -> None:
            try:
                made.append(work())
            except MPI.Exception as error:
                problems.append(str(error))

        thread = threading.Thread(target=run, daemon=True, name="collective")
        thread.start()
        end_s = time.monotonic() + _BLOCKED_LIMIT_S
        while thread.is_alive():
            thread.join(_BLOCKED_LOOK_S)
            self._watch.fence_the_still()
            if time.monotonic() > end_s:
                raise RankLost(f"MPI did not go on within {_BLOCKED_LIMIT_S:g} s after a rank was lost", final=True)
        if problems:
            raise RankLost(f"a rank was lost, and MPI could not go on ({problems[0]})", final=True)
        return made[0]

    def meet(self) -> None:
        """Wait until all ranks are here; at a deadline the master names those that are not. Collective."""
        _meet(self.transport)

    def order_reserve(self, rank: int, order: bytes, wake: bool = True) -> None:
        """Master: send an order (shorter than a frame) to a sleeping rank, and wake it, or leave that for later."""
        frame = np.zeros(FRAME_BYTES, np.uint8)
        frame[:8].view(np.int64)[0] = len(order)
        frame[8 : 8 + len(order)] = np.frombuffer(order, np.uint8)
        self.transport.post(rank, frame, _ORDER)
        if wake:
            self.wake([rank])

    def wake(self, ranks: Sequence[int]) -> None:
        """Wake ranks that sleep, to hear the orders that they were sent."""
        for rank in ranks:
            self._bell.ring(self.seats[rank].bell)

    def sleep_until_order(self, stop_requested: Any) -> bytes:
        """Reserve: sleep, at next to no cost, until the master sends an order. A stop request that reaches
        this rank (`stop_requested()`) is passed on to the master once.

        A reserve may sleep for hours, so it has no deadline: its job's launcher and master end it (lifeline).
        """
        frame = np.zeros(FRAME_BYTES, np.uint8)
        told = False
        with lost_ranks(self.comm, self.transport.keep, frame):
            request = self.comm.Irecv(frame, 0, _ORDER)
            while not request.Test():
                if not told and stop_requested():
                    self.comm.Isend(np.zeros(1, np.uint8), 0, _STOP).Wait()
                    told = True
                self._bell.sleep()
                self.waiter.watch()
        return frame[8 : 8 + int(frame[:8].view(np.int64)[0])].tobytes()

    def stop_from_reserve(self) -> bool:
        """Master: whether a reserve passed on a stop request since the last call."""
        from mpi4py import MPI

        seen, status = False, MPI.Status()
        with lost_ranks(self.comm, id, []):
            while self.comm.Iprobe(tag=_STOP, status=status):
                # from this rank: with MPICH over UCX a receive from any, for what another node sent, never ends
                self.comm.Recv(np.zeros(1, np.uint8), status.Get_source(), _STOP)
                seen = True
        return seen

    def agree(self, problem: str | None) -> None:
        """All go on, or all raise the same InputError: `problem` is what is wrong on this rank. Collective."""
        problems = [said.decode() for said in self._all_say((problem or "").encode())]
        found = {text: [r for r, other in enumerate(problems) if other == text] for text in problems if text}
        if found:
            everywhere = len(next(iter(found.values()))) == self.size
            where = ["" if everywhere else f"on world rank {', '.join(map(str, r))}: " for r in found.values()]
            raise InputError("; ".join(map("".join, zip(where, found, strict=True))), agreed=True)

    def agree_same(self, what: str, value: bytes) -> None:
        """Raise on all ranks if `value` differs between them. Collective."""
        values = self._all_say(value)
        odd = [rank for rank, other in enumerate(values) if other != values[0]]
        if odd:
            raise InputError(
                f"{what} on world rank {', '.join(map(str, odd))} differs from that on rank 0; start all ranks "
                "with the same file, options and code",
                agreed=True,
            )

    def _all_say(self, words: bytes) -> list[bytes]:
        """The words of all ranks, in their order. Collective."""
        lengths = gather(self.transport, np.array([len(words)]))[:, 0]
        lengths = np.frombuffer(broadcast_bytes(self.transport, lengths.tobytes()), lengths.dtype)
        row = np.zeros(max(lengths), np.uint8)
        row[: len(words)] = np.frombuffer(words, np.uint8)
        said = broadcast_bytes(self.transport, gather(self.transport, row).tobytes())
        return [said[row.size * rank :][:length] for rank, length in enumerate(lengths)]

    def close(self) -> Any:
        """Meet, then free what this world holds; the communicator of its ranks that the next can be made of.
        Collective."""
        self.waiter.watch = self._watch.fence_the_still  # whoever has met may end at once
        while True:
            try:
                self.meet()
                break
            except RankLost as lost:
                if lost.final:
                    raise
                self.recover()
        self._watch.close()
        self._bell.close()
        if self.lost:
            return self.comm
        if self._own is not None:
            self._own.Free()
        return self._parent


def usable_cores() -> frozenset[int]:
    """The cores that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def _meet(transport: Transport) -> None:
    here = np.zeros(1, np.uint8)
    gather(transport, here)
    broadcast(transport, here)
