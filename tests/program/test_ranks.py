"""The test bench itself: ranks that hang are named and ended, and one failing rank does not hang tests/mpi."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import ranks

ONE_HANGS = """
import os, time
from pathlib import Path
from mpi4py import MPI
Path({folder!r}, str(MPI.COMM_WORLD.rank)).write_text(str(os.getpid()))
print("here I am", flush=True)
if MPI.COMM_WORLD.rank == 1:
    time.sleep(100)
MPI.COMM_WORLD.Barrier()
"""

RECORDED = """

def pytest_sessionfinish(session, exitstatus):
    from mpi4py import MPI
    Path(__file__).with_name(f"status-{MPI.COMM_WORLD.rank}").write_text(str(int(exitstatus)))
    MPI.COMM_WORLD.Barrier()
"""

ONE_FAILS = """
import pytest
pytestmark = pytest.mark.mpi

def test_before(comm):
    comm.Barrier()

def test_one_sided(comm):
    assert comm.rank != 1, "the last words of rank 1"
    {waits}
"""


def test_ranks_at_the_deadline(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(ONE_HANGS.format(folder=str(tmp_path)))
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as caught:
        ranks.run(2, [str(script)], deadline_s=4)
    assert time.monotonic() - start < 4 + 3 * ranks.END_S
    complaint = str(caught.value)
    pids = [int((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    assert "did not end within 4 s" in complaint and complaint.count("here I am") == 2
    assert f"rank 0 (pid {pids[0]}" in complaint and f"rank 1 (pid {pids[1]}" in complaint
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def test_another_status_than_expected(tmp_path: Path) -> None:
    script = tmp_path / "exit.py"
    script.write_text("from mpi4py import MPI; print('well'); raise SystemExit(3)")
    assert "well" in ranks.run(1, [str(script)], status=3)
    assert "well" in ranks.run(1, [str(script)], status=None)
    with pytest.raises(pytest.fail.Exception, match=r"ended with status 3\n(.*\n)*well"):
        ranks.run(1, [str(script)])


@pytest.mark.parametrize("waits", ["comm.Barrier()", "pass"], ids=["the others wait", "the others do not"])
def test_one_rank_that_fails_fails_the_tests_of_all(tmp_path: Path, waits: str) -> None:
    conftest = Path(__file__).parents[1] / "mpi" / "conftest.py"
    (tmp_path / "conftest.py").write_text(conftest.read_text() + RECORDED)
    (tmp_path / "test_one_fails.py").write_text(ONE_FAILS.format(waits=waits))
    options = ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--with-mpi"]
    start = time.monotonic()
    output = ranks.run(3, ["-m", "pytest", *options, str(tmp_path)], status=None)
    assert time.monotonic() - start < 25
    assert "the last words of rank 1" in output and "test_one_sided" in output
    ended = sorted(path.name for path in tmp_path.glob("status-*"))
    assert ended == ([] if waits != "pass" else ["status-0", "status-1", "status-2"])
    assert all((tmp_path / name).read_text() == "1" for name in ended)
