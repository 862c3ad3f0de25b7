"""Two-dimensional convolution as matrix products.

The windows of the images are the rows of a matrix (im2col), so that for every output pixel  y = row(window) W + b
with W of shape (kernel, kernel, inputs, outputs). The matrix is made and used a block of output pixels at a time,
small enough to stay in the cache, in memory that all layers share. Backwards, with stride 1, dx is a convolution of
dy with mirrored weights; else the gradient of the matrix is added up over the pixels that windows share (col2im).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal.backend import Array
from shoal.kernels import layers as loops
from shoal.kernels.layers import Block, Windows
from shoal.model.flat import Shape, Tensor
from shoal.model.layer import Layer, Scratch, check_sizes

BLOCK_BYTES = 1 << 20
"""Of a block's windows, at least, if there are so many: it should stay in the second cache."""
BLOCK_WEIGHTS = 2
"""And as many numbers as this many times the weights, which each block reads and whose gradient it adds to."""


class Conv2d(Layer):
    """Samples (h, w, inputs) become (h', w', outputs) with h' = (h + 2 padding - kernel) // stride + 1."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 0, *, bias: bool = True
    ) -> None:
        check_sizes("Conv2d", inputs=inputs, outputs=outputs, kernel=kernel, stride=stride)
        check_sizes("Conv2d", least=0, padding=padding)
        self.inputs, self.outputs, self.bias = inputs, outputs, bias
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.windows = Windows(kernel, stride, padding)

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
        return (self.windows.along(height), self.windows.along(width), self.outputs)

    def forward(self, x: Array, training: bool) -> Array:
        self._x = x
        batch, height, width, _ = x.shape
        y = self.scratch("y", (batch, self.windows.along(height), self.windows.along(width), self.outputs))
        rows, weight = y.reshape(-1, self.outputs), self._weight
        if self._pointwise:
            self.xp.matmul(x.reshape(-1, self.inputs), weight, out=rows)
        else:
            for block, at, columns in self._blocks("y", x, self.windows):
                loops.unfold(self.xp, x, self.windows, block, columns)
                self.xp.matmul(columns, weight, out=rows[at])
        if self.bias:
            self.xp.add(rows, self.values["bias"], out=rows)
        return y

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        rows, by_weight = dy.reshape(-1, self.outputs), self.gradients["weight"]
        if self.bias:
            self.xp.matmul(self.scratch("ones", rows.shape[:1], fill=1), rows, out=self.gradients["bias"])
        dx = self.scratch.lend(self._x.shape) if want_dx else None
        if self._pointwise:
            self.xp.matmul(self._x.reshape(-1, self.inputs).T, rows, out=by_weight.reshape(-1, self.outputs))
            if dx is not None:
                self.xp.matmul(rows, self._weight.T, out=dx.reshape(-1, self.inputs))
        elif dx is not None and self.stride == 1 and self.padding < self.kernel:
            self._backward_mirrored(dy, dx)
        else:
            self._backward_folded(rows, dx)
        return dx

    @property
    def _weight(self) -> Array:
        """As a matrix, (kernel * kernel * inputs, outputs)."""
        return self.values["weight"].reshape(-1, self.outputs)

    @property
    def _pointwise(self) -> bool:
        """Whether the images are the matrix already."""
        return self.kernel == 1 and self.stride == 1 and self.padding == 0

    def _backward_folded(self, rows: Array, dx: Array | None) -> None:
        """By the windows of x; dx adds up what its pixels get from the windows that share them."""
        total = _Sum(self.gradients["weight"].reshape(-1, self.outputs), self.scratch, self.xp)
        if dx is not None:
            dx.fill(0)
        for block, at, columns in self._blocks("y", self._x, self.windows):
            loops.unfold(self.xp, self._x, self.windows, block, columns)
            total.add_product(columns.T, rows[at])
            if dx is not None:
                self.xp.matmul(rows[at], self._weight.T, out=columns)
                loops.fold(self.xp, columns, self.windows, block, dx)
        total.close()

    def _backward_mirrored(self, dy: Array, dx: Array) -> None:
        """By the windows of dy: dx is the convolution of dy with the mirrored weights, and the same windows by x are
        the mirrored gradient of the weights."""
        kernel, xp = self.kernel, self.xp
        windows = loops.Windows(kernel, 1, kernel - 1 - self.padding)
        shape = (kernel, kernel, self.outputs, self.inputs)
        weight, by_weight = self.scratch.lend(shape), self.scratch.lend(shape)
        loops.mirror(xp, self.values["weight"], weight)
        matrix, rows_x, rows_dx = (one.reshape(-1, self.inputs) for one in (weight, self._x, dx))
        total = _Sum(by_weight.reshape(-1, self.inputs), self.scratch, xp)
        for block, at, columns in self._blocks("dx", dy, windows):
            loops.unfold(xp, dy, windows, block, columns)
            xp.matmul(columns, matrix, out=rows_dx[at])
            total.add_product(columns.T, rows_x[at])
        total.close()
        loops.mirror(xp, by_weight, self.gradients["weight"])
        self.scratch.release(weight)
        self.scratch.release(by_weight)

    def _blocks(self, what: str, images: Array, windows: Windows) -> Iterator[tuple[Block, slice, Array]]:
        """The output pixels of `windows` in blocks: each block, its rows of all pixels, memory for its windows."""

        def plan(shape: Shape) -> tuple[tuple[Block, slice], ...]:
            return tuple(self._cut(shape, windows))

        blocks = self.scratch.keep(what, images.shape, plan)
        rows, row = blocks[0][1].stop, self.kernel * self.kernel * images.shape[3]
        work = self.scratch.lend((rows, row))
        for block, at in blocks:
            count = at.stop - at.start
            yield block, at, work if count == rows else work[:count]
        self.scratch.release(work)

    def _cut(self, shape: Shape, windows: Windows) -> Iterator[tuple[Block, slice]]:
        """Each block and its rows of all; the first is the largest."""
        batch, height, width, channels = shape
        row, columns = self.kernel * self.kernel * channels, windows.along(width)
        numbers = max(BLOCK_BYTES // self.scratch.dtype.itemsize, BLOCK_WEIGHTS * row * self.outputs)
        start = 0
        for block in cut(batch, windows.along(height), max(1, numbers // (row * columns))):
            rows = block.images * block.lines * columns
            yield block, slice(start, start + rows)
            start += rows


class _Sum:
    """A sum of products in `out`, in the order in which they come."""

    def __init__(self, out: Array, scratch: Scratch, xp: Any) -> None:
        self._out, self._scratch, self._xp = out, scratch, xp
        self._part: Array = None
        self._first = True

    def add_product(self, left: Array, right: Array) -> None:
        if self._first:
            self._xp.matmul(left, right, out=self._out)
            self._first = False
            return
        if self._part is None:
            self._part = self._scratch.lend(self._out.shape)
        self._xp.matmul(left, right, out=self._part)
        self._xp.add(self._out, self._part, out=self._out)

    def close(self) -> None:
        self._scratch.release(self._part)


def cut(images: int, lines: int, most: int) -> Iterator[Block]:
    """The lines of all images in blocks of at most `most` lines: parts of an image, or whole ones where they fit."""
    if most < lines:
        count = -(-lines // most)
        each = -(-lines // count)
        for image in range(images):
            for line in range(0, lines, each):
                yield Block(image, 1, line, min(each, lines - line))
        return
    count = -(-images // (most // lines))
    each = -(-images // count)
    for image in range(0, images, each):
        yield Block(image, min(each, images - image), 0, lines)
