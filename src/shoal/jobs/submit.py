"""A batch job from submission to its end: `shoal submit`, `status` and `cancel`.

DIR/job.sh      the script          DIR/jobs        ids of the jobs, the newest last
DIR/link        links used up       DIR/cancelled   no link goes on
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from shoal import config as configs
from shoal.errors import InputError
from shoal.jobs.command import LIMIT_S
from shoal.jobs.render import SCHEDULERS, SCRIPT, read_spec, render, scheduler_of
from shoal.jobs.spec import Batch, JobSpec
from shoal.record import durable, runlog


def script_of(batch: Batch) -> str:
    """`render`, read by bash if there is one: lines of the user's are in it. Raises InputError."""
    text = render(batch)
    with suppress(OSError):
        read = subprocess.run(
            ["/bin/bash", "-n"], input=text.encode(), capture_output=True, timeout=LIMIT_S, check=False
        )
        if read.returncode:
            raise InputError(
                "bash cannot read the script with these setup lines and launcher options "
                f"({read.stderr.decode(errors='replace').splitlines()[0]}); look for a quote or a "
                "bracket that is not closed"
            )
    return text


def submit(batch: Batch) -> str:
    """Write the script to the run directory and submit it; the job's id. Raises InputError before anything is."""
    text, directory = script_of(batch), Path(batch.spec.out)
    _refuse_missing(batch)
    _refuse_done_or_other(batch, directory)
    _refuse_busy(directory)
    script = directory / SCRIPT
    try:
        directory.mkdir(parents=True, exist_ok=True)
        written = durable.beside(script)
        written.write_text(text, encoding="utf-8")
        durable.publish(written, script)
        for name in ("link", "cancelled"):
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"the run directory {directory} cannot be written ({error.strerror}); give another") from None
    job = str(SCHEDULERS[batch.machine.scheduler].submit(batch, script))
    with (directory / "jobs").open("a", encoding="utf-8") as jobs:
        jobs.write(f"{job}\n")
    return job


def status(directory: Path) -> Iterator[str]:
    """Lines on the newest job of a run, and on the run. Raises InputError if none was submitted there."""
    spec, scheduler, job = _submitted(directory)
    yield f"job {job} on {spec.machine}: {scheduler.state(job).words}"
    if link := _read(directory / "link").strip():
        yield f"went on {link} of {spec.max_links} times, by {spec.after_limit}"
    yield f"run {directory}: {_progress(directory)}"


def cancel(directory: Path) -> str:
    """End the newest job of a run, and let none follow; what was done, in a line. Raises InputError if none was
    submitted there."""
    _, scheduler, job = _submitted(directory)
    (directory / "cancelled").touch()
    state = scheduler.state(job)
    if not state.alive:
        return f"job {job} has ended already ({state.words}); none will follow it"
    scheduler.cancel(job)
    return f"told the scheduler to end job {job}"


def _refuse_missing(batch: Batch) -> None:
    """What this machine must have for the job to be submitted, and what the job would miss later."""
    submits, spec = SCHEDULERS[batch.machine.scheduler].SUBMITS, batch.spec
    if shutil.which(submits) is None:
        raise InputError(f"{submits} is not on PATH; submit where the scheduler's commands are")
    if spec.stage and not Path(spec.stage).is_file():
        raise InputError(f"the archive {spec.stage} is not there; give that of the environment (--stage)")
    if "/" in spec.python and not spec.stage and shutil.which(spec.python) is None:
        raise InputError(f"the interpreter {spec.python} is not there; give the one that has shoal (--python)")


def _refuse_done_or_other(batch: Batch, directory: Path) -> None:
    """What the ranks would refuse hours later."""
    asked = configs.load(Path(batch.spec.config), batch.spec.overrides)
    if (directory / "DONE").exists():
        raise InputError(f"{directory} holds a run that is done; give another --out")
    written = directory / "config.toml"
    changed = configs.differences(configs.load(written), asked) if written.exists() else []
    if changed:
        raise InputError(
            f"{directory} holds a run of another config ({', '.join(changed)} differ); submit its own config "
            f"({written}), or give another --out"
        )


def _refuse_busy(directory: Path) -> None:
    """One job at a time works in a run directory."""
    try:
        spec, scheduler, job = _submitted(directory)
    except InputError:
        return
    if (state := scheduler.state(job)).alive:
        raise InputError(
            f"job {job} on {spec.machine} is at work in {directory} ({state.words}); end it first "
            f"(shoal cancel {directory}), or give another --out"
        )


def _submitted(directory: Path) -> tuple[JobSpec, ModuleType, str]:
    """The job that the script in a run directory was made of, its scheduler, and its newest id."""
    script, ids = directory / SCRIPT, re.findall(r"^(?:Job <)?(\d+)", _read(directory / "jobs"), re.MULTILINE)
    if not ids or not script.exists():
        raise InputError(f"no job was submitted in {directory}; shoal submit does it")
    text = _read(script)
    return read_spec(text, str(script)), scheduler_of(text), ids[-1]


def _progress(directory: Path) -> str:
    if (directory / "DONE").exists():
        return "done"
    log = directory / "run.jsonl"
    events = runlog.read(log) if log.exists() else []
    rounds = [event for event in events if event["event"] == "round"]
    if not rounds:
        return "not begun" if not events else "no round yet"
    last = rounds[-1]
    return f"{last['round']} rounds, epoch {last['epoch']:.2f}, {last['learners']} learners"


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""
