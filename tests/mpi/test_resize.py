"""The reserve provider on MPI: decisions reach whom they concern, and joiners have the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shoal.backend import numpy_backend
from shoal.comm.collectives import broadcast, gather
from shoal.comm.group import Group
from shoal.comm.places import Sizes
from shoal.comm.shared import NodeMemory, share
from shoal.comm.transport import Subset
from shoal.elastic.master import Decision
from shoal.elastic.reserve import ReserveProvider
from shoal.model.flat import Layout, Tensor
from shoal.sgd.rates import Switch
from shoal.state import TrainState

pytestmark = pytest.mark.mpi

LAYOUT = Layout([Tensor("w", (300, 7), "weight"), Tensor("m", (7,), "statistic")])


def _state(filled_with: float | None) -> TrainState:
    """A state whose every number says how far training is; None: as a rank that never had it."""
    state = TrainState(LAYOUT, numpy_backend())
    if filled_with is not None:
        _advance_to(state, filled_with)
    return state


def _meet(group: Group) -> None:
    gather(group.transport, np.zeros(1))
    broadcast(group.transport, np.zeros(1))


def _advance_to(state: TrainState, number: float) -> None:
    state.progress.round = int(number)
    for n, array in enumerate(state.arrays.values()):
        array[...] = number * 10 + n
    state.progress.counts.train_s = number / 3
    state.progress.history = [Switch(i, i + 1) for i in range(int(number))]


def _is_at(state: TrainState, number: float) -> bool:
    expected = _state(number)
    return state.progress == expected.progress and all(
        array.tobytes() == expected.arrays[name].tobytes() for name, array in state.arrays.items()
    )


@pytest.mark.parametrize("members", ["all", "every other", "last first"])
def test_hand_over(world: Any, members: str) -> None:
    ranks = {
        "all": list(range(world.size)),
        "every other": list(range(0, world.size, 2)),
        "last first": [world.size - 1, *range(world.size - 1)],
    }[members]
    state = _state(100 if world.rank == ranks[0] else None)
    if world.rank in ranks:
        members = Subset(world.transport, ranks)
        state.hand_over(members, members)
        assert _is_at(state, 100)
    else:
        assert _is_at(state, 0) or state.progress.round == 0


def _script(size: int) -> list[Decision]:
    """Trainings on all sizes after all sizes, twice each, with evaluations and checkpoints in between."""
    sizes = [n for a in range(1, size + 1) for b in range(1, size + 1) for n in (a, b)]
    decisions, before = [], 1
    for n, ranks in enumerate(sizes + sizes):
        decisions.append(Decision("train", learners=ranks, rate=float(n), ranks=ranks, knowing=before, round=n))
        before = ranks
        if n % 3 == 0:
            decisions.append(Decision("evaluate", ranks=ranks, knowing=ranks, round=n + 1))
        if n % 4 == 0:
            decisions.append(Decision("checkpoint", ranks=ranks, knowing=ranks, round=n + 1))
    return [*decisions, Decision("end", ranks=before, knowing=before, round=len(2 * sizes), reason="done")]


@pytest.mark.parametrize("shared", [False, True], ids=["own memory", "shared memory"])
def test_every_growth_and_shrinkage_with_the_state(world: Any, shared: bool) -> None:
    """As in training: only the ranks of the group advance the state; whoever joins must have it at once."""
    script = _script(world.size)
    memory = share(world, Sizes(LAYOUT.size, LAYOUT.parameters, LAYOUT.size, 1, np.dtype(np.float32)))
    assert isinstance(memory, NodeMemory) == (world.size > 1)
    memory = memory if shared and isinstance(memory, NodeMemory) else None
    provider = ReserveProvider(world, memory, lambda: False)
    ahead, rounds = iter(script), 0
    group, row = None, None
    state = TrainState(LAYOUT, numpy_backend(), memory.versions if memory else None)
    if world.is_master:
        _advance_to(state, 0)

    def decide(rows: Sequence[Sequence[float]] | None) -> Decision:
        assert (rows is None) == (row is None)
        if rows is not None:
            assert rows == [[float(rank), float(rounds)] for rank in range(group.size)]
        return next(ahead)

    while True:
        decision = provider.next_decision(group, state.progress.round, row, decide)
        row, state.progress.round = None, decision.round
        if decision.action in ("evaluate", "end"):
            provider.spread(state.anchor, decision)
            assert np.all(state.anchor == 10 * decision.round)
            world.meet()
        if decision.action == "end":
            break
        if decision.action == "train":
            group = provider.resize(group, decision, state)
            assert (group is not None) == (world.rank < decision.ranks)
            if group is not None:
                assert group.size == decision.ranks
                rounds = int(decision.rate) + 1
                assert _is_at(state, rounds - 1)
                row = [float(world.rank), float(rounds)]
                provider.tell(group, row)
                _meet(group)  # as a reduction: none writes before all have read, nor goes on before all have written
                _advance_to(state, rounds)
                _meet(group)
    if world.is_master:
        assert next(ahead, None) is None and rounds == sum(decision.action == "train" for decision in script)
    if group is not None:
        group.close()


def test_the_same_ranks_keep_their_group(world: Any) -> None:
    provider = ReserveProvider(world, None, lambda: False)
    state = _state(1)
    first = provider.resize(None, Decision("train", ranks=world.size, knowing=1), state)
    again = provider.resize(first, Decision("train", learners=9, ranks=world.size, knowing=world.size), state)
    assert again is first
    first.close()
