"""Two-dimensional convolution as one matrix product.

The windows of the padded images are copied into the rows of a matrix (im2col), so that for every output
pixel  y = row(window) W + b  with W of shape (kernel, kernel, inputs, outputs). Backwards, the gradient of
that matrix is added up over the pixels that windows share (col2im). The matrices and their views are made
once for each batch size.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.backend import Array
from shoal.model.flat import Shape, Tensor
from shoal.model.layer import Layer, check_sizes


@dataclass(frozen=True)
class _Unfold:
    """Images to matrix: copy x to `interior`, then `windows` to `columns`, which `matrix` (pixels, K) views."""

    interior: Array
    windows: Array
    columns: Array
    matrix: Array


@dataclass(frozen=True)
class _Fold:
    """Matrix to images: clear `padded`, add each part of `matrix` to its place, copy `interior` to dx."""

    matrix: Array
    padded: Array
    interior: Array
    parts: tuple[tuple[Array, Array], ...]


class Conv2d(Layer):
    """Samples (h, w, inputs) become (h', w', outputs) with h' = (h + 2 padding - kernel) // stride + 1."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 0, *, bias: bool = True
    ) -> None:
        check_sizes("Conv2d", inputs=inputs, outputs=outputs, kernel=kernel, stride=stride)
        check_sizes("Conv2d", least=0, padding=padding)
        self.inputs, self.outputs, self.bias = inputs, outputs, bias
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def details(self) -> str:
        text = f"{self.inputs}, {self.outputs}, kernel={self.kernel}, stride={self.stride}, padding={self.padding}"
        return text + ("" if self.bias else ", bias=False")

    def tensors(self) -> tuple[Tensor, ...]:
        weight = Tensor("weight", (self.kernel, self.kernel, self.inputs, self.outputs), "weight")
        return (weight, Tensor("bias", (self.outputs,), "bias")) if self.bias else (weight,)

    def output_shape(self, input_shape: Shape) -> Shape:
        if len(input_shape) != 3:
            self.refuse(input_shape, "it takes images, whose axes are height, width and channels")
        height, width, channels = input_shape
        if channels != self.inputs:
            self.refuse(input_shape, f"it takes {self.inputs} channels; write Conv2d({channels}, ...)")
        if min(height, width) + 2 * self.padding < self.kernel:
            self.refuse(input_shape, "its kernel is larger than the padded image; use a smaller one or more padding")
        return (self._outputs_along(height), self._outputs_along(width), self.outputs)

    def _outputs_along(self, side: int) -> int:
        return (side + 2 * self.padding - self.kernel) // self.stride + 1

    def forward(self, x: Array, training: bool) -> Array:
        batch, height, width, _ = self._shape = x.shape
        self._matrix = self._unfold(x)
        y = self.scratch("y", (batch, self._outputs_along(height), self._outputs_along(width), self.outputs))
        rows = y.reshape(-1, self.outputs)
        self.xp.matmul(self._matrix, self.values["weight"].reshape(-1, self.outputs), out=rows)
        if self.bias:
            self.xp.add(rows, self.values["bias"], out=rows)
        return y

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        rows = dy.reshape(-1, self.outputs)
        self.xp.matmul(self._matrix.T, rows, out=self.gradients["weight"].reshape(-1, self.outputs))
        if self.bias:
            self.xp.matmul(self.scratch("ones", rows.shape[:1], fill=1), rows, out=self.gradients["bias"])
        return self._fold(rows) if want_dx else None

    @property
    def _pointwise(self) -> bool:
        """Whether the images are the matrix already."""
        return self.kernel == 1 and self.stride == 1 and self.padding == 0

    def _unfold(self, x: Array) -> Array:
        """The windows of x as a matrix (pixels of y, kernel * kernel * inputs)."""
        if self._pointwise:
            return x.reshape(-1, self.inputs)
        to = self.scratch.keep("unfold", x.shape, self._make_unfold)
        self.xp.copyto(to.interior, x)
        self.xp.copyto(to.columns, to.windows)
        return to.matrix

    def _fold(self, rows: Array) -> Array:
        """The gradient by x from that by the rows of y."""
        weight = self.values["weight"].reshape(-1, self.outputs)
        dx = self.scratch.lend(self._shape)
        if self._pointwise:
            self.xp.matmul(rows, weight.T, out=dx.reshape(-1, self.inputs))
            return dx
        to = self.scratch.keep("fold", self._shape, self._make_fold)
        self.xp.matmul(rows, weight.T, out=to.matrix)
        to.padded.fill(0)
        for target, part in to.parts:
            self.xp.add(target, part, out=target)
        self.xp.copyto(dx, to.interior)
        return dx

    def _windows(self, padded: Array, row: int, column: int, height: int, width: int) -> Array:
        """All windows of `padded` as a view (batch, h', w', height, width, inputs), each `height` by `width`
        pixels that start at (row, column) of the full window."""
        batch, padded_height, padded_width, channels = padded.shape
        rows = (padded_height - self.kernel) // self.stride + 1
        columns = (padded_width - self.kernel) // self.stride + 1
        a, b, c, d = padded.strides
        return self.xp.lib.stride_tricks.as_strided(
            padded[:, row:, column:],
            (batch, rows, columns, height, width, channels),
            (a, b * self.stride, c * self.stride, b, c, d),
        )

    def _interior(self, padded: Array) -> Array:
        """The images without their padding."""
        _, height, width, _ = padded.shape
        return padded[:, self.padding : height - self.padding, self.padding : width - self.padding]

    def _padded(self, what: str, shape: Shape, fill: float | None = None) -> Array:
        batch, height, width, channels = shape
        wide = (batch, height + 2 * self.padding, width + 2 * self.padding, channels)
        return self.scratch(what, wide, fill=fill)

    def _make_unfold(self, shape: Shape) -> _Unfold:
        padded = self._padded("padded", shape, fill=0)
        windows = self._windows(padded, 0, 0, self.kernel, self.kernel)
        across = self.kernel * self.inputs
        if across < windows.shape[2]:
            # Few channels: rows of pixels are longer than those of windows, so copying along them is faster.
            windows = windows.transpose(3, 4, 5, 0, 1, 2)
            columns = self.scratch("columns", windows.shape)
            matrix = columns.reshape(self.kernel * across, -1).T
        else:
            columns = self.scratch("columns", windows.shape)
            matrix = columns.reshape(-1, self.kernel * across)
        return _Unfold(self._interior(padded), windows, columns, matrix)

    def _make_fold(self, shape: Shape) -> _Fold:
        """The windows are cut into blocks of at most `stride` by `stride` pixels: within a block no two windows
        share a pixel, so that one addition adds up a block of all windows."""
        padded = self._padded("dpadded", shape)
        windows = self._windows(padded, 0, 0, self.kernel, self.kernel).shape
        dcolumns = self.scratch("dcolumns", windows)
        parts = []
        for row in range(0, self.kernel, self.stride):
            height = min(self.stride, self.kernel - row)
            for column in range(0, self.kernel, self.stride):
                width = min(self.stride, self.kernel - column)
                part = dcolumns[:, :, :, row : row + height, column : column + width]
                parts.append((self._windows(padded, row, column, height, width), part))
        matrix = dcolumns.reshape(-1, self.kernel * self.kernel * self.inputs)
        return _Fold(matrix, padded, self._interior(padded), tuple(parts))
