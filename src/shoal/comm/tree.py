"""The canonical sum: one fixed binary tree over the learners, whichever ranks host them.

Vertex (h, i) covers learners [i*2^h, (i+1)*2^h) and is left + right; a missing right side adds nothing. A
rank adds the learners of its own contiguous block as far as whole subtrees go, and the rest of the tree is
walked over the parts of all ranks. Every addition is one that the tree contains, so the bits of the result
do not depend on how the learners are dealt.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from shoal.backend import Array

Vertex = tuple[int, int]
T = TypeVar("T")


def blocks(learners: int, ranks: int) -> list[range]:
    """The learners of each rank: contiguous blocks of ceil(P/ranks), as many as there are learners for."""
    size = -(-learners // ranks)
    return [range(start, min(start + size, learners)) for start in range(0, learners, size)]


def cover(block: range) -> list[Vertex]:
    """The fewest whole subtrees that cover a block, left to right."""
    found, start = list[Vertex](), block.start
    while start < block.stop:
        fits = (block.stop - start).bit_length() - 1
        height = min(fits, (start & -start).bit_length() - 1) if start else fits
        found.append((height, start >> height))
        start += 1 << height
    return found


def push(stack: list[T], item: T, join: Callable[[T, T], T], vertex: Callable[[T], Vertex]) -> None:
    """Append the next subtree to the right, then join siblings for as long as the last two are siblings."""
    stack.append(item)
    while len(stack) > 1:
        (height, left), (height_right, right) = vertex(stack[-2]), vertex(stack[-1])
        if height != height_right or left % 2 or right != left + 1:
            return
        last = stack.pop()
        stack[-1] = join(stack[-1], last)


def runs(vertices: Sequence[Vertex]) -> list[tuple[Vertex, int, int]]:
    """The fewest whole subtrees that these can be joined into: (vertex, start, stop), the range that makes it."""
    stack: list[tuple[Vertex, int, int]] = []
    for number, vertex in enumerate(vertices):
        push(stack, (vertex, number, number + 1), _join_runs, lambda run: run[0])
    return stack


def _join_runs(left: tuple[Vertex, int, int], right: tuple[Vertex, int, int]) -> tuple[Vertex, int, int]:
    (height, index), start, _ = left
    return (height + 1, index // 2), start, right[2]


def sum_scalars(values: Sequence[float]) -> float:
    """The canonical sum of one number per learner."""
    stack: list[tuple[Vertex, float]] = []
    for learner, value in enumerate(values):
        push(stack, ((0, learner), value), _join_scalars, lambda item: item[0])
    total = stack.pop()[1]
    while stack:
        total = stack.pop()[1] + total
    return total


def _join_scalars(left: tuple[Vertex, float], right: tuple[Vertex, float]) -> tuple[Vertex, float]:
    (height, index), value = left
    return (height + 1, index // 2), value + right[1]


def joins(vertices: Sequence[Vertex]) -> tuple[int, ...]:
    """How many joins follow each of these subtrees, in order, until the root is left: a stack machine's program.

    What is left at the end is joined from the right, since a missing right side adds nothing."""
    counts, stack = [], list[Vertex]()
    for vertex in vertices:
        before = len(stack)
        push(stack, vertex, lambda left, _: (left[0] + 1, left[1] // 2), lambda one: one)
        counts.append(before + 1 - len(stack))
    counts[-1] += len(stack) - 1
    return tuple(counts)


class SubtreeSums:
    """Adds arrays, given in the order of their vertices, into the fewest whole subtrees.

    Takes the few arrays that are open at a time, and reuses them: `array(i)` is called once for each i. `slot` is where
    the next one is to be written. The same calls take the same arrays.
    """

    def __init__(self, xp: Any, array: Callable[[int], Array]) -> None:
        self._xp, self._array = xp, functools.cache(array)
        self._fresh: Iterator[int] = itertools.count()
        self._free: list[int] = []
        self._stack: list[tuple[Vertex, int]] = []

    def start(self, numbers: Iterator[int] | None = None) -> None:
        """Forget what was summed; the arrays are taken in the order of these numbers."""
        self._stack.clear()
        self._free.clear()
        self._fresh = numbers or itertools.count()

    def slot(self) -> Array:
        """An array for the next `add`; its contents are old."""
        if not self._free:
            self._free.append(next(self._fresh))
        return self._array(self._free[-1])

    def add(self, vertex: Vertex) -> None:
        """Take what was written into `slot` as the sum of `vertex`."""
        push(self._stack, (vertex, self._free.pop()), self._join, lambda item: item[0])

    @property
    def numbers(self) -> list[int]:
        """Which of the arrays hold the sums of the subtrees that cover what was added, left to right."""
        return [number for _, number in self._stack]

    @property
    def parts(self) -> list[Array]:
        """Those arrays."""
        return [self._array(number) for number in self.numbers]

    def _join(self, left: tuple[Vertex, int], right: tuple[Vertex, int]) -> tuple[Vertex, int]:
        (height, index), number = left
        array = self._array(number)
        self._xp.add(array, self._array(right[1]), out=array)
        self._free.append(right[1])
        return (height + 1, index // 2), number
