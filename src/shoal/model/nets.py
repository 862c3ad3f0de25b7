"""The nets that a config can name.

    mlp          flatten, then a linear layer, ReLU and `dropout` for each width of `hidden`, then a linear layer
    convnet-s    3x3 convolution to `width` channels, max pooling by 2, ReLU; 3x3 convolution to 4 `width`
                 channels, ReLU; max pooling down to 4 to 7 pixels a side; a linear layer
    resnet18, resnet20, senet18: see resnets.py; `width` channels in the first stage

(Pooling before ReLU gives what ReLU before pooling gives, on a quarter of the pixels.) With `batchnorm`, batch
norm stands before each ReLU of the first two, and the layer with weights before it has no bias. Bigger or other nets
are made from the layers themselves.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.errors import InputError
from shoal.model.convolution import Conv2d
from shoal.model.dropout import Dropout
from shoal.model.flat import Shape
from shoal.model.layer import Layer, check_sizes
from shoal.model.layers import Flatten, Linear, ReLU, Sequential
from shoal.model.normalisation import BatchNorm
from shoal.model.pooling import MaxPool
from shoal.model.resnets import resnet18, resnet20, senet18

DEFAULT_WIDTH = 16
POOLED_SIDE = 4


class NetOptions(Protocol):
    """What `build` reads: the net's name, the mlp's hidden widths and dropout, the others' width (0: 16), batch norm
    of the first two."""

    @property
    def net(self) -> str: ...
    @property
    def hidden(self) -> Sequence[int]: ...
    @property
    def dropout(self) -> float: ...
    @property
    def width(self) -> int: ...
    @property
    def batchnorm(self) -> bool: ...


def build(options: NetOptions, sample_shape: Shape, outputs: int) -> Sequential:
    """The net that `options` name, for samples of `sample_shape` and this many outputs."""
    builders: dict[str, Callable[[NetOptions, Shape, int], Sequential]] = {"mlp": _mlp, "convnet-s": _convnet_s}
    builders |= {make.__name__: functools.partial(_residual, make) for make in (resnet18, resnet20, senet18)}
    if options.net not in builders:
        near = difflib.get_close_matches(options.net, builders, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"the nets are {', '.join(builders)}"
        raise InputError(f"net {options.net!r} is not known: {hint}")
    return builders[options.net](options, sample_shape, outputs)


def _mlp(options: NetOptions, sample_shape: Shape, outputs: int) -> Sequential:
    layers: list[Layer] = [Flatten()]
    inputs = math.prod(sample_shape)
    for width in options.hidden:
        check_sizes("net mlp", hidden=width)
        layers.append(Linear(inputs, width, bias=not options.batchnorm))
        layers += _activation(width, options.batchnorm)
        layers += [Dropout(options.dropout)] if options.dropout else []
        inputs = width
    return Sequential(*layers, Linear(inputs, outputs))


def _residual(
    make: Callable[[int, int, int], Sequential], options: NetOptions, shape: Shape, outputs: int
) -> Sequential:
    width, channels = _image_sizes(options, shape)
    return make(width, outputs, channels)


def _image_sizes(options: NetOptions, sample_shape: Shape) -> tuple[int, int]:
    """The width of a net for images, and their channels."""
    name = options.net
    if len(sample_shape) != 3:
        raise InputError(
            f"net {name} takes images (height, width, channels), not samples of shape {sample_shape}: use net mlp"
        )
    check_sizes(f"net {name}", least=0, width=options.width)
    return options.width or DEFAULT_WIDTH, sample_shape[2]


def _convnet_s(options: NetOptions, sample_shape: Shape, outputs: int) -> Sequential:
    width, channels = _image_sizes(options, sample_shape)
    bias, norm = not options.batchnorm, options.batchnorm
    layers = [
        Conv2d(channels, width, 3, padding=1, bias=bias),
        MaxPool(2),
        *_activation(width, norm),
        Conv2d(width, 4 * width, 3, padding=1, bias=bias),
        *_activation(4 * width, norm),
    ]
    height, breadth, _ = Sequential(*layers).output_shape(sample_shape)
    size = min(height, breadth) // POOLED_SIDE
    if size > 1:
        layers.append(MaxPool(size))
    layers.append(Flatten())
    return Sequential(*layers, Linear(Sequential(*layers).output_shape(sample_shape)[0], outputs))


def _activation(width: int, batchnorm: bool) -> list[Layer]:
    return [BatchNorm(width), ReLU()] if batchnorm else [ReLU()]
