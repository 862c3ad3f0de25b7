"""What a schedule would cost on a machine that nobody need have: times from a step, a net's size and a network.

    round    = steps of a rank's learners + waiting for the slowest + reduction + overhead
    waiting  = jitter * step * sqrt(steps) * E(R),   E(R): the expected largest of R standard normals
    resize   = the state to the nodes that are new, by a tree
    schedule = its rounds and resizes

Evaluations, checkpoints, the start of the job and its wait in the queue are not in it. A batch other than the one that
was measured takes its share of that one's time. The reduction is done as training would do it: by the algorithm that
`tuning` chooses, at the cost that algorithms.py states; or by a library, whose times network.py describes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from shoal.comm.algorithms import hand_over, on_node
from shoal.comm.network import Buffers, Network
from shoal.comm.tree import blocks
from shoal.comm.tuning import Links, Place, Tuner
from shoal.config import Config, Run
from shoal.elastic.plan import StageForecast, forecast, make_plan
from shoal.errors import InputError

KINDS = {"host": "MPI on host buffers", "device": "MPI on device buffers", "nccl": "NCCL"}
ITEM_BYTES = 4


@dataclass(frozen=True)
class Load:
    """What is trained. step_s: of one learner's step of `batch` samples, alone on its node; numbers: of a reduction;
    state: numbers that a joiner on a new node is sent; samples: of an epoch."""

    step_s: float
    batch: int
    numbers: int
    state: int
    samples: int


@dataclass(frozen=True)
class Site:
    """A machine, for predictions. per_node: ranks on a node; kind: the memory that is reduced (`KINDS`)."""

    name: str
    network: Network
    per_node: int
    kind: str = "host"
    most_nodes: int | None = None

    @property
    def buffers(self) -> Buffers:
        """The parameters of that kind of memory. Raises InputError where there are none."""
        found: Buffers | None = getattr(self.network, self.kind)
        if found is None:
            have = [kind for kind in KINDS if getattr(self.network, kind) is not None]
            raise InputError(
                f"machine {self.name} has no parameters for {KINDS[self.kind]} ([network.{self.kind}]); "
                + (f"take --buffers {' or '.join(have)}" if have else "measure and fit them: shoal calibrate")
            )
        return found

    def nodes(self, ranks: int) -> tuple[int, ...]:
        """The ranks on each node, nodes filled one after another."""
        whole, rest = divmod(ranks, self.per_node)
        return (self.per_node,) * whole + (rest,) * (rest > 0)

    def check(self, ranks: int) -> None:
        """Raises InputError where the machine cannot hold so many ranks."""
        needed = len(self.nodes(ranks))
        if self.most_nodes is not None and needed > self.most_nodes:
            raise InputError(
                f"{ranks} ranks at {self.per_node} a node take {needed} nodes, and a job on {self.name} gets at most "
                f"{self.most_nodes}; give fewer ranks, or more of them a node (--ranks-per-node)"
            )


@dataclass(frozen=True)
class Round:
    """The parts of a round of the slowest rank, in seconds, and how it reduces."""

    steps_s: float
    wait_s: float
    reduction_s: float
    overhead_s: float
    algorithm: str

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.steps_s + self.wait_s + self.reduction_s + self.overhead_s


@dataclass(frozen=True)
class Stage:
    """One stage of a schedule. resize_s: the hand-over at its start; busy_s: rank-seconds in learners' steps."""

    forecast: StageForecast
    ranks: int
    nodes: int
    round: Round
    resize_s: float
    busy_s: float

    @property
    def seconds(self) -> float:
        return self.forecast.rounds * self.round.seconds + self.resize_s


@dataclass(frozen=True)
class Prediction:
    """A whole schedule on a job of `ranks` ranks on `nodes` nodes."""

    label: str
    site: Site
    ranks: int
    nodes: int
    stages: tuple[Stage, ...]

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def busy_s(self) -> float:
        """Rank-seconds in learners' steps."""
        return sum(stage.busy_s for stage in self.stages)

    @property
    def efficiency(self) -> float:
        """Busy over what the ranks of the group took, reserves left out."""
        return self.busy_s / sum(stage.seconds * stage.ranks for stage in self.stages)

    @property
    def learner_steps(self) -> int:
        return sum(stage.forecast.learner_steps for stage in self.stages)

    @property
    def node_s(self) -> float:
        """Of the whole job, which holds its nodes from start to end."""
        return self.seconds * self.nodes

    @property
    def used_node_s(self) -> float:
        """Of nodes that host learners: what is charged where nodes are given back, or taken when needed."""
        return sum(stage.seconds * stage.nodes for stage in self.stages)


def predict(config: Config, load: Load, site: Site, ranks: int = 0, label: str = "") -> Prediction:
    """The config's schedule; ranks: of the job, 0 for as many as learners at most. Raises InputError."""
    rows = forecast(make_plan(config, load.samples), config)
    ranks = ranks or max(row.stage.learners for row in rows)
    site.check(ranks)
    stages, before = list[Stage](), 0
    for row in rows:
        group = len(blocks(row.stage.learners, ranks))
        now = round_of(config.run, load, site, (row.stage.learners, group), (row.stage.steps, row.stage.batch))
        step_s = load.step_s * row.stage.batch / load.batch * _crowd(site, group)
        stages.append(
            Stage(
                row,
                group,
                len(site.nodes(group)),
                now,
                resize_s(load, site, before, group),
                row.learner_steps * step_s,
            )
        )
        before = group
    return Prediction(label or config.name, site, ranks, len(site.nodes(ranks)), tuple(stages))


def round_of(run: Run, load: Load, site: Site, size: tuple[int, int], work: tuple[int, int]) -> Round:
    """A round. size: learners, ranks; work: steps, batch."""
    (learners, ranks), (steps, batch) = size, work
    step_s = load.step_s * batch / load.batch * _crowd(site, ranks)
    serial = -(-learners // ranks) * steps
    wait_s = site.network.jitter * step_s * math.sqrt(serial) * largest_of(ranks)
    algorithm, reduction_s = reduction(run, load.numbers, site, (learners, ranks))
    return Round(serial * step_s, wait_s, reduction_s, site.network.overhead_s, algorithm)


def reduction(run: Run, numbers: int, site: Site, size: tuple[int, int]) -> tuple[str, float]:
    """The algorithm that a group of (learners, ranks) uses, and the time of its reduction."""
    (learners, ranks), buffers = size, site.buffers
    nodes, links = site.nodes(ranks), buffers.links
    if links is None or site.kind == "nccl" or run.algorithm == "native":
        if buffers.allreduce is None:
            other = ", or take another algorithm (--set run.algorithm=auto)" if links and site.kind != "nccl" else ""
            raise InputError(
                f"machine {site.name} has no [network.{site.kind}.allreduce], which a library's allreduce needs; add "
                f"it{other}"
            )
        sent_s = buffers.allreduce.seconds(ITEM_BYTES * numbers, ranks, len(nodes))
        return f"{site.kind} library", sent_s + _update_s(site, links, 1, numbers)
    tuner = Tuner(run.reproducible, run.algorithm, run.wire, links)
    place = Place(learners, ranks, nodes, shared=site.kind == "host")
    name = tuner.choose(place, numbers, ITEM_BYTES).algorithm
    here = max(nodes) if name in ("shared", "hierarchical") else 1
    between_s = 0.0 if name in ("shared", "alone") else tuner.time_s(name, place, numbers, ITEM_BYTES)
    return name, _update_s(site, links, here, numbers) + between_s


def resize_s(load: Load, site: Site, before: int, after: int) -> float:
    """The hand-over of a growth: the state to one rank of each node that is new. A shrinkage hands nothing over."""
    new = len(site.nodes(after)) - len(site.nodes(before)) if before else 0
    if new <= 0 or site.buffers.links is None:
        return 0.0
    return site.buffers.links.seconds(hand_over(new, load.state), ITEM_BYTES)


def largest_of(count: int) -> float:
    """The expected largest of `count` standard normals, by Blom's formula (1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def weak_efficiency(
    load: Load, site: Site, ranks: Sequence[int], hidden: float = 0.0, item_bytes: int = ITEM_BYTES
) -> float:
    """Of a learner a rank on ranks[1] ranks over ranks[0], every step reduced by the library's allreduce.

    hidden: what share of a step can run beside the reduction, as frameworks have it that send what the backward pass
    has finished; shoal hides nothing."""

    def step_s(count: int) -> float:
        nodes, library = len(site.nodes(count)), site.buffers.allreduce
        assert library is not None
        exposed_s = max(0.0, library.seconds(item_bytes * load.numbers, count, nodes) - hidden * load.step_s)
        return load.step_s * (1 + site.network.jitter * largest_of(count)) + exposed_s

    return step_s(ranks[0]) / step_s(ranks[1])


def _crowd(site: Site, ranks: int) -> float:
    return 1 + site.network.crowding * (min(ranks, site.per_node) - 1)


def _update_s(site: Site, links: Links | None, ranks: int, numbers: int) -> float:
    """The pass over a node's memory; a device's is so much faster that it is left out."""
    return links.seconds(on_node(ranks, numbers), ITEM_BYTES) if links and site.kind == "host" else 0.0
