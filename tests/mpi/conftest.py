"""Tests on several ranks: `mpiexec -n N python -m pytest --with-mpi tests/mpi`, every rank running every test.

A test is over when it is over on all ranks, which then agree on whether it failed. A rank that fails while
the others wait for it inside the test would hang them all, so it prints its report and aborts the job.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TEST_TIMEOUT_S = 30.0
GRACE_S = 5.0
"""how long a rank that failed waits for the others to end the test too"""
COMM_OF_REPORTS = pytest.StashKey[Any]()


@pytest.fixture(scope="session")
def comm() -> Any:
    """MPI.COMM_WORLD."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def world(comm: Any) -> Iterator[Any]:
    """A World of all ranks, whose waits end after a third of the test's time."""
    from shoal.backend import numpy_backend
    from shoal.comm.world import World

    world = World(comm, numpy_backend(), TEST_TIMEOUT_S / 3)
    yield world
    world.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--with-mpi", False):
        from mpi4py import MPI

        config.stash[COMM_OF_REPORTS] = MPI.COMM_WORLD.Dup()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S, method="thread"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    ended = call.when == "call" or (call.when == "setup" and not report.passed)
    if ended and COMM_OF_REPORTS in item.config.stash and item.get_closest_marker("mpi"):
        failed_on = _lowest_failing_rank(item.config.stash[COMM_OF_REPORTS], report)
        if failed_on is not None and not report.failed:
            report.outcome = "failed"
            report.longrepr = f"failed on rank {failed_on}"
    return report


def _lowest_failing_rank(comm: Any, report: pytest.TestReport) -> int | None:
    """The lowest rank on which the test failed. Collective; aborts the job if this rank failed and others hang."""
    from mpi4py import MPI

    lowest = np.array(comm.rank if report.failed else comm.size)
    request = comm.Iallreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    end = time.monotonic() + GRACE_S
    while not request.Test():
        if report.failed and time.monotonic() > end:
            print(
                f"{report.nodeid} failed on rank {comm.rank}, and other ranks do not end it:\n{report.longreprtext}",
                file=sys.stderr,
                flush=True,
            )
            comm.Abort(1)
        time.sleep(1e-3)
    return int(lowest) if lowest < comm.size else None
