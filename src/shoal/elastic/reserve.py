"""The reserve provider: a world started at full size, whose ranks sleep while no learner needs them.

A resize changes a list of ranks between two rounds; joiners receive the state. Decisions go to the group by
broadcast, and to sleeping ranks only when they concern them. At the start, and after the world has changed, nobody
sleeps: the next decision is broadcast to all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shoal.backend import Array
from shoal.comm.collectives import broadcast, broadcast_bytes, gather
from shoal.comm.group import Group
from shoal.comm.shared import BARRIERS, NodeMemory
from shoal.comm.transport import Subset
from shoal.comm.world import World
from shoal.elastic.master import Decision
from shoal.state import TrainState

Decide = Callable[[Sequence[Sequence[float]] | None], Decision]


class ReserveProvider:
    """Carries decisions to all ranks of a world and makes its groups. memory: where ranks of a node share the state, if
    they do; listen: nobody ever sleeps, since all have a part in bringing in ranks; forget: called before arrays of
    another node are written over those of this one, to which nobody can go back from then on."""

    def __init__(
        self,
        world: World,
        memory: NodeMemory | None,
        stop_requested: Callable[[], bool],
        listen: bool = False,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._world, self._memory = world, memory
        self._stop_requested = stop_requested
        self._always, self._forget = listen, forget
        self._all_listen = True

    def next_decision(self, group: Group | None, done: int, row: Sequence[float] | None, decide: Decide) -> Decision:
        """The master's next decision, on every rank that it concerns.

        done: rounds done; row: what this rank told of the last of them, or None where that has been decided on.
        `decide` is called on the master alone, with the rows of all ranks of the group. Ranks without a group sleep
        until then. Collective over the group.
        """
        world = self._world
        if group is None and not self._all_listen:
            return Decision.decode(world.sleep_until_order(self._stop_requested))
        rows = self._told(group, row) if group is not None and row is not None else None
        decision = decide(rows) if world.is_master else None
        order = decision.encode() if decision is not None else b""
        if group is not None and row is not None and not self._all_listen:
            order = self._pass_on(group, done, order)
        else:
            order = broadcast_bytes(world.transport if group is None or self._all_listen else group.transport, order)
        if decision is not None and not self._all_listen:
            self._order(group, decision, order)
        decision = decision or Decision.decode(order)
        self._all_listen = self._always or (self._all_listen and decision.action != "train")
        return decision

    def _pass_on(self, group: Group, done: int, order: bytes) -> bytes:
        """The order after a round, from the master to the group. Collective over it."""
        if (memory := self._memory_of(group)) is None:
            return broadcast_bytes(group.transport, order)
        here = memory.members(group.ids)
        if group.rank == 0:
            memory.order(here, order)
            memory.barrier(here[:1], BARRIERS * done)
            return order
        memory.barrier((here[0], memory.me), BARRIERS * done)
        return memory.ordered()

    def tell(self, group: Group, row: Sequence[float]) -> None:
        """This rank's facts of a round, of one length on all ranks; before the reduction, with which they
        travel if the group shares memory."""
        if (memory := self._memory_of(group)) is not None:
            memory.tell(row)

    def _told(self, group: Group, row: Sequence[float]) -> list[list[float]] | None:
        """Master: the rows of all ranks of the group."""
        if (memory := self._memory_of(group)) is None:
            rows: list[list[float]] = gather(group.transport, np.array(row)).tolist()
            return rows
        return memory.told(memory.members(group.ids), len(row)) if self._world.is_master else None

    def _memory_of(self, group: Group) -> NodeMemory | None:
        """The memory that all ranks of the group share."""
        return self._memory if len(set(group.nodes)) == 1 else None

    def all_listen(self) -> None:
        """The world has changed: the next decision is for everybody."""
        self._all_listen = True

    def resize(self, group: Group | None, decision: Decision, state: TrainState) -> Group | None:
        """The group for a `train` decision: the same one, or a new one whose joiners have the state.

        Returns None on ranks that are not in it. Collective over the two groups.
        """
        world = self._world
        ranks = world.order[: decision.ranks]
        if group is not None and group.ranks == tuple(ranks):
            return group
        if group is not None:
            group.close()
        joiners = ranks[decision.knowing :]
        if joiners and (world.is_master or world.rank in joiners):
            receivers = self._receivers(world.order[: decision.knowing], joiners)
            everybody = Subset(world.transport, [ranks[0], *joiners])
            state.hand_over(everybody, self._subset(0, receivers), wait=bool(receivers))
            if world.is_master:
                world.wake(joiners)
        return world.group(ranks)

    def spread(self, anchor: Array, decision: Decision) -> None:
        """The anchor from the group to all ranks of the world. Collective over the world."""
        order, known = self._world.order, decision.knowing
        holders = self.holders(0, order[:known], order[known:])
        if holders is not None:
            broadcast(holders, anchor)
        self._world.meet()

    def holders(self, source: int, knowing: Sequence[int], others: Sequence[int]) -> Subset | None:
        """The rank `source`, and those of the others that must be sent the arrays, if this rank is one of them."""
        return self._subset(source, self._receivers(knowing, others))

    def _receivers(self, knowing: Sequence[int], others: Sequence[int]) -> list[int]:
        """Who must be sent the arrays: all others, or where ranks share memory the first of each node on which nobody
        knows them."""
        if self._memory is None:
            return list(others)
        node_of = self._world.node_of
        have = {node_of[rank] for rank in knowing}
        first = {node_of[rank]: rank for rank in reversed(others) if node_of[rank] not in have}
        return [rank for rank in others if rank in first.values()]

    def _subset(self, source: int, receivers: Sequence[int]) -> Subset | None:
        holders = [source, *receivers]
        if self._world.rank in receivers:
            self._forget()
        return Subset(self._world.transport, holders) if receivers and self._world.rank in holders else None

    def _order(self, group: Group | None, decision: Decision, order: bytes) -> None:
        """Master: the decision to those that sleep, if it concerns them. Who needs no more than the scalars to train
        is woken when they are sent: once awake it may take the core that the master needs for that."""
        working, trains = () if group is None else group.ranks, decision.action not in ("evaluate", "end")
        concerned = self._world.order[: decision.ranks] if trains else self._world.order
        for rank in concerned:
            if rank != self._world.rank and rank not in working:
                self._world.order_reserve(rank, order, wake=not (trains and self._memory is not None))
