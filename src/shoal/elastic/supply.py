"""The spawn provider's supply of ranks: processes come by MPI_Comm_spawn ahead of the stage that needs them, and go.

One rank comes or goes at a time (comm/spawn.py). While it is brought in, training goes on; the master hears from all
ranks, with every decision, how far their part is, and orders the switch when all are ready:

    spawn     every rank's helper thread begins        grow      the joiner is a rank of the world, and has the state
    wait      nothing, at the end of a run             release   the last that came leaves, its process ends
    forget    a growth that failed is given up; the run goes on with the ranks that it has

A joiner is prepared (imports, data, net) before it joins, so nobody waits for that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from shoal.comm import joining
from shoal.comm.collectives import gather
from shoal.comm.joining import Hello, Joined, Welcome
from shoal.comm.places import Sizes
from shoal.comm.shared import NodeMemory, attach, share
from shoal.comm.spawn import Spawner
from shoal.comm.world import Seat, World
from shoal.config import Run
from shoal.errors import InputError, ShoalError

Step = Literal["spawn", "grow", "wait", "release", "forget"]
CHANGES = get_args(Step)

JOINS = "--joins"
"""what the command line of a spawned process has besides"""
_STATES = ("idle", "busy", "ready", "failed")
_PATIENCE_S, _GIVE_UP_S = 60.0, 0.1
_FIRST_LEAD_S = 1.0
"""what a rank is thought to take to come, before one has taken longer"""


class Supply:
    """One rank's part. most: ranks there can be; fingerprint: of the job that a joiner must have too."""

    def __init__(self, world: World, memory: NodeMemory, spawner: Spawner, run: Run, fingerprint: bytes) -> None:
        self._world, self._memory, self._spawner, self._run = world, memory, spawner, run
        self.most = run.max_ranks
        self._fingerprint = fingerprint
        self._seat: Seat | None = None
        self.lead_s = _FIRST_LEAD_S
        self.problem = ""
        """why no more ranks can be had"""
        self._states = np.zeros((1, 1), np.int64)
        self._gave_up = False
        self._lost: set[int] = set()

    def hear(self) -> None:
        """The master hears how far all ranks' parts are. Collective over the world."""
        state = _STATES.index(self._spawner.state())
        self._states = gather(self._world.transport, np.array([state], np.int64))

    def next_step(self, wanted: int, kept: int, at_the_end: bool) -> Step | None:
        """Master: what is to be done before the next round. wanted: ranks that must come; kept: that need not go."""
        states = {_STATES[state] for state in self._states[:, 0]}
        if self._gave_up and states != {"idle"}:  # a helper thread sits in MPI for good: no rank can come or leave
            return None
        if "failed" in states or self._spawner.waited_s > _PATIENCE_S:
            self.problem = self._spawner.error or f"a spawned rank did not come within {_PATIENCE_S:g} s"
            return "forget"
        if states == {"ready"}:
            return "grow"
        if states != {"idle"}:
            return "wait" if at_the_end else None
        if at_the_end or self._world.size > kept:
            return "release" if self._spawner.spawned else None
        if self._world.size < min(wanted, self.most) and not self.problem:
            return "spawn"
        return None

    def begin(self) -> None:
        """Start to bring in a rank that runs what this one runs. All ranks do. The last rank of the start asks for it:
        a reserve, if there is one."""
        last = self._world.size - self._spawner.spawned - 1
        self._spawner.begin(_joiners_command(), joining.welcomed(self._welcome), root=last)

    def take(self) -> dict[str, float]:
        """The joiner is the last rank of the world now: who it is, what it took. Collective over the new world."""
        comm, lead = self._spawner.take()
        assert self._seat is not None
        self._memory.admit(self._seat.id)
        self._world.admit(comm, self._seat)
        self._memory.new_generation(self._world.generation)
        self.lead_s = max(self.lead_s, lead.total_s)
        who = {"rank": self._seat.id, "pid": self._seat.pid}
        return {**who, "spawn_s": lead.spawn_s, "prepare_s": lead.greeting_s, "merge_s": lead.merge_s}

    def release(self) -> bool:
        """The last rank that came leaves; whether this is it. Collective over the world."""
        comm = self._world.outlast(self._spawner.release)
        if comm is None:
            return True
        self._memory.dismiss(self._world.dismiss_last(comm))
        self._memory.new_generation(self._world.generation)
        return False

    def forget(self) -> None:
        """Give up a growth."""
        self._spawner.give_up(_GIVE_UP_S)

    def give_up(self) -> None:
        """Give up a growth that failed; whoever was to come and hangs has ended, since mpiexec would wait for it."""
        self._gave_up = True
        if self._world.is_master:
            joining.end_others(_joiners_command(), {seat.pid for seat in self._world.seats})
        self.forget()

    def found_again(self, lost: Sequence[int]) -> None:
        """After a loss: ranks can come to those that are left. Collective over the world. Raises RankLost."""
        self._gave_up = False
        for one in lost:
            self._memory.dismiss(one)
        if not self._run.respawn:
            self._lost |= set(lost)
            self.most = self._run.max_ranks - len(self._lost)
        self._spawner = self._world.rebuild(Spawner.found)
        self._world.move_to(self._spawner.top)

    def close(self) -> None:
        """Nobody comes any more. Collective over the world, which is as it was at the start unless ranks were lost, or
        a growth that hangs has kept others from leaving."""
        self._world.lost = self._world.lost or self._gave_up
        if not self._world.lost:
            self._world.move_home()
            self._spawner.close()

    def _welcome(self, hello: Hello) -> Welcome:
        """What a joiner is told, by each rank's helper thread."""
        if hello.fingerprint != self._fingerprint:
            raise ShoalError("the spawned rank has another config, data, net or code")
        world, memory = self._world, self._memory
        self._seat = seat = world.seat_for(hello.pid, hello.cores)
        places = memory.places_with(seat.id)
        return Welcome((*world.seats, seat), world.generation + 1, memory.place, places, memory.can_claim)


def _joiners_command() -> list[str]:
    command, *arguments = [argument for argument in sys.argv[1:] if argument != JOINS]
    return [sys.executable, "-m", "shoal", command, JOINS, *arguments]


def memory_and_supply(
    world: World, sizes: Sizes, run: Run, fingerprint: bytes, joined: Joined | None
) -> tuple[NodeMemory | str, Supply | None]:
    """The node's memory, and where ranks come from, if they are to be spawned. Collective over the world, but for a
    rank that has joined. Raises InputError if they are to be and cannot."""
    if joined is not None:
        welcome, me = joined.welcome, world.ids[world.rank]
        memory: NodeMemory | str = attach(welcome.memory, welcome.places, me, sizes, world.waiter)
        assert isinstance(memory, NodeMemory)
        memory.new_generation(world.generation)
        memory.can_claim = welcome.can_claim
        return memory, Supply(world, memory, joined.spawner, run, fingerprint)
    if run.provider != "spawn":
        return share(world, sizes), None
    memory = share(world, sizes, run.max_ranks)
    if isinstance(memory, str) or world.nodes > 1:
        why = memory if isinstance(memory, str) else f"there are {world.nodes} nodes"
        raise InputError(
            f"run.provider is spawn, and ranks can be spawned on one node with shared memory only ({why}); "
            "use reserve, and start as many ranks as the schedule can use",
            agreed=True,
        )
    spawner = Spawner.found(world.comm)
    world.move_to(spawner.top)
    return memory, Supply(world, memory, spawner, run, fingerprint)
