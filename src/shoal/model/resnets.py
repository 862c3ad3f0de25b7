"""Residual nets for small images: a 3x3 convolution first, no pooling before the last layers, no biases but the last.

    resnet18    K. He et al. 2015 (arXiv 1512.03385) in the form common for CIFAR-10: four stages of two blocks
    resnet20    the same paper's net for CIFAR-10: three stages of three blocks, with projection shortcuts
    senet18     resnet18 with the batch norms before the convolutions (arXiv 1603.05027) and squeeze-excitation

A stage has twice the channels of the one before it, on half as many lines and columns. Parameters are named as in the
usual PyTorch code, with `body`, `joint` and `shortcut` in between: `layer2.0.body.conv1.weight` is its
`layer2.0.conv1.weight`, transposed from (kernel, kernel, inputs, outputs) to (outputs, inputs, kernel, kernel); a
block's `joint` is its `bn2`, in senet18 its `fc1` and `fc2`; `gamma`, `beta`, `mean` and `variance` are the `weight`,
`bias`, `running_mean` and `running_var` of a batch norm.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.model.convolution import Conv2d
from shoal.model.layer import Layer, check_sizes
from shoal.model.layers import Linear, Sequential
from shoal.model.normalisation import BatchNorm
from shoal.model.pooling import GlobalPool
from shoal.model.residual import Residual, SqueezeExcitation

MakeBlock = Callable[[int, int, int], Layer]
"""A block from its inputs, outputs and stride."""


def resnet18(width: int = 64, classes: int = 10, channels: int = 3) -> Sequential:
    """11,173,962 parameters at width 64, the channels of the first stage."""
    return _net("resnet18", (2, 2, 2, 2), _block, (width, classes, channels))


def resnet20(width: int = 16, classes: int = 10, channels: int = 3) -> Sequential:
    """272,474 parameters at width 16, the channels of the first stage."""
    return _net("resnet20", (3, 3, 3), _block, (width, classes, channels))


def senet18(width: int = 64, classes: int = 10, channels: int = 3) -> Sequential:
    """11,260,354 parameters at width 64, the channels of the first stage."""
    return _net("senet18", (2, 2, 2, 2), _excited_block, (width, classes, channels))


def _net(name: str, stages: tuple[int, ...], make: MakeBlock, sizes: tuple[int, int, int]) -> Sequential:
    width, classes, channels = sizes
    check_sizes(f"net {name}", width=width, classes=classes, channels=channels)
    parts: dict[str, Layer] = {"conv1": _conv(channels, width), "bn1": BatchNorm(width, relu=True)}
    inputs = width
    for stage, count in enumerate(stages):
        outputs, blocks = width << stage, []
        for place in range(count):
            blocks.append(make(inputs, outputs, 2 if stage and not place else 1))
            inputs = outputs
        parts[f"layer{stage + 1}"] = Sequential(*blocks)
    return Sequential(**parts, pool=GlobalPool(), linear=Linear(inputs, classes))


def _conv(inputs: int, outputs: int, stride: int = 1, kernel: int = 3) -> Conv2d:
    return Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _block(inputs: int, outputs: int, stride: int) -> Layer:
    """relu(bn(conv(relu(bn(conv(x))))) + x), x projected by a convolution and batch norm where sizes differ."""
    body = Sequential(
        conv1=_conv(inputs, outputs, stride), bn1=BatchNorm(outputs, relu=True), conv2=_conv(outputs, outputs)
    )
    shortcut = None
    if stride > 1 or inputs != outputs:
        shortcut = Sequential(_conv(inputs, outputs, stride, kernel=1), BatchNorm(outputs))
    return Residual(body, shortcut, BatchNorm(outputs, relu=True))


def _excited_block(inputs: int, outputs: int, stride: int) -> Layer:
    """excited(conv(relu(bn(conv(z))))) + x, z = relu(bn(x)); where sizes differ, with z projected for x."""
    first = BatchNorm(inputs, relu=True)
    parts = {"conv1": _conv(inputs, outputs, stride), "bn2": BatchNorm(outputs, relu=True)}
    parts["conv2"] = _conv(outputs, outputs)
    if stride == 1 and inputs == outputs:
        return Residual(Sequential(bn1=first, **parts), joint=SqueezeExcitation(outputs))
    shortcut = _conv(inputs, outputs, stride, kernel=1)
    return Sequential(bn1=first, block=Residual(Sequential(**parts), shortcut, SqueezeExcitation(outputs)))
