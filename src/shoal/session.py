"""A process that is one rank of a job, from MPI's start to an orderly or a disorderly end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from shoal import allocation, errors
from shoal.backend import numpy_backend
from shoal.comm import lifeline
from shoal.comm.world import World

Work = Callable[[World, lifeline.Lifeline], int]
"""What a rank does in a world; returns the exit status, the same on all ranks."""


def be_a_rank(work: Work, stop_file: Path | None = None) -> NoReturn:
    """Do `work` in the world of all ranks, then leave with its status.

    What all ranks raise together (bad input, a stop) is said once and all leave with its status; any other
    exception is this rank's failure, and ends the job. Collective.
    """
    life, world = lifeline.start(stop_file), None
    try:
        world = World(life.comm, numpy_backend(), recovers=life.recovers)
        try:
            allocation.check_joined(allocation.read(os.environ), world.size, world.library)
            status = work(world, life)
        except errors.ShoalError as error:
            if not error.agreed:
                raise
            status = error.status
            if world.is_master:
                print(f"shoal: {error}", file=sys.stderr, flush=True)
        life.comm = world.close()
    except errors.RankLost as lost:
        life.abandon(lost, (world or life.comm).rank)
    except BaseException as error:
        life.fail(error)
    life.leave(status, world.is_master, world.lost)


def be_a_joiner(work: Callable[[lifeline.Lifeline], tuple[World, int | None]]) -> NoReturn:
    """Do `work` in a process that was spawned: it joins a world, and returns that with the status of the job, or None
    where this rank was released before the end."""
    life, world = lifeline.start(), None
    try:
        world, status = work(life)
        if status is not None:
            life.comm = world.close()
    except errors.RankLost as lost:
        life.abandon(lost, (world or life.comm).rank)
    except BaseException as error:
        life.fail(error)
    life.leave(status or 0, status is not None and world.is_master, world.lost and status is not None)
