"""The PyTorch modules and samples that torch_step.py and peers/ddp.py train, written as anybody writes them."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import nn

BATCH, RATE = 64, 0.01
SAMPLES = {"mlp": 2 * BATCH * 40, "resnet18": 2 * BATCH * 4}


def samples(net: str) -> tuple[np.ndarray, np.ndarray]:
    """Noise with labels: x float32, of MNIST's or CIFAR-10's shape."""
    generator = np.random.default_rng(1)
    shape = (784,) if net == "mlp" else (3, 32, 32)
    x = generator.standard_normal((SAMPLES[net], *shape), np.float32)
    return x, generator.integers(0, 10, len(x))


def build(net: str) -> nn.Module:
    """The module, the same in all processes: mlp (784-784-512-256-10) or resnet18 for 32x32 images."""
    torch.manual_seed(1)
    return _mlp(784, 784, 512, 256, 10) if net == "mlp" else _resnet18()


def _mlp(*widths: int) -> nn.Module:
    layers = [layer for ends in itertools.pairwise(widths) for layer in (nn.Linear(*ends), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _resnet18() -> nn.Module:
    blocks, channels = [], 64
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        blocks.append(Block(channels, width, stride))
        channels = width
    stem = (nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = stride == 1 and channels == width
        projection = (nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.shortcut = nn.Identity() if same else nn.Sequential(*projection)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As in K. He et al., arXiv 1512.03385."""
        return torch.relu(self.body(x) + self.shortcut(x))
