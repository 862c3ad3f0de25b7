"""A job: everything a rank needs to train, made from a config before any rank talks to another."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shoal import config as configs
from shoal.backend import Backend, numpy_backend
from shoal.config import Config
from shoal.data.augmentation import augmentation
from shoal.data.batches import Batches, BatchSource
from shoal.data.mapstyle import MapData
from shoal.data.order import SampleOrder
from shoal.data.sets import DataSet, normalised, open_set
from shoal.elastic.plan import Plan, make_plan
from shoal.elastic.policy import Policy
from shoal.errors import InputError
from shoal.model.gradient import Model, check_fit
from shoal.model.layer import Layer
from shoal.model.nets import build
from shoal.model.trainable import OwnModel, Trainable
from shoal.sgd.optimizer import LocalSGD


@dataclass(frozen=True)
class Job:
    """What is trained on what: the same on all ranks, but for the memory it works in."""

    config: Config
    backend: Backend
    data: DataSet | MapData
    plan: Plan
    model: Trainable
    batches: BatchSource
    local: LocalSGD
    policy: Policy | None = None
    """what decides on the size while it runs, beside the schedule"""

    def fingerprint(self) -> bytes:
        """Equal on all ranks that will compute the same run."""
        return f"{configs.dump(self.config)}{self.model.layout.describe()}{self.data_sum}".encode()

    @functools.cached_property
    def data_sum(self) -> str:
        """The data's checksum."""
        return self.data.checksum()


def prepare(
    config: Config,
    data: DataSet | MapData | None = None,
    net: Layer | OwnModel | None = None,
    policy: Policy | None = None,
) -> Job:
    """Open the data, build the net, work out the plan. Raises InputError if they do not fit together."""
    backend = numpy_backend()
    data = open_set(config.data, config.seed) if data is None else data
    if isinstance(data, DataSet) and config.data.normalise == "channel":
        data = normalised(data)
    plan = make_plan(config, len(data.train))
    model = _model(config, data, net, backend)
    batches = _batches(config, data, backend)
    local = LocalSGD(model, batches, config.train, backend)
    local.rehearse(stage.batch for stage in plan.stages)
    return Job(config, backend, data, plan, model, batches, local, policy)


def _model(config: Config, data: DataSet | MapData, net: Layer | OwnModel | None, backend: Backend) -> Trainable:
    """The user's model, or one of the net, or of the net that the config names."""
    if isinstance(net, OwnModel):
        net.prepare(data, backend, config.seed)
        return net
    net = build(config.model, data.sample_shape, data.outputs) if net is None else net
    model = Model(net, data.sample_shape, config.model.loss, backend, seed=config.seed)
    check_fit(data, model)
    return model


def _batches(config: Config, data: DataSet | MapData, backend: Backend) -> BatchSource:
    order = SampleOrder(len(data.train), config.seed)
    if isinstance(data, DataSet):
        moves = augmentation(config.data, len(data.train), data.sample_shape, config.seed)
        return Batches(data, order, backend, moves, config.run.prefetch)
    for key in ("normalise", "augment"):
        if (value := getattr(config.data, key)) != "none":
            raise InputError(f'data.{key} is "{value}", and is for arrays; do it in the __getitem__ of your dataset')
    return data.batches(order, backend)
