"""Two hosts with a link of 1 Gbit/s: the digests of one, and no more bytes over the link than there must be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
from test_digests import CASES, LOOSE
from two_hosts import TwoHosts

from shoal.comm.library import OPEN_MPI, loaded

SIZE = 11_000_000
ALGORITHMS = ("hierarchical", "MPI_Allreduce", "MPI_Allreduce+mean", "native", "exchange", "ring", "rabenseifner")


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    if loaded().name != OPEN_MPI:
        pytest.skip("written for Open MPI's mpiexec")
    if problem := TwoHosts.missing():
        pytest.skip(problem)
    with TwoHosts("1gbit") as both:
        yield both


@pytest.fixture(scope="module")
def figures(hosts: TwoHosts) -> dict[str, dict[str, Any]]:
    """What reduce_many.py printed, by algorithm: 44 MB, 2 ranks on each host, 4 learners.

    Their times are printed (pytest -s), not judged. The hosts share cores of which each thinks it has them all, so the
    library is told to yield them (it takes 7 times longer if it does not)."""
    script = Path(__file__).with_name("reduce_many.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
        output = ranks.run(4, [str(script), str(SIZE), "3", *ALGORITHMS], 120.0, wrap=hosts.wrapped)
    print(output)
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {row["algorithm"]: row for row in rows}


def test_no_more_bytes_than_there_must_be(figures: dict[str, dict[str, Any]]) -> None:
    """N(c+1)(M-1)/M = N numbers leave each host, of 4 bytes."""
    assert figures["hierarchical"]["nodes"] == 2
    assert SIZE * 4 <= figures["hierarchical"]["link_bytes"] <= 1.1 * SIZE * 4


def test_the_digests_are_those_of_one_host(hosts: TwoHosts, train_many: Any) -> None:
    cases = {name: {**CASES[name], "run": {"algorithm": "hierarchical"}} for name in LOOSE}
    over, one = train_many(4, cases, wrap=hosts.wrapped), train_many(1, cases)
    for name in LOOSE:
        used = [event for event in over.histories[name] if event["event"] == "algorithm" and len(event["nodes"]) > 1]
        assert {"hierarchical"} == {event["algorithm"] for event in used if event["nodes"] == [2, 2]}, name
        assert over.digest(name) == one.digest(name), name
