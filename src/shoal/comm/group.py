"""A group: the ranks that host learners for a while. It never changes; a resize makes a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.comm.transport import Members
from shoal.comm.tree import blocks


@dataclass(frozen=True, eq=False)
class Group:
    """`ranks` are world ranks, in the order of `group.rank`; the first is the master. A table of ranks over the
    world's communicator, so that making one takes no message; it is of use as long as the world has the same ranks."""

    ranks: tuple[int, ...]
    ids: tuple[int, ...]
    """what they are called for as long as they live, whatever becomes of the world"""
    nodes: tuple[int, ...]
    """something that names the node of each"""
    transport: Members

    @property
    def rank(self) -> int:
        """This process's index in the group."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """R, the number of ranks."""
        return len(self.ranks)

    def learners_here(self, learners: int) -> range:
        """The block of the P learners that this rank hosts."""
        return blocks(learners, self.size)[self.rank]

    @property
    def on_nodes(self) -> list[range] | None:
        """The indices of the ranks on each node, None if they are not next to each other."""
        starts = [0, *(n for n in range(1, self.size) if self.nodes[n] != self.nodes[n - 1])]
        if len(starts) != len(set(self.nodes)):
            return None
        return [range(start, stop) for start, stop in zip(starts, [*starts[1:], self.size], strict=True)]

    def close(self) -> None:
        """Free what its transport made. Collective over the group."""
        self.transport.close()


def ranks_for(learners: int, living: Sequence[int]) -> tuple[int, ...]:
    """The first R = ceil(P / ceil(P/W)) of the W living ranks: no more than the blocks need."""
    return tuple(living[: len(blocks(learners, len(living)))])
