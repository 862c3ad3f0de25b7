"""The compiled kernels, where there are any, and what to say about it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

cpu: ModuleType | None = None
_refused = ""
try:
    import shoal.kernels._cpu as _compiled

    cpu = _compiled
except ModuleNotFoundError:
    pass
except ImportError as error:  # compiled for another CPU, or against another Python
    _refused = str(error)


def backing() -> str:
    """Which form of the hot loops runs, and why: for `shoal info`, the run's log, the first line of training."""
    if cpu is not None:
        return f"C ({cpu.COMPILER}, {cpu.FLAGS})"
    note = Path(__file__).with_name("not_compiled.txt")
    reason = note.read_text(encoding="utf-8").strip() if note.exists() else "the C kernels were not compiled"
    return f"NumPy twins ({_refused or reason})"
