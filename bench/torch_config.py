"""A config trained with its net as a PyTorch module: `shoal launch -n 2 bench/torch_config.py CONFIG [--out DIR]`.

The module starts from the weights that the net of shoal's layers would start from, and trains by the same config, so
that `shoal launch -n 2 CONFIG` is the same run but for the rounding of PyTorch's layers: `shoal compare` shows both.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import shoal
import shoal.torch
from peers import torch_nets
from shoal import config as configs
from shoal.backend import numpy_backend
from shoal.config import Config
from shoal.data.sets import open_set
from shoal.model import FlatBuffer, Model
from shoal.model.nets import build


def module(config: Config) -> nn.Module:
    """The net of the config, resnet18, resnet20 or senet18, as PyTorch users write it."""
    data, backend, net = open_set(config.data, config.seed), numpy_backend(), config.model.net
    own = Model(build(config.model, data.sample_shape, data.outputs), data.sample_shape, config.model.loss, backend)
    start = FlatBuffer(own.layout, backend)
    own.initialise(start.flat, config.seed)
    made = torch_nets.make(net, config.model.width, data.outputs)
    state = made.state_dict()
    for name, values in start.views.items():
        tensor = state[torch_nets.torch_name(name, net)]
        tensor.copy_(torch.from_numpy(torch_nets.as_torch(values, tensor)))
    return made


def train(config: Config, out: str | None) -> Any:
    """Train the module by the config. Collective."""
    sections: dict[str, Any] = {**msgspec.to_builtins(config.train), **msgspec.to_builtins(config.run)}
    data = {key: value for key, value in msgspec.to_builtins(config.data).items() if key != "set"}
    return shoal.train(
        shoal.torch.Model(module(config), channels="last"),
        config.data.set,
        learners=msgspec.to_builtins(config.learners.schedule),
        averaging=config.averaging,
        learning_rate=config.learning_rate,
        out=out,
        name=config.name,
        seed=config.seed,
        **sections,
        **data,
    )


def main() -> None:
    """Train on all ranks of the job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", metavar="DIR")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for shoal launch")
    options = parser.parse_args()
    result = train(configs.load(options.config, options.set), options.out)
    if result.master:
        print(f"test accuracy {100 * result.accuracy:.2f}%", flush=True)


if __name__ == "__main__":
    main()
