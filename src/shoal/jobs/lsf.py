"""LSF: directives, what a script does to go on, and the commands of the login node."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.errors import STOPPED, InputError
from shoal.jobs.command import FORGOTTEN, SchedulerError, State, run, tell
from shoal.jobs.spec import Batch
from shoal.jobs.times import lsf_minutes, lsf_time

PREFIX = "#BSUB"
SUBMITS = "bsub"
SAME = {"-n": "-nnodes"}
"""what excludes a directive"""


def directives(batch: Batch) -> list[str]:
    """Options of bsub, in the order of the script. -nnodes excludes -n; -wa and -wt stand without quotes."""
    spec, request = batch.spec, batch.machine.request
    flags = list(request.alloc_flags)
    if spec.stage and batch.machine.staging.needs:
        flags.append(batch.machine.staging.needs)
    if request.nodes == "nnodes":
        size = [f"-nnodes {batch.nodes}"]
    else:
        size = [f"-n {spec.ranks}", f'-R "span[ptile={spec.ranks_per_node}]"']
    named = {request.account_option: spec.account, "-q": spec.queue, "-U": spec.reservation}
    return [
        f"-J {_quoted(spec.name)}",
        *size,
        *([f'-alloc_flags "{" ".join(dict.fromkeys(flags))}"'] if flags else []),
        *([request.gpus.format(gpus=batch.gpus_per_node)] if request.gpus and spec.gpus_per_rank else []),
        f"-W {lsf_time(spec.time_s)}",
        *(f"{option} {_quoted(value)}" for option, value in named.items() if value),
        f"-wa {spec.signal} -wt {lsf_minutes(spec.grace_s)}",
        *([f'-Q "{STOPPED}"'] if spec.after_limit == "requeue" else []),
        f"-o {_quoted(spec.out + '/job-%J.log')}",
        *request.directives,
    ]


def functions(batch: Batch) -> list[str]:
    """What the script does to go on; -Q has named the status. LSF itself puts a preempted job back."""
    redirect = "< " if batch.machine.request.submit == "stdin" else ""
    chain = f'bsub -w "ended($LSB_JOBID)" {redirect}"$run/job.sh" >> "$run/jobs"'
    act = {"requeue": f"status={STOPPED}", "chain": chain, "none": "false"}[batch.spec.after_limit]
    return [
        f"go_on() {{ {act}; }}",
        "preempted() { false; }",
        f"end_time() {{ echo $(($(date +%s) + {batch.spec.time_s})); }}",
    ]


def submit(batch: Batch, script: Path) -> str:
    """The job's id."""
    as_argument = batch.machine.request.submit == "argument"
    said = tell(["bsub", str(script)]) if as_argument else tell(["bsub"], stdin=script)
    found = re.findall(r"^Job <(\d+)> is submitted", said, re.MULTILINE)
    if not found:
        raise SchedulerError(f"bsub took {script} but named no job:\n{said.rstrip()}")
    return str(found[-1])


def state(job: str) -> State:
    """In LSF's words."""
    status, said = run(["bjobs", "-noheader", "-o", "stat run_time", job])
    if "is not found" in said:
        return State(False, FORGOTTEN)
    if status:
        raise SchedulerError(f"bjobs ended with status {status}:\n{said.rstrip()}")
    return State(said.split()[:1] not in (["DONE"], ["EXIT"]), said.strip())


def cancel(job: str) -> None:
    """Asks LSF to end the job: INT, TERM and KILL in turn."""
    tell(["bkill", job])


def _quoted(value: str) -> str:
    """As bsub reads a directive: between double quotes, and nothing that would end or escape them."""
    if re.fullmatch(r"[\w.,:@%+=/-]+", value, re.ASCII):
        return value
    if bad := re.search(r'["\\$`]', value):
        raise InputError(f"{value!r} has a {bad[0]}, which no directive of LSF can hold; take another name")
    return f'"{value}"'
