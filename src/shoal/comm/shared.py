"""The memory that the ranks of one node share: the state of the training, twice, and what learners contribute.

One memory file without a name (memfd): it leaves nothing behind, whatever is killed. The node's first rank makes
it, the others open it through /proc. It is large enough for whatever the schedule can ask for, and takes memory
only where it is touched, so a resize changes a list of ranks and no memory:

    board       a line of 64 bytes a rank, for the barrier, and one for the work that one rank does for all
    journals    of each rank: the last decision that it carries out, and the scalars of its state
    table       which arrays hold the subtree sums of a rank, in the order of the tree
    facts       what a rank tells the master of a round
    orders      what the master tells each rank after it
    homes       anchor and velocity in two versions, of which each round reads one and writes the other; the first
                sums of the round lie where it writes
    momentum    the two versions of it
    slots       a rank's work memory for further sums of its learners

A reduction then copies nothing: each rank reads its own slice of every rank's sums where they lie, and writes its
slice of the new state, which all ranks see.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from shoal import kernels
from shoal.backend import Array
from shoal.comm import places
from shoal.comm.collectives import FRAME_BYTES, broadcast_bytes, gather
from shoal.comm.group import Group
from shoal.comm.places import HOMES, Sizes
from shoal.comm.transport import Subset
from shoal.comm.wait import Waiter
from shoal.comm.world import World
from shoal.errors import DeadlineError

BARRIERS = 4
"""The numbers of a round: 1 to 3 are the reduction's, at 4 the decision after it has been made."""
_PAGE = 4096
_STAGGER_BYTES = 3 * _PAGE + 17 * 64
"""Arrays that lie a power of two apart meet in the same sets of the caches and banks of the memory: sums of 128 MB
took 2.2 times as long."""
_LINE_BYTES = 64
_JOURNAL_BYTES = 1 << 20
_GENERATION = 1 << 32
"""Barriers of two generations of a world never have the same number: what a rank wrote before a loss counts for
nothing after it."""
_SPINS = 50
"""Short: a rank that spins may have the core that the one it waits for needs, whatever the number of cores."""
_YIELDS, _YIELDS_CROWDED = 400, 100
"""Longer than the master takes for a decision: who sleeps is woken late."""
_ONE_FOR_ALL_BYTES = 512 << 10
"""With more ranks than cores, one rank does the work of all if it is no more than this: measured."""
_KEPT_BARRIERS = 16
_LOOK_S = 0.02
"""A wait in C comes back this often, so that Python sees signals, lost ranks and the deadline."""


class NodeMemory:
    """One rank's view of the node's memory. `ids` are those of the ranks that have a place in
    it (None: a free one), `me` the index of this one's among them."""

    can_claim = False
    """whether one rank may do the work of all: where all ranks of the node have compiled kernels"""

    place = ""
    """where others of the node can open it"""

    def __init__(self, memory: mmap.mmap, ids: Sequence[int | None], me: int, sizes: Sizes, waiter: Waiter) -> None:
        self.ids, self.me = list(ids), me
        self._base = 0
        self._waiter = waiter
        self._barriers: dict[tuple[int, ...], kernels.Barrier] = {}
        self._map = memory
        self._bytes = np.frombuffer(memory, np.uint8)
        starts = _starts(len(ids), sizes)
        self._board = self._view(starts["board"], (len(ids) + 1) * 8, np.dtype(np.int64))
        self._table = self._view(starts["table"], len(ids) * (1 + sizes.slots), np.dtype(np.int64)).reshape(
            len(ids), -1
        )
        self._facts = self._view(starts["facts"], len(ids) * sizes.facts, np.dtype(np.float64)).reshape(len(ids), -1)
        orders = self._view(starts["orders"], len(ids) * FRAME_BYTES, np.dtype(np.uint8)).reshape(len(ids), -1)
        self._lengths, self._orders = orders[:, :8].view(np.int64)[:, 0], orders[:, 8:]
        pages = self._view(starts["journals"], 2 * len(ids) * _JOURNAL_BYTES, np.dtype(np.uint8))
        pages = pages.reshape(len(ids), 2, _JOURNAL_BYTES)
        self._heads, self._journals = pages[:, :, :_LINE_BYTES].view(np.int64), pages[:, :, _LINE_BYTES:]
        self._sizes, self._starts = sizes, starts
        momenta = [self._view(starts[f"momentum{k}"], sizes.velocity, sizes.dtype) for k in (0, 1)]
        self.versions = places.versions([self.part(0, number) for number in range(HOMES)], momenta, sizes)

    def members(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The places of those of these ranks that are of this node, in their order."""
        return tuple(self.ids.index(one) for one in ids if one in self.ids)

    def places_with(self, one: int) -> tuple[int | None, ...]:
        """Who has which place when this rank has taken the first that is free."""
        free = self.ids.index(None)
        return (*self.ids[:free], one, *self.ids[free + 1 :])

    def admit(self, one: int) -> None:
        """A rank has joined. All ranks of the node know it in the same order."""
        self.ids[:] = self.places_with(one)

    def dismiss(self, one: int) -> None:
        """A rank has left, or was lost and cannot write any more: its place and its memory are free."""
        if one in self.ids:
            number = self.ids.index(one)
            self.ids[number] = None
            length = _slots_bytes(self._sizes)
            if hasattr(mmap, "MADV_REMOVE") and length:
                self._map.madvise(mmap.MADV_REMOVE, self._starts["slots"] + number * length, length)

    def keep_open(self, file: BinaryIO) -> None:
        """Let joiners open it through this process."""
        self._file = os.fdopen(os.dup(file.fileno()), "r+b")
        self.place = _place(self._file)

    def new_generation(self, generation: int) -> None:
        """Count barriers afresh: all ranks here do so between the same two."""
        self._base = generation * _GENERATION

    def note(self, mark: int, scalars: bytes) -> None:
        """Keep the scalars of a state under a mark that grows, for whoever is left of the node. What was noted in an
        older generation counts for nothing from then on."""
        heads, pages = self._heads[self.me], self._journals[self.me]
        older = int(heads[0][0] >= heads[1][0])
        pages[older][: len(scalars)] = np.frombuffer(scalars, np.uint8)
        heads[older][1] = len(scalars)
        heads[older][0] = self._base + mark + 1

    def forget(self) -> None:
        """Nothing was noted by any rank of the node."""
        self._heads[:, :, 0] = 0

    def noted(self) -> tuple[int, bytes]:
        """The last mark that a rank of the node noted, in the newest generation that one noted in, with its scalars; -1
        if nothing was."""
        marks = self._heads[:, :, 0]
        place, page = divmod(int(marks.argmax()), 2)
        return int(marks[place, page]) % _GENERATION - 1, self._journals[place, page][
            : self._heads[place, page, 1]
        ].tobytes()

    def numbers(self, group: Group, version: int) -> Iterator[int]:
        """Which arrays this rank takes for its sums, in order, in a round of the group that writes the version."""
        here = self.members(group.ids)
        return places.numbers(version, here.index(self.me), len(here))

    def array(self, number: int) -> Array:
        """Array `number` of this rank, (contribution,)."""
        return self.part(self.me, number)

    def publish(self, numbers: Sequence[int]) -> None:
        """Say which arrays hold this rank's subtree sums, left to right; seen by the others after a barrier."""
        row = self._table[self.me]
        row[0] = len(numbers)
        row[1 : 1 + len(numbers)] = numbers

    def tell(self, row: Sequence[float]) -> None:
        """Leave facts of this rank for those that meet it next."""
        self._facts[self.me, : len(row)] = row

    def told(self, members: Sequence[int], width: int) -> list[list[float]]:
        """The first `width` of what each told before the last barrier."""
        return [self._facts[member, :width].tolist() for member in members]

    def order(self, members: Sequence[int], data: bytes) -> None:
        """Leave these bytes, which fit a frame, for each of the members, which have read what was left for them before;
        seen after a barrier."""
        text, length = np.frombuffer(data, np.uint8), len(data)
        for member in members:
            self._lengths[member] = length
            self._orders[member, :length] = text

    def ordered(self) -> bytes:
        """What was left for this rank."""
        return self._orders[self.me, : self._lengths[self.me]].tobytes()

    def parts(self, members: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(member, number of the array) of the subtree sums that these ranks of the node published, in their order."""
        return tuple((m, int(n)) for m in members for n in self._table[m, 1 : 1 + self._table[m, 0]])

    def part(self, member: int, number: int) -> Array:
        """Array `number` of a rank of the node."""
        sizes = self._sizes
        start, index = self._starts["homes"], number
        if number >= HOMES:
            start, index = self._starts["slots"] + member * _slots_bytes(sizes), number - HOMES
        return self._view(start + index * _array_bytes(sizes), sizes.contribution, sizes.dtype)

    def one_for_all(self, contributions: int, size: int) -> bool:
        """Whether a reduction of so many arrays of `size` numbers is done by one rank alone."""
        small = contributions * size * self._sizes.dtype.itemsize <= _ONE_FOR_ALL_BYTES
        return small and self._waiter.crowded and self.can_claim

    def barrier(self, members: tuple[int, ...], sequence: int) -> None:
        """Wait until all members (places) are at `sequence`, which grows from barrier to barrier.

        Raises DeadlineError naming the world ranks that are missing."""
        sequence += self._base
        line = self._barrier(members)
        line.arrive(sequence)
        self._until(lambda *patience: line.wait(sequence, *patience), members, (sequence,))

    def meeting(self, members: tuple[int, ...], moves: Sequence[kernels.Move], alone: bool) -> kernels.Meeting:
        """The meeting of the members at which each does its moves or (`alone`) one of them does all."""
        hub = len(self.ids) if alone else kernels.NO_HUB
        return kernels.meeting(np, self._barrier(members), moves, hub)

    def meet(
        self, meeting: kernels.Meeting, members: tuple[int, ...], sequence: int, numbers: tuple[float, float]
    ) -> None:
        """Two barriers, at `sequence` and the next number, with the moves of the meeting in between; numbers: mu
        and the rate. Raises as `barrier` does."""
        run, (mu, rate), sequence = meeting.run, numbers, self._base + sequence
        if run(sequence, mu, rate, *self.patience) >= 0:
            self._until(lambda *patience: run(sequence, mu, rate, *patience), members, (sequence, sequence + 1))

    @property
    def patience(self) -> tuple[int, int, float]:
        """How a wait in C goes: looks, then looks with the core given away in between, then sleep, and seconds until
        it comes back."""
        return (0, _YIELDS_CROWDED, _LOOK_S) if self._waiter.crowded else (_SPINS, _YIELDS, _LOOK_S)

    def _barrier(self, members: tuple[int, ...]) -> kernels.Barrier:
        if members not in self._barriers:
            if len(self._barriers) == _KEPT_BARRIERS:
                self._barriers.clear()
            self._barriers[members] = kernels.barrier(self._board, members, self.me)
        return self._barriers[members]

    def _until(self, wait: Callable[..., int], members: tuple[int, ...], sequences: tuple[int, ...]) -> None:
        """Wait on until the deadline; `wait` comes back with a member that is missing at one of the sequences."""
        end_s = time.monotonic() + self._waiter.timeout_s
        self._waiter.watch()
        while (one := wait(*self.patience)) >= 0:
            self._waiter.watch()
            if time.monotonic() > end_s:
                late = [self.ids[m] for m in self._late(one, members, sequences)]
                raise DeadlineError(
                    f"waited {self._waiter.timeout_s:.0f} s for world rank {', '.join(map(str, late))}, which did "
                    "not come to a reduction; look at what it is doing, or raise run.timeout_s if it was only slow"
                )

    def _late(self, one: int, members: tuple[int, ...], sequences: tuple[int, ...]) -> list[int]:
        """All members that are missing where `one` is: those behind the first of the sequences that this rank is at
        and `one` is not. There is none if all are waiting for what `one` does for them."""
        for sequence in sequences:
            late = kernels.missing(self._board, members, sequence)
            if one in late and self.me not in late:
                return late
        return [one]

    def _view(self, start: int, size: int, dtype: np.dtype) -> Array:
        return self._bytes[start : start + size * dtype.itemsize].view(dtype)


def share(world: World, sizes: Sizes, ranks: int = 0) -> NodeMemory | str:
    """The node's memory, or why there is none (then every rank keeps its own). Collective over the world: there is
    one on every node or on none. ranks: how many there may be on a node some day, if more than now."""
    local = Subset(world.transport, world.node_ranks)
    ids: list[int | None] = [world.ids[rank] for rank in world.node_ranks]
    ids += [None] * (ranks - len(ids))
    if world.size == 1 == len(ids):
        return "there is one rank"
    if not kernels.orders_memory():
        return "the kernels are not compiled, and this CPU needs them to order memory between ranks"
    memory, problem, place = None, "", ""
    with contextlib.ExitStack() as files:  # open until all ranks of the node have opened the file, or never will
        if local.rank == 0:
            try:
                file = files.enter_context(os.fdopen(os.memfd_create("shoal"), "r+b"))
                file.truncate(_starts(len(ids), sizes)["end"])
                place = _place(file)
            except (OSError, AttributeError) as error:
                problem = f"no memory file could be made ({error})"
        place = broadcast_bytes(local, place.encode()).decode()
        if place:
            try:
                memory = attach(place, ids, world.ids[world.rank], sizes, world.waiter)
            except (OSError, ValueError) as error:
                problem = f"the node's memory file could not be mapped ({error})"
        answers = gather(world.transport, np.array([memory is None, not kernels.can_claim()], np.uint8))
        lists = [", ".join(map(str, np.flatnonzero(column))) for column in answers.T]
        without, twins = broadcast_bytes(world.transport, ";".join(lists).encode()).decode().split(";")
    if without or memory is None:
        return problem or f"world rank {without} could not map the memory of its node"
    memory.new_generation(world.generation)
    memory.can_claim = not twins
    return memory


def attach(place: str, ids: Sequence[int | None], me: int, sizes: Sizes, waiter: Waiter) -> NodeMemory:
    """The memory that lies at `place`, for the rank whose id is `me`. Raises OSError or ValueError."""
    with Path(place).open("r+b") as file:
        memory = NodeMemory(mmap.mmap(file.fileno(), 0), ids, ids.index(me), sizes, waiter)
        if None in ids:  # somebody may come and open it here
            memory.keep_open(file)
        return memory


def _place(file: BinaryIO) -> str:
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _array_bytes(sizes: Sizes) -> int:
    """From one contribution to the next, which starts on a cache line."""
    return _on_page(sizes.contribution * sizes.dtype.itemsize) + _STAGGER_BYTES


def _slots_bytes(sizes: Sizes) -> int:
    """Those of a rank, in pages."""
    return _on_page(sizes.slots * _array_bytes(sizes))


def _on_page(n_bytes: int) -> int:
    return -(-n_bytes // _PAGE) * _PAGE


def _starts(ranks: int, sizes: Sizes) -> dict[str, int]:
    """Where each part starts, in bytes, every one on a page; "end" is the size of the file."""
    item = sizes.dtype.itemsize
    lengths = [("board", (ranks + 1) * _LINE_BYTES), ("table", ranks * (1 + sizes.slots) * 8)]
    lengths.append(("facts", ranks * sizes.facts * 8))
    lengths.append(("orders", ranks * FRAME_BYTES))
    lengths.append(("journals", 2 * ranks * _JOURNAL_BYTES))
    lengths.append(("homes", HOMES * _array_bytes(sizes)))
    lengths += [(f"momentum{k}", sizes.velocity * item) for k in (0, 1)]
    lengths.append(("slots", ranks * _slots_bytes(sizes)))
    starts, end = {}, 0
    for name, length in lengths:
        starts[name] = end
        end += _on_page(length)
    return {**starts, "end": end}
