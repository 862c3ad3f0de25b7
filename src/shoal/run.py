"""One run from a config to its end: what `shoal train`, a sweep and the Python API share.

Everything that can be wrong with the input is found, and agreed on by all ranks, before anything is trained
or written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal import environment, errors, kernels
from shoal.allocation import Allocation
from shoal.comm.collectives import broadcast_bytes
from shoal.comm.joining import come
from shoal.comm.world import World
from shoal.config import Config
from shoal.data.mapstyle import MapData
from shoal.data.sets import DataSet
from shoal.elastic.master import Decision
from shoal.elastic.plan import warnings
from shoal.elastic.policy import Policy
from shoal.errors import InputError
from shoal.job import Job, prepare
from shoal.model.layer import Layer
from shoal.model.trainable import OwnModel
from shoal.record.recorder import OnEvent, Recorder
from shoal.training import Training


@dataclass(frozen=True)
class Result:
    """What a training gives: the same on all ranks, but for `master`.

    parameters: the final anchor by tensor name, running statistics included, as float32 arrays.
    history: the events of the run, as in run.jsonl, from its very start (over resumes).
    status, reason: 0 and why it ended, or 99 and who asked it to stop.
    master: whether this rank is the master, the one to print and to write files.
    """

    parameters: dict[str, np.ndarray]
    history: list[dict[str, Any]]
    status: int
    reason: str
    master: bool

    @property
    def accuracy(self) -> float:
        """Test accuracy of the last evaluation; nan if there was none."""
        scores = [event["test"]["accuracy"] for event in self.history if event["event"] == "evaluation"]
        return scores[-1] if scores else float("nan")


@dataclass(frozen=True)
class Request:
    """What to run. out: the run directory (None records nothing); data and net replace the config's; here: what
    launcher and scheduler say."""

    config: Config
    out: Path | None = None
    resume: bool = False
    patient: bool = True
    """on a resume, wait for the lease of a job that is just ending"""
    data: DataSet | MapData | None = None
    net: Layer | OwnModel | None = None
    policy: Policy | None = None
    listen: Callable[[], Sequence[OnEvent]] = tuple
    """makes the listeners, on the rank that is or becomes the master"""
    here: Allocation = field(default_factory=Allocation)


def run(world: World, request: Request, stop_requested: Callable[[], bool]) -> Result:
    """Run it. Collective over the world. Raises InputError on all ranks alike."""
    world.waiter.timeout_s = request.config.run.timeout_s
    world.watch_every(request.config.run.heartbeat_s)
    environment.limit_threads(request.config.run.threads)
    job = _prepare(world, request)
    recorder = _open(world, request)
    try:
        return _train(world, job, recorder, Training(job, world, recorder, stop_requested, request.here))
    finally:
        job.batches.close()
        recorder.close()


def _prepare(world: World, request: Request) -> Job:
    job, problem = None, None
    try:
        job = prepare(request.config, request.data, request.net, request.policy)
    except InputError as error:
        problem = str(error)
    world.agree(problem)
    assert job is not None
    world.agree_same("the config, net or data", job.fingerprint())
    return job


def _open(world: World, request: Request) -> Recorder:
    recorder, problem, lease = Recorder(request.out, request.config, request.listen), "", ""
    if world.is_master:
        try:
            recorder.open(request.resume, request.patient)
        except InputError as error:
            problem = str(error)
        except errors.LeaseError as error:
            lease = str(error)
    problem, lease = msgspec.json.decode(
        broadcast_bytes(world.transport, msgspec.json.encode((problem, lease))), type=tuple[str, str]
    )
    if problem:
        raise InputError(problem, agreed=True)
    if lease:
        raise errors.LeaseError(lease, agreed=True)
    return recorder


def join(request: Request, recovers: bool, stop_requested: Callable[[], bool]) -> tuple[World, Result | None]:
    """Be a rank that was spawned into a run of the same request: the world it came to, and the result, or None if this
    rank was released before the end. recovers: as in World. Raises InputError on this rank alone."""
    run = request.config.run
    environment.limit_threads(run.threads)
    job = prepare(request.config, request.data, request.net, request.policy)
    joined = come(job.fingerprint())
    world = World(joined.spawner.top, job.backend, run.timeout_s, recovers=recovers, seats=joined.welcome.seats)
    world.generation = joined.welcome.generation
    world.watch_every(run.heartbeat_s)
    recorder = Recorder(request.out, request.config, request.listen)
    training = Training(job, world, recorder, stop_requested, request.here, joined)
    end = training.run()
    return world, None if training.released else _result(world, job, recorder, training, end)


def _train(world: World, job: Job, recorder: Recorder, training: Training) -> Result:
    problem = ""
    if world.is_master:
        try:
            _begin(world, job, recorder, training)
        except InputError as error:
            problem = str(error)
    problem = broadcast_bytes(world.transport, problem.encode()).decode()
    if problem:
        raise InputError(problem, agreed=True)
    return _result(world, job, recorder, training, training.run())


def _result(world: World, job: Job, recorder: Recorder, training: Training, end: Decision) -> Result:
    """After the last decision: the run is complete, or says why not. Collective over the world."""
    if world.is_master and end.status == errors.DONE:
        p = training.state.progress
        test = next(e["test"] for e in reversed(recorder.history()) if e["event"] == "evaluation")
        counts = {"serial_steps": p.serial_steps, "learner_steps": p.learner_steps, "test": test}
        where = {"round": p.round, "consumed": p.consumed, "epoch": p.consumed / job.plan.samples}
        recorder.event("end", **where, reason=end.reason, digest=training.state.digest(), **counts)
    recorder.finish(end.status, done=end.status == errors.DONE)
    if end.status == errors.BAD_INPUT:
        raise InputError(end.reason, agreed=True)
    history = broadcast_bytes(world.transport, msgspec.json.encode(recorder.history()))
    views = job.model.layout.views(job.backend.to_host(training.state.anchor))
    parameters = {name: view.copy() for name, view in views.items()}
    training.close()
    return Result(parameters, msgspec.json.decode(history), end.status, end.reason, world.is_master)


def _begin(world: World, job: Job, recorder: Recorder, training: Training) -> None:
    """Master: the state to start from, and the first lines of the log."""
    here = {
        **environment.describe(),
        "world": world.size,
        "nodes": world.nodes,
        "mpi": world.library,
        "reductions": training.memory if isinstance(training.memory, str) else "in the node's shared memory",
        **_allocated(training.here),
    }
    if recorder.resumed is not None:
        training.restore(*recorder.resumed)
        p = training.state.progress
        _warn_of_other_bits(recorder, here)
        recorder.event("resume", round=p.round, consumed=p.consumed, **here)
    else:
        job.model.initialise(training.state.anchor, job.config.seed)
        recorder.event("header", format=1, **_what(job), **here)
        for text in warnings(job.plan):
            recorder.event("warning", text=text)
    for text in (*_slow_paths(world, job, training), *_idle_nodes(world, job, training.here)):
        recorder.event("warning", text=text)


def _allocated(here: Allocation) -> dict[str, Any]:
    left_s = None if here.end_time_s is None else here.end_time_s - time.time()
    return {"launcher": here.launcher, "job": here.job, "hosts": len(here.hosts), "time_left_s": left_s}


def _what(job: Job) -> dict[str, Any]:
    """What is trained on what, for the header."""
    data, trained = job.data, [t for t in job.model.layout.tensors if t.kind != "statistic"]
    return {
        "name": job.config.name,
        "seed": job.config.seed,
        "config": msgspec.to_builtins(job.config),
        "caption": data.caption,
        "samples": len(data.train),
        "test_samples": len(data.test),
        "validation_samples": len(data.validation) if data.validation is not None else 0,
        "parameters": sum(tensor.size for tensor in trained),
    }


def _slow_paths(world: World, job: Job, training: Training) -> Iterator[str]:
    """What makes this job slower than it could be."""
    threads = job.config.run.threads
    if world.ranks_on_node * threads > world.cores_on_node:
        yield (
            f"{world.ranks_on_node} ranks x {threads} BLAS threads share {world.cores_on_node} cores on this node: "
            "oversubscribed, so times say little"
        )
    if kernels.cpu is None:
        yield f"the hot loops run as {kernels.backing()}: install a C compiler, then shoal again, for the fast ones"
    if world.size > 1 and isinstance(training.memory, str):
        yield f"reductions go by messages, and every rank keeps a state of its own: {training.memory}"


def _idle_nodes(world: World, job: Job, here: Allocation) -> Iterator[str]:
    """What makes this job dearer than it could be."""
    if world.nodes < len(here.hosts):
        yield f"the job has {len(here.hosts)} hosts, and its ranks sit on {world.nodes}: the others are paid and idle"
    if job.config.run.give_back_nodes and not here.gives_back:
        yield (
            "run.give_back_nodes is set, and this job's script cannot release nodes: all are kept to the end, and "
            "allocated and busy rank-seconds are counted apart"
        )


def _warn_of_other_bits(recorder: Recorder, here: dict[str, Any]) -> None:
    header = next((event for event in recorder.history() if event["event"] == "header"), {})
    changed = [key for key in environment.SAME_BITS if key in header and header[key] != here.get(key)]
    if changed:
        recorder.event(
            "warning",
            text=f"this resume runs with another {', '.join(changed)} than the run began with; results may differ "
            "in the last bits",
        )
