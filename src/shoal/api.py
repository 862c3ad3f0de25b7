"""The Python API: `shoal.train` runs a net and arrays of your own with everything the command line has.

Start the script with `shoal launch -n 4 my_training.py`; run plainly, it trains on one rank. Every rank of the
job calls `train`; reserves sleep inside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal import errors
from shoal.backend import numpy_backend
from shoal.comm import lifeline
from shoal.comm.world import World
from shoal.config import Averaging, Config, Data, LearningRate, Model, Run, Train, from_tree
from shoal.data.sets import DataSet, from_arrays, open_set
from shoal.elastic.policy import Policy
from shoal.errors import InputError
from shoal.model.layer import Layer
from shoal.record.progress import Progress
from shoal.record.recorder import OnEvent
from shoal.run import Request, Result, run

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""x_train, y_train, x_test, y_test"""


def train(
    model: Layer | str,
    data: DataSet | Arrays | str,
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

    model: a net made of shoal's layers, or the name of one ("convnet-s", "mlp").
    data: (x_train, y_train, x_test, y_test), a DataSet, or the name of a set. x is uint8 or float, one sample a
      row, images as (height, width, channels); y holds labels from 0, or float targets for loss="mse".
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
        config, data_set = _agreed(world, lambda: _input(model, data, learners, averaging, learning_rate, options))

        def listen() -> list[OnEvent]:
            if progress:
                lines.append(Progress(config.train.epochs, sys.stdout))
            return [*([on_event] if on_event else []), *(line.on_event for line in lines)]

        net = model if isinstance(model, Layer) else None
        directory = Path(out) if out is not None else None
        request = Request(config, directory, resume, data=data_set, net=net, policy=policy, listen=listen)
        result = run(world, request, life.stop_requested)
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


def _agreed(world: World, read: Callable[[], tuple[Config, DataSet]]) -> tuple[Config, DataSet]:
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
    model: Layer | str,
    data: DataSet | Arrays | str,
    learners: str | Sequence[Mapping[str, Any]],
    averaging: Averaging | None,
    learning_rate: LearningRate | float,
    options: Mapping[str, Any],
) -> tuple[Config, DataSet]:
    """The arguments of `train` as a config and a data set. Raises InputError."""
    if not isinstance(model, Layer | str):
        raise InputError(f"model is a {type(model).__name__}; give a net of shoal's layers, or the name of one")
    tree: dict[str, Any] = {"train": {}, "run": {}, "data": {}, "model": {}}
    homes = {"train": Train, "run": Run, "model": Model, "data": Data}
    for key, value in options.items():
        home = next((name for name, section in homes.items() if key in section.__struct_fields__), "train")
        (tree if key in ("seed", "name") else tree[home])[key] = value
    tree["model"]["net"] = model if isinstance(model, str) else "custom"
    tree["data"]["set"] = data if isinstance(data, str) else data.name if isinstance(data, DataSet) else "arrays"
    tree["learners"] = {"schedule": learners if isinstance(learners, str) else [dict(stage) for stage in learners]}
    tree["averaging"] = msgspec.to_builtins(averaging or Averaging())
    if isinstance(learning_rate, LearningRate):
        tree["learning_rate"] = msgspec.to_builtins(learning_rate)
    else:
        tree["learning_rate"] = {"base": learning_rate}
    config = from_tree(tree, "shoal.train")
    return config, _data(data, config)


def _data(data: DataSet | Arrays | str, config: Config) -> DataSet:
    if isinstance(data, DataSet):
        return data
    if isinstance(data, str):
        return open_set(config.data, config.seed)
    if len(data) != 4:
        raise InputError(f"data has {len(data)} parts; give x_train, y_train, x_test, y_test, a DataSet or a name")
    return from_arrays(*data, classes=config.data.classes, validation=config.data.validation, seed=config.seed)
