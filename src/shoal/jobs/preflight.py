"""Whether srun and mpi4py's MPI understand each other, asked before any rank is started.

If they do not, srun starts as many jobs of one rank as there were to be ranks. (mpiexec needs no such check:
`launch.find_mpiexec` takes the one that belongs to the library.)
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

from shoal.comm.library import INTEL_MPI, MPICH, OPEN_MPI, Library, loaded
from shoal.errors import InputError

ANSWER_S = 20.0


def check_srun(plugin: str) -> str:
    """Refuse `srun --mpi=plugin` ("" for the site's default) if the ranks would not find each other.

    Returns a line that says what fits. Raises InputError."""
    library = loaded()
    chosen = plugin or default_plugin(os.environ, _answer("scontrol", "show", "config"))
    offered = plugins(_answer("srun", "--mpi=list"))
    if found := problem(chosen, offered, library):
        raise InputError(found)
    return f"srun --mpi={chosen or '(default)'} and {library} understand each other"


def problem(plugin: str, offered: tuple[str, ...], library: Library) -> str:
    """Why `library` cannot be started by srun with this plugin, or an empty text. Says nothing where it cannot know:
    a site's MPI may have been built for any plugin but none."""
    fitting = [name for name in offered if knows(library, name)]
    way_out = (
        f"use {' or '.join(f'--mpi={name}' for name in fitting)}, or mpiexec"
        if fitting
        else "use mpiexec (shoal launch)"
    )
    if plugin and offered and plugin not in offered:
        return f"srun has no --mpi={plugin} here, only {', '.join(offered)}; {way_out}"
    if plugin and not knows(library, plugin):
        return f"{library} does not understand srun --mpi={plugin}: every rank would be alone; {way_out}"
    return ""


def knows(library: Library, plugin: str) -> bool:
    """Whether the library may speak with srun's plugin. The wheels of MPICH and of Intel MPI speak PMI-2 only, Open
    MPI gave PMI-2 up with version 5."""
    kind = re.split(r"[_-]", plugin)[0]
    if kind == "none":
        return False
    if library.name == OPEN_MPI and int(library.version.split(".")[0]) >= 5:
        return kind == "pmix"
    if library.name == INTEL_MPI or (library.name == MPICH and library.bundled):
        return kind == "pmi2"
    return True


def plugins(listed: str) -> tuple[str, ...]:
    """The names in what `srun --mpi=list` prints, each on its line and versions (pmix_v4) on one."""
    names: list[str] = []
    for line in listed.splitlines():
        text, versions, more = line.removeprefix("srun:").strip().partition("available:")
        names += re.findall(r"[\w-]+", more) if versions else re.findall(r"^[\w-]+$", text)
    return tuple(names)


def default_plugin(given: Mapping[str, str], config: str) -> str:
    """What srun takes without --mpi: the user's SLURM_MPI_TYPE, or MpiDefault; "" if neither is known."""
    if given.get("SLURM_MPI_TYPE"):
        return given["SLURM_MPI_TYPE"]
    found = re.search(r"^MpiDefault\s*=\s*(\S+)", config, re.MULTILINE)
    return found[1] if found else ""


def _answer(*command: str) -> str:
    """What a command prints on either stream; nothing if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
