"""The hot loops: passes over flat arrays that a round is made of.

Each is written in NumPy (`twins`), which says what it computes and is the oracle, and in C (cpu/), with the same
bits. A call takes C for flat C-contiguous float32 or float64 NumPy arrays where it was compiled, and the twin for
all else; `backing` says which there is. All work in place, C allocates nothing, and sizes are arguments. `xp` is
the array module that holds the arrays. Arrays of one call are the same memory or do not overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.kernels import twins
from shoal.kernels.barrier import Barrier, barrier, missing, orders_memory
from shoal.kernels.compiled import backing, cpu
from shoal.kernels.gather import SampleMap, gather
from shoal.kernels.meeting import DISPLACEMENT, NO_HUB, PER_RATE, STATISTICS, SUM, Meeting, Move, TwinMeeting, can_claim
from shoal.kernels.terms import LocalStep, Terms
from shoal.kernels.twins import momentum_step

__all__ = [
    "DISPLACEMENT",
    "NO_HUB",
    "PER_RATE",
    "STATISTICS",
    "SUM",
    "Barrier",
    "LocalStep",
    "Meeting",
    "Move",
    "SampleMap",
    "Terms",
    "apply",
    "backing",
    "barrier",
    "can_claim",
    "canonical_sum",
    "cpu",
    "delta",
    "gather",
    "local_step",
    "meeting",
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


def local_step(xp: Any, start: Pair, g: Any, end: Pair, step: LocalStep, origin: Any | None = None) -> None:
    """One step of SGD with weight decay and momentum, in one pass: from start = (w, m) by the gradient g to
    end = (w', m'). Both m may be None. With an origin a, w' - a is written instead of w'.

    The formula is at `twins.local_step`."""
    if cpu is not None and xp is np:
        (w, m), (w_out, m_out), by = start, end, step
        numbers = (by.rate, by.beta, by.nesterov, by.weight_decay, by.decayed)
        if cpu.local_step(w, m, g, origin, w_out, m_out, *numbers):
            return
    twins.local_step(xp, start, g, end, step, origin)


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


def apply(xp: Any, move: Move, mu: float, rate: float) -> None:
    """One move, outside a meeting."""
    terms, arrays = move.terms, move.arrays
    if move.decay is not None:
        step, a = LocalStep(rate, weight_decay=move.decay, decayed=arrays[0].size), arrays[0]
        for part in terms.parts:
            local_step(xp, (a, None), part, (part, None), step, origin=a)
    if move.rule == SUM:
        canonical_sum(xp, terms, *arrays)
    elif move.rule == STATISTICS:
        reduce_statistics(xp, terms, *arrays)
    elif move.rule == DISPLACEMENT:
        reduce_displacement(xp, terms, arrays[:2], arrays[2:], mu)
    else:
        reduce_per_rate(xp, terms, arrays[:2], arrays[2:], (mu, rate))


def meeting(xp: Any, barrier: Barrier, moves: Sequence[Move], hub: int = NO_HUB) -> Meeting:
    """The meeting of the barrier's members, compiled where barrier, parts and arrays are. Raises ValueError where
    sizes differ, or a hub is given that cannot be used."""
    if cpu is not None and xp is np and isinstance(barrier, cpu.Barrier):
        listed = tuple((one.terms.compiled, one.rule, one.arrays, one.terms.scale, one.decay) for one in moves)
        try:
            return cpu.Meeting(barrier, listed, hub)
        except TypeError:  # not C-contiguous float32 or float64: the twin's
            pass
    if hub != NO_HUB:
        raise ValueError("only a compiled meeting can have a hub: see can_claim")
    return TwinMeeting(barrier, moves, functools.partial(apply, xp))


def pack(xp: Any, x: Any, out: Any) -> None:
    """float32 to float16, or to bfloat16 (as uint16 bits): `out`'s dtype says which. To nearest even."""
    if cpu is None or xp is not np or not cpu.pack(x, out):
        twins.pack(xp, x, out)


def unpack(xp: Any, packed: Any, out: Any) -> None:
    """What `pack` packed, as float32."""
    if cpu is None or xp is not np or not cpu.unpack(packed, out):
        twins.unpack(xp, packed, out)
