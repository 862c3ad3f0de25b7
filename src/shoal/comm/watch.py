"""Who of this node's ranks still lives: looked at by whoever waits, so that no wait outlasts the one it waits for.

The kernel tells: a pidfd is readable when its process has ended, and /proc shows one that is stopped (SIGSTOP) or
stuck in the kernel (a dead file system). Such a rank is no use to the others but could wake up and write into their
sums, so it is killed before anybody goes on without it (fenced). A rank that computes is never in those states, so
the time that a user's step takes does not count; one that reads a slow disk is in them, but the kernel counts that it
runs in between. Ranks of other nodes are watched by the MPI library (ULFM).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from shoal.errors import RankLost

_LOOK_S = 0.01
_STATE_LOOK_S = 0.2
_STILL = 2.5
"""heartbeats for which a rank must have been seen still, so that it is found within three"""


class Watch:
    """The other ranks of this node by their ids, with their processes. elsewhere(): whether MPI knows of a failure."""

    def __init__(self, processes: Mapping[int, int], elsewhere: Callable[[], bool]) -> None:
        self.heartbeat_s = 1.0
        self._elsewhere = elsewhere
        self._pids: dict[int, int] = {}
        self._descriptors: dict[int, int] = {}
        self._poll = select.poll() if hasattr(select, "poll") else None
        for rank, pid in processes.items():
            self.add(rank, pid)
        self._looked_s = self._states_s = 0.0
        self._still: dict[int, tuple[str, float]] = {}
        """of a rank that stands still: what the kernel says of it, and for how long nothing has changed"""
        self.excluded: set[int] = set()
        """ids of ranks that were killed because they stood still"""

    def add(self, rank: int, pid: int) -> None:
        """Watch one more."""
        self._pids[rank] = pid
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or it has just died
            self._descriptors[rank] = os.pidfd_open(pid)
            if self._poll is not None:
                self._poll.register(self._descriptors[rank], select.POLLIN)

    def forget(self, rank: int) -> None:
        """It may end."""
        if (descriptor := self._descriptors.pop(rank, None)) is not None:
            if self._poll is not None:
                self._poll.unregister(descriptor)
            os.close(descriptor)

    def look(self) -> None:
        """Raises RankLost if a rank is lost. Cheap: looks a hundred times a second at most."""
        now = time.monotonic()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        self.fence_the_still()
        if dead := self.dead():
            raise RankLost(f"world rank {', '.join(map(str, dead))} died")
        if self._elsewhere():
            raise RankLost("a rank was lost, another rank says")

    def dead(self) -> list[int]:
        """The ids of those that have ended."""
        if self._poll is None or not self._descriptors:
            return []
        ended = {descriptor for descriptor, _ in self._poll.poll(0)}
        return [rank for rank, descriptor in self._descriptors.items() if descriptor in ended]

    def fence_the_still(self) -> None:
        """Kill whoever has not moved for most of three heartbeats."""
        now = time.monotonic()
        gap_s = now - self._states_s
        if gap_s < _STATE_LOOK_S:
            return
        self._states_s = now
        gap_s = min(gap_s, self.heartbeat_s)  # if this rank was stopped too, the others get some time to move
        for rank in self._descriptors:
            mark = _stillness(self._pids[rank])
            before, still_s = self._still.get(rank, ("", 0.0))
            if not mark:
                self._still.pop(rank, None)
            elif mark != before:
                self._still[rank] = (mark, 0.0)
            else:
                self._still[rank] = (mark, still_s + gap_s)
                if still_s + gap_s > _STILL * self.heartbeat_s - _STATE_LOOK_S:
                    self.excluded.add(rank)
                    self._kill(rank)

    def fence(self, ranks: Iterable[int], limit_s: float) -> list[int]:
        """Make sure that these have ended, and forget them; those that cannot be confirmed within the limit."""
        gone = [rank for rank in ranks if rank in self._descriptors]
        for rank in gone:
            self._kill(rank)
        end_s = time.monotonic() + limit_s
        while (alive := [rank for rank in gone if rank not in self.dead()]) and time.monotonic() < end_s:
            time.sleep(_LOOK_S / 10)
        for rank in gone:
            self.forget(rank)
        return alive

    def close(self) -> None:
        """Give the descriptors back."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        self._poll = None

    def _kill(self, rank: int) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._descriptors[rank], signal.SIGKILL)


def _stillness(pid: int) -> str:
    """State and count of switches of a process that is stopped by a signal, or waits in the kernel where no signal
    reaches it: the same text means that it has not run in between. Empty for all others."""
    try:
        told = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
    except OSError:
        return ""
    switches = (told.get(f"{kind}voluntary_ctxt_switches", "") for kind in ("", "non"))
    return " ".join((told["State"], *switches)) if told.get("State", "").startswith(("T", "D")) else ""
