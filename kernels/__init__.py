"""The hot loops: passes over flat arrays that a round is made of.

Each is written in NumPy (`twins`), which says what it computes and is the oracle, and in C (cpu/), with the same
bits. A call takes C for flat C-contiguous float32 or float64 NumPy arrays where it was compiled, and the twin for
all else; `backing` says which there is. All work in place, C allocates nothing, and sizes are arguments. `xp` is
the array module that holds the arrays. Arrays of one call are the same memory or do not overlap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.kernels import twins
from shoal.kernels.barrier import Barrier, barrier, missing, orders_memory
from shoal.kernels.compiled import backing, cpu
from shoal.kernels.terms import LocalStep, Terms
from shoal.kernels.twins import momentum_step

__all__ = [
    "Barrier",
    "LocalStep",
    "Terms",
    "backing",
    "barrier",
    "canonical_sum",
    "cpu",
    "delta",
    "local_step",
    "missing",
    "momentum_step",
    "orders_memory",
    "pack",
    "reduce_displacement",
    "reduce_per_rate",
    "reduce_statistics",
    "unpack",
]

Pair = tuple[Any, Any]


def delta(xp: Any, w: Any, a: Any, out: Any) -> None:
    """out = w - a."""
    if cpu is None or xp is not np or not cpu.delta(w, a, out):
        twins.delta(xp, w, a, out)


def local_step(xp: Any, w: Any, g: Any, m: Any | None, step: LocalStep) -> None:
    """One step of SGD with weight decay and momentum, in one pass; w and m change, g stays. `m` may be None.

    The formula is at `twins.local_step`."""
    if cpu is not None and xp is np:
        by = step
        if cpu.local_step(w, g, m, by.rate, by.beta, by.nesterov, by.weight_decay, by.decayed):
            return
    twins.local_step(xp, w, g, m, step)


def canonical_sum(xp: Any, terms: Terms, out: Any) -> None:
    """out = d = scale * sum of the parts in the order of the joins, each part read once. `out` may be a part."""
    if terms.compiled is None or not terms.compiled.sum(out, terms.scale):
        twins.canonical_sum(xp, terms, out)


def reduce_statistics(xp: Any, terms: Terms, a: Any, a_out: Any) -> None:
    """a_out = a + d, in one pass."""
    if terms.compiled is None or not terms.compiled.statistics(a, a_out, terms.scale):
        twins.reduce_statistics(xp, terms, a, a_out)


def reduce_displacement(xp: Any, terms: Terms, start: Pair, end: Pair, mu: float) -> None:
    """From start = (a, v) to end = (a', v'), which may be the same: v' = mu*v + d, a' = a + v', in one pass."""
    if terms.compiled is None or not terms.compiled.displacement(*start, *end, terms.scale, mu):
        twins.reduce_displacement(xp, terms, start, end, mu)


def reduce_per_rate(xp: Any, terms: Terms, start: Pair, end: Pair, factors: tuple[float, float]) -> None:
    """The same with factors = (mu, rate): v' = mu*v + d/rate, a' = a + rate*v'."""
    if terms.compiled is None or not terms.compiled.per_rate(*start, *end, terms.scale, *factors):
        twins.reduce_per_rate(xp, terms, start, end, factors)


def pack(xp: Any, x: Any, out: Any) -> None:
    """float32 to float16, or to bfloat16 (as uint16 bits): `out`'s dtype says which. To nearest even."""
    if cpu is None or xp is not np or not cpu.pack(x, out):
        twins.pack(xp, x, out)


def unpack(xp: Any, packed: Any, out: Any) -> None:
    """What `pack` packed, as float32."""
    if cpu is None or xp is not np or not cpu.unpack(packed, out):
        twins.unpack(xp, packed, out)
