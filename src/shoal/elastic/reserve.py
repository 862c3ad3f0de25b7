"""The reserve provider: a world started at full size, whose ranks sleep while no learner needs them.

A resize is one MPI_Comm_split of the world between two rounds; joiners receive the state. Decisions go to
the group by broadcast, and to sleeping ranks only when they concern them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shoal.comm.collectives import broadcast_bytes, gather
from shoal.comm.group import Group
from shoal.comm.transport import Subset
from shoal.comm.world import World
from shoal.elastic.master import Decision
from shoal.state import TrainState

Decide = Callable[[np.ndarray | None], Decision]


class ReserveProvider:
    """Carries decisions to all ranks of a world and makes its groups."""

    def __init__(self, world: World, stop_requested: Callable[[], bool]) -> None:
        self._world = world
        self._stop_requested = stop_requested

    def next_decision(self, group: Group | None, row: np.ndarray | None, decide: Decide) -> Decision:
        """The master's next decision, on every rank that it concerns.

        row: this rank's facts of the round just done, or None where there was none. `decide` is called on
        the master alone, with the rows of all ranks of the group. Ranks without a group sleep until then.
        Collective over the group.
        """
        world = self._world
        if group is None and not world.is_master:
            return Decision.decode(world.sleep_until_order(self._stop_requested))
        rows = gather(group.transport, row) if group is not None and row is not None else None
        order = decide(rows).encode() if world.is_master else b""
        if group is not None:
            order = broadcast_bytes(group.transport, order)
        decision = Decision.decode(order)
        resize = decision.ranks != decision.ranks_before
        if world.is_master and (decision.action in ("evaluate", "end") or resize):
            for rank in world.order:
                if rank != world.rank and (group is None or rank not in group.ranks):
                    world.order_reserve(rank, order)
        return decision

    def resize(self, group: Group | None, decision: Decision, state: TrainState) -> Group | None:
        """The group for a `train` decision: the same one, or a new one whose joiners have the state.

        Returns None on ranks that are not in it. Collective over the world if the number of ranks changes.
        """
        world = self._world
        if group is not None and group.size == decision.ranks:
            return group
        if group is not None:
            group.close()
        ranks = world.order[: decision.ranks]
        new = world.split(ranks)
        knowing = max(decision.ranks_before, 1)
        if knowing < len(ranks) and (world.is_master or world.rank in ranks[knowing:]):
            state.hand_over(Subset(world.transport, [ranks[0], *ranks[knowing:]]))
        return new
