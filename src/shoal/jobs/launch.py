"""Start the ranks of a job with the mpiexec that belongs to mpi4py's MPI, and end with them.

The launcher stays the parent of mpiexec for as long as the job runs. Output goes straight through: ranks
write to mpiexec, which writes to the launcher's own stdout and stderr. A signal to the launcher asks for an
orderly stop, a second one ends the job; if the launcher is killed, mpiexec and the ranks die with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from shoal.comm.library import INTEL_MPI, MPICH, OPEN_MPI, Library, loaded
from shoal.comm.lifeline import STATUS_FILE, death_with_parent
from shoal.errors import InputError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
FORWARDED = signal.SIGUSR1
"""Every mpiexec tried passes SIGUSR1 on to the ranks; SIGUSR2 kills MPICH's, SIGTERM ends Open MPI's."""

END_S = 5.0
ONE_SIGNAL_S = 0.5
TOLD_LOOK_S, TOLD_LIMIT_S = 1.0, 15.0
VERSION_S = 20.0
NAMES = ("mpiexec", "mpirun", "mpiexec.hydra")
PATH_NAMES = (*NAMES, "mpiexec.openmpi", "mpirun.openmpi", "mpiexec.mpich", "mpirun.mpich")
SIGNATURES = {OPEN_MPI: ("Open MPI", "OpenRTE"), INTEL_MPI: ("Intel(R) MPI",), MPICH: ("HYDRA", "MPICH")}


def launch(
    n: int,
    command: list[str],
    *,
    stop_file: Path | None,
    ulfm: bool = False,
    extra: Sequence[str] = (),
) -> int:
    """Run `command` on `n` ranks and return the run's exit status (128 + k if mpiexec died of signal k).

    `extra` are further options for mpiexec. A stop signal creates `stop_file`; without one it goes on to the
    ranks. `ulfm` switches Open MPI's fault tolerance on. InputError if the ranks cannot be started.
    """
    if n < 1:
        raise InputError(f"{n} ranks cannot be started: give at least 1 (-n).")
    library = loaded()
    arguments = [*launcher(library, ulfm, extra), "-n", str(n), *command]
    job = _Job(stop_file)
    with _handling(job), folder() as own:
        told = own / "status"
        told.touch()
        process = job.start(arguments, {**environment(library, os.environ, own), STATUS_FILE: str(told)})
        threading.Thread(target=job.end_when_told, args=(told,), daemon=True).start()
        status = process.wait()
        said = told.read_text()
    if said:
        return int(said)
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder for one mpiexec and for what it leaves behind."""
    with tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def launcher(library: Library, ulfm: bool, extra: Sequence[str]) -> list[str]:
    """mpiexec with its options, up to the number of ranks."""
    return [str(find_mpiexec(library)), *_ulfm_options(library, ulfm), *extra]


def find_mpiexec(library: Library) -> Path:
    """The mpiexec of `library`: beside the interpreter, beside the library, or on PATH; checked by asking."""
    folders = [Path(sys.executable).parent]
    if library.path is not None:
        folders += [folder / "bin" for folder in list(library.path.parents)[1:5]]
    candidates = [folder / name for folder in folders for name in NAMES]
    candidates += [Path(found) for name in PATH_NAMES if (found := shutil.which(name))]
    others = []
    for candidate in dict.fromkeys(candidates):
        if os.access(candidate, os.X_OK) and candidate.is_file():
            if _belongs(candidate, library):
                return candidate
            others.append(str(candidate))
    seen = f" (found, of another MPI: {', '.join(others)})" if others else ""
    raise InputError(
        f"No mpiexec of {library.name} {library.version}, the MPI that mpi4py loads, was found beside "
        f"{sys.executable}, beside the library or on PATH{seen}: put its folder on PATH."
    )


def environment(library: Library, given: Mapping[str, str], own: Path) -> dict[str, str]:
    """`given` and what this MPI needs besides; what the user has set stays. own: the `folder` of this mpiexec."""
    threads = given.get("OMP_NUM_THREADS", "1")
    defaults = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
    defaults["PYTHONUNBUFFERED"] = "1"
    if library.name == OPEN_MPI:
        defaults |= _open_mpi_defaults(library, own)
    if library.name == INTEL_MPI:
        defaults["I_MPI_SPAWN"] = "on"
    return {**defaults, **given}


def _open_mpi_defaults(library: Library, own: Path) -> dict[str, str]:
    """More ranks than cores; root where we are root; files in a folder of its own, since what a killed mpiexec leaves
    keeps a later one of the same process id from starting; for the wheel on one machine also a fast start.

    The fast start names the transports, which would keep a site's own Open MPI from its network: only the
    wheel gets it. It saves a second of MPI_Init.
    """
    defaults = {}
    if int(library.version.split(".")[0]) >= 5:
        defaults["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
        defaults["PRTE_MCA_prte_local_tmpdir_base"] = str(own)
        # Else its TCP sends a large message at one go, and what a peer needs to begin to send waits behind it.
        defaults["OMPI_MCA_btl_tcp_flags"] = "send"
    else:
        defaults["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"  # threads that spawn ranks wait inside MPI, beside training
    if os.geteuid() == 0:
        defaults |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if library.bundled:
        defaults |= {
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_mtl": "^ofi",
            "OMPI_MCA_osc": "^ucx",
        }
    return defaults


def _ulfm_options(library: Library, ulfm: bool) -> list[str]:
    if not ulfm:
        return []
    if library.name != OPEN_MPI or int(library.version.split(".")[0]) < 5:
        raise InputError(f"--ulfm needs Open MPI 5 or newer, and mpi4py loads {library}: leave --ulfm out.")
    return ["--with-ft", "ulfm"]


def _belongs(mpiexec: Path, library: Library) -> bool:
    """Whether `mpiexec --version` names this MPI, for Open MPI also this version (others start singletons)."""
    try:
        answer = subprocess.run(
            [str(mpiexec), "--version"], capture_output=True, text=True, timeout=VERSION_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    if library.name == OPEN_MPI and library.version not in answer:
        return False
    return any(sign in answer for sign in SIGNATURES.get(library.name, SIGNATURES[MPICH]))


class _Job:
    """The running mpiexec, and what the launcher does about signals."""

    def __init__(self, stop_file: Path | None) -> None:
        self._stop_file = stop_file
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_s: float | None = None

    def start(self, arguments: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start mpiexec in a session of its own (a terminal's ^C reaches the launcher alone)."""
        launcher = os.getpid()
        ask_kernel = death_with_parent()

        def die_with_launcher() -> None:
            ask_kernel()
            if os.getppid() != launcher:
                os._exit(1)

        self._process = subprocess.Popen(
            arguments,
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_launcher,
        )
        return self._process

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks the ranks to stop, any later one ends the job. timeout(1), for one, sends each of its
        signals to its child and to its group: what comes at once is one signal."""
        name = signal.Signals(number).name
        if self._asked_s is not None:
            if time.monotonic() - self._asked_s > ONE_SIGNAL_S:
                say(f"{name}: ending the job now")
                self._end()
            return
        self._asked_s = time.monotonic()
        if self._create_stop_file() or self._forward():
            say(f"{name}: stopping at the next reduction; a second signal ends the job at once")
        else:
            say(f"{name}: the ranks cannot be told to stop; a second signal ends the job at once")

    def end_when_told(self, told: Path) -> None:
        """Once the ranks have left the job's status in this file, mpiexec has some time to end: where ranks were lost,
        prterun may wait for ever."""
        with contextlib.suppress(OSError):  # the file goes with the job
            while self._process is not None and self._process.poll() is None:
                if told.stat().st_size:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(TOLD_LIMIT_S)
                        return
                    self._end()
                    return
                time.sleep(TOLD_LOOK_S)

    def _create_stop_file(self) -> bool:
        if self._stop_file is None:
            return False
        try:
            self._stop_file.parent.mkdir(parents=True, exist_ok=True)  # the ranks may not be as far
            self._stop_file.touch()
        except OSError:
            return False
        return True

    def _forward(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            return False
        self._process.send_signal(FORWARDED)
        return True

    def _end(self) -> None:
        """SIGTERM lets mpiexec clean up; a rank may take that for a wish to stop, so SIGKILL follows."""
        if self._process is None:
            sys.exit(1)
        self._process.terminate()
        threading.Thread(target=self._kill_after, daemon=True).start()

    def _kill_after(self) -> None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _handling(job: _Job) -> Iterator[None]:
    """Handle the signals that are not ignored (nohup), where they can be: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, job.on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """One line to the user, who may have closed the terminal."""
    with contextlib.suppress(OSError):
        print(f"shoal: {text}", file=sys.stderr, flush=True)
