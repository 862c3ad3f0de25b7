"""A group: the ranks that host learners for a while. It never changes; a resize makes a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.comm.transport import MpiTransport
from shoal.comm.tree import blocks


@dataclass(frozen=True, eq=False)
class Group:
    """`ranks` are world ranks, in the order of `group.rank`; the first is the master."""

    ranks: tuple[int, ...]
    transport: MpiTransport

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

    def close(self) -> None:
        """Free the communicator. Collective over the group."""
        self.transport.close()


def ranks_for(learners: int, living: Sequence[int]) -> tuple[int, ...]:
    """The first R = ceil(P / ceil(P/W)) of the W living ranks: no more than the blocks need."""
    return tuple(living[: len(blocks(learners, len(living)))])
