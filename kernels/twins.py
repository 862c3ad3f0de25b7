"""The loops in NumPy: what each computes, element by element, in the order of roundings written here.

The oracle for the C loops, and what runs where they were not compiled or the arrays are not on the CPU: `xp` is
the module that holds the arrays (numpy or cupy). Every product is rounded before it is added. Long arrays are
walked in blocks that stay in the cache; the work memory of a block is all that a call allocates (on a GPU, where
launches cost more than memory, a block is the whole array). Outputs may be the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

BLOCK = 16384
"""Elements of a block."""


def delta(xp: Any, w: Any, a: Any, out: Any) -> None:
    """out = w - a."""
    _same_size(w, a, out)
    xp.subtract(w, a, out=out)


def local_step(xp: Any, start: Any, g: Any, end: Any, step: Any, origin: Any | None = None) -> None:
    """One step of SGD from start = (w, m) by the gradient g to end = (w', m'); `step` is a `LocalStep`.

    g' = g + weight_decay*w for the first `decayed` elements, g elsewhere;
    m' = beta*m + g';  w' = w - rate*m', or w - rate*(g' + beta*m') (Nesterov), or w - rate*g' without an m;
    with an origin a, w' - a (w' rounded first) takes the place of w'."""
    arrays = (*start, g, *end, origin)
    _same_size(*(array for array in arrays if array is not None))
    if not 0 <= step.decayed <= g.size:
        raise ValueError(f"decayed is {step.decayed}, and the array has {g.size} elements")
    decayed = step.decayed if step.weight_decay else 0
    work = xp.empty((2, min(BLOCK, g.size) if xp is np else g.size), g.dtype)
    for part, decay in ((slice(0, decayed), step.weight_decay), (slice(decayed, None), 0.0)):
        for at in _blocks(xp, part, g.size):
            here = [None if array is None else array[at] for array in arrays]
            _step_block(xp, here, step, decay, work[:, : at.stop - at.start])


def _step_block(xp: Any, arrays: Sequence[Any], step: Any, decay: float, work: Any) -> None:
    (w, m, g, w_out, m_out, origin), (direction, move) = arrays, work
    xp.copyto(direction, g)
    if decay:
        xp.multiply(w, decay, out=move)
        xp.add(direction, move, out=direction)
    if m is not None:
        xp.multiply(m, step.beta, out=m_out)
        xp.add(m_out, direction, out=m_out)
        if step.nesterov:
            xp.multiply(m_out, step.beta, out=move)
            xp.add(direction, move, out=direction)
        else:
            direction = m_out
    xp.multiply(direction, step.rate, out=move)
    if origin is None:
        xp.subtract(w, move, out=w_out)
    else:
        xp.subtract(w, move, out=move)
        xp.subtract(move, origin, out=w_out)


def momentum_step(xp: Any, m: Any, g: Any, beta: float, nesterov: bool, work: Any) -> Any:
    """m <- beta*m + g; returns the step's direction: m, or (Nesterov) g + beta*m in `work`.

    Sutskever et al. 2013 in the form of PyTorch's SGD."""
    xp.multiply(m, beta, out=m)
    xp.add(m, g, out=m)
    if not nesterov:
        return m
    xp.multiply(m, beta, out=work)
    xp.add(work, g, out=work)
    return work


def canonical_sum(xp: Any, terms: Any, out: Any) -> None:
    """out = scale * sum of the parts, added in the order of the joins. `terms` is a `Terms`."""
    _same_size(terms.parts[0], out)
    for at, d in _means(xp, terms):
        xp.copyto(out[at], d)


def reduce_statistics(xp: Any, terms: Any, a: Any, a_out: Any) -> None:
    """a_out = a + d, d = scale * sum."""
    _same_size(terms.parts[0], a, a_out)
    for at, d in _means(xp, terms):
        xp.add(a[at], d, out=a_out[at])


def reduce_displacement(xp: Any, terms: Any, start: Any, end: Any, mu: float) -> None:
    """(a, v) = start; end = (a + v', v'), v' = mu*v + d, d = scale * sum: reduction momentum (M-AVG; BMUF)."""
    (a, v), (a_out, v_out) = start, end
    _same_size(terms.parts[0], a, v, a_out, v_out)
    for at, d in _means(xp, terms):
        xp.multiply(v[at], mu, out=v_out[at])
        xp.add(v_out[at], d, out=v_out[at])
        xp.add(a[at], v_out[at], out=a_out[at])


def reduce_per_rate(xp: Any, terms: Any, start: Any, end: Any, factors: tuple[float, float]) -> None:
    """(a, v) = start, (mu, rate) = factors; end = (a + rate*v', v'), v' = mu*v + d/rate: SlowMo's buffer
    (arXiv 1910.00643, alpha = 1)."""
    (a, v), (a_out, v_out), (mu, rate) = start, end, factors
    _same_size(terms.parts[0], a, v, a_out, v_out)
    for at, d in _means(xp, terms):
        xp.divide(d, rate, out=d)
        xp.multiply(v[at], mu, out=v_out[at])
        xp.add(v_out[at], d, out=v_out[at])
        xp.multiply(v_out[at], rate, out=d)
        xp.add(a[at], d, out=a_out[at])


def pack(xp: Any, x: Any, out: Any) -> None:
    """float32 to 16 bits, rounded to nearest even: to half where `out` is float16, to the bits of a bfloat16
    where it is uint16. Too large becomes infinite; NaN stays NaN."""
    _same_size(x, out)
    if out.dtype == np.float16:
        with np.errstate(over="ignore"):
            xp.copyto(out, x, casting="same_kind")
        return
    _bfloat16(out)
    for at in _blocks(xp, slice(None), x.size):
        bits = x[at].view(np.uint32)
        rounded = (bits >> 16) & 1
        rounded += 0x7FFF
        rounded += bits
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        out[at] = xp.where(nan, (bits >> 16) | 0x40, rounded >> 16)


def unpack(xp: Any, packed: Any, out: Any) -> None:
    """The float32 that `pack` packed, exactly: from float16, or from uint16 as the bits of a bfloat16."""
    _same_size(packed, out)
    if packed.dtype == np.float16:
        xp.copyto(out, packed)
        return
    _bfloat16(packed)
    bits = out.view(np.uint32)
    xp.copyto(bits, packed)
    xp.left_shift(bits, 16, out=bits)


def _bfloat16(array: Any) -> None:
    if array.dtype != np.uint16:
        raise TypeError(f"packed numbers are float16, or uint16 for bfloat16, and these are {array.dtype}")


def _same_size(*arrays: Any) -> None:
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1 or arrays[0].ndim != 1:
        raise ValueError(f"a kernel takes flat arrays of one size, and these have the shapes {sorted(shapes)}")


def _blocks(xp: Any, part: slice, size: int) -> Iterator[slice]:
    start, stop, _ = part.indices(size)
    step = BLOCK if xp is np else max(1, size)
    for at in range(start, stop, step):
        yield slice(at, min(at + step, stop))


def _means(xp: Any, terms: Any) -> Iterator[tuple[slice, Any]]:
    """Each block's place, and scale * sum of it in memory that the next block reuses."""
    first = terms.parts[0]
    block = min(BLOCK, first.size) if xp is np else first.size
    work = xp.empty((terms.depth, block), first.dtype)
    for at in _blocks(xp, slice(None), first.size):
        here = work[:, : at.stop - at.start]
        total = _fold(xp, [part[at] for part in terms.parts], terms.joins, here)
        yield at, xp.multiply(total, terms.scale, out=here[0])


def _fold(xp: Any, parts: Sequence[Any], joins: Sequence[int], work: Any) -> Any:
    stack: list[Any] = []
    for part, count in zip(parts, joins, strict=True):
        stack.append(part)
        for _ in range(count):
            right = stack.pop()
            stack[-1] = xp.add(stack[-1], right, out=work[len(stack) - 1])
    return stack[0]
