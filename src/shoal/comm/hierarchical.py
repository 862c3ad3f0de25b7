"""Between nodes that have shared memory: each node sends its sum once, all its ranks at work. Canonical.

The vector is cut into lanes, as many as the smallest node has ranks; lane l is carried by the l-th rank of each
node. A carrier joins what the ranks of its node contributed into the c whole subtrees that cover the node's learners,
swaps pieces of the lane all-to-all with its fellow carriers, adds all nodes' subtrees for its own piece in the tree's
order, and hands the finished piece to the fellows. A node sends and receives about N(c+1)(M-1)/M numbers for M nodes.
A long lane goes so in sections, one after another: while one is summed, or taken into the state, others are on their
way.
The mean takes the place of the node's first contribution, so it needs no memory, and all of the node see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shoal import kernels
from shoal.backend import Array
from shoal.comm.canonical import known_by
from shoal.comm.setting import Setting, length, slices
from shoal.comm.transport import Message
from shoal.comm.tree import cover, joins, runs

_SECTION_BYTES = 1 << 20
_MOST_SECTIONS = 16
"""Each has its messages and calls, which more sections would not hide."""


class Carrier:
    """One rank's part. nodes: the ranks of the transport on each node, next to each other, in order."""

    def __init__(self, setting: Setting, nodes: Sequence[range]) -> None:
        rank = setting.transport.rank
        here = next(ranks for ranks in nodes if rank in ranks)
        number, lanes = rank - here.start, min(map(len, nodes))
        self._sections: list[_Section] = []
        if number < lanes:
            lane = slices(setting.size, lanes)[number]
            count = min(_MOST_SECTIONS, 1 + setting.empty(0).itemsize * length(lane) // _SECTION_BYTES)
            self._sections += [_Section(setting, nodes, at) for at in _cut(lane, count)]

    def __call__(self, parts: Sequence[Array], scale: float, take: Callable[[slice], None]) -> None:
        """parts[0] = scale * (sum over all learners) in this rank's lane, and take(section) for each section of it
        when that is there. Collective over the lane.

        parts: the subtree sums of all ranks of this node in order, each (size,), which nobody else changes in the lane
        meanwhile; `take` may."""
        under_way = [section.steps(parts, scale, take) for section in self._sections]
        for beat in range(len(under_way) + 2):
            for steps in reversed(under_way[max(0, beat - 2) : beat + 1]):
                next(steps, None)


class _Section:
    """A part of this rank's lane, with the work memory for it."""

    def __init__(self, setting: Setting, nodes: Sequence[range], at: slice) -> None:
        self._transport, self._xp, self._at = setting.transport, setting.backend.xp, at
        rank, dealt = setting.transport.rank, setting.dealt
        self._here = next(n for n, ranks in enumerate(nodes) if rank in ranks)
        number = rank - nodes[self._here].start
        self._pieces = _cut(at, len(nodes))
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

    def steps(self, parts: Sequence[Array], scale: float, take: Callable[[slice], None]) -> Iterator[None]:
        """Swap sums, then the mean, then take it into the state: each step begins what the next one waits for."""
        mean, mine = parts[0], self._pieces[self._here]
        swapped = self._transport.begin(
            [message for n in self._fellows for message in self._sums_for(n, parts)],
            [(self._fellows[n], array) for n, arrays in self._received.items() for array in arrays],
        )
        yield
        swapped()
        everything = {**self._received, self._here: [part[mine] for part in parts]}
        ordered = [array for n in sorted(everything) for array in everything[n]]
        kernels.canonical_sum(self._xp, kernels.Terms(self._xp, ordered, self._joins, scale), mean[mine])
        handed_out = self._transport.begin(
            [(peer, mean[mine]) for peer in self._fellows.values()],
            [(peer, mean[self._pieces[n]]) for n, peer in self._fellows.items()],
        )
        yield
        handed_out()
        take(self._at)

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


def _cut(at: slice, count: int) -> list[slice]:
    """`count` slices, next to each other; trailing ones may be empty."""
    return [slice(at.start + cut.start, at.start + cut.stop) for cut in slices(length(at), count)]
