"""Which MPI srun's plugins can start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.comm.library import MPICH, OPEN_MPI, Library
from shoal.jobs.preflight import default_plugin, plugins, problem

LISTED = """MPI plugin types are...
\tpmix
\tnone
\tcray_shasta
\tpmi2
specific pmix plugin versions available: pmix_v3,pmix_v4
"""
OLDER = "srun: MPI types are...\nsrun: none\nsrun: pmi2\n"
OFFERED = ("pmix", "none", "cray_shasta", "pmi2", "pmix_v3", "pmix_v4")

MPICH_WHEEL = Library(MPICH, "5.0.2", Path(sys.prefix).resolve() / "lib" / "libmpi.so.12", False)
MPICH_OF_THE_SITE = Library(MPICH, "4.1.2", Path("/opt/mpich/lib/libmpi.so.12"), False)
OPEN_MPI_5 = Library(OPEN_MPI, "5.0.11", None, False)
OPEN_MPI_4 = Library(OPEN_MPI, "4.1.4", None, False)


def test_the_list_of_plugins() -> None:
    assert plugins(LISTED) == OFFERED
    assert plugins(OLDER) == ("none", "pmi2")
    assert plugins("") == ()


def test_the_default() -> None:
    assert default_plugin({}, "MinJobAge = 300 sec\nMpiDefault              = pmix\n") == "pmix"
    assert default_plugin({"SLURM_MPI_TYPE": "pmi2"}, "MpiDefault = pmix\n") == "pmi2"
    assert default_plugin({}, "") == ""


@pytest.mark.parametrize(
    ("library", "plugin", "found"),
    [
        (MPICH_WHEEL, "pmi2", ""),
        (
            MPICH_WHEEL,
            "pmix",
            "MPICH 5.0.2 does not understand srun --mpi=pmix: every rank would be alone; use --mpi=pmi2",
        ),
        (MPICH_WHEEL, "none", "MPICH 5.0.2 does not understand srun --mpi=none"),
        (MPICH_OF_THE_SITE, "cray_shasta", ""),
        (MPICH_OF_THE_SITE, "none", "MPICH 4.1.2 does not understand srun --mpi=none"),
        (OPEN_MPI_5, "pmix_v4", ""),
        (OPEN_MPI_5, "pmi2", "Open MPI 5.0.11 does not understand srun --mpi=pmi2"),
        (OPEN_MPI_4, "pmi2", ""),
        (OPEN_MPI_5, "pmix_v5", "srun has no --mpi=pmix_v5 here, only pmix, none, "),
        (OPEN_MPI_5, "", ""),
    ],
)
def test_what_fits(library: Library, plugin: str, found: str) -> None:
    said = problem(plugin, OFFERED, library)
    assert said.startswith(found) and bool(said) == bool(found)


def test_where_srun_lists_nothing_that_fits() -> None:
    assert problem("pmi2", ("none", "pmi2"), OPEN_MPI_5).endswith("use mpiexec (shoal launch)")
    assert problem("pmi2", (), MPICH_WHEEL) == ""
