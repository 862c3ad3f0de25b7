"""What a call of a kernel is given besides arrays: the terms of a reduction, and the numbers of a local step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.kernels.compiled import cpu

DEPTH = 64
"""Sums that may be open at a time."""


@dataclass(frozen=True)
class LocalStep:
    """The numbers of a local step; the first `decayed` elements have weight decay."""

    rate: float
    beta: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decayed: int = 0


class Terms:
    """d = scale * sum of the parts: flat arrays of one size and dtype, which must stay where they are.

    The order of the additions is a stack machine's: push part i, then joins[i] times replace the top two by
    left + right; the end leaves one. Made once, used every round; holds the parts' memory. Raises ValueError where
    sizes differ or the joins do not fit.
    """

    __slots__ = ("compiled", "depth", "joins", "parts", "scale")

    def __init__(self, xp: Any, parts: Sequence[Any], joins: Sequence[int], scale: float) -> None:
        self.parts, self.joins, self.scale = tuple(parts), tuple(joins), float(scale)
        self.depth = _depth(self.joins, len(self.parts))
        sizes = {part.shape for part in self.parts}
        if len(sizes) > 1 or self.parts[0].ndim != 1:
            raise ValueError(f"parts are flat arrays of one size, and these have the shapes {sorted(sizes)}")
        self.compiled = None
        if cpu is not None and xp is np:
            try:
                self.compiled = cpu.Terms(self.parts, bytes(self.joins))
            except TypeError:  # not C-contiguous float32 or float64: the twin's
                self.compiled = None


def _depth(joins: Sequence[int], parts: int) -> int:
    """The most sums that are open at a time."""
    depth = most = 0
    for count in joins:
        depth += 1
        most = max(most, depth)
        if not 0 <= count < depth:
            raise ValueError(f"the joins {list(joins)} take more sums than there are")
        depth -= count
    if len(joins) != parts or depth != 1 or most > DEPTH:
        raise ValueError(f"the joins {list(joins)} do not leave one sum of {parts} parts with {DEPTH} open at most")
    return most
