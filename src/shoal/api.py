"""The Python API: `shoal.train` runs a net and data of your own with everything the command line has.

Start the script with `shoal launch -n 4 my_training.py`; run plainly, it trains on one rank. Every rank of the
job calls `train`; reserves sleep inside it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np

from shoal import allocation, errors
from shoal import config as configs
from shoal.backend import numpy_backend
from shoal.comm import lifeline
from shoal.comm.world import World
from shoal.config import Averaging, Config, LearningRate, from_tree
from shoal.data import generators
from shoal.data.mapstyle import MapData, MapStyle
from shoal.data.sets import DataSet, from_arrays, open_set
from shoal.elastic.policy import Policy
from shoal.errors import InputError
from shoal.model.layer import Layer
from shoal.model.trainable import OwnModel
from shoal.record.progress import Progress
from shoal.record.recorder import OnEvent
from shoal.run import Request, Result, run

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""x_train, y_train, x_test, y_test"""
Data = DataSet | MapData


def train(
    model: Layer | OwnModel | str,
    data: Data | Arrays | tuple[MapStyle, ...] | str,
    *,
    learners: str | Sequence[Mapping[str, Any]] = "0:1",
    averaging: Averaging | None = None,
    learning_rate: LearningRate | float = 0.1,
    out: str | Path | None = None,
    resume: bool = False,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    policy: Policy | None = None,
    progress: bool = True,
    **options: Any,
) -> Result:
    """Train, and return the final parameters and the history on every rank. Collective over the job.

    model: a net made of shoal's layers, the name of one ("convnet-s", "mlp"), or shoal.torch.Model(module, loss).
    data: (x_train, y_train, x_test, y_test), a DataSet, or the name of a set. x is uint8 or float, one sample a
      row, images as (height, width, channels); y holds labels from 0, or float targets for loss="mse".
      Or (train, test) or (train, test, validation), map-style datasets as PyTorch has them, or a MapData of them.
    learners: the schedule, as in a config: "0:2, 20:8", a preset's name, or a list of tables.
    averaging: shoal.Averaging(steps=K, momentum=mu). learning_rate: a number or shoal.LearningRate(...).
    out: the run directory (log, checkpoints); None records nothing. resume: go on with what is there.
    policy: decides on the size while training runs, beside the schedule: called on the master after each round with a
      shoal.Situation; returns a number of learners, a shoal.Resize(ranks=, learners=), or None for no wish.
    on_event: called on the master with each event of the log, as a dict. progress: print the progress line.
    options: seed, name, and every key of [train], [run], [model] and [data], e.g. epochs=40, batch=16,
      loss="mse", validation=0.1.

    Raises InputError on all ranks alike, and Stopped after a stop request was honoured.
    """
    life = lifeline.start()
    world, lines = World(life.comm, numpy_backend(), recovers=life.recovers), list[Progress]()
    try:
        here = allocation.read(os.environ)
        allocation.check_joined(here, world.size, world.library)
        config, data_set = _agreed(world, lambda: _input(model, data, learners, averaging, learning_rate, options))

        def listen() -> list[OnEvent]:
            if progress:
                lines.append(Progress(config.train.epochs, sys.stdout))
            return [*([on_event] if on_event else []), *(line.on_event for line in lines)]

        net = model if isinstance(model, Layer | OwnModel) else None
        directory = Path(out) if out is not None else None
        request = Request(config, directory, resume, data=data_set, net=net, policy=policy, listen=listen, here=here)
        with generators.kept(), _given_back(net):
            result = run(world, request, life.stop_requested)
        if isinstance(net, OwnModel):
            net.load(result.parameters)
    except errors.ShoalError as error:
        if error.agreed:
            life.comm = world.close()
        raise
    finally:
        for line in lines:
            line.close()
    life.comm = world.close()
    if result.status == errors.STOPPED:
        raise errors.Stopped(f"stopped on request ({result.reason}) with a checkpoint; resume=True goes on")
    return result


@contextmanager
def _given_back(net: Layer | OwnModel | None) -> Iterator[None]:
    """In the end a model of the user's has memory of its own again, before that of the job is gone."""
    try:
        yield
    finally:
        if isinstance(net, OwnModel):
            net.release()


def _agreed(world: World, read: Callable[[], tuple[Config, Data]]) -> tuple[Config, Data]:
    """What `read` returns, or the same InputError on all ranks. Collective."""
    found, problem = None, None
    try:
        found = read()
    except InputError as error:
        problem = str(error)
    world.agree(problem)
    assert found is not None
    return found


def _input(
    model: Layer | OwnModel | str,
    data: Data | Arrays | tuple[MapStyle, ...] | str,
    learners: str | Sequence[Mapping[str, Any]],
    averaging: Averaging | None,
    learning_rate: LearningRate | float,
    options: Mapping[str, Any],
) -> tuple[Config, Data]:
    """The arguments of `train` as a config and a data set. Raises InputError."""
    _check_model(model, options)
    tree: dict[str, Any] = {"train": {}, "run": {}, "data": {}, "model": {}}
    homes = {"train": configs.Train, "run": configs.Run, "model": configs.Model, "data": configs.Data}
    for key, value in options.items():
        home = next((name for name, section in homes.items() if key in section.__struct_fields__), "train")
        (tree if key in ("seed", "name") else tree[home])[key] = value
    tree["model"]["net"] = model if isinstance(model, str) else "custom"
    if isinstance(model, OwnModel):
        tree["model"]["loss"] = model.loss_name
    tree["data"]["set"] = data if isinstance(data, str) else getattr(data, "name", "arrays")
    if (validation := _validation(data)) is not None and "validation" not in tree["data"]:
        tree["data"]["validation"] = validation
    tree["learners"] = {"schedule": learners if isinstance(learners, str) else [dict(stage) for stage in learners]}
    tree["averaging"] = msgspec.to_builtins(averaging or Averaging())
    if isinstance(learning_rate, LearningRate):
        tree["learning_rate"] = msgspec.to_builtins(learning_rate)
    else:
        tree["learning_rate"] = {"base": learning_rate}
    config = from_tree(tree, "shoal.train")
    return config, _data(data, config)


def _check_model(model: object, options: Mapping[str, Any]) -> None:
    if isinstance(model, OwnModel) and "loss" in options:
        raise InputError(
            "loss is given to shoal.train, and the model has one of its own; give it there: Model(module, loss)"
        )
    if isinstance(model, Layer | OwnModel | str):
        return
    if any(kind.__module__.startswith("torch.nn") for kind in type(model).__mro__):
        raise InputError(f"model is {type(model).__name__}, a PyTorch module; give shoal.torch.Model(module, loss)")
    raise InputError(
        f"model is a {type(model).__name__}; give a net of shoal's layers, the name of one, or a shoal.torch.Model"
    )


def _are_datasets(data: object) -> TypeGuard[tuple[MapStyle, ...]]:
    """(train, test) or (train, test, validation), not arrays."""
    return isinstance(data, tuple | list) and len(data) in (2, 3) and not any(hasattr(part, "dtype") for part in data)


def _validation(data: object) -> float | None:
    """The share that a validation set, which is given apart, has of the samples for training."""
    parts: tuple[object, ...] = (None, None)
    if isinstance(data, MapData):
        parts = data.train, data.validation
    elif _are_datasets(data) and len(data) == 3:
        parts = data[0], data[2]
    lengths = [len(part) for part in parts if isinstance(part, Sized)]
    return lengths[1] / max(1, sum(lengths)) if len(lengths) == 2 else None


def _data(data: Data | Arrays | tuple[MapStyle, ...] | str, config: Config) -> Data:
    if isinstance(data, DataSet | MapData):
        return data
    if isinstance(data, str):
        return open_set(config.data, config.seed)
    if _are_datasets(data):
        if config.data.validation and len(data) == 2:
            raise InputError(
                f"data.validation is {config.data.validation}, and cannot be held out of a dataset; "
                "give one as the third: data=(train, test, validation)"
            )
        return MapData(*data, classes=config.data.classes)
    if len(data) != 4:
        raise InputError(
            f"data has {len(data)} parts; give x_train, y_train, x_test, y_test, a DataSet, a name, or two datasets"
        )
    return from_arrays(*data, classes=config.data.classes, validation=config.data.validation, seed=config.seed)
