"""The updates of a round, each element by element in the order of operations written here.

Every product is rounded before it is added (no fused multiply-add): two machines that follow IEEE 754 agree.
"""

from __future__ import annotations

from typing import Any


def sgd_step(xp: Any, w: Any, g: Any, rate: float, work: Any) -> None:
    """w <- w - rate*g. In place; `work` has w's shape."""
    xp.multiply(g, rate, out=work)
    xp.subtract(w, work, out=w)


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


def displacement_update(xp: Any, a: Any, v: Any, d: Any, mu: float) -> None:
    """v <- mu*v + d, a <- a + v: reduction momentum (M-AVG; BMUF with averages). In place."""
    xp.multiply(v, mu, out=v)
    xp.add(v, d, out=v)
    xp.add(a, v, out=a)


def per_rate_update(xp: Any, a: Any, v: Any, d: Any, mu: float, rate: float) -> None:
    """v <- mu*v + d/rate, a <- a + rate*v: SlowMo's buffer (arXiv 1910.00643, alpha = 1). In place; d is used up."""
    xp.divide(d, rate, out=d)
    xp.multiply(v, mu, out=v)
    xp.add(v, d, out=v)
    xp.multiply(v, rate, out=d)
    xp.add(a, d, out=a)
