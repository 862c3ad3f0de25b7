"""The one way to wait for another rank: poll, give the core away, and end at a deadline with names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import DeadlineError

_SPINS = 200
_YIELD_S = 200e-6
_LONGEST_SLEEP_S = 500e-6


def _look_away() -> None:
    return None


@dataclass
class Waiter:
    """How long to wait (a run sets its own `timeout_s`), whether the node has more ranks than cores (`crowded`: then
    a waiting rank never spins), and who is called to `watch` for lost ranks, and raises RankLost: once in each wait, so
    that a lost rank that nobody waits for is found too, and again and again in a long one."""

    timeout_s: float
    crowded: bool
    watch: Callable[[], None] = _look_away

    def until(self, done: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Return when `done()`; `done` also drives the progress of what it tests.

        Raises DeadlineError with the text of `missing()`, which names who or what did not come.
        """
        self.watch()
        spins = 0 if self.crowded else _SPINS
        start = time.perf_counter()
        while not done():
            if spins:
                spins -= 1
                continue
            waited_s = time.perf_counter() - start
            if waited_s > self.timeout_s:
                raise DeadlineError(
                    f"waited {waited_s:.0f} s for {missing()}, which did not come; look at what it is doing, "
                    "or raise run.timeout_s if it was only slow"
                )
            if waited_s < _YIELD_S:
                os.sched_yield()
            else:
                self.watch()
                time.sleep(min(_LONGEST_SLEEP_S, waited_s / 20))
