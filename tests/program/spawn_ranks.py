"""Ranks that grow and shrink while their main threads exchange messages: `spawn_ranks.py SCENE ARGUMENTS...`.

A spawned rank runs the same command with "joins" at its end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from shoal.comm import lifeline
from shoal.comm.spawn import Spawner, is_spawned, join_within

LIMIT_S = 30.0
STATES = ("idle", "busy", "ready", "failed")
SETTLED = 2
"""cycles after which all that is allocated once has been"""
KB_PER_SPAWN = 250
"""an MPI keeps about 100 KB for each process it has spawned"""
COMMAND = [sys.executable, *[word for word in sys.argv if word != "joins"], "joins"]

if sys.argv[-1] == "joins":
    join_within(15)
lifeline.die_with_parent()

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402


class Training:
    """What main threads do: small messages between all pairs, and now and then a split."""

    def __init__(self, spawner: Spawner) -> None:
        self.spawner = spawner
        self._rounds = 0

    def round(self, flag: int = 0) -> list[int]:
        """The flags of all ranks. Raises MPI.Exception if one has died, TimeoutError if one does not come."""
        top = self.spawner.top
        rank, size = top.Get_rank(), top.Get_size()
        flags = np.full(size, flag)
        others = [r for r in range(size) if r != rank]
        requests = [top.Irecv(flags[r : r + 1], r, 5) for r in others]
        requests += [top.Isend(np.full(1, flag), r, 5) for r in others]
        end = time.monotonic() + LIMIT_S
        while not MPI.Request.Testall(requests):
            time.sleep(1e-4)
            if time.monotonic() > end:
                raise TimeoutError(f"a rank of {size} does not come")
        if self._rounds % 4 == 0:
            top.Split(rank % 2, rank).Free()
        self._rounds += 1
        return [int(one) for one in flags]

    def check(self) -> None:
        """All are there, in the order in which they came, from a first round on."""
        self._rounds = 0
        assert self.round(self.spawner.top.Get_rank()) == list(range(self.spawner.top.Get_size()))

    def grow(self, meet: Any = None, command: list[str] = COMMAND) -> set[str]:
        """One more rank, if all find it ready; in what states the ranks were when none was busy any more."""
        self.spawner.begin(command, meet)
        rounds, states = 0, {"busy"}
        while "busy" in states:
            states = {STATES[one] for one in self.round(STATES.index(self.spawner.state()))}
            rounds += 1
            assert self.spawner.waited_s < LIMIT_S, states
        if states == {"ready"}:
            assert rounds > 1, "the main threads stood still"
            self.spawner.take()
            self.check()
        return states

    def release(self) -> bool:
        """One rank less; whether this one has left."""
        left = self.spawner.release() is None
        if not left:
            self.check()
        return left


def begin(meet: Any = None) -> Training:
    """Of a start rank, or of one that joins."""
    if not is_spawned():
        return Training(Spawner.found(MPI.COMM_WORLD))
    training = Training(Spawner.join(meet))
    training.check()
    return training


def up_and_down(training: Training, height: int) -> bool:
    """From any height up, and all the way down; whether this rank has left."""
    while training.spawner.spawned < height:
        assert training.grow(greet) == {"ready"}
    return any(training.release() for _ in range(height))


def greet(comm: Any) -> None:
    """What is told to the others when a rank joins."""
    told = comm.allgather(("shoal", comm.rank))
    assert told == [("shoal", rank) for rank in range(comm.size)]


def counts() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def memory_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def cycles(times: str, height: str) -> None:
    """Nothing is left of ranks that came and went."""
    training = begin(greet)
    if is_spawned():
        assert up_and_down(training, int(height)), "a spawned rank did not leave"
        return
    settled, seen = (0, 0), []
    for cycle in range(int(times)):
        assert not up_and_down(training, int(height)), "a start rank left"
        seen.append(memory_kb())
        settled = max(settled, counts()) if cycle <= SETTLED else settled
    assert training.spawner.spawned == 0
    before_kb, after_kb = seen[min(SETTLED, len(seen) - 1)], seen[-1]
    end = time.monotonic() + LIMIT_S  # the socket of a rank that has just left is closed in passing
    while counts() > settled:
        training.spawner.top.Iprobe()
        assert time.monotonic() < end, f"descriptors, threads: {settled} became {counts()}"
    assert after_kb - before_kb < KB_PER_SPAWN * len(seen) * int(height), f"{before_kb} KB became {after_kb}"
    training.spawner.close()
    print(f"rank {MPI.COMM_WORLD.rank} went up and down {times} times", flush=True)


def refused() -> None:
    """A command that does not exist: all are told, and the next one joins."""
    training = begin()
    if is_spawned():
        training.release()
        return
    assert training.grow(command=["/nonexistent/python"]) == {"failed"}
    assert training.spawner.give_up()
    training.check()
    assert training.grow() == {"ready"}
    training.release()
    print("went on", flush=True)


def dies(who: str) -> None:
    """ULFM: a rank dies while one is brought in; the others go on, and bring in and release another."""
    again = "again" in sys.argv

    def meet(comm: Any) -> None:
        if who == "joiner" and comm.rank == comm.size - 1 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.Barrier()

    training = begin(meet)
    if is_spawned():
        if not again:
            os.kill(os.getpid(), signal.SIGKILL)  # those who spawned it died or shrank before they took it
        training.release()
        return
    top = training.spawner.top
    if who == "joiner":
        assert "failed" in training.grow(meet)
        shrunk = top
    else:
        training.spawner.begin(COMMAND, meet)
        if top.rank == int(who):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        shrunk = _survivors(training)
    training.spawner.give_up()
    after = Training(Spawner.found(shrunk))
    COMMAND.insert(-1, "again")
    assert after.grow(lambda comm: comm.Barrier()) == {"ready"}
    after.release()
    print(f"{after.spawner.top.size} ranks went on", flush=True)
    os._exit(0)  # MPI_Finalize may wait for those who died, or for one that was never taken


def _survivors(training: Training) -> Any:
    try:
        while True:
            training.round()
    except MPI.Exception:
        training.spawner.top.Revoke()
        shrunk = training.spawner.top.Shrink()
        shrunk.Set_errhandler(MPI.ERRORS_RETURN)
        return shrunk


def stay() -> None:
    """Until somebody ends the job."""
    training = begin()
    if not is_spawned():
        assert training.grow() == {"ready"}
        if MPI.COMM_WORLD.rank == 0:
            print("three ranks", flush=True)
    while True:
        training.round()


if __name__ == "__main__":
    arguments = [word for word in sys.argv[2:] if word not in ("joins", "again")]
    {"cycles": cycles, "refused": refused, "dies": dies, "stay": stay}[sys.argv[1]](*arguments)
