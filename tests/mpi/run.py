"""Runs tests/mpi under mpiexec with pytest-mpi at each number of ranks: `python tests/mpi/run.py 1 2 3 4`.

Fails if a rank fails, if the deadline passes, or if any rank ran no test (without --with-mpi pytest-mpi skips
everything, green).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEADLINE_S = 240

START = """
import sys
from shoal.jobs.launch import launch
n, tests = int(sys.argv[1]), sys.argv[2]
command = [sys.executable, "-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", tests]
sys.exit(launch(n, command, stop_file=None))
"""


def run(ranks: int) -> str:
    """What is wrong, or an empty text."""
    command = [sys.executable, "-c", START, str(ranks), str(HERE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as late:
        return f"{ranks} ranks: not done after {DEADLINE_S} s\n{(late.stdout or b'').decode(errors='replace')}"
    passed = [int(count) for count in re.findall(r"(\d+) passed", done.stdout)]
    if done.returncode or len(passed) != ranks or not all(passed):
        return f"{ranks} ranks: exit status {done.returncode}, passed {passed}\n{done.stdout}\n{done.stderr}"
    print(f"tests/mpi on {ranks} ranks: {passed[0]} passed on each", flush=True)
    return ""


if __name__ == "__main__":
    sys.exit("\n".join(filter(None, map(run, map(int, sys.argv[1:])))) or 0)
