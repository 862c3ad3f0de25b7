"""The local steps of one learner: from the anchor, K steps of SGD, and what it brings to the reduction.

    for k in 0..K-1:   g <- gradient (+ weight decay * w);   m <- beta*m + g;   w <- w - rate*m
    contribution:      w - a, and for averaged local momentum also m

With K = 1 and beta > 0 the gradients are averaged instead, and one m is shared by all (`averaging.commit`).
"""

from __future__ import annotations

from shoal import kernels
from shoal.backend import Array, Backend
from shoal.config import Train
from shoal.data.batches import BatchSource
from shoal.model.trainable import Trainable
from shoal.sgd.interfaces import Settings, State


def shares_gradient(options: Train, steps: int) -> bool:
    """Whether learners contribute gradients rather than displacements: ordinary distributed momentum SGD."""
    return steps == 1 and options.local_momentum > 0


def averages_momentum(options: Train, steps: int) -> bool:
    """Whether the learners' m is averaged at a reduction, rather than reset."""
    return steps > 1 and options.local_momentum > 0 and options.local_momentum_at_reduction == "average"


def contribution_size(model: Trainable, options: Train) -> int:
    """How many numbers a learner brings to a reduction: the whole model, and m where it may be averaged."""
    with_momentum = options.local_momentum > 0 and options.local_momentum_at_reduction == "average"
    return model.layout.size + (model.layout.parameters if with_momentum else 0)


class LocalSGD:
    """The work memory of one rank, used by its learners one after another."""

    def __init__(self, model: Trainable, batches: BatchSource, options: Train, backend: Backend) -> None:
        self.model, self._batches, self._options, self._xp = model, batches, options, backend.xp
        layout = model.layout
        self.weights = backend.zeros(layout.size)
        self._gradient = backend.zeros(layout.parameters)
        self._momentum = backend.zeros(layout.parameters)
        self._decayed = layout.parameters if options.decay_norms else layout.decayed
        model.bind(self.weights, self._gradient)

    def rehearse(self, batch: int) -> None:
        """Run one step of this batch for nothing, so that what a layer refuses is refused before training."""
        self.model.gradient(*self._batches.training(0, batch))

    def contribute(self, state: State, at: Settings, learner: int, rate: float, out: Array) -> float:
        """Run learner j's K steps of the round at `state`, write its contribution to `out`; its mean loss.

        Step k takes the samples at [c + kPB + jB, +B). Leaves the state as it is."""
        xp, layout = self._xp, self.model.layout
        shared = shares_gradient(self._options, at.steps)
        xp.copyto(self.weights, state.anchor)
        if self._options.local_momentum:
            xp.copyto(self._momentum, state.momentum)
        parameters = self.weights[: layout.parameters]
        momentum = self._momentum if self._options.local_momentum else None
        step = kernels.LocalStep(
            rate, self._options.local_momentum, self._options.nesterov, self._options.weight_decay, self._decayed
        )
        position, loss = state.position + learner * at.batch, 0.0
        stride = at.learners * at.batch
        for _ in range(at.steps):
            # Its first position of the next round is one stride after its last of this one.
            x, y = self._batches.training(position, at.batch, following=position + stride)
            loss += self.model.gradient(x, y, position)
            if not shared:
                kernels.local_step(xp, parameters, self._gradient, momentum, step)
            position += stride
        kernels.delta(xp, self.weights, state.anchor, out[: layout.size])
        if shared:
            out[: layout.parameters] = self._decayed_gradient()
        if out.size > layout.size:
            out[layout.size :] = self._momentum
        return loss / at.steps

    def _decayed_gradient(self) -> Array:
        """g + weight_decay*w, where the gradients are averaged and the step is taken once."""
        if self._options.weight_decay:
            decayed = slice(0, self._decayed)
            self._gradient[decayed] += self._options.weight_decay * self.weights[decayed]
        return self._gradient
