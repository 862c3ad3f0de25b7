"""The nets as PyTorch users write them, and a training step of each: what shoal's are checked and timed against.

In a venv with torch, `python bench/peers/torch_nets.py NET WIDTH BATCH` waits for lines on its input; at each it trains
a step and prints how long it took in seconds, and at the end the growth of its peak memory in MB.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10


def conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


class Block(nn.Module):
    """The block of ResNet-18 and ResNet-20."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv3(outputs, outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ExcitedBlock(nn.Module):
    """The block of SENet-18: norms before the convolutions, squeeze-excitation at the end."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), conv3(inputs, outputs, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), conv3(outputs, outputs)
        self.shortcut = None
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        squeezed = max(1, outputs // 16)
        self.fc1, self.fc2 = nn.Conv2d(outputs, squeezed, 1), nn.Conv2d(squeezed, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(x))
        beside = x if self.shortcut is None else self.shortcut(y)
        y = self.conv2(functional.relu(self.bn2(self.conv1(y))))
        scale = functional.relu(self.fc1(functional.adaptive_avg_pool2d(y, 1)))
        return y * torch.sigmoid(self.fc2(scale)) + beside


class ResidualNet(nn.Module):
    """A 3x3 convolution, stages of blocks, the mean over the image, a linear layer."""

    def __init__(self, block: type[nn.Module], stages: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3(3, width), nn.BatchNorm2d(width)
        self.stages = len(stages)
        inputs = width
        for stage, count in enumerate(stages):
            blocks = []
            for place in range(count):
                blocks.append(block(inputs, width << stage, 2 if stage and not place else 1))
                inputs = width << stage
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.linear(x.mean((2, 3)))


def make(net: str, width: int, classes: int = CLASSES) -> nn.Module:
    """A net by shoal's name for it; the mlp is 784-`width`-`width`-`classes`."""
    if net == "mlp":
        layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)]
        return nn.Sequential(*layers)
    stages = (3, 3, 3) if net == "resnet20" else (2, 2, 2, 2)
    return ResidualNet(ExcitedBlock if net == "senet18" else Block, stages, width, classes)


def torch_name(name: str, net: str) -> str:
    """PyTorch's name of a tensor, as shoal's resnets.py explains it."""
    name = name.replace(".body.", ".").replace(".gate.", ".").replace(".block.", ".")
    name = name.replace(".joint.", "." if net == "senet18" else ".bn2.")
    if net == "senet18":
        name = name.replace(".shortcut.0.", ".shortcut.")
    ends = {"gamma": "weight", "beta": "bias", "mean": "running_mean", "variance": "running_var"}
    stem, _, end = name.rpartition(".")
    return f"{stem}.{ends.get(end, end)}"


def as_torch(array: np.ndarray, like: Tensor) -> np.ndarray:
    """A tensor of shoal's in the order of PyTorch's axes."""
    axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim, (0,))
    return np.ascontiguousarray(array.transpose(axes)).reshape(like.shape)


def peak_mb() -> float:
    """Of this program; ru_maxrss would begin with that of the one that started it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    """Train a step for each line read."""
    torch.set_num_threads(1)
    name, width, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    before_mb = peak_mb()
    net = make(name, width)
    x, y = torch.randn(batch, *((784,) if name == "mlp" else (3, 32, 32))), torch.randint(0, CLASSES, (batch,))
    if x.ndim == 4:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for _ in sys.stdin:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        spent = {"step_s": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s}
        print(json.dumps(spent), flush=True)
    print(json.dumps({"growth_mb": peak_mb() - before_mb}), flush=True)


if __name__ == "__main__":
    main()
