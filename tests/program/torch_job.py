"""Cases of PyTorch modules and datasets, trained on the ranks of this job: `torch_job.py CASE EPOCHS [DIR]`.

The master prints what came out as JSON; every rank checks that its own module holds it, and that the generators are
where they were."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

import shoal
import shoal.torch


class Net(nn.Module):
    """Batch norm, dropout, an unused layer, a buffer that is replaced, and draws of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.last, self.unused = nn.Linear(16, 3), nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Noisy in training."""
        y = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        if self.training:
            self.steps = self.steps + 1
            y = y * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        return y


class Samples(torch.utils.data.Dataset):
    """Rows of x with labels; `noise` is drawn anew for each item, from all three generators."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, noise: float) -> None:
        self.x, self.y, self.noise = x, y, noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = torch.randn(8) + float(np.random.rand()) + random.random()
        return self.x[index] + self.noise * drawn, int(self.y[index])


def points(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 8 numbers in 3 classes."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(5))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def datasets() -> dict[str, Any]:
    """User augmentation, growing, K = 2."""
    x, y = points(150)
    sets = (Samples(x[:90], y[:90], 0.1), Samples(x[90:120], y[90:120], 0.0), Samples(x[120:], y[120:], 0.0))
    stages = {"learners": "0:3, 1:4, 2:1", "averaging": shoal.Averaging(steps=2, momentum=0.5)}
    return {"data": sets, "classes": 3, "batch": 3, "batchnorm_eval": "recalibrate", **stages}


def arrays() -> dict[str, Any]:
    """Arrays, with local momentum that is averaged, and weight decay."""
    x, y = (part.numpy() for part in points(120))
    local = {"local_momentum": 0.9, "local_momentum_at_reduction": "average", "weight_decay": 1e-3}
    stages = {"learners": "0:4", "averaging": shoal.Averaging(steps=3, momentum=0.5), "learning_rate": 0.02}
    return {"data": (x[:90], y[:90], x[90:], y[90:]), "batch": 2, **local, **stages}


def main() -> None:
    """Train the case."""
    case, epochs, out = sys.argv[1], float(sys.argv[2]), (sys.argv[3:] or [None])[0]
    options = {"datasets": datasets, "arrays": arrays}[case]()
    from mpi4py import MPI

    # Each rank starts elsewhere; the master's values count.
    torch.manual_seed(3 + MPI.COMM_WORLD.rank)
    module = Net()
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    result = shoal.train(shoal.torch.Model(module), epochs=epochs, out=out, resume=bool(out), progress=False, **options)
    drawn = float(torch.rand(1)), np.random.rand(), random.random()
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    assert drawn == (float(torch.rand(1)), np.random.rand(), random.random())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, torch.from_numpy(np.array(result.parameters[name])).to(tensor.dtype)), name
    assert module.steps == module.norm.num_batches_tracked == result.history[-1]["serial_steps"]
    if result.master:
        end = {key: result.history[-1][key] for key in ("digest", "test", "serial_steps")}
        print("END", json.dumps({**end, "torch": result.history[0]["torch"]}), flush=True)


if __name__ == "__main__":
    main()
