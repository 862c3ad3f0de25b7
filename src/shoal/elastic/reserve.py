"""The reserve provider: a world started at full size, whose ranks sleep while no learner needs them.

A resize is one MPI_Comm_split of the world between two rounds; joiners receive the state. Decisions go to
the group by broadcast, and to sleeping ranks only when they concern them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shoal.backend import Array
from shoal.comm.collectives import broadcast, broadcast_bytes, gather
from shoal.comm.group import Group
from shoal.comm.transport import Subset
from shoal.comm.world import World
from shoal.elastic.master import Decision
from shoal.state import TrainState

Decide = Callable[[np.ndarray | None], Decision]


class ReserveProvider:
    """Carries decisions to all ranks of a world and makes its groups. shared: ranks of a node share the state."""

    def __init__(self, world: World, shared: bool, stop_requested: Callable[[], bool]) -> None:
        self._world, self._shared = world, shared
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
        joiners = ranks[knowing:]
        if joiners and (world.is_master or world.rank in joiners):
            state.hand_over(Subset(world.transport, [ranks[0], *joiners]), self._holders(ranks[:knowing], joiners))
        return new

    def spread(self, anchor: Array, decision: Decision) -> None:
        """The anchor from the group to all ranks of the world. Collective over the world."""
        order, known = self._world.order, max(1, decision.ranks)
        holders = self._holders(order[:known], order[known:])
        if holders is not None:
            broadcast(holders, anchor)
        self._world.meet()

    def _holders(self, knowing: Sequence[int], others: Sequence[int]) -> Subset | None:
        """The master, and those of the others that must be sent the arrays, if this rank is one of them: all, or
        where ranks share memory the first of each node on which nobody knows them."""
        receivers = list(others)
        if self._shared:
            node_of = self._world.node_of
            have = {node_of[rank] for rank in knowing}
            first = {node_of[rank]: rank for rank in reversed(others) if node_of[rank] not in have}
            receivers = [rank for rank in others if rank in first.values()]
        holders = [0, *receivers]
        return Subset(self._world.transport, holders) if receivers and self._world.rank in holders else None
