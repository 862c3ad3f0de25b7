"""A job: everything a rank needs to train, made from a config before any rank talks to another."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass

import numpy as np

from shoal import config as configs
from shoal.backend import Backend, numpy_backend
from shoal.config import Config
from shoal.data.batches import Batches
from shoal.data.order import SampleOrder
from shoal.data.sets import DataSet, open_set
from shoal.elastic.plan import Plan, make_plan
from shoal.elastic.policy import Policy
from shoal.model.gradient import Model, check_fit
from shoal.model.layer import Layer
from shoal.model.nets import build
from shoal.sgd.optimizer import LocalSGD


@dataclass(frozen=True)
class Job:
    """What is trained on what: the same on all ranks, but for the memory it works in."""

    config: Config
    backend: Backend
    data: DataSet
    plan: Plan
    model: Model
    batches: Batches
    local: LocalSGD
    policy: Policy | None = None
    """what decides on the size while it runs, beside the schedule"""

    def fingerprint(self) -> bytes:
        """Equal on all ranks that will compute the same run."""
        return f"{configs.dump(self.config)}{self.model.layout.describe()}{self.data_sum}".encode()

    @functools.cached_property
    def data_sum(self) -> str:
        """A checksum over all samples and targets, and how samples are mapped."""
        splits = [split for split in (self.data.train, self.data.test, self.data.validation) if split is not None]
        total = 0
        for array in (self.data.shift, self.data.scale, *(a for split in splits for a in (split.x, split.y))):
            total = zlib.crc32(np.ascontiguousarray(array).data, zlib.crc32(repr(array.shape).encode(), total))
        return f"{total:08x}"


def prepare(config: Config, data: DataSet | None = None, net: Layer | None = None, policy: Policy | None = None) -> Job:
    """Open the data, build the net, work out the plan. Raises InputError if they do not fit together."""
    backend = numpy_backend()
    data = open_set(config.data, config.seed) if data is None else data
    plan = make_plan(config, len(data.train))
    net = build(config.model, data.sample_shape, data.outputs) if net is None else net
    model = Model(net, data.sample_shape, config.model.loss, backend)
    check_fit(data, model)
    batches = Batches(data, SampleOrder(len(data.train), config.seed), backend)
    local = LocalSGD(model, batches, config.train, backend)
    local.rehearse(min(stage.batch for stage in plan.stages))
    return Job(config, backend, data, plan, model, batches, local, policy)
