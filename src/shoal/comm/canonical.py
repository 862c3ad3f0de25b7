"""Allreduce algorithms that keep the canonical order, on any number of ranks.

`Exchange`: each rank owns a slice, receives that slice of every rank's subtree sums, joins them in the tree's order,
and sends the finished slice to all. Two steps; about N(c+1)(R-1)/R numbers a rank, for c subtrees a rank.

`Tree`: recursive doubling over ranks next to each other. A rank knows the sums of the whole subtrees that cover the
learners of 1, 2, 4, ... neighbours, and swaps them for those of the other half: log2(R) steps with all numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal import kernels
from shoal.backend import Array
from shoal.comm.setting import Fold, Setting, length, slices
from shoal.comm.tree import Vertex, cover, joins, runs


class Exchange:
    """Slices all-to-all, twice."""

    def __init__(self, setting: Setting) -> None:
        self._transport, self._xp = setting.transport, setting.backend.xp
        covers = [cover(block) for block in setting.dealt]
        self._joins = joins([vertex for vertices in covers for vertex in vertices])
        self._slices = slices(setting.size, setting.transport.size)
        mine = self._slices[setting.transport.rank]
        self._received = [
            [setting.empty(length(mine)) for _ in vertices] if peer != setting.transport.rank else []
            for peer, vertices in enumerate(covers)
        ]

    def __call__(self, parts: Sequence[Array], out: Array, scale: float) -> None:
        """As `Allreduce`. Collective."""
        transport, rank = self._transport, self._transport.rank
        peers = [peer for peer in range(transport.size) if peer != rank]
        transport.exchange(
            [(peer, part[self._slices[peer]]) for peer in peers for part in parts],
            [(peer, array) for peer in peers for array in self._received[peer]],
        )
        mine = self._slices[rank]
        own = [part[mine] for part in parts]
        all_parts = [array for peer, arrays in enumerate(self._received) for array in (own if peer == rank else arrays)]
        finished = out[mine]
        kernels.canonical_sum(self._xp, kernels.Terms(self._xp, all_parts, self._joins, scale), finished)
        transport.exchange([(peer, finished) for peer in peers], [(peer, out[self._slices[peer]]) for peer in peers])


class _Sums(NamedTuple):
    """Sums of whole subtrees, left to right: `rows` is (len(vertices), size)."""

    vertices: list[Vertex]
    rows: Array


class _Step(NamedTuple):
    """Swap sums with a peer (or only take its), then make each row of the next sums."""

    peer: int
    sent: Array | None
    received: Array
    made: list[tuple[kernels.Terms, Array]]


class Tree:
    """Recursive doubling that adds in the tree's order."""

    def __init__(self, setting: Setting) -> None:
        self._transport, self._xp = setting.transport, setting.backend.xp
        self._fold = fold = Fold.of(setting.transport.rank, setting.transport.size)
        self._mine = known = self._sums(setting, range(fold.rank, fold.rank + 1))
        self._steps: list[_Step] = []
        if fold.gives_to is not None:
            return
        if fold.takes_from is not None:
            other = self._sums(setting, range(fold.takes_from, fold.rank))
            known = self._add_step(setting, (fold.takes_from, None), (other, known), other.rows)
        for bit, peer in fold.partners():
            first = (fold.index ^ bit) & -bit
            theirs = range(fold.ranks(first)[0], fold.ranks(first + bit - 1)[-1] + 1)
            other = self._sums(setting, theirs)
            pair = (other, known) if fold.index & bit else (known, other)
            known = self._add_step(setting, (peer, known.rows), pair, other.rows)
        self._all = known

    def __call__(self, parts: Sequence[Array], out: Array, scale: float) -> None:
        """As `Allreduce`. Collective."""
        xp, transport, fold = self._xp, self._transport, self._fold
        for row, part in zip(self._mine.rows, parts, strict=True):
            xp.copyto(row, part)
        if fold.gives_to is not None:
            transport.exchange([(fold.gives_to, self._mine.rows)], [])
            transport.exchange([], [(fold.gives_to, out)])
            return
        for step in self._steps:
            sends = [] if step.sent is None else [(step.peer, step.sent)]
            transport.exchange(sends, [(step.peer, step.received)])
            for terms, row in step.made:
                kernels.canonical_sum(xp, terms, row)
        kernels.canonical_sum(xp, kernels.Terms(xp, list(self._all.rows), joins(self._all.vertices), scale), out)
        if fold.takes_from is not None:
            transport.exchange([(fold.takes_from, out)], [])

    def _sums(self, setting: Setting, ranks: range) -> _Sums:
        """Room for the sums of what these ranks know together."""
        vertices = known_by(setting.dealt, ranks)
        return _Sums(vertices, setting.empty(len(vertices), setting.size))

    def _add_step(
        self, setting: Setting, swap: tuple[int, Array | None], pair: tuple[_Sums, _Sums], received: Array
    ) -> _Sums:
        """Append the step that joins the pair (left, right); returns what is known after it."""
        vertices = pair[0].vertices + pair[1].vertices
        rows = [*pair[0].rows, *pair[1].rows]
        joined = runs(vertices)
        after = setting.empty(len(joined), setting.size)
        made = [
            (kernels.Terms(self._xp, rows[start:stop], joins(vertices[start:stop]), 1.0), row)
            for (_, start, stop), row in zip(joined, after, strict=True)
        ]
        self._steps.append(_Step(*swap, received, made))
        return _Sums([vertex for vertex, _, _ in joined], after)


def known_by(dealt: Sequence[range], ranks: range) -> list[Vertex]:
    """The fewest whole subtrees that cover the learners of ranks next to each other."""
    return cover(range(dealt[ranks[0]].start, dealt[ranks[-1]].stop))
