"""How a rank ends: with the others, for a reason that is told once, and never left behind.

Three ends, each found by trial on Open MPI (with and without ULFM) and MPICH:

- *leave*: all ranks together, with one exit status that mpiexec passes on.
- *fail*: one rank has an exception; it prints it and ends everybody, whatever they are doing.
- *orphaned*: mpiexec was killed; the kernel then kills each rank, also one that sits in a long C call.

A signal asks for an orderly stop: it only raises a flag, and training stops at the next reduction.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn

from shoal import errors
from shoal.comm import library
from shoal.errors import ERROR, DeadlineError, RankLost, ShoalError

if TYPE_CHECKING:
    from mpi4py import MPI

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""SIGUSR1 is the one that every mpiexec passes on to its ranks untouched."""

LAUNCHERS = ("prte", "orte", "mpiexec", "mpirun", "hydra", "pmi_proxy", "slurmstepd", "jsm")
"""How the names of processes begin that start ranks."""

STATUS_FILE = "SHOAL_STATUS_FILE"
"""the environment variable that names it"""
PARENT_POLL_S, SUMMONS_POLL_S = 1.0, 0.5
CONSEQUENCE_S, ALL_ALIKE_S = 2.0, 0.6
ABORT_LIMIT_S, FINALIZE_LIMIT_S, EXIT_LIMIT_S = 4.0, 30, 5.0
LAST_WORD_S = 0.3
PR_SET_PDEATHSIG = 1


def brace(launched: bool) -> None:
    """The first thing that a rank does, before the imports that take their time; `start` does the rest.

    Stop signals wait until `start` can take them, a dead launcher takes the rank along, and an exception ends the
    launcher: a rank that goes before MPI_Init would otherwise hang the others under ULFM and MPICH. launched: by an
    mpiexec or the like, so that being nobody's child means that it has died already."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    parent = os.getppid()
    if _is_launcher(parent):
        death_with_parent()()
        sys.excepthook = _fail_early
    elif launched and parent == 1:
        os._exit(ERROR)


def _fail_early(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """Before MPI: SIGTERM ends Open MPI's mpiexec and its ranks; MPICH's proxy passes it on, so there SIGKILL."""
    sys.stderr.write(f"{_who()} failed:\n{''.join(traceback.format_exception(value))}")
    sys.stderr.flush()
    time.sleep(LAST_WORD_S)
    parent = os.getppid()
    if _is_launcher(parent):
        hydra = _name(parent).startswith(("hydra", "pmi_proxy"))
        os.kill(parent, signal.SIGKILL if hydra else signal.SIGTERM)
    os._exit(ERROR)


def start(stop_file: Path | None = None) -> Lifeline:
    """Tie this rank to the job, once. Collective over the world; initialises MPI if nobody has.

    With `stop_file`, a stop signal to any rank also creates that file, so that the master, which looks
    for it, learns of a signal that reached another rank.
    """
    if isinstance(tied_already := getattr(sys.excepthook, "__self__", None), Lifeline):
        return tied_already
    tied = _is_launcher(os.getppid())
    if tied:  # before MPI_Init, which takes long enough for mpiexec to die in it
        die_with_parent()
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finalize)
    if not tied and MPI.COMM_WORLD.size > 1:
        die_with_parent()
    return Lifeline(stop_file, _Summons(MPI.COMM_WORLD) if library.loaded().ulfm else None)


class Lifeline:
    """One rank's hold on the job, made by `start`; the hooks and handlers it installs stay."""

    def __init__(self, stop_file: Path | None, summons: _Summons | None) -> None:
        from mpi4py import MPI

        self.comm: MPI.Intracomm = MPI.COMM_WORLD
        """the communicator of the ranks that live"""
        self.recovers = summons is not None
        """whether the MPI can go on without ranks that were lost"""
        self._stop_file = stop_file
        self._summons = summons
        self._stop = False
        self._failing = threading.Lock()
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception

    def stop_requested(self) -> bool:
        """Whether a signal has asked this rank to stop. Differs between ranks: the master decides."""
        return self._stop

    def fail(self, exception: BaseException) -> NoReturn:
        """End the whole job with exit status 1 because of `exception`; from any thread of any one rank."""
        # If another rank is ending the job, this one dies here, silently; where all fail alike, rank 0 speaks.
        wait_s = CONSEQUENCE_S if _may_be_a_consequence(exception) else ALL_ALIKE_S * (_rank() > 0)
        self._end(f"{_who()} failed:\n{''.join(traceback.format_exception(exception))}", ERROR, wait_s)

    def abandon(self, lost: RankLost, rank: int) -> NoReturn:
        """End the job with status 75. rank: of the living, who take turns: asked thrice, prterun leaves files."""
        tell_launcher(errors.TRY_AGAIN)
        text = f"shoal: {lost}; --resume goes on from the last checkpoint\n"
        self._end(text, errors.TRY_AGAIN, ALL_ALIKE_S * min(rank, 1) + CONSEQUENCE_S * min(max(rank - 1, 0), 2))

    def _end(self, text: str, status: int, wait_s: float) -> NoReturn:
        if not self._failing.acquire(blocking=False):
            time.sleep(2 * ABORT_LIMIT_S)  # another thread is at it: one text is enough
        time.sleep(wait_s)
        # Whatever blocks below (a broken terminal, a lock in MPI): this process does not outlive it.
        _after(ABORT_LIMIT_S, self._die)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stdout.flush()
            sys.stderr.flush()
        time.sleep(LAST_WORD_S)  # mpiexec drops what it has not read when the job ends
        self._end_everybody(status)
        self._die()

    def leave(self, status: int, speaker: bool, lost: bool = False) -> NoReturn:
        """The orderly end, with exit status `status`. Collective; raises SystemExit when MPI is finished.

        lost: whether ranks were. One rank, the speaker, carries the status, and after the others: a non-zero exit
        makes Open MPI print a page of help, and MPICH kill whoever is still in its exit, if others are there then.
        """
        for number in STOP_SIGNALS:  # too late: the end is as it is, and Python's own handlers go before Python
            signal.signal(number, signal.SIG_IGN)
        if speaker:
            tell_launcher(status)  # which ends mpiexec if a rank does not come out of Finalize
        if self._summons is not None:
            self._summons.close()
        if lost:  # Finalize may wait for them for ever
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(errors.DONE)  # another status would hang mpiexec
        _finalize()
        sys.stdout.flush()
        sys.stderr.flush()
        if speaker and status != 0:
            time.sleep(LAST_WORD_S)
        status = status if speaker else 0
        # A thread that never ends would hold the interpreter; MPICH needs the normal way out otherwise.
        _after(EXIT_LIMIT_S, lambda: os._exit(status))
        raise SystemExit(status)

    def _end_everybody(self, status: int) -> None:
        """MPI_Abort; with ULFM that takes only the caller away, so there mpiexec is told to end."""
        from mpi4py import MPI

        if self._summons is not None:
            self._summons.send()
            time.sleep(ABORT_LIMIT_S)  # mpiexec kills this rank before that is over
        elif MPI.Is_initialized() and not MPI.Is_finalized() and self.comm.size > 1:
            MPI.COMM_WORLD.Abort(status)

    def _die(self) -> NoReturn:
        """Die so that mpiexec sees it: a bad exit, or under ULFM (where that hangs mpiexec) a kill."""
        if self._summons is not None:
            self._summons.desert()
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(ERROR)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        if self._stop_file is not None:
            with contextlib.suppress(OSError):
                self._stop_file.touch()

    def _on_exception(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        """An exception that nobody caught. What all ranks raise together is an end in order, told once."""
        if not (isinstance(value, ShoalError) and value.agreed):
            self.fail(value)
        speaker = self.comm.rank == 0
        if speaker:
            print(f"shoal: {value}", file=sys.stderr, flush=True)
        with contextlib.suppress(SystemExit):  # which cannot be raised from here
            self.leave(value.status, speaker)
        os._exit(value.status if speaker else 0)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            self.fail(args.exc_value if args.exc_value is not None else args.exc_type())


class _Summons:
    """Under ULFM: how any rank gets mpiexec to end the job.

    SIGTERM to mpiexec is the one thing that ends all ranks and returns non-zero. A rank beside mpiexec
    sends it; a rank on another node asks one that is, by a message. (Killing its own daemon also ends
    the job, but mpiexec then returns 0.) Making one is collective; costs nothing on a single node.
    """

    def __init__(self, world: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._launcher = _ancestors()[-1]
        self._beside = not _name(self._launcher).startswith("prted")
        beside = world.allgather(self._beside)
        self._helpers = [rank for rank, is_beside in enumerate(beside) if is_beside]
        self._others = [rank for rank, is_beside in enumerate(beside) if not is_beside]
        self._comm = world.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._closed = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True, name="summons")
        if self._beside and self._others and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._listener.start()

    def send(self) -> None:
        """Tell mpiexec to end the job, through a helper if it is not on this node."""
        if self._beside:
            self._end_launcher()
            return
        from mpi4py import MPI

        requests = []
        for rank in self._helpers:
            with contextlib.suppress(MPI.Exception):  # it may have died before
                requests.append(self._comm.Isend([bytearray(1), MPI.BYTE], rank))
        with contextlib.suppress(MPI.Exception):
            while not MPI.Request.Testall(requests):
                time.sleep(SUMMONS_POLL_S / 10)

    def desert(self) -> None:
        """The last resort: end the local daemon, and by that the job."""
        self._end_launcher()

    def close(self) -> None:
        """Stop listening, before MPI is finalised."""
        self._closed.set()
        if self._listener.is_alive():
            self._listener.join()

    def _listen(self) -> None:
        from mpi4py import MPI

        while not self._closed.wait(SUMMONS_POLL_S):
            for rank in list(self._others):
                try:
                    if self._comm.Iprobe(rank):
                        self._end_launcher()
                except MPI.Exception:  # that rank has died; it will not call
                    self._others.remove(rank)

    def _end_launcher(self) -> None:
        """SIGTERM to what started this rank (never to the shell of a run without mpiexec)."""
        if _ancestors()[-1] == self._launcher and _is_launcher(self._launcher):
            os.kill(self._launcher, signal.SIGTERM)


def tell_launcher(status: int) -> None:
    """Leave the job's exit status where `shoal launch`, on this node, looks for it: mpiexec cannot carry it once ranks
    were lost."""
    if path := os.environ.get(STATUS_FILE):
        with contextlib.suppress(OSError):
            Path(path).write_text(str(status))


def die_with_parent() -> None:
    """From now on this process is killed when its parent dies.

    The kernel does it (Linux), so that a rank busy in C dies too. A thread looks as well: for systems
    without PR_SET_PDEATHSIG, and for a wrapper script between mpiexec and the rank, which would live on.
    """
    chain = _ancestors()
    death_with_parent()()
    threading.Thread(target=_watch, args=(chain,), daemon=True, name="lifeline").start()


def death_with_parent() -> Callable[[], None]:
    """A call that asks the kernel for SIGKILL when the parent dies; it does nothing without prctl (Linux).

    Returned ready to make, so that a child between fork and exec has nothing to look up.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return lambda: None
    return lambda: prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _watch(chain: list[int]) -> None:
    while _intact(chain):
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _ancestors() -> list[int]:
    """The parent, its parent and so on up to what starts ranks; the parent alone if that is not found."""
    chain = [os.getppid()]
    with contextlib.suppress(OSError):
        while chain[-1] > 1 and not _is_launcher(chain[-1]):
            chain.append(_parent_of(chain[-1]))
    return chain if _is_launcher(chain[-1]) else chain[:1]


def _intact(chain: list[int]) -> bool:
    """Whether each is still the parent of the one before; a dead one's children change parents at once."""
    try:
        return os.getppid() == chain[0] and all(_parent_of(a) == b for a, b in pairwise(chain))
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # that no file can be opened says nothing about mpiexec
        return True


def _parent_of(pid: int) -> int:
    """From /proc; the name in the middle of the line may hold spaces and brackets."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _is_launcher(pid: int) -> bool:
    return _name(pid).startswith(LAUNCHERS)


def _name(pid: int) -> str:
    """The process's name, "" where the system does not tell it in /proc."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _finalize() -> None:
    from mpi4py import MPI

    if not MPI.Is_finalized():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(FINALIZE_LIMIT_S)  # the kernel, since no thread of Python runs meanwhile
        MPI.Finalize()
        signal.alarm(0)


def _rank() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank if MPI.Is_initialized() and not MPI.Is_finalized() else 0


def _may_be_a_consequence(exception: BaseException) -> bool:
    """Whether it may only say that another rank has gone."""
    from mpi4py import MPI

    return isinstance(exception, MPI.Exception | DeadlineError)


def _who() -> str:
    if "mpi4py.MPI" not in sys.modules:
        return f"shoal: a process on {socket.gethostname()}"
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return f"shoal: a process on {socket.gethostname()}"
    return f"shoal: rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} on {socket.gethostname()}"


def _after(delay_s: float, action: Callable[[], object]) -> threading.Event:
    """Run `action` on a daemon thread after `delay_s`, unless the returned event is set before."""
    cancelled = threading.Event()

    def wait() -> None:
        if not cancelled.wait(delay_s):
            action()

    threading.Thread(target=wait, daemon=True, name="deadline").start()
    return cancelled
