"""After a loss: the survivors agree on the newest state that there is, and all of them get it.

A decision at state d is made when all of the group have committed that state and told the facts of the round before.
State d stays as it is, on every rank that has it, until a decision at the next is known there; so the newest decision
that any survivor knows of can be taken again, and everything before it is in the log. A rank has state d if it knows
of a decision at d, or began the round before. What a rank knows stays in the memory of its node, so that one that
slept all the time can go on for a group of which nobody is left.
"""

from __future__ import annotations

import numpy as np

from shoal.comm.collectives import broadcast, broadcast_bytes, gather
from shoal.comm.shared import NodeMemory
from shoal.comm.transport import Subset
from shoal.comm.world import World
from shoal.elastic.reserve import ReserveProvider
from shoal.errors import RankLost
from shoal.state import Progress, TrainState


class Journal:
    """The last decision that this rank, or a rank of its node, has begun to carry out. A mark is 2*d, for a decision
    at state d, + 1 if it began a round."""

    def __init__(self, memory: NodeMemory | None) -> None:
        self._memory = memory
        self._own = (-1, b"")

    def note(self, progress: Progress, trains: bool) -> None:
        """All that work have this state. With `trains`, before anything of the round is written: that may lie where
        the state before is, which is worth nothing from then on."""
        self._own = (2 * progress.round + trains, progress.encode())
        if self._memory is not None:
            self._memory.note(*self._own)

    def forget(self) -> None:
        """What this rank and its node have of the state is about to be overwritten from outside."""
        self._own = (-1, b"")
        if self._memory is not None:
            self._memory.forget()

    def newest(self) -> tuple[int, bytes]:
        """The mark and the scalars, -1 if nothing was begun here."""
        if self._memory is None:
            return self._own
        noted = self._memory.noted()
        return self._own if self._own[0] == noted[0] else noted  # of several notes at one state the own are in order


def recover_state(world: World, provider: ReserveProvider, journal: Journal, state: TrainState) -> None:
    """Everybody has the newest state that survived. Collective over the world, which has no dead rank any more.

    Raises RankLost if another rank is lost, a final one if nobody has any."""
    mark, scalars = journal.newest()
    rows = gather(world.transport, np.array([mark], np.int64))
    marks = np.frombuffer(broadcast_bytes(world.transport, rows.tobytes()), np.int64)
    newest = int(marks.max())
    if newest < 0:
        raise RankLost("no rank is left that has the state of the training", final=True)
    source = int(np.argmax(marks == newest))
    everybody = [source, *(rank for rank in range(world.size) if rank != source)]
    state.progress = Progress.decode(broadcast_bytes(Subset(world.transport, everybody), scalars))
    state_mark = newest // 2 * 2
    knowing = [rank for rank in range(world.size) if marks[rank] >= max(state_mark - 1, 0)]
    others = [rank for rank in range(world.size) if rank not in knowing]
    if world.rank in knowing:
        # Before anybody goes on: a round that was begun here is done again, perhaps without this rank, which has the
        # state after it no more.
        journal.note(state.progress, trains=False)
    holders = provider.holders(source, knowing, others)
    if holders is not None:
        for array in state.arrays.values():
            broadcast(holders, array)
    world.meet()
    if world.rank in others:
        journal.note(state.progress, trains=False)
    provider.all_listen()
