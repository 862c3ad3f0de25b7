"""Why a run stops on its own before its schedule's end: the job's time is nearly over, or it has nodes to spare.

The batch script goes on with it, in the next job or on fewer nodes, and the bits stay the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from shoal.comm.group import ranks_for
from shoal.comm.world import World
from shoal.elastic.plan import Plan

_REMEMBERED = 64
"""rounds: a hiccup is forgotten after so many"""


class Deadline:
    """Whether the time to the job's end still holds a round and a checkpoint. The master asks between rounds.

    end_time_s: when the scheduler ends the job, by `now`; None if it does not. margin_s: kept free besides.
    """

    def __init__(self, end_time_s: float | None, margin_s: float, now: Callable[[], float] = time.time) -> None:
        self._end_time_s, self._margin_s, self._now = end_time_s, margin_s, now
        self._asked_s: float | None = None
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)

    def reason(self, checkpoint_s: float) -> str:
        """Why to stop now, or an empty text; never before the first round. checkpoint_s: what saving takes."""
        now_s, asked_s = self._now(), self._asked_s
        self._asked_s = now_s
        if asked_s is None or self._end_time_s is None:
            return ""
        self._took_s.append(now_s - asked_s)
        left_s, needed_s = self._end_time_s - now_s, max(self._took_s) + checkpoint_s + self._margin_s
        if left_s >= needed_s:
            return ""
        return f"the job ends in {left_s:.0f} s; a round, a checkpoint and run.stop_margin_s may take {needed_s:.0f} s"


def nodes_needed(plan: Plan, position: int, world: World) -> int:
    """How many nodes of the world have learners in the stage of this position (in samples) or in a later one."""
    left = plan.stages[plan.stages.index(plan.at(position)) :]
    ranks = max((ranks_for(stage.learners, world.order) for stage in left), key=len)
    return len({world.node_of[rank] for rank in ranks})
