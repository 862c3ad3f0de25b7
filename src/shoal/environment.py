"""What this process runs on: for the header of a run's log, for `shoal info`, and to warn at a resume.

Two runs have the same bits only on the same CPU type, BLAS and thread count, so these are written down.
"""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from shoal import kernels

SAME_BITS = ("cpu", "blas", "threads", "numpy", "torch")
"""What must be equal for a resumed run to have the bits of the uninterrupted one."""


def limit_threads(threads: int) -> None:
    """Let the BLAS of this process use so many threads, and PyTorch, whatever the environment says."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)


def describe() -> dict[str, Any]:
    """Versions, host, CPU, BLAS and threads. Reads, changes nothing; does not load MPI."""
    return {
        "shoal": shoal.__version__,
        "commit": _commit(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": _cpu(),
        **_blas(),
        "backend": "numpy",
        "kernels": kernels.backing(),
        **_torch(),
    }


def _torch() -> dict[str, str]:
    """The version of PyTorch, where this process has imported it."""
    torch = sys.modules.get("torch")
    return {"torch": str(torch.__version__)} if torch else {}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines[:40])}
    known = [fields[key] for key in ("model name", "cpu", "cpu family", "model", "stepping") if key in fields]
    return " / ".join(known) or platform.processor() or platform.machine()


def _blas() -> dict[str, Any]:
    from threadpoolctl import threadpool_info

    found = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    if not found:
        return {"blas": "unknown", "threads": 0}
    pool = found[0]
    name = " ".join(str(pool[key]) for key in ("internal_api", "version", "architecture") if pool.get(key))
    return {"blas": name, "threads": pool["num_threads"]}


def _commit() -> str:
    """The commit of the checkout that this package runs from, or an empty text."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
