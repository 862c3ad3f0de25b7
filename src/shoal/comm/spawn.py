"""Ranks that join while the job runs, by MPI_Comm_spawn, and leave again in the reverse order.

The communicators of a world that grows are a stack: below all the start world, on top of it one merged
communicator for each spawned rank. Each level has a second communicator of the same ranks, the *spare*, on which
helper threads (one on every rank) bring in the next rank, while the main threads train on the top:

    begin     every rank's thread: Spawn of one process, a greeting from it, Merge, a spare for the next
    state     the local part of it: "idle", "busy", "ready" or "failed"
    take      the new top, once all ranks have found theirs ready
    release   the topmost spawned rank leaves, the others are back on the communicator below

One process a call, because the children of one MPI_Comm_spawn can leave only together. Found by trial (docs/resize.md
has the table): Open MPI hangs if a merged communicator is disconnected (it is freed, and the intercommunicator
disconnected), and if Spawn is called on MPI_COMM_SELF and bridged by Create_intercomm.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shoal.comm import library
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from mpi4py import MPI

Meet = Callable[["MPI.Intracomm"], None]
"""What is exchanged on a merged communicator as soon as it is there. Collective over it, on the helper threads of
the ranks that were there before and on the joiner's main thread; it must not keep the communicator."""
State = Literal["idle", "busy", "ready", "failed"]

_GREETING = 3
_POLL_S = 1e-3
_BURST = 8
"""Open MPI looks at its sockets in every eighth call only"""
_HANDOVER_S = 50e-6
"""a sleep that lets a helper thread have Python's lock: a main thread that gives it away for less keeps it (14 s)"""


@dataclass(frozen=True)
class Lead:
    """Where the time of a growth went: until Spawn returned, until the joiner's greeting, until it had merged."""

    spawn_s: float
    greeting_s: float
    merge_s: float

    @property
    def total_s(self) -> float:
        return self.spawn_s + self.greeting_s + self.merge_s


@dataclass(frozen=True)
class _Level:
    """One floor of the stack: what the caller uses, what the next Spawn uses, and the way to the spawned rank."""

    comm: MPI.Intracomm
    spare: MPI.Intracomm
    bridge: MPI.Intercomm | None

    def close(self) -> None:
        """Collective. A spawned rank that belongs to it alone may end afterwards."""
        self.comm.Free()
        self.spare.Free()
        if self.bridge is not None:
            self.bridge.Disconnect()


class Spawner:
    """This rank's part in growing and shrinking the world; one on every rank, made by `found` or `join`."""

    def __init__(self, bottom: _Level, start_size: int) -> None:
        self._stack = [bottom]
        self._start_size = start_size
        self._growth: _Growth | None = None

    @classmethod
    def found(cls, comm: MPI.Intracomm) -> Spawner:
        """Of the start world, whose ranks stay; `comm` is duplicated. Collective."""
        own = _Attempt([])
        bottom = _Level(comm.Dup(), comm.Dup(), None)
        own.holds(bottom.comm)
        own.holds(bottom.spare)
        return cls(bottom, comm.Get_size())

    @classmethod
    def join(cls, meet: Meet | None = None) -> Spawner:
        """Of a spawned process (`is_spawned`): greet those who spawned it and become the last rank of `top`.

        Returns when the old ranks' threads are through, which they need not notice before they `take`. Whoever joins
        does it after its slow imports, so that nobody waits for those inside MPI. Raises MPI.Exception."""
        from mpi4py import MPI

        bridge = MPI.Comm.Get_parent()
        bridge.Set_errhandler(MPI.ERRORS_RETURN)
        attempt = _Attempt([])
        hello = [bridge.Isend(bytearray(1), rank, _GREETING) for rank in range(bridge.Get_remote_size())]
        attempt.until(lambda: MPI.Request.Testall(hello))
        spawner = cls(*_merge(bridge, 0, meet, attempt))
        signal.alarm(0)
        return spawner

    @property
    def top(self) -> MPI.Intracomm:
        """The communicator of all ranks; spawned ones are the last, in the order in which they came."""
        return self._stack[-1].comm

    @property
    def spawned(self) -> int:
        """How many spawned ranks there are: so many can be released. The same on all ranks."""
        return self.top.Get_size() - self._start_size

    def begin(
        self, command: Sequence[str], meet: Meet | None = None, info: Mapping[str, str] | None = None, root: int = 0
    ) -> None:
        """Start to bring in one rank that runs `command`, which must call `join`; returns at once.

        Collective over `top`, in the sense that all ranks must begin, sooner or later, with the same arguments.
        `info`: hints for MPI_Comm_spawn, like {"host": NAME}. root: the rank that asks the launcher; in MPICH its main
        thread stands still while the process starts, so a rank that does not train should do it, if there is one.
        ShoalError if one is under way."""
        if self._growth is not None:
            raise ShoalError(f"a rank cannot be spawned while another is {self.state()}")
        order = _Order(tuple(command), dict(info or {}), root, self._start_size, meet)
        self._growth = _Growth(self._stack[-1].spare, order)

    def state(self) -> State:
        """How far this rank is; it differs between ranks. To be asked once a round: while "busy" that takes 0.1 ms,
        in which the helper thread gets on."""
        return "idle" if self._growth is None else self._growth.state()

    @property
    def error(self) -> str:
        """What went wrong, when the state is "failed"."""
        return "" if self._growth is None else self._growth.error

    @property
    def waited_s(self) -> float:
        """Seconds since `begin`, 0 when idle; how long is too long is the caller's matter."""
        return 0.0 if self._growth is None else self._growth.waited_s

    def take(self) -> tuple[MPI.Intracomm, Lead]:
        """The new top, and what it took. Collective; all ranks must have found theirs "ready", which the caller
        agrees on by its own means, and nothing of the old top need be given up."""
        if self._growth is None or self._growth.level is None or self._growth.lead is None:
            raise ShoalError(f"there is no spawned rank to take: {self.state()}")
        level, lead = self._growth.level, self._growth.lead
        self._growth = None
        self._stack.append(level)
        return level.comm, lead

    def give_up(self, patience_s: float = 1.0) -> bool:
        """Forget a growth that failed, on this rank or another: every rank gives up by itself, at any time.

        Returns whether its thread has ended; one that sits in MPI after `patience_s` is left there, and `begin`
        raises. If all ranks had failed (Spawn was refused), another growth may begin. Otherwise those that go on
        found a new Spawner, on the top or, under ULFM, what they shrank it to; its ranks stay, spawned ones too.
        Under ULFM what the others wait on is revoked: their threads end, and a joiner that was ready is told."""
        growth = self._growth
        if growth is not None and growth.abandon(patience_s):
            self._growth = None
        return self._growth is None

    def release(self) -> MPI.Intracomm | None:
        """The last spawned rank leaves: the communicator below, or None on that rank, whose process must then end
        (by MPI_Finalize, which does not wait for anybody). Collective over `top`. ShoalError if there is none, or
        while one is being brought in."""
        if self._growth is not None or not self.spawned:
            raise ShoalError(f"no rank to release: {self.spawned} spawned, growth {self.state()}")
        leaves = self.top.Get_rank() == self.top.Get_size() - 1
        self._stack.pop().close()
        return None if leaves else self.top

    def close(self) -> None:
        """Free the start world's communicators, when all spawned ranks are gone. Collective."""
        self._stack.pop().close()


def join_within(limit_s: int) -> None:
    """The kernel ends this process, wherever it is, unless it has joined in time; for a spawned one to call first.

    If those who spawn it die or give up meanwhile, it would sit in MPI_Init for ever, and mpiexec with it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(limit_s)


def is_spawned() -> bool:
    """Whether this process was started by MPI_Comm_spawn. MPI must be initialised."""
    from mpi4py import MPI

    return MPI.Comm.Get_parent() != MPI.COMM_NULL


@dataclass(frozen=True)
class _Order:
    """What to spawn, and how it is met."""

    command: tuple[str, ...]
    info: dict[str, str]
    root: int
    start_size: int
    meet: Meet | None


class _Growth:
    """One rank being brought in, on a thread of its own."""

    def __init__(self, spare: MPI.Intracomm, order: _Order) -> None:
        self.level: _Level | None = None
        self.lead: Lead | None = None
        self.error = ""
        self._began = time.perf_counter()
        self._spare = spare
        self._attempt = _Attempt([spare])
        self._order = order
        self._thread = threading.Thread(target=self._run, daemon=True, name="spawn")
        self._thread.start()

    @property
    def waited_s(self) -> float:
        return time.perf_counter() - self._began

    def state(self) -> State:
        if self._thread.is_alive():
            time.sleep(_HANDOVER_S)
            return "busy"
        return "failed" if self.error else "ready"

    def abandon(self, patience_s: float) -> bool:
        """End the thread, if that can be done; whether it has ended."""
        if self._thread.is_alive() or self.level is not None:
            self._attempt.give_up()
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            bridge = self._spawn()
            spawned = time.perf_counter()
            self._attempt.until(bridge.Irecv(bytearray(1), 0, _GREETING).Test)
            greeted = time.perf_counter()
            self.level, _ = _merge(bridge, self._order.start_size, self._order.meet, self._attempt)
            self.lead = Lead(spawned - self._began, greeted - spawned, time.perf_counter() - greeted)
        except Exception as error:  # also of the caller's `meet`; `state` tells it
            self.error = f"no rank could be spawned: {error}"

    def _spawn(self) -> MPI.Intercomm:
        from mpi4py import MPI

        program, *arguments = self._order.command
        info = MPI.Info.Create(self._order.info)
        try:
            bridge = self._spare.Spawn(program, arguments, 1, info, self._order.root)
        finally:
            info.Free()
        bridge.Set_errhandler(MPI.ERRORS_RETURN)
        return bridge


class _Attempt:
    """What one side of a growth waits on, so that it can be given up from another thread.

    Revoking the bridge is left out: it hangs if the process at its other end has died unseen."""

    def __init__(self, comms: list[MPI.Intracomm]) -> None:
        self._comms = comms
        self._given_up = False

    def holds(self, comm: MPI.Intracomm) -> None:
        """`comm` has come to be; its errors are raised, not fatal."""
        from mpi4py import MPI

        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comms.append(comm)

    def until(self, done: Callable[[], bool]) -> None:
        """Poll with long pauses: the cores belong to the main threads, which train."""
        while not any(done() for _ in range(_BURST)):
            if self._given_up:
                raise ShoalError("given up")
            time.sleep(_POLL_S)

    def give_up(self) -> None:
        self._given_up = True
        if library.loaded().ulfm:
            for comm in self._comms:
                comm.Revoke()


def _merge(bridge: MPI.Intercomm, start_size: int, meet: Meet | None, attempt: _Attempt) -> tuple[_Level, int]:
    """Both sides' way from the bridge to a level and the start world's size (0: to be told). Collective over both."""
    comm = bridge.Merge(high=not start_size)
    attempt.holds(comm)
    size = bytearray(start_size.to_bytes(8, "little"))
    comm.Bcast(size, 0)
    attempt.until(_greetings(comm))
    spare = comm.Dup()
    attempt.holds(spare)
    if meet is not None:
        meet(spare)
    return _Level(comm, spare, bridge), int.from_bytes(size, "little")


def _greetings(comm: MPI.Intracomm) -> Callable[[], bool]:
    """A byte to and from everybody, so that connections exist before training needs them; whether all is through."""
    from mpi4py import MPI

    others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
    requests = [comm.Irecv(bytearray(1), rank, _GREETING) for rank in others]
    requests += [comm.Isend(bytearray(1), rank, _GREETING) for rank in others]
    return lambda: MPI.Request.Testall(requests)
