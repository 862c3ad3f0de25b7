"""A Slurm cluster of emulated nodes on this machine: slurmctld, a slurmd for each node, munged; no systemd, no cgroups.

All listen on loopback only, keep their files in one folder, and are children of the process that made them, so they
end with it. Every process of the cluster has SLURM_CONF in its environment; what is left of jobs is found by it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from shoal.comm.lifeline import death_with_parent

PACKAGES = "slurm-wlm munge libpmi2-0"
PROGRAMS = ("unshare", "munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
UP_S, ANSWER_S, END_S = 20.0, 20.0, 10.0
POLL_S = 0.1

CONFIG = """
ClusterName=shoal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
KillWait=20
PropagateResourceLimits=NONE
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
"""cred_expire: a requeued job waits for so long; 120 s if left alone. config_overrides: CPUs that are not there."""
NODE = 'mount -t tmpfs shm /dev/shm && exec slurmd -D -N "$0"'
"""A node has shared memory of its own, which goes with it, whatever a killed MPI leaves there."""


class Cluster:
    """In a `with` block there are the nodes n1, n2, ... with `cpus` CPUs each."""

    def __init__(self, nodes: int, cpus: int) -> None:
        self.nodes, self._cpus = nodes, cpus
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-slurm-"))
        self._daemons: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def missing() -> str:
        """Why there cannot be a cluster here, or an empty text."""
        programs = [name for name in PROGRAMS if shutil.which(name) is None]
        if programs:
            return f"there is no {programs[0]}; on Debian: apt-get install -y --no-install-recommends {PACKAGES}"
        if os.geteuid():
            return "Slurm's daemons run jobs of any user, so they need root"
        made = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
        return f"no mount namespace can be made ({made.stderr.strip()})" if made.returncode else ""

    @property
    def environment(self) -> dict[str, str]:
        """For commands that talk to the cluster: that of no other job; ranks leave nothing outside the folder."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        tmp = str(self.folder / "tmp")
        own = {"SLURM_CONF": str(self._config), "TMPDIR": tmp, "OMPI_MCA_btl_sm_backing_directory": tmp}
        return {**kept, **own}

    def __enter__(self) -> Cluster:
        try:
            self._make_files()
            self._start("munged", "--foreground", "--force", *self._munge_options())
            self._until((self.folder / "munge.socket").is_socket, "munged listens")
            self._start("slurmctld", "-D", "-c")
            for i in range(self.nodes):
                self._start("unshare", "--mount", "sh", "-c", NODE, f"n{i + 1}")
            self._until(lambda: len(self.idle()) == self.nodes, "all nodes are idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        while left := list(self.processes()):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, END_S)
        for daemon in self._daemons:
            daemon.wait(END_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, *words: object) -> str:
        """What a command of Slurm, or one that calls some, prints. Raises CalledProcessError if it fails."""
        done = subprocess.run(
            list(map(str, words)), env=self.environment, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
        return done.stdout

    def idle(self) -> set[str]:
        """The nodes without a job."""
        with contextlib.suppress(subprocess.CalledProcessError):
            return set(self.command("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split())
        return set()

    def job(self, number: int) -> dict[str, str]:
        """What scontrol shows of a job, by its names."""
        return dict(re.findall(r"(\w+)=(\S*)", self.command("scontrol", "show", "job", "-o", number)))

    def processes(self, job: int | None = None) -> Iterator[psutil.Process]:
        """What lives of the cluster, or of one of its jobs."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                given = environment_of(process)
                ours = given.get("SLURM_CONF") == str(self._config) and process.status() != psutil.STATUS_ZOMBIE
                if ours and job in (None, int(given.get("SLURM_JOB_ID", -1))):
                    yield process

    def logs(self) -> str:
        """The ends of the daemons' logs, for a failed test."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in paths)

    @property
    def _config(self) -> Path:
        return self.folder / "slurm.conf"

    def _make_files(self) -> None:
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        folder.chmod(0o755)
        for name in ("state", "tmp"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.touch(0o400)
        key.write_bytes(secrets.token_bytes(1024))
        port, *ports = _free_ports(self.nodes + 1)
        lines = [
            f"NodeName=n{i + 1} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} State=UNKNOWN"
            for i, port in enumerate(ports)
        ]
        text = CONFIG.format(host=host, port=port, folder=folder, nodes=self.nodes)
        self._config.write_text("\n".join([text, *lines, ""]))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")  # read, not used

    def _munge_options(self) -> list[str]:
        files = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        return [f"--{option}={self.folder / 'munge'}.{name}" for option, name in files.items()]

    def _start(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.out.log").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    words,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=death_with_parent(),
                )
            )

    def _until(self, reached: Callable[[], bool], what: str, deadline_s: float = UP_S) -> None:
        end = time.monotonic() + deadline_s
        while not reached():
            dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if dead or time.monotonic() > end:
                raise TimeoutError(f"not after {deadline_s:g} s: {what}; ended: {dead}\n{self.logs()}")
            time.sleep(POLL_S)


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Its environment, also where its beginning was overwritten: slurmstepd writes its title there."""
    given = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return {name: value for name, equals, value in (line.partition("=") for line in given) if equals}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
