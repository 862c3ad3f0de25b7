"""Batch normalisation, over all axes but the last, with the semantics of PyTorch.

In training, with mean m and variance s2 of the batch's M values of a feature (biased, so over M):

    y = gamma (x - m) / sqrt(s2 + epsilon) + beta

and the running statistics move by r <- (1 - momentum) r + momentum * (m, or s2 M/(M-1)). In evaluation the
running statistics take the place of m and s2. S. Ioffe and C. Szegedy, arXiv 1502.03167.

A feature is one affine map of x, and so is the way back: the passes over memory are two for each. What belongs
to a feature is float64 until it meets x.
"""

from __future__ import annotations

import numpy as np

from shoal.backend import Array
from shoal.errors import InputError
from shoal.kernels import layers as loops
from shoal.model.flat import Shape, Tensor
from shoal.model.layer import Joint, check_sizes


class BatchNorm(Joint):
    """Samples (features,) or (h, w, features) keep their shape. With `relu`, y = max(y, 0) in the same pass.

    `share` is the weight a batch gets in the running statistics: `momentum`, except while these are
    recalibrated.
    """

    def __init__(self, features: int, momentum: float = 0.1, epsilon: float = 1e-5, *, relu: bool = False) -> None:
        check_sizes("BatchNorm", features=features)
        if not 0 < momentum <= 1:
            raise InputError(f"BatchNorm with momentum={momentum!r}: give a number in (0, 1]")
        if not epsilon > 0:
            raise InputError(f"BatchNorm with epsilon={epsilon!r}: give a number above 0")
        self.features, self.momentum, self.epsilon = features, momentum, epsilon
        self.share, self.relu = momentum, relu

    def details(self) -> str:
        return f"{self.features}" + (", relu=True" if self.relu else "")

    def tensors(self) -> tuple[Tensor, ...]:
        shape = (self.features,)
        return (
            Tensor("gamma", shape, "norm", initial=1),
            Tensor("beta", shape, "norm"),
            Tensor("mean", shape, "statistic"),
            Tensor("variance", shape, "statistic", initial=1),
        )

    def output_shape(self, input_shape: Shape) -> Shape:
        if not input_shape or input_shape[-1] != self.features:
            self.refuse(input_shape, f"it takes {self.features} features along the last axis")
        return input_shape

    def join(self, x: Array, beside: Array | None, training: bool) -> Array:
        xp, (mean, inverse, scale, shift, _) = self.xp, self._features
        if training:
            self._measure(x)
        else:
            xp.copyto(mean, self.values["mean"])
            self._invert_root(self.values["variance"])
        xp.multiply(self.values["gamma"], inverse, out=scale)
        xp.multiply(mean, scale, out=shift)
        xp.subtract(self.values["beta"], shift, out=shift)
        factors = self.scratch("factors", (2, 1, self.features))
        xp.copyto(factors[0, 0], scale, casting="same_kind")
        xp.copyto(factors[1, 0], shift, casting="same_kind")
        y = self.scratch("y", x.shape)
        loops.affine(xp, x, factors[0], factors[1], beside, y, self.relu)
        self._x, self._y = x, y
        return y

    def _measure(self, x: Array) -> None:
        """Take the batch's mean and variance; move the running statistics."""
        xp, count = self.xp, x.size // self.features
        if count < 2:
            raise InputError(f"layer {self.title} trains on 1 value a feature, which has no variance: use batch >= 2")
        sums, mean = self._sums, self._features[0]
        loops.moments(xp, x, sums)
        xp.multiply(sums[0, 0], 1 / count, out=mean)
        variance = xp.multiply(sums[1, 0], 1 / count, out=sums[1, 0])
        xp.multiply(mean, mean, out=sums[0, 0])
        xp.subtract(variance, sums[0, 0], out=variance)
        xp.maximum(variance, 0, out=variance)
        self._invert_root(variance)
        self._move("mean", mean, 1)
        self._move("variance", variance, count / (count - 1))

    def _invert_root(self, variance: Array) -> None:
        inverse = self.xp.add(variance, self.epsilon, out=self._features[1])
        self.xp.sqrt(inverse, out=inverse)
        self.xp.divide(1, inverse, out=inverse)

    def _move(self, name: str, batch: Array, factor: float) -> None:
        """Move a running statistic towards the batch's times `factor`."""
        running, moved = self.values[name], self._features[4]
        self.xp.multiply(running, 1 - self.share, out=running)
        self.xp.multiply(batch, self.share * factor, out=moved)
        self.xp.add(running, moved, out=running, casting="same_kind")

    def part(self, dy: Array) -> tuple[Array, Array]:
        """dx = gamma / sqrt(s2 + epsilon) * (dz - dbeta/M - n dgamma/M), with n the normal values and dz = dy where
        ReLU let y through."""
        dz = self.scratch.lend(dy.shape) if self.relu else dy
        self._sum_gradient(dy, dz if self.relu else None)
        return self._back(dz, None), dz

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        self._sum_gradient(dy, None)
        return self._back(dy, self._y if self.relu else None) if want_dx else None

    def _sum_gradient(self, dy: Array, dz: Array | None) -> None:
        """dbeta and dgamma, which stay in float64 too; and dz."""
        xp, sums, (mean, inverse, _, _, work) = self.xp, self._sums, self._features
        loops.gradient_moments(xp, dy, self._x, self._y if self.relu else None, dz, sums)
        dbeta, dgamma = sums[:, 0]
        xp.multiply(dbeta, mean, out=work)
        xp.subtract(dgamma, work, out=dgamma)
        xp.multiply(dgamma, inverse, out=dgamma)
        xp.copyto(self.gradients["beta"], dbeta, casting="same_kind")
        xp.copyto(self.gradients["gamma"], dgamma, casting="same_kind")

    def _back(self, dz: Array, y: Array | None) -> Array:
        """dx from dz, or from dy with the y that masks it."""
        xp, (mean, inverse, scale, _, by_x) = self.xp, self._features
        count = self._x.size // self.features
        dbeta, dgamma = self._sums[:, 0]
        factors = self.scratch("factors back", (3, self.features))
        xp.multiply(dgamma, inverse, out=by_x)
        xp.multiply(by_x, -1 / count, out=by_x)
        xp.multiply(by_x, mean, out=dgamma)
        xp.multiply(dbeta, 1 / count, out=dbeta)
        xp.add(dbeta, dgamma, out=dbeta)
        xp.copyto(factors[0], scale, casting="same_kind")
        xp.multiply(by_x, scale, out=factors[1], casting="same_kind")
        xp.multiply(dbeta, scale, out=dbeta)
        xp.negative(dbeta, out=factors[2], casting="same_kind")
        dx = self.scratch.lend(dz.shape)
        loops.affine_gradient(xp, dz, self._x, y, factors, dx)
        return dx

    @property
    def _features(self) -> tuple[Array, ...]:
        """Float64, a number a feature: mean, 1 / sqrt(variance + epsilon), scale and shift of x, and work memory."""
        return self.scratch.keep("features", (5, self.features), lambda shape: tuple(self._wide("features", shape)))

    @property
    def _sums(self) -> Array:
        return self._wide("sums", (2, 1, self.features))

    def _wide(self, what: str, shape: Shape) -> Array:
        return self.scratch(what, shape, np.float64)
