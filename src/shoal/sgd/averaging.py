"""The round's arithmetic after the local steps: from the mean contribution to the next state.

    d  = mean_j (w_j - a)
    v <- mu*v + d,        a <- a + v             "displacement": M-AVG; K-AVG at mu = 0
    v <- mu*v + d/rate,   a <- a + rate*v        "per_rate": SlowMo's buffer, which survives a change of the rate

Where a learner left its step to the reduction (K = 1), w_j = a - rate*(g_j + weight decay * a) is made here, of each
learner before the mean, in the same pass.

Running statistics of batch norm are averaged (a <- a + d) and take no momentum. The state has two versions: a
round reads one and writes the other, each rank those elements that the reducer gives it.
"""

from __future__ import annotations

import functools

from shoal import kernels
from shoal.backend import Array, Backend
from shoal.comm.reducer import Passes, TermsAt
from shoal.config import Averaging, Train
from shoal.model.flat import Layout
from shoal.sgd.interfaces import Numbers, State
from shoal.sgd.optimizer import averages_momentum, shares_gradient


class ReductionMomentum:
    """Makes the update of a round; `mu` and `rate` are the round's."""

    def __init__(self, layout: Layout, averaging: Averaging, train: Train, backend: Backend) -> None:
        self._layout, self._averaging, self._train, self._xp = layout, averaging, train, backend.xp
        self._work = backend.zeros((2, layout.parameters)) if train.local_momentum else None

    def update(self, state: State, by: Numbers, span: slice, terms: TermsAt) -> None:
        """Elements `span` of the next version of the state.

        A contribution is [parameters | statistics | local momentum, where it may be averaged]."""
        layout, (_, after) = self._layout, state.versions
        trained = _part(span, 0, layout.parameters)
        averages = averages_momentum(self._train, by.steps)
        if shares_gradient(self._train, by.steps):
            terms = self._step(state, trained, terms, by.rate)
        elif self._train.local_momentum and trained is not None and not averages:
            after["momentum"][trained].fill(0)
        for move in self._moves(state, by.gradients, span, terms):
            kernels.apply(self._xp, move, by.mu, by.rate)
        if (kept := _part(span, layout.size, 2 * layout.size)) is not None and averages:
            own = slice(kept.start - layout.size, kept.stop - layout.size)
            kernels.canonical_sum(self._xp, terms(kept.start, kept.stop), after["momentum"][own])

    def passes(self, state: State, by: Numbers) -> Passes | None:
        """The same as moves of the kernels alone, or None where there is more to it: local momentum."""
        if self._train.local_momentum:
            return None
        return Passes(functools.partial(self._moves, state, by.gradients), (by.mu, by.rate), by.gradients)

    def _moves(self, state: State, gradients: bool, span: slice, terms: TermsAt) -> list[kernels.Move]:
        """Anchor and velocity from the mean displacement, running statistics from theirs."""
        layout, (now, after) = self._layout, state.versions
        rule = kernels.PER_RATE if self._averaging.velocity == "per_rate" else kernels.DISPLACEMENT
        moves = []
        for start, stop, decay in self._trained(gradients):
            if (trained := _part(span, start, stop)) is not None:
                arrays = [one[name][trained] for one in (now, after) for name in ("anchor", "velocity")]
                moves.append(kernels.Move(terms(trained.start, trained.stop), rule, tuple(arrays), decay))
        if (measured := _part(span, layout.parameters, layout.size)) is not None:
            statistics = (now["anchor"][measured], after["anchor"][measured])
            moves.append(kernels.Move(terms(measured.start, measured.stop), kernels.STATISTICS, statistics))
        return moves

    def _trained(self, gradients: bool) -> list[tuple[int, int, float | None]]:
        """(start, stop, decay): the parameters, apart where the decay of a step that is still to be taken differs."""
        end, decay = self._layout.parameters, self._train.weight_decay
        if not gradients or not decay:
            return [(0, end, 0.0 if gradients else None)]
        decayed = end if self._train.decay_norms else self._layout.decayed
        return [(0, decayed, decay), (decayed, end, 0.0)]

    def _step(self, state: State, trained: slice | None, terms: TermsAt, rate: float) -> TermsAt:
        """Distributed momentum SGD: from the mean gradient to the displacement, -rate * direction."""
        if trained is None:
            return terms
        assert self._work is not None
        xp, (now, after) = self._xp, state.versions
        gradient, work = self._work[0][trained], self._work[1][trained]
        momentum: Array = after["momentum"][trained]
        kernels.canonical_sum(xp, terms(trained.start, trained.stop), gradient)
        xp.copyto(momentum, now["momentum"][trained])
        direction = kernels.momentum_step(
            xp, momentum, gradient, self._train.local_momentum, self._train.nesterov, work
        )
        xp.multiply(direction, -rate, out=gradient)

        def displacement(lo: int, hi: int) -> kernels.Terms:
            if lo >= self._layout.parameters:
                return terms(lo, hi)
            return kernels.Terms(xp, [gradient[lo - trained.start : hi - trained.start]], (0,), 1.0)

        return displacement


def _part(span: slice, start: int, stop: int) -> slice | None:
    """What of [start, stop) lies in the span, None if nothing does."""
    lo, hi = max(span.start, start), min(span.stop, stop)
    return slice(lo, hi) if lo < hi else None
