"""Between nodes that have shared memory: each node sends its sum once, all its ranks at work. Canonical.

The vector is cut into lanes, as many as the smallest node has ranks; lane l is carried by the l-th rank of each
node. A carrier joins what the ranks of its node contributed into the c whole subtrees that cover the node's learners,
swaps pieces of the lane all-to-all with its fellow carriers, adds all nodes' subtrees for its own piece in the tree's
order, and hands the finished piece to the fellows. A node sends and receives about N(c+1)(M-1)/M numbers for M nodes.
The mean takes the place of the node's first contribution, so it needs no memory, and all of the node see it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal import kernels
from shoal.backend import Array
from shoal.comm.canonical import known_by
from shoal.comm.setting import Setting, length, slices
from shoal.comm.transport import Message
from shoal.comm.tree import cover, joins, runs


class Carrier:
    """One rank's part. nodes: the ranks of the transport on each node, next to each other, in order."""

    def __init__(self, setting: Setting, nodes: Sequence[range]) -> None:
        self._transport, self._xp = setting.transport, setting.backend.xp
        rank, dealt = setting.transport.rank, setting.dealt
        self._here = next(n for n, ranks in enumerate(nodes) if rank in ranks)
        number, lanes = rank - nodes[self._here].start, min(map(len, nodes))
        self._carries = number < lanes
        if not self._carries:
            return
        lane = slices(setting.size, lanes)[number]
        self._pieces = [
            slice(lane.start + piece.start, lane.start + piece.stop) for piece in slices(length(lane), len(nodes))
        ]
        self._fellows = {n: ranks.start + number for n, ranks in enumerate(nodes) if n != self._here}
        covers = [known_by(dealt, ranks) for ranks in nodes]
        mine = length(self._pieces[self._here])
        self._received = {n: [setting.empty(mine) for _ in covers[n]] for n in self._fellows}
        given = [vertex for learner_rank in nodes[self._here] for vertex in cover(dealt[learner_rank])]
        self._runs = [(start, stop, joins(given[start:stop])) for _, start, stop in runs(given)]
        self._joined = {
            (n, start): setting.empty(length(self._pieces[n]))
            for n in self._fellows
            for start, stop, _ in self._runs
            if stop - start > 1
        }
        covers[self._here] = given
        self._joins = joins([vertex for vertices in covers for vertex in vertices])

    def __call__(self, parts: Sequence[Array], scale: float) -> None:
        """parts[0] = scale * (sum over all learners), as far as this rank's lane goes. Collective over the lane.

        parts: the subtree sums of all ranks of this node in order, each (size,), which nobody changes meanwhile."""
        if not self._carries:
            return
        mean, mine = parts[0], self._pieces[self._here]
        self._transport.exchange(
            [message for n in self._fellows for message in self._sums_for(n, parts)],
            [(self._fellows[n], array) for n, arrays in self._received.items() for array in arrays],
        )
        everything = {**self._received, self._here: [part[mine] for part in parts]}
        ordered = [array for n in sorted(everything) for array in everything[n]]
        kernels.canonical_sum(self._xp, kernels.Terms(self._xp, ordered, self._joins, scale), mean[mine])
        self._transport.exchange(
            [(peer, mean[mine]) for peer in self._fellows.values()],
            [(peer, mean[self._pieces[n]]) for n, peer in self._fellows.items()],
        )

    def _sums_for(self, node: int, parts: Sequence[Array]) -> list[Message]:
        """This node's subtree sums for the piece of another node."""
        piece, messages = self._pieces[node], []
        for start, stop, order in self._runs:
            sent = parts[start][piece]
            if stop - start > 1:
                terms = kernels.Terms(self._xp, [part[piece] for part in parts[start:stop]], order, 1.0)
                sent = self._joined[node, start]
                kernels.canonical_sum(self._xp, terms, sent)
            messages.append((self._fellows[node], sent))
        return messages
