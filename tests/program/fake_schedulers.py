"""sbatch, scontrol, squeue, scancel, srun and bsub, bjobs, bkill, jsrun for tests: strict about their options.

    python fake_schedulers.py COMMAND ARGUMENTS...

They refuse what the real ones refuse, keep jobs as files in $FAKE_CLUSTER, and start real ranks by $FAKE_MPIEXEC (a
JSON list); before that, a step ends at once with the first status that is left in $FAKE_CLUSTER/statuses. They run
no job themselves: batch.Cluster is the machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

END = "2099-01-01T00:00:00"
PMI_PLUGINS = ("cray_shasta", "none", "pmi2")
SLURM_TIME = re.compile(r"(\d+-\d\d:\d\d:\d\d|\d+:\d\d:\d\d)\Z")
SBATCH = {
    "--job-name": r".+", "--nodes": r"\d+", "--ntasks": r"\d+", "--ntasks-per-node": r"\d+", "--cpus-per-task": r"\d+",
    "--gres": r"gpu(:\w+)?:\d+", "--gpus-per-node": r"\d+", "--time": SLURM_TIME.pattern, "--account": r".+",
    "--partition": r".+", "--qos": r".+", "--constraint": r"[\w&|]+", "--reservation": r".+", "--mail-type": r"[A-Z,]+",
    "--signal": r"B:(USR1|USR2|URG)@\d{2,5}", "--output": r".+", "--open-mode": r"append", "--requeue": "",
    "--no-requeue": "", "--no-kill": "", "--exclusive": "", "--parsable": "", "--dependency": r"afterany:\d+",
    "--kill-on-invalid-dep": r"yes", "-S": r"\d+",
}  # fmt: skip
SRUN = {
    "--nodes": r"\d+", "--ntasks": r"\d+", "--ntasks-per-node": r"\d+", "--cpus-per-task": r"\d+", "--mpi": r"\w+",
    "--cpu-bind": r"cores|none|sockets", "--distribution": r"block|cyclic|plane=\d+", "--gpus-per-task": r"\d+",
    "--gpu-bind": r"closest|none|map_gpu:[\d,]+", "--kill-on-bad-exit": r"[01]", "--no-kill": "", "--overlap": "",
}  # fmt: skip
BSUB = {
    "-J": r".+", "-P": r".+", "-G": r".+", "-q": r".+", "-U": r".+", "-o": r".+", "-W": r"\d+:[0-5]\d",
    "-nnodes": r"\d+", "-n": r"\d+", "-R": r"span\[ptile=\d+\]", "-alloc_flags": r"(smt[124]|nvme|gpumps)( \w+)*",
    "-gpu": r"num=\d+", "-wa": r"USR1|USR2|URG", "-wt": r"\d+(:\d\d)?", "-Q": r"\d+", "-N": None, "-w": r"ended\(\d+\)",
}  # fmt: skip
JSRUN = {
    "--nrs": r"\d+", "--tasks_per_rs": r"\d+", "--cpu_per_rs": r"\d+", "--gpu_per_rs": r"\d+", "--rs_per_host": r"\d+",
    "--bind": r"none|rs|packed:\d+", "--launch_distribution": r"packed|cyclic|plane:\d+",
    "--latency_priority": r"[a-z,-]+", "--smpiargs": r"-gpu",
}  # fmt: skip
ALWAYS = set(JSRUN) - {"--smpiargs", "--latency_priority"}


def refuse(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(1)


# --- jobs are files


def cluster() -> Path:
    return Path(os.environ["FAKE_CLUSTER"])


def record(job: str) -> dict[str, Any]:
    path = cluster() / f"{job}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save(job: str, **changes: Any) -> None:
    path = cluster() / f"{job}.json"
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps({**record(job), **changes}))
    beside.rename(path)


def queue(script: str, options: dict[str, str], after: str = "") -> str:
    """A job that waits; its script is a copy, as schedulers spool it."""
    job = str(1001 + len(list(cluster().glob("*.json"))))
    (cluster() / f"{job}.sh").write_text(script)
    save(job, options=options, after=after, state="PENDING", restarts=0, requeued=False)
    return job


# --- options


def slurm_words(line: str) -> list[str]:
    """A directive as sbatch splits it."""
    return shlex.split(line, comments=True)


def lsf_words(line: str) -> list[str]:
    """As bsub splits one; -wa and -wt in quotes are not understood (a user's report)."""
    if re.search(r"-w[at] +['\"]", line):
        refuse(f"bsub: bad warning time in: {line}")
    return shlex.split(line)


def directives(script: str, prefix: str, split: Any) -> list[str]:
    """Words of the directives, which end at the first line that is no comment."""
    words: list[str] = []
    for line in script.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith(prefix + " "):
            words += split(line.removeprefix(prefix))
    return words


def options(command: str, words: list[str], known: dict[str, Any], equals: bool) -> tuple[dict[str, str], list[str]]:
    """What the options say, and the words after them; refuses what the command does not know."""
    found: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, has_value, value = words[at].partition("=") if equals else (words[at], "", "")
        if name not in known:
            refuse(f"{command}: unrecognized option '{words[at]}'")
        if name in found:
            refuse(f"{command}: {name} is given twice")
        rule = known[name]
        takes_next = bool(rule) and not has_value and (not equals or not name.startswith("--"))
        if takes_next:
            at += 1
            value = words[at] if at < len(words) else ""
        if rule and not re.fullmatch(rule, value):
            refuse(f"{command}: Invalid {name} specification: {value}")
        found[name] = value
        at += 1
    return found, words[at:]


# --- Slurm


def sbatch(words: list[str]) -> None:
    given, rest = options("sbatch", words, SBATCH, True)
    if len(rest) != 1:
        refuse("sbatch: error: one script, please")
    script = Path(rest[0]).read_text()
    if not script.startswith("#!"):
        refuse("sbatch: error: This does not look like a batch script")
    asked, left = options("sbatch", directives(script, "#SBATCH", slurm_words), SBATCH, True)
    if left:
        refuse(f"sbatch: error: words behind the directives: {left}")
    nodes, tasks, per_node = (int(asked[name]) for name in ("--nodes", "--ntasks", "--ntasks-per-node"))
    if not (nodes - 1) * per_node < tasks <= nodes * per_node:
        refuse(f"sbatch: error: {tasks} tasks do not fit {nodes} nodes of {per_node}")
    if "--requeue" in asked and "--no-requeue" in asked:
        refuse("sbatch: error: --requeue with --no-requeue")
    if not Path(asked["--output"]).parent.is_dir():
        refuse("the job would end without a word: there is no folder for its output")
    job = queue(script, asked, given.get("--dependency", "").partition(":")[2])
    print("A banner of the site, with 12345 in it", file=sys.stderr)
    print(job if "--parsable" in given else f"Submitted batch job {job}")


def scontrol(words: list[str]) -> None:
    if words == ["show", "config"]:
        print("ClusterName = fake")
    elif words[:1] == ["requeue"] and len(words) == 2 and record(words[1]):
        job = words[1]
        if "--requeue" not in record(job)["options"]:
            refuse(f"Requested operation is presently disabled for job {job}")
        save(job, requeued=True)
        os.kill(record(job)["pid"], signal.SIGTERM)  # Slurm ends the script that asked
    else:
        refuse(f"scontrol: unknown: {words}")


def squeue(words: list[str]) -> None:
    known = {"--noheader": "", "--jobs": r"\d+", "--states": "all", "--format": ".+"}
    given, _ = options("squeue", words, known, True)
    held = record(given["--jobs"])
    if not held:
        refuse("slurm_load_jobs error: Invalid job id specified")
    if "--states" in given or held["state"] in ("PENDING", "RUNNING", "COMPLETING"):
        fields = {
            "%T": held["state"],
            "%M": "0:01",
            "%l": held["options"]["--time"],
            "%D": held["options"]["--nodes"],
            "%e": END,
        }
        print(re.sub(r"%\w", lambda field: fields.get(field[0], "None"), given["--format"]))


def scancel(words: list[str]) -> None:
    held = record(words[0])
    if not held:
        refuse("scancel: error: Invalid job id")
    if held["state"] == "PENDING":
        save(words[0], state="CANCELLED")
    elif held["state"] == "RUNNING":
        save(words[0], state="COMPLETING")
        os.killpg(held["pid"], signal.SIGTERM)


def srun(words: list[str]) -> None:
    if words == ["--mpi=list"]:
        print("MPI plugin types are...\n\t" + "\n\t".join(PMI_PLUGINS), file=sys.stderr)
        return
    given, command = options("srun", words, SRUN, True)
    inside = record(os.environ.get("SLURM_JOB_ID", ""))
    if not inside:
        refuse("srun: error: not in a job")
    if given.get("--mpi", "none") not in PMI_PLUGINS:
        refuse(f"srun: error: Couldn't find the specified plugin name for mpi/{given['--mpi']}")
    variable = os.environ.get("SRUN_CPUS_PER_TASK")
    if "--cpus-per-task" in given and given["--cpus-per-task"] != variable:
        refuse("srun: fatal: cpus-per-task set by two different environment variables, or not inherited")
    for name in ("--nodes", "--ntasks"):
        if int(given[name]) > int(inside["options"][name]):
            refuse(f"srun: error: Unable to create step: more {name} than the job has")
    one_a_node = given["--ntasks-per-node"] == "1" and given["--ntasks"] == given["--nodes"]
    if not one_a_node and ("--no-kill" in given) == (given.get("--kill-on-bad-exit") == "1"):
        refuse("srun: a rank that dies would leave the others waiting")
    step(command, int(given["--ntasks"]))


# --- LSF


def bsub(words: list[str]) -> None:
    given, rest = options("bsub", words, BSUB, False)
    if rest:
        refuse("bsub: with a script as an argument this site ignores its directives")
    script = sys.stdin.read()
    asked, left = options("bsub", directives(script, "#BSUB", lsf_words), BSUB, False)
    if left:
        refuse(f"bsub: words behind the directives: {left}")
    if ("-n" in asked) == ("-nnodes" in asked):
        refuse("bsub: -n and -nnodes exclude each other. Job not submitted.")
    if ("-wa" in asked) != ("-wt" in asked):
        refuse("bsub: -wa needs -wt. Job not submitted.")
    if re.search(r"^\s*(export\s+)?TMPDIR=", script, re.MULTILINE):
        refuse("an exported TMPDIR breaks jsrun")
    job = queue(script, asked, given.get("-w", "").removeprefix("ended(").removesuffix(")"))
    print(f"Job <9> of yesterday is done.\nJob <{job}> is submitted to queue <{asked.get('-q', 'batch')}>.")


def bjobs(words: list[str]) -> None:
    given, rest = options("bjobs", words, {"-noheader": "", "-o": ".+"}, False)
    held = record(rest[0])
    if not held:
        refuse(f"Job <{rest[0]}> is not found")
    names = {"PENDING": "PEND", "RUNNING": "RUN", "COMPLETED": "DONE", "CANCELLED": "EXIT", "FAILED": "EXIT"}
    print(" ".join([names[held["state"]], "12 second(s)"][: len(given["-o"].split())]))


def bkill(words: list[str]) -> None:
    held = record(words[0])
    if held["state"] == "PENDING":
        save(words[0], state="CANCELLED")
    else:
        os.killpg(held["pid"], signal.SIGINT)


def jsrun(words: list[str]) -> None:
    given, command = options("jsrun", words, JSRUN, True)
    inside = record(os.environ.get("LSB_JOBID", ""))
    if not inside or "-nnodes" not in inside["options"]:
        refuse("jsrun: error: not in a job of whole nodes")
    if missing := ALWAYS - set(given):
        refuse(f"jsrun: {sorted(missing)} left to defaults that differ between sites")
    number = {name: int(value) for name, value in given.items() if value.isdigit()}
    hosts = -(-number["--nrs"] // number["--rs_per_host"])
    if hosts > int(inside["options"]["-nnodes"]):
        refuse("jsrun: error: not enough hosts for these resource sets")
    if number["--rs_per_host"] * number["--cpu_per_rs"] > 42 or number["--rs_per_host"] * number["--gpu_per_rs"] > 6:
        refuse("jsrun: error: It was not possible to place the resource sets on a host")
    if number["--gpu_per_rs"] and given.get("--smpiargs") != "-gpu":
        refuse("jsrun: device pointers would crash without --smpiargs=-gpu")
    step(command, number["--nrs"] * number["--tasks_per_rs"])


# --- what both do


def step(command: list[str], tasks: int) -> NoReturn:
    """Real ranks. A launcher dies of a signal that it does not ignore, and its ranks with it."""
    planned = cluster() / "statuses"
    if planned.exists() and (left := planned.read_text().split()):
        planned.write_text(" ".join(left[1:]))
        print("CSM reports jsmd running on host, but can't locate there", file=sys.stderr)
        sys.exit(int(left[0]))

    def die_with_launcher() -> None:
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    mine = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LSB_"))}
    process = subprocess.Popen(
        [*json.loads(os.environ["FAKE_MPIEXEC"]), "-n", str(tasks), *command],
        env=mine,
        start_new_session=True,
        preexec_fn=die_with_launcher,
    )
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    status = process.wait()
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2:])
