"""Slurm: directives, what a script does to go on, and the commands of the login node."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.jobs.command import FORGOTTEN, SchedulerError, State, run, tell
from shoal.jobs.spec import Batch, JobSpec
from shoal.jobs.times import slurm_time

PREFIX = "#SBATCH"
SUBMITS = "sbatch"
SAME = {
    "-J": "--job-name", "-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-t": "--time", "-A": "--account",
    "-p": "--partition", "-q": "--qos", "-C": "--constraint", "-o": "--output", "-k": "--no-kill",
    "--no-requeue": "--requeue",
}  # fmt: skip
"""other names of directives, and what excludes them"""
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
)  # fmt: skip


def directives(batch: Batch) -> list[str]:
    """Options of sbatch, in the order of the script."""
    spec, request = batch.spec, batch.machine.request
    features = [*request.constraint, *([spec.constraint] if spec.constraint else [])]
    if spec.stage and batch.machine.staging.needs:
        features.append(batch.machine.staging.needs)
    named = {
        "account": spec.account,
        "partition": spec.queue,
        "qos": spec.qos,
        "constraint": _all_of(features),
        "reservation": spec.reservation,
    }
    return [
        f"--job-name={_quoted(spec.name)}",
        f"--nodes={batch.nodes}",
        f"--ntasks={spec.ranks}",
        f"--ntasks-per-node={spec.ranks_per_node}",
        f"--cpus-per-task={spec.cores_per_rank}",
        *([request.gpus.format(gpus=batch.gpus_per_node)] if request.gpus and spec.gpus_per_rank else []),
        f"--time={slurm_time(spec.time_s)}",
        *(f"--{option}={_quoted(value)}" for option, value in named.items() if value),
        f"--signal=B:{spec.signal}@{spec.grace_s}",
        "--requeue" if spec.after_limit == "requeue" else "--no-requeue",
        *(["--no-kill"] if spec.recovery else []),
        f"--output={_quoted(spec.out + '/job-%j.log')}",
        "--open-mode=append",
        *request.directives,
    ]


def _all_of(features: list[str]) -> str:
    """Alternatives in brackets of their own, where there is something else to ask for."""
    each = list(dict.fromkeys(features))
    grouped = [f"({text})" if "|" in text and not re.fullmatch(r"\([^()]*\)|\[.*\]", text) else text for text in each]
    return "&".join(grouped if len(each) > 1 else each)


def functions(batch: Batch) -> list[str]:
    """What the script does to go on. A preempted job is told to end like a cancelled one, but still runs."""
    after = '--dependency=afterany:"$SLURM_JOB_ID" --kill-on-invalid-dep=yes'
    act = {
        "requeue": 'scontrol requeue "$SLURM_JOB_ID"',
        "chain": f'sbatch --parsable {after} "$run/job.sh" >> "$run/jobs"',
        "none": "false",
    }[batch.spec.after_limit]
    return [
        f"go_on() {{ {act}; }}",
        'preempted() { [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; }',
        "end_time() {",
        '  local end; end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)',
        f'  {{ [ -n "$end" ] && date -d "$end" +%s 2>/dev/null; }} || echo $(($(date +%s) + {batch.spec.time_s}))',
        "}",
        *(_give_back(batch.spec) if batch.spec.give_back_nodes else []),
    ]


def _give_back(spec: JobSpec) -> list[str]:
    """Keep so many nodes of the job. Where Slurm refuses, the run goes on with all and does not ask again; a requeued
    job begins with all."""
    resized = '"$run/slurm_job_${SLURM_JOB_ID}_resize'
    return [
        "export SHOAL_GIVES_BACK_NODES=1",
        "sized() {",
        f"  nodes=$1 ranks=$(($1 * {spec.ranks_per_node}))",
        f'  [ "$ranks" -le {spec.ranks} ] || ranks={spec.ranks}',
        "}",
        'sized "$SLURM_JOB_NUM_NODES"',
        "give_back() {",
        '  if (cd -- "$run" && scontrol update JobId="$SLURM_JOB_ID" NumNodes="$1" > /dev/null); then',
        f'    . {resized}.sh"',
        f'    rm -f -- {resized}".{{sh,csh}}',
        '    sized "$1"',
        f'    export SLURM_TASKS_PER_NODE="{spec.ranks_per_node}(x$1)" # mpiexec reads it',
        "  else",
        "    unset SHOAL_GIVES_BACK_NODES",
        "  fi",
        "}",
    ]


def submit(batch: Batch, script: Path) -> str:
    """The job's id."""
    said = tell(["sbatch", "--parsable", str(script)])
    found = [line for line in said.splitlines() if re.fullmatch(r"\d+(;\S*)?", line.strip())]
    if not found:
        raise SchedulerError(f"sbatch took {script} but named no job:\n{said.rstrip()}")
    return found[-1].strip().partition(";")[0]


def state(job: str) -> State:
    """In Slurm's words."""
    status, said = run(["squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T, %M of %l, %D nodes %R"])
    if status and "invalid job id" not in said.lower():
        raise SchedulerError(f"squeue ended with status {status}:\n{said.rstrip()}")
    words = "" if status else said.strip()
    return State(bool(words) and words.partition(",")[0] not in ENDED, words or FORGOTTEN)


def cancel(job: str) -> None:
    """Asks Slurm to end the job; the ranks have its KillWait to stop in order."""
    tell(["scancel", job])


def _quoted(value: str) -> str:
    """As sbatch reads a directive: quotes keep spaces and #, a backslash keeps the next character."""
    if re.fullmatch(r"[\w.,:@%+=/&|*()\[\]-]+", value, re.ASCII):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
