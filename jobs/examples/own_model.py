"""A net and arrays of your own: `shoal launch -n 4 jobs/examples/own_model.py [--tensorboard DIR]`.

Every rank runs this file; `shoal.train` gives each its part of the work and the same result.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import shoal


def two_rings(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of two noisy rings, x (N, 2) float32, and which ring, y (N,)."""
    generator = np.random.Generator(np.random.Philox(seed))
    y = generator.integers(0, 2, samples)
    angle = generator.uniform(0, 2 * np.pi, samples)
    radius = 1.0 + y + generator.normal(0, 0.2, samples)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(np.float32), y


def tensorboard(directory: str) -> Any:
    """An on_event callback that writes scalars for TensorBoard (pip install tensorboardX)."""
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(directory)

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            for name in ("loss", "rate", "learners", "ranks"):
                writer.add_scalar(f"train/{name}", event[name], event["learner_steps"])
        elif event["event"] == "evaluation":
            writer.add_scalar("test/accuracy", event["test"]["accuracy"], event["learner_steps"])

    return on_event


options = argparse.ArgumentParser()
options.add_argument("--tensorboard", metavar="DIR")
directory = options.parse_args().tensorboard

model = shoal.Sequential(
    shoal.Linear(2, 32),
    shoal.ReLU(),
    shoal.Residual(shoal.Sequential(shoal.Linear(32, 32), shoal.ReLU(), shoal.Linear(32, 32))),
    shoal.ReLU(),
    shoal.Linear(32, 2),
)
result = shoal.train(
    model,
    data=(*two_rings(4000, seed=1), *two_rings(1000, seed=2)),
    learners="0:1, 2:2, 50%:4",
    averaging=shoal.Averaging(steps=4, momentum=0.5),
    learning_rate=0.1,
    epochs=8,
    batch=16,
    on_event=tensorboard(directory) if directory else None,
)
for name, parameter in result.parameters.items():
    assert np.isfinite(parameter).all(), name
if result.master:
    print(f"test accuracy {100 * result.accuracy:.1f}%", flush=True)
