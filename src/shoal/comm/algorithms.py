"""The allreduce algorithms by name: which keep the canonical order, and what each sends.

All are called alike (`setting.Allreduce`), and are made once for a `Setting`. `hierarchical` and `shared` work in the
shared memory of nodes, so the reducer makes them (strategies.py). What a node's pass over its memory moves and what a
hand-over of the state sends is counted here too: `tuning`, predictions and benchmarks read the same formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.comm.canonical import Exchange, Tree, known_by
from shoal.comm.setting import Allreduce, Fold, Setting, slices
from shoal.comm.tree import blocks, cover
from shoal.comm.unordered import Native, Nothing, Rabenseifner, RecursiveDoubling, Ring

__all__ = ["KEEPS_ORDER", "TAKES_WIRE", "Cost", "Exchange", "Setting", "cost", "hand_over", "make", "on_node", "slices"]

KEEPS_ORDER = {
    "hierarchical": True,
    "exchange": True,
    "tree": True,
    "ring": False,
    "recursive-doubling": False,
    "rabenseifner": False,
    "native": False,
    "none": False,
}
"""Whether the sum has the canonical tree's bits."""

TAKES_WIRE = ("ring", "recursive-doubling", "rabenseifner")
"""Those that can send float16 and bfloat16."""

_MAKERS: dict[str, Callable[[Setting], Allreduce]] = {
    "exchange": Exchange,
    "tree": Tree,
    "ring": Ring,
    "recursive-doubling": RecursiveDoubling,
    "rabenseifner": Rabenseifner,
    "native": Native,
    "none": Nothing,
}


def make(name: str, setting: Setting) -> Allreduce:
    """The algorithm of that name, with its work memory."""
    return _MAKERS[name](setting)


@dataclass(frozen=True)
class Cost:
    """What an allreduce sends. steps: exchanges one after another; messages, numbers: sent by the rank that sends
    most; crossing: numbers that leave the node that sends most, about, for nodes of equal size. The sections of a long
    vector (hierarchical) count as one, since all but the first hide behind one another."""

    steps: float
    messages: float
    numbers: float
    crossing: float


def cost(name: str, learners: int, nodes: Sequence[int], size: int) -> Cost:
    """Of `size` numbers over the ranks of `nodes` (ranks on each); exact where the slices are equal, whole lines."""
    ranks = sum(nodes)
    if ranks == 1 or name == "none":
        return Cost(0, 0, 0, 0)
    return _COSTS[name](learners, nodes, size)


def on_node(ranks: int, size: int) -> Cost:
    """The pass of `ranks` of one node over their shared memory, between two barriers: each reads its slice of all their
    sums, of the anchor and the velocity, and writes the last two. numbers: those that a rank moves."""
    return Cost(2 if ranks > 1 else 0, 0, size * (ranks + 4) / ranks, 0)


def hand_over(holders: int, size: int) -> Cost:
    """`size` numbers from one rank to `holders` others on nodes of their own, by a binomial tree."""
    steps = holders.bit_length()
    return Cost(steps, steps, size * steps, size * steps)


def _ring(learners: int, nodes: Sequence[int], size: int) -> Cost:
    ranks = sum(nodes)
    numbers = 2 * size * (ranks - 1) / ranks
    return Cost(2 * (ranks - 1), 2 * (ranks - 1), numbers, numbers if len(nodes) > 1 else 0)


def _doubling(learners: int, nodes: Sequence[int], size: int) -> Cost:
    steps, folded = _doublings(sum(nodes))
    crossing = max(nodes) * size * _doublings_up(len(nodes))
    return Cost(steps + 2 * folded, steps + folded, size * (steps + folded), crossing)


def _rabenseifner(learners: int, nodes: Sequence[int], size: int) -> Cost:
    steps, folded = _doublings(sum(nodes))
    numbers = 2 * size * (1 - 0.5**steps) + folded * size
    crossing = 2 * size * (len(nodes) - 1) / len(nodes) + folded * size * (len(nodes) > 1)
    return Cost(2 * steps + 2 * folded, 2 * steps + folded, numbers, crossing)


def _exchange(learners: int, nodes: Sequence[int], size: int) -> Cost:
    ranks = sum(nodes)
    arrays = 1 + max(len(cover(block)) for block in blocks(learners, ranks))
    crossing = max(here * (ranks - here) for here in nodes) * arrays * size / ranks
    return Cost(2, (ranks - 1) * arrays, size * arrays * (ranks - 1) / ranks, crossing)


def _tree(learners: int, nodes: Sequence[int], size: int) -> Cost:
    ranks = sum(nodes)
    steps, folded = _doublings(ranks)
    dealt = blocks(learners, ranks)
    dealt += [range(learners, learners)] * (ranks - len(dealt))
    rows = [[len(known_by(dealt, known)) for known in _known(Fold.of(rank, ranks))] for rank in range(ranks)]
    sent = [sum(counts) + (Fold.of(rank, ranks).takes_from is not None) for rank, counts in enumerate(rows)]
    crossing = max(nodes) * size * _doublings_up(len(nodes)) * max(max(counts) for counts in rows)
    return Cost(steps + 2 * folded, steps + folded, size * max(sent), crossing)


def _known(fold: Fold) -> list[range]:
    """The ranks whose sums this one sends, step by step."""
    if fold.gives_to is not None:
        return [range(fold.rank, fold.rank + 1)]
    firsts = [(bit, fold.index & -bit) for bit, _ in fold.partners()]
    return [range(fold.ranks(first)[0], fold.ranks(first + bit - 1)[-1] + 1) for bit, first in firsts]


def _hierarchical(learners: int, nodes: Sequence[int], size: int) -> Cost:
    count, lanes = len(nodes), min(nodes)
    if count == 1:
        return Cost(0, 0, 0, 0)
    dealt, starts = blocks(learners, sum(nodes)), [sum(nodes[:n]) for n in range(count)]
    covers = [known_by(dealt, range(start, start + here)) for start, here in zip(starts, nodes, strict=True)]
    arrays = 1 + max(map(len, covers))
    crossing = size * arrays * (count - 1) / count
    return Cost(2, (count - 1) * arrays, crossing / lanes, crossing)


def _doublings(ranks: int) -> tuple[int, bool]:
    """log2 of the largest power of two there is in `ranks`, and whether there are more."""
    power = ranks.bit_length() - 1
    return power, ranks != 1 << power


def _doublings_up(count: int) -> int:
    return (count - 1).bit_length()


_COSTS: dict[str, Callable[[int, Sequence[int], int], Cost]] = {
    "ring": _ring,
    "recursive-doubling": _doubling,
    "rabenseifner": _rabenseifner,
    "native": _rabenseifner,
    "exchange": _exchange,
    "tree": _tree,
    "hierarchical": _hierarchical,
}
"""`native` is taken for Rabenseifner's: what a library does is its own affair."""
