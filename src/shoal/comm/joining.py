"""What a rank that joins and those that are there say to each other before the world changes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.comm.spawn import Meet, Spawner
from shoal.comm.world import Seat, usable_cores
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Hello:
    """What a joiner says of itself."""

    pid: int
    cores: frozenset[int]
    fingerprint: bytes


@dataclass(frozen=True)
class Welcome:
    """What it is told: who is there, its own seat, and where the node's memory lies, with who has which place in it."""

    seats: tuple[Seat, ...]
    generation: int
    memory: str
    places: tuple[int | None, ...]
    can_claim: bool


@dataclass(frozen=True)
class Joined:
    """What a process that has joined has in hand."""

    spawner: Spawner
    welcome: Welcome


def welcomed(answer: Callable[[Hello], Welcome]) -> Meet:
    """The part of those that are there, on their helper threads: each works out the answer, rank 0 sends it."""

    def meet(comm: MPI.Intracomm) -> None:
        hello: Hello = comm.bcast(None, comm.Get_size() - 1)
        _on_one_node(comm)
        welcome = answer(hello)
        comm.bcast(welcome if comm.Get_rank() == 0 else None, 0)

    return meet


def come(fingerprint: bytes) -> Joined:
    """The part of a spawned process, which then is the last rank of `spawner.top`. fingerprint: of its job."""
    heard: list[Welcome] = []

    def meet(comm: MPI.Intracomm) -> None:
        comm.bcast(Hello(os.getpid(), usable_cores(), fingerprint), comm.Get_size() - 1)
        _on_one_node(comm)
        heard.append(comm.bcast(None, 0))

    return Joined(Spawner.join(meet), heard[0])


def end_others(command: Sequence[str], known: Collection[int]) -> None:
    """Kill processes of this node that were started here with this command, but for the known ones: joiners that hang.
    Does nothing where the system does not tell in /proc."""
    here, sought = str(Path.cwd()), [os.fsencode(word) for word in command]
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().split(b"\0")[:-1]
            if words == sought and int(place.name) not in known and str((place / "cwd").readlink()) == here:
                os.kill(int(place.name), signal.SIGKILL)


def _on_one_node(comm: MPI.Intracomm) -> None:
    """ShoalError where the ranks do not share memory. Collective."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    together = node.Get_size() == comm.Get_size()
    node.Free()
    if not together:
        raise ShoalError("the spawned rank came to another node")
