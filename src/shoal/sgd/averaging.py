"""The round's arithmetic after the sum: from the mean contribution to the new anchor.

    d  = mean_j (w_j - a)
    v <- mu*v + d,        a <- a + v             "displacement": M-AVG; K-AVG at mu = 0
    v <- mu*v + d/rate,   a <- a + rate*v        "per_rate": SlowMo's buffer, which survives a change of the rate

Running statistics of batch norm are averaged (a <- a + d) and take no momentum.
"""

from __future__ import annotations

from shoal import kernels
from shoal.backend import Array, Backend
from shoal.config import Averaging, Train
from shoal.model.flat import Layout
from shoal.sgd.interfaces import State
from shoal.sgd.optimizer import averages_momentum, shares_gradient


class ReductionMomentum:
    """Commits rounds to a state; the same on all ranks, which all have the same mean."""

    def __init__(self, layout: Layout, averaging: Averaging, train: Train, backend: Backend) -> None:
        self._layout, self._averaging, self._train, self._xp = layout, averaging, train, backend.xp
        self._work = backend.zeros(layout.parameters)

    def commit(self, state: State, mean: Array, steps: int, mu: float, rate: float) -> None:
        """Move the anchor by the mean contribution of a round of K = `steps`. Uses `mean` up."""
        xp, layout = self._xp, self._layout
        d = mean[: layout.parameters]
        if shares_gradient(self._train, steps):
            direction = kernels.momentum_step(
                xp, state.momentum, d, self._train.local_momentum, self._train.nesterov, self._work
            )
            xp.multiply(direction, -rate, out=d)
        elif averages_momentum(self._train, steps):
            xp.copyto(state.momentum, mean[layout.size :])
        else:
            state.momentum.fill(0)
        anchor = state.anchor[: layout.parameters]
        if self._averaging.velocity == "per_rate":
            kernels.per_rate_update(xp, anchor, state.velocity, d, mu, rate)
        else:
            kernels.displacement_update(xp, anchor, state.velocity, d, mu)
        statistics = slice(layout.parameters, layout.size)
        xp.add(state.anchor[statistics], mean[statistics], out=state.anchor[statistics])
