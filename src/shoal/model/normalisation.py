"""Batch normalisation, over all axes but the last, with the semantics of PyTorch.

In training, with mean m and variance s2 of the batch's M values of a feature (biased, so over M):

    y = gamma (x - m) / sqrt(s2 + epsilon) + beta

and the running statistics move by r <- (1 - momentum) r + momentum * (m, or s2 M/(M-1)). In evaluation the
running statistics take the place of m and s2. S. Ioffe and C. Szegedy, arXiv 1502.03167.
"""

from __future__ import annotations

from shoal.backend import Array
from shoal.errors import InputError
from shoal.model.flat import Shape, Tensor
from shoal.model.layer import Layer, check_sizes


class BatchNorm(Layer):
    """Samples (features,) or (h, w, features) keep their shape.

    `share` is the weight a batch gets in the running statistics: `momentum`, except while these are
    recalibrated.
    """

    def __init__(self, features: int, momentum: float = 0.1, epsilon: float = 1e-5) -> None:
        check_sizes("BatchNorm", features=features)
        if not 0 < momentum <= 1:
            raise InputError(f"BatchNorm with momentum={momentum!r}: give a number in (0, 1]")
        if not epsilon > 0:
            raise InputError(f"BatchNorm with epsilon={epsilon!r}: give a number above 0")
        self.features, self.momentum, self.epsilon = features, momentum, epsilon
        self.share = momentum

    def details(self) -> str:
        return f"{self.features}"

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

    def forward(self, x: Array, training: bool) -> Array:
        y = self.scratch("y", x.shape)
        rows, rows_y = x.reshape(-1, self.features), y.reshape(-1, self.features)
        if training:
            self._normalise(rows, rows_y)
            self.xp.multiply(self._normal, self.values["gamma"], out=rows_y)
            self.xp.add(rows_y, self.values["beta"], out=rows_y)
        else:
            self._apply_running(rows, rows_y)
        return y

    def _normalise(self, rows: Array, work: Array) -> None:
        """Set the normal values of the rows, keep what `backward` needs, move the running statistics."""
        count = len(rows)
        if count < 2:
            raise InputError(f"layer {self.title} trains on 1 value a feature, which has no variance: use batch >= 2")
        xp, shape = self.xp, (self.features,)
        ones = self.scratch("ones", (count,), fill=1)
        mean, variance = self.scratch("mean", shape), self.scratch("variance", shape)
        xp.matmul(ones, rows, out=mean)
        xp.multiply(mean, 1 / count, out=mean)
        self._normal = normal = xp.subtract(rows, mean, out=self.scratch("normal", rows.shape))
        xp.multiply(normal, normal, out=work)
        xp.matmul(ones, work, out=variance)
        xp.multiply(variance, 1 / count, out=variance)
        self._inverse = inverse = xp.add(variance, self.epsilon, out=self.scratch("inverse", shape))
        xp.sqrt(inverse, out=inverse)
        xp.divide(1, inverse, out=inverse)
        xp.multiply(normal, inverse, out=normal)
        self._move("mean", mean, 1)
        self._move("variance", variance, count / (count - 1))

    def _move(self, name: str, batch: Array, factor: float) -> None:
        """Move a running statistic towards the batch's times `factor`; overwrites `batch`."""
        running = self.values[name]
        self.xp.multiply(running, 1 - self.share, out=running)
        self.xp.multiply(batch, self.share * factor, out=batch)
        self.xp.add(running, batch, out=running)

    def _apply_running(self, rows: Array, out: Array) -> None:
        """Normalise by the running statistics."""
        xp = self.xp
        scale = xp.add(self.values["variance"], self.epsilon, out=self.scratch("scale", (self.features,)))
        xp.sqrt(scale, out=scale)
        xp.divide(self.values["gamma"], scale, out=scale)
        xp.subtract(rows, self.values["mean"], out=out)
        xp.multiply(out, scale, out=out)
        xp.add(out, self.values["beta"], out=out)

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        """dx = gamma / sqrt(s2 + epsilon) * (dy - dbeta/M - n dgamma/M), n the normal values."""
        xp, shape = self.xp, (self.features,)
        rows, normal = dy.reshape(-1, self.features), self._normal
        dgamma, dbeta = self.gradients["gamma"], self.gradients["beta"]
        ones = self.scratch("ones", rows.shape[:1], fill=1)
        dx = self.scratch("dx", dy.shape)
        work = dx.reshape(-1, self.features)
        xp.multiply(rows, normal, out=work)
        xp.matmul(ones, work, out=dgamma)
        xp.matmul(ones, rows, out=dbeta)
        if not want_dx:
            return None
        mean = xp.multiply(dgamma, 1 / len(rows), out=self.scratch("dmean", shape))
        xp.multiply(normal, mean, out=work)
        xp.subtract(rows, work, out=work)
        xp.multiply(dbeta, 1 / len(rows), out=mean)
        xp.subtract(work, mean, out=work)
        xp.multiply(self.values["gamma"], self._inverse, out=mean)
        xp.multiply(work, mean, out=work)
        return dx
