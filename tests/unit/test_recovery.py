"""The rule of recovery, on ranks that are threads: whose state it goes on from, and who is sent what."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from threads import ThreadTransport, on_ranks

from shoal.backend import numpy_backend
from shoal.comm.collectives import broadcast, gather
from shoal.comm.places import Sizes
from shoal.comm.shared import NodeMemory
from shoal.comm.wait import Waiter
from shoal.elastic.master import Decision
from shoal.elastic.recovery import Journal, recover_state
from shoal.elastic.reserve import ReserveProvider
from shoal.errors import RankLost
from shoal.model.flat import Layout, Tensor
from shoal.state import Progress, TrainState

LAYOUT = Layout([Tensor("w", (300, 7), "weight"), Tensor("m", (7,), "statistic")])
NEVER = -1


class World(SimpleNamespace):
    """What recovery sees of a world. node_of: for each rank the lowest rank of its node."""

    def __init__(self, transport: ThreadTransport, node_of: tuple[int, ...]) -> None:
        super().__init__(transport=transport, size=transport.size, rank=transport.rank, node_of=node_of)

    def meet(self) -> None:
        gather(self.transport, np.zeros(1, np.uint8))
        broadcast(self.transport, np.zeros(1, np.uint8))


def at(round: int, by: int) -> Progress:
    """Scalars as rank `by` knows them."""
    return Progress(round=round, consumed=8 * round, serial_steps=by)


def filled(state: TrainState, round: int, by: int) -> None:
    """Both versions: the present one is of this round, the other is worth nothing."""
    state.progress = at(round, by)
    for array in state.versions[0].values():
        array[...] = 100 * round + by
    for array in state.versions[1].values():
        array[...] = np.nan


def recovered(
    marks: tuple[int, ...], node_of: tuple[int, ...] | None = None, memories: dict[int, list[NodeMemory]] | None = None
) -> list[tuple[TrainState, int, list[Any]]]:
    """Of each rank: its state, its mark, and whom it sent arrays. `marks`: the last that each noted; odd ones began a
    round at state mark // 2, and so may have the next state too."""

    def work(transport: ThreadTransport) -> tuple[TrainState, int, list[Any]]:
        rank, mark = transport.rank, marks[transport.rank]
        memory = None
        if memories is not None and node_of is not None:
            memory = memories[node_of[rank]][[r for r in range(len(marks)) if node_of[r] == node_of[rank]].index(rank)]
        world, state = World(transport, node_of or tuple(range(len(marks)))), TrainState(LAYOUT, numpy_backend())
        journal, newest = Journal(memory), max(marks) // 2
        if mark != NEVER:
            journal._own = (mark, at(mark // 2, rank).encode())
            if mark >= 2 * newest - 1:
                filled(state, newest, rank)
        provider = ReserveProvider(world, memory, lambda: False)  # type: ignore[arg-type]
        provider._all_listen = False
        recover_state(world, provider, journal, state)  # type: ignore[arg-type]
        assert provider._all_listen
        whole = state.anchor.size
        return state, journal.newest()[0], sorted(peer for peer, numbers in transport.sent if numbers == whole)

    return on_ranks(len(marks), work)


def test_the_newest_decision_is_taken_again() -> None:
    """Rank 0 knows of a decision at state 2, rank 1 began the round from there, rank 2 has slept since state 1."""
    results = recovered((4, 5, 2))
    assert [state.progress for state, _, _ in results] == 3 * [at(2, by=1)]
    assert [mark for _, mark, _ in results] == [4, 4, 4]
    assert [sent for _, _, sent in results] == [[], [2], []]
    assert [float(state.anchor[0]) for state, _, _ in results] == [200, 201, 201]


def test_who_committed_the_round_before_has_the_state() -> None:
    """Rank 0 has not heard of the decision at state 2, which was made after all had committed it."""
    results = recovered((3, 4))
    assert [state.progress for state, _, _ in results] == 2 * [at(2, by=1)]
    assert [sent for _, _, sent in results] == [[], []]
    assert [float(state.anchor[0]) for state, _, _ in results] == [200, 201]


def test_of_those_that_know_as_much_the_first_is_the_source() -> None:
    results = recovered((NEVER, 6, 6, NEVER))
    assert {state.progress.serial_steps for state, _, _ in results} == {1}
    assert [sent for _, _, sent in results] == [[], [0, 3], [], []]
    for name in ("anchor", "velocity", "momentum"):
        assert {float(state.arrays[name][0]) for state, _, _ in results} == {301, 302}


def test_who_never_had_a_state_does_not_have_the_first_one() -> None:
    results = recovered((1, NEVER, 0))
    assert [state.progress for state, _, _ in results] == 3 * [at(0, by=0)]
    assert [sent for _, _, sent in results] == [[1], [], []]


def test_nobody_has_the_state() -> None:
    with pytest.raises(RankLost, match="no rank is left that has the state") as raised:
        recovered((NEVER, NEVER, NEVER))
    assert raised.value.final


def nodes_memory(ranks: int, *notes: tuple[int, Progress]) -> list[NodeMemory]:
    """The memory of a node, of which a rank that has died has noted something."""
    sizes = Sizes(LAYOUT.size, LAYOUT.parameters, LAYOUT.size, 1, np.dtype(np.float32))
    file = mmap.mmap(-1, 16 << 20)
    memories = [
        NodeMemory(file, range(10, 11 + ranks), me, sizes, Waiter(5.0, crowded=True)) for me in range(ranks + 1)
    ]
    for mark, progress in notes:
        memories[ranks].note(mark, progress.encode())
    return memories[:ranks]


def test_reserves_go_on_for_a_group_that_is_gone() -> None:
    """Neither of the two was ever told of the state; it lies in the memory of their node."""
    memories = nodes_memory(2, (6, at(3, by=7)), (9, at(4, by=7)))
    results = recovered((NEVER, NEVER), (0, 0), {0: memories})
    assert [state.progress for state, _, _ in results] == 2 * [at(4, by=7)]
    assert [sent for _, _, sent in results] == [[], []]


def test_the_first_of_a_node_that_does_not_know_is_sent_the_arrays() -> None:
    memories = {0: nodes_memory(2, (4, at(2, by=7))), 2: nodes_memory(2)}
    results = recovered((NEVER, NEVER, NEVER, NEVER), (0, 0, 2, 2), memories)
    assert [state.progress for state, _, _ in results] == 4 * [at(2, by=7)]
    assert [sent for _, _, sent in results] == [[2], [], [], []]


def test_the_journal_keeps_the_last_of_two_notes_whole() -> None:
    writer, reader = nodes_memory(2)
    assert reader.noted() == (NEVER, b"")
    for mark in (0, 1, 2, 3, 8):
        writer.note(mark, at(mark, by=0).encode())
        assert reader.noted() == (mark, at(mark, by=0).encode())
    page = int(reader._heads[0, 0, 0] > reader._heads[0, 1, 0])  # the older one, which a writer that dies leaves torn
    reader._journals[0, page, :4] = 255
    assert reader.noted() == (8, at(8, by=0).encode())


def test_a_node_knows_what_any_of_its_ranks_knew() -> None:
    """Whoever begins a round may write over the state before it, and then nobody may go back to that."""
    first, second = nodes_memory(2)
    Journal(first).note(at(1, by=0), trains=True)
    assert second.noted() == (3, at(1, by=0).encode())
    Journal(second).note(at(2, by=1), trains=True)
    assert first.noted() == (5, at(2, by=1).encode())
    Journal(first).note(at(2, by=0), trains=False)
    assert first.noted() == second.noted() == (5, at(2, by=1).encode())


def test_a_round_that_is_done_again_without_a_node_leaves_it_without_the_state_after() -> None:
    """Both nodes began round 4, in which a rank was lost; the first did it again alone, and another is lost."""
    first, second = nodes_memory(1)[0], nodes_memory(1)[0]
    for memory in (first, second):
        Journal(memory).note(at(4, by=0), trains=True)
        memory.new_generation(1)
    recovered((NEVER, NEVER), (0, 1), {0: [first], 1: [second]})
    assert first.noted()[0] == second.noted()[0] == 8
    Journal(first).note(at(4, by=0), trains=True)
    Journal(first).note(at(5, by=0), trains=True)
    for memory in (first, second):
        memory.new_generation(2)
    results = recovered((NEVER, NEVER), (0, 1), {0: [first], 1: [second]})
    assert [state.progress for state, _, _ in results] == 2 * [at(5, by=0)]
    assert [sent for _, _, sent in results] == [[1], []]


def test_of_several_notes_at_one_state_the_last_counts() -> None:
    """An evaluation, a checkpoint and a resize may be decided on at one state; the first changes what is counted."""
    memory = nodes_memory(1)[0]
    for first in (3, 4):
        journal = Journal(memory)
        journal.note(at(first, by=0), trains=True)
        for by in (1, 2, 3):
            journal.note(at(first + 1, by), trains=False)
            assert journal.newest() == (2 * first + 2, at(first + 1, by).encode())


def test_what_is_overwritten_from_another_node_is_nothing_to_go_back_to() -> None:
    """The second node trained before, and what it has of the state of then is worth nothing after an evaluation."""
    away = nodes_memory(2)
    memories = {0: nodes_memory(2)[:1], 1: away}
    Journal(memories[0][0]).note(at(7, by=0), trains=False)
    Journal(away[1]).note(at(3, by=1), trains=True)

    def work(transport: ThreadTransport) -> int:
        rank, node_of = transport.rank, (0, 1, 1)
        world = World(transport, node_of)
        world.order = (0, 1, 2)
        memory = memories[node_of[rank]][rank - node_of[rank]]
        journal = Journal(memory)
        provider = ReserveProvider(world, memory, lambda: False, forget=journal.forget)  # type: ignore[arg-type]
        provider.spread(np.zeros(5, np.float32), Decision("evaluate", knowing=1))
        return journal.newest()[0]

    assert on_ranks(3, work) == [14, NEVER, NEVER]
