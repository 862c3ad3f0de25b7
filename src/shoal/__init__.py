"""shoal: elastic data-parallel training on MPI ranks.

    result = shoal.train(model, data, learners="0:2, 20:8", averaging=shoal.Averaging(steps=8, momentum=0.5))

Names are loaded when they are used, so that importing shoal costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "shoal.api": ("train",),
    "shoal.run": ("Result",),
    "shoal.config": ("Averaging", "LearningRate"),
    "shoal.elastic.policy": ("Resize", "Situation"),
    "shoal.errors": ("InputError", "ShoalError", "Stopped"),
    "shoal.data.sets": ("DataSet",),
    "shoal.model": (
        "AveragePool", "BatchNorm", "Conv2d", "Dropout", "Flatten", "GlobalPool", "Linear", "MaxPool", "ReLU",
        "Residual", "Sequential", "Sigmoid", "SqueezeExcitation", "resnet18", "resnet20", "senet18",
    ),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name == "torch":
        return importlib.import_module("shoal.torch")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "torch"])
