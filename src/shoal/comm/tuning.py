"""Which algorithm a group uses: named in the config, or chosen by the time that each would take.

A step costs a latency, each message posted beside others some more, each byte its share of a rank's or a node's way
out. These few figures (`Links`) are measured at the start of a run, in a few ms, where there is something to choose;
the master takes the medians over all ranks and tells them. After a resize the choice is made from the same figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from shoal.backend import Backend
from shoal.comm.algorithms import KEEPS_ORDER, TAKES_WIRE, Cost, cost
from shoal.comm.collectives import broadcast_bytes, gather
from shoal.comm.transport import Subset, Transport
from shoal.comm.world import World
from shoal.config import Run

_LONG_BYTES = 1 << 16
_BESIDE = 4
_TRIES = 4
_WIRE_BYTES = {"float32": None, "float16": 2, "bfloat16": 2}


class Links(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What it costs to send."""

    step_s: Annotated[float, Meta(ge=0, le=1e9)]
    """the latency of a step"""
    message_s: Annotated[float, Meta(ge=0, le=1e9)]
    """one more message in a step"""
    byte_s: Annotated[float, Meta(ge=0, le=1e9)]
    """a byte between ranks of a node"""
    crossing_byte_s: Annotated[float, Meta(ge=0, le=1e9)]
    """a byte that leaves a node, all its ranks together"""

    def seconds(self, spent: Cost, item_bytes: int) -> float:
        """The time of what is sent, numbers of `item_bytes`."""
        posted = max(0.0, spent.messages - spent.steps) * self.message_s
        sent_s = (spent.numbers * self.byte_s + spent.crossing * self.crossing_byte_s) * item_bytes
        return spent.steps * self.step_s + posted + sent_s


USUAL = Links(step_s=20e-6, message_s=3e-6, byte_s=0.2e-9, crossing_byte_s=1e-9)
"""those of a usual cluster, where nothing was measured"""


@dataclass(frozen=True)
class Place:
    """Where a group lies: learners, ranks, the ranks on each node (None if they are mixed), whether there is shared
    memory on nodes."""

    learners: int
    ranks: int
    nodes: tuple[int, ...] | None
    shared: bool


@dataclass(frozen=True)
class Choice:
    """What is used. algorithm: as in the config, or "shared" (one pass over a node's memory), or "alone"."""

    algorithm: str
    wire: str = "float32"


@dataclass(frozen=True)
class Tuner:
    """Chooses; the same on all ranks. links: as measured, None for the usual ones; report(event, **fields): where
    choices are logged, on the master."""

    reproducible: bool = True
    algorithm: str = "auto"
    wire: str = "float32"
    links: Links | None = None
    report: Callable[..., None] | None = None

    def choose(self, place: Place, size: int, item_bytes: int) -> Choice:
        """How a group at this place reduces `size` numbers of `item_bytes`."""
        one_node = place.nodes is not None and len(place.nodes) == 1
        if self.algorithm in ("auto", "hierarchical"):
            if place.shared and one_node:
                return Choice("shared")
            if place.ranks == 1:
                return Choice("alone")
        possible = [name for name in KEEPS_ORDER if self._fits(name, place)]
        if self.algorithm in possible:
            return Choice(self.algorithm, self.wire)
        if self.algorithm == "hierarchical":
            return Choice("exchange")
        return Choice(min(possible, key=lambda name: self.time_s(name, place, size, item_bytes)), self.wire)

    def time_s(self, name: str, place: Place, size: int, item_bytes: int) -> float:
        """The time that the algorithm would take, by the figures of the links."""
        spent = cost(name, place.learners, place.nodes or (1,) * place.ranks, size)
        return (self.links or USUAL).seconds(spent, _WIRE_BYTES[self.wire] or item_bytes)

    def log(self, choice: Choice, place: Place, round: int) -> None:
        """Report what was chosen, at which place, from which figures."""
        if self.report is not None:
            links = {} if self.links is None else {"links": msgspec.structs.asdict(self.links)}
            self.report("algorithm", round=round, **asdict(choice), **asdict(place), **links)

    def _fits(self, name: str, place: Place) -> bool:
        """Whether this algorithm may be used there."""
        if name == "none" or (name == "native" and self.algorithm != "native"):
            return False
        if name == "hierarchical" and not (place.shared and place.nodes):
            return False
        if self.wire != "float32" and name not in TAKES_WIRE:
            return False
        return KEEPS_ORDER[name] or not self.reproducible


def make_tuner(world: World, run: Run, shared: bool, report: Callable[..., None]) -> Tuner:
    """The tuner of a run; links are measured if the algorithm is to be chosen. shared: there is shared memory on
    nodes. report(event, **fields) records nothing but on the master. Collective over the world."""
    one_way = world.size == 1 or (shared and world.nodes == 1)
    links = measure(world) if run.algorithm == "auto" and not one_way else None
    return Tuner(run.reproducible, run.algorithm, run.wire, links, report)


def measure(world: World) -> Links:
    """The figures of this world's links. Collective over the world; the same on all ranks."""
    world.meet()
    near = Subset(world.transport, world.node_ranks)
    far = _lane(world)
    own = [_times(near, world.backend), _times(far, world.backend) if far is not None else [0.0, 0.0, 0.0]]
    rows = gather(world.transport, np.array(own).reshape(-1))
    links = b""
    if world.is_master:
        links = msgspec.json.encode(_links(rows.reshape(-1, 2, 3), _lanes(world)))
    return msgspec.json.decode(broadcast_bytes(world.transport, links), type=Links)


def _lanes(world: World) -> int:
    return min(list(world.node_of).count(node) for node in set(world.node_of))


def _lane(world: World) -> Subset | None:
    """The ranks of the same number on all nodes, if every node has one."""
    number = world.node_ranks.index(world.rank)
    if world.nodes == 1 or number >= _lanes(world):
        return None
    nodes = [[rank for rank in world.order if world.node_of[rank] == node] for node in sorted(set(world.node_of))]
    return Subset(world.transport, [ranks[number] for ranks in nodes])


def _times(transport: Transport, backend: Backend) -> list[float]:
    """Seconds of a shift by one rank: of one short message, of some, and of a long one; zeros for a single rank."""
    if transport.size == 1:
        return [0.0, 0.0, 0.0]
    return [_shift_s(transport, backend, count, n_bytes) for count, n_bytes in ((1, 8), (_BESIDE, 8), (1, _LONG_BYTES))]


def _shift_s(transport: Transport, backend: Backend, count: int, n_bytes: int) -> float:
    sent = [backend.zeros(n_bytes, np.uint8) for _ in range(count)]
    received = [backend.zeros(n_bytes, np.uint8) for _ in range(count)]
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        transport.exchange([(right, array) for array in sent], [(left, array) for array in received])
        times.append(time.perf_counter() - start)
    return min(times)


def _links(rows: np.ndarray, lanes: int) -> Links:
    """rows: (ranks, 2, 3), the times of all ranks in their node and between nodes; zeros where there were none."""
    middle = [
        [float(np.median(kind[:, k][kind[:, k] > 0])) if (kind[:, k] > 0).any() else 0.0 for k in range(3)]
        for kind in (rows[:, 0], rows[:, 1])
    ]
    near, far = middle
    slowest = far if far[0] else near
    if not slowest[0]:
        return USUAL
    message_s = max(0.0, slowest[1] - slowest[0]) / (_BESIDE - 1)
    byte_s = max(0.0, near[2] - near[0]) / _LONG_BYTES
    crossing_byte_s = max(0.0, far[2] - far[0]) / (_LONG_BYTES * lanes)
    return Links(step_s=slowest[0], message_s=message_s, byte_s=byte_s, crossing_byte_s=crossing_byte_s)
