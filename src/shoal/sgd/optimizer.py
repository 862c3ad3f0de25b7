"""The local steps of one learner: from the anchor, K steps of SGD, and what it brings to the reduction.

    for k in 0..K-1:   g <- gradient (+ weight decay * w);   m <- beta*m + g;   w <- w - rate*m
    contribution:      w - a, and for averaged local momentum also m

The first step is taken at the anchor itself, which no learner writes, and the last one writes the contribution
rather than w; so with K = 1 a learner passes over its parameters once. Running statistics of batch norm, which move
with every step, are the learner's own from the start. A step goes piece by piece where the model has its gradient in
pieces: they need not be put together first.

With K = 1 a learner may leave its step to the reduction (averaging.py), where what it reads of each learner is in
memory anyway: it brings g, and the result has the same bits. And with K = 1 and beta > 0 the gradients are averaged,
and one m is shared by all.

A batch larger than memory goes in micro-batches: their mean gradients are added in order, each weighted by its share of
the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal import kernels
from shoal.backend import Array, Backend
from shoal.config import Train
from shoal.data.batches import BatchSource
from shoal.model.trainable import Trainable
from shoal.sgd.interfaces import Numbers, Settings, State


def shares_gradient(options: Train, steps: int) -> bool:
    """Whether learners contribute gradients rather than displacements: ordinary distributed momentum SGD."""
    return steps == 1 and options.local_momentum > 0


def may_leave_step(options: Train, steps: int) -> bool:
    """Whether a learner's only step can be taken where its contribution is read: then it brings its gradient."""
    return steps == 1 and not options.local_momentum


def averages_momentum(options: Train, steps: int) -> bool:
    """Whether the learners' m is averaged at a reduction, rather than reset."""
    return steps > 1 and options.local_momentum > 0 and options.local_momentum_at_reduction == "average"


def contribution_size(model: Trainable, options: Train) -> int:
    """How many numbers a learner brings to a reduction: the whole model, and m where it may be averaged."""
    with_momentum = options.local_momentum > 0 and options.local_momentum_at_reduction == "average"
    return model.layout.size + (model.layout.parameters if with_momentum else 0)


def micro_batches(batch: int, most: int) -> list[int]:
    """The sizes of the pieces in which a batch is computed: `most` each and what is left; all at once if most is 0."""
    whole, rest = divmod(batch, most or batch)
    return [most or batch] * whole + [rest] * (rest > 0)


_KEPT_BINDINGS = 64
"""More than the anchors and slots of a rank; what is bound to memory that is no longer used goes some time."""


class LocalSGD:
    """The work memory of one rank, used by its learners one after another."""

    def __init__(self, model: Trainable, batches: BatchSource, options: Train, backend: Backend) -> None:
        self.model, self._batches, self._options, self._backend = model, batches, options, backend
        layout = model.layout
        self._weights = backend.zeros(layout.size)
        self._momentum = backend.zeros(layout.parameters) if options.local_momentum else None
        self._total = backend.zeros(layout.parameters) if options.micro_batch else None
        self._decayed = layout.parameters if options.decay_norms else layout.decayed
        self._bindings: dict[tuple[int, int], tuple[Any, Array, Array]] = {}

    def rehearse(self, batches: Iterable[int]) -> None:
        """Compute the smallest piece of steps of these batches for nothing, so that what a layer refuses is refused
        before training."""
        smallest = min(micro_batches(batch, self._options.micro_batch)[-1] for batch in batches)
        self.model.bind(self._weights, self._backend.zeros(self.model.layout.parameters))
        self.model.gradient(*self._batches.training(0, smallest))

    def evaluate_at(self, weights: Array) -> None:
        """Bind the model to a copy of these weights, for evaluation."""
        self._backend.xp.copyto(self._weights, weights)
        self.model.bind(self._weights)

    def contribute(self, state: State, at: Settings, learner: int, by: Numbers, out: Array) -> float:
        """Run learner j's K steps of the round at `state`, write its contribution to `out`; its mean loss.

        Step k takes the samples at [c + kPB + jB, +B). Leaves the state as it is."""
        xp, layout, anchor = self._backend.xp, self.model.layout, state.anchor
        measured = slice(layout.parameters, layout.size)
        xp.copyto(self._weights[measured], anchor[measured])
        whole = by.gradients or shares_gradient(self._options, at.steps)
        weights, loss = anchor, 0.0
        position = state.position + learner * at.batch
        for step in range(at.steps):
            self._use(weights, out)
            loss += self._gradient(position, at, out[: layout.parameters], whole)
            if not by.gradients:
                self._step(state, step, by, out)
            weights = self._weights
            position += at.learners * at.batch
        kernels.delta(xp, self._weights[measured], anchor[measured], out[measured])
        return loss / at.steps

    def _use(self, weights: Array, out: Array) -> None:
        """Work with these weights, the learner's own statistics, and the gradient in the contribution."""
        key = (id(weights), id(out))
        if key in self._bindings:
            self.model.use(self._bindings[key][0])
            return
        if len(self._bindings) == _KEPT_BINDINGS:
            self._bindings.clear()
        gradient = out[: self.model.layout.parameters]
        out[gradient.size :].fill(0)  # the gaps of the momentum, which no piece covers
        binding = self.model.bind(self._backend.read_only(weights), gradient, self._weights)
        self._bindings[key] = (binding, weights, out)  # which keep their ids

    def _gradient(self, position: int, at: Settings, gradient: Array, whole: bool) -> float:
        """The mean loss of the samples at [position, +B); the model has their gradient, which is in `gradient`, where
        it is bound to, if that is to be `whole`."""
        # A learner's next batch, in the next round too, is one stride on; so is each micro-batch of it.
        stride, batch = at.learners * at.batch, at.batch
        if self._total is None or batch <= self._options.micro_batch:
            return self.model.gradient(*self._batches.training(position, batch, position + stride), position, whole)
        xp, total, loss = self._backend.xp, self._total, 0.0
        total.fill(0)
        for size in micro_batches(batch, self._options.micro_batch):
            share = size / batch
            piece = self._batches.training(position, size, position + stride)
            loss += share * self.model.gradient(*piece, position)
            xp.multiply(gradient, share, out=gradient)
            xp.add(total, gradient, out=total)
            position += size
        xp.copyto(gradient, total)
        return loss

    def _step(self, state: State, k: int, by: Numbers, out: Array) -> None:
        """Local step k by the model's gradient: the first leaves the anchor, the last makes the contribution."""
        options, layout, last = self._options, self.model.layout, k == by.steps - 1
        trained = slice(0, layout.parameters)
        anchor, own, brought = state.anchor[trained], self._weights[trained], out[trained]
        momenta = out[layout.size :]
        if shares_gradient(options, by.steps):
            self._decay(anchor, brought)
            momenta.fill(0)
            return
        start = end = (own, self._momentum)
        if k == 0:
            start = (anchor, state.momentum if options.local_momentum else None)
        if last:
            end = (brought, momenta if momenta.size else self._momentum)
        for at, gradient in self.model.pieces:
            decayed = min(max(self._decayed - at.start, 0), gradient.size)
            step = kernels.LocalStep(by.rate, options.local_momentum, options.nesterov, options.weight_decay, decayed)
            origin = anchor[at] if last else None
            kernels.local_step(self._backend.xp, _part(start, at), gradient, _part(end, at), step, origin)

    def _decay(self, weights: Array, gradient: Array) -> None:
        """g <- g + weight_decay*w, where the gradients are averaged and the step is taken once."""
        if self._options.weight_decay:
            xp, decayed = self._backend.xp, slice(0, self._decayed)
            work = xp.multiply(weights[decayed], self._options.weight_decay, out=self._weights[decayed])
            xp.add(gradient[decayed], work, out=gradient[decayed])


def _part(pair: tuple[Array, Array | None], at: slice) -> tuple[Array, Array | None]:
    """Weights and momentum of one piece."""
    weights, momentum = pair
    return weights[at], None if momentum is None else momentum[at]
