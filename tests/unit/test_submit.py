"""Machine files, what schedulers answer, and that a login node needs neither MPI nor a GPU nor matplotlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shoal.errors import InputError, ShoalError
from shoal.jobs import lsf, machine, slurm
from shoal.jobs.command import run
from shoal.jobs.render import render
from shoal.jobs.spec import Batch, ask
from shoal.jobs.submit import cancel, status, submit

CONFIG = Path(__file__).resolve().parents[2] / "jobs" / "experiments" / "digits.toml"
MINE = """
about = "mine"
scheduler = "slurm"
[node]
cores = 4
[launch]
program = "srun"
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


def answer(folder: Path, name: str, text: str, ends: int = 0) -> None:
    """A command that writes this."""
    (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {ends}\n")
    (folder / name).chmod(0o755)


def anywhere(scheduler: ModuleType) -> Batch:
    """A job for this scheduler."""
    return ask("lsf-generic" if scheduler is lsf else "slurm-generic", CONFIG)


@pytest.mark.parametrize("name", machine.names())
def test_machines_that_come_with_shoal(name: str) -> None:
    assert machine.load(name).about


def test_a_file_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(MINE)
    assert machine.load("./mine.toml") == machine.load("mine.toml") == machine.load(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cores = 4", "cores = 4\ngpu = 1", "node.gpu is not a known key; did you mean gpus?"),
        ("[launch]", "[lunch]", "lunch is not a known key; did you mean launch?"),
        ("cores = 4", "cores = 0", "node.cores = 0"),
        ('"srun"', '"aprun"', "known: srun, jsrun, mpiexec"),
        ('about = "mine"', "", "has no `about`"),
        ('"srun"', '"jsrun"', "does not start ranks under slurm"),
        ('"srun"', '"mpiexec"\nplugin = "pmix"', "is for srun"),
        ("[node]", 'limits.time = "2:30"\n[node]', "2:30"),
        ("[node]", "[node", "not valid TOML"),
        ("[node]", 'environment."A B" = "x"\n[node]', "no name of a variable"),
        ("[node]", 'environment.A = "x\\ny"\n[node]', "control character"),
        ("[node]", 'request.gpus = "--gres=gpu:{n}"\n[node]', "only {gpus}"),
        ("[node]", 'request.directives = ["--a\\nb"]\n[node]', "control character"),
    ],
)
def test_a_wrong_machine_file_is_one_sentence(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace(old, new))
    with pytest.raises(InputError) as raised:
        machine.load(str(path))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("scheduler", "name", "said", "job"),
    [
        (slurm, "sbatch", "17", "17"),
        (slurm, "sbatch", "sbatch: quota is 123 of 456\n1234567;cluster2", "1234567"),
        (lsf, "bsub", "Job <3052> is submitted to default queue <batch>.", "3052"),
        (lsf, "bsub", "You have 99 node hours <left>\nJob <12> is submitted to queue <pbatch>.", "12"),
    ],
)
def test_what_a_submission_says(
    commands: Path, tmp_path: Path, scheduler: ModuleType, name: str, said: str, job: str
) -> None:
    answer(commands, name, said)
    (tmp_path / "job.sh").touch()
    assert scheduler.submit(anywhere(scheduler), tmp_path / "job.sh") == job


def test_a_site_may_want_the_script_as_an_argument(commands: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text((machine.FOLDER / "summit.toml").read_text().replace("[request]", '[request]\nsubmit = "argument"'))
    batch = ask(str(mine), CONFIG, account="a", after_limit="chain")
    assert 'bsub -w "ended($LSB_JOBID)" "$run/job.sh"' in render(batch)
    (commands / "bsub").write_text('#!/bin/sh\necho "Job <$#> is submitted to queue <batch>."\n')
    (commands / "bsub").chmod(0o755)
    assert lsf.submit(batch, tmp_path / "job.sh") == "1"


def test_what_is_no_utf8_is_read(commands: Path) -> None:
    (commands / "sbatch").write_text('#!/bin/sh\nprintf "caf\\351"\n')
    (commands / "sbatch").chmod(0o755)
    assert run(["sbatch"]) == (0, "caf\ufffd")


@pytest.mark.parametrize(("scheduler", "name"), [(slurm, "sbatch"), (lsf, "bsub")])
@pytest.mark.parametrize("ends", [0, 1])
def test_what_cannot_be_read_is_shown(
    commands: Path, tmp_path: Path, scheduler: ModuleType, name: str, ends: int
) -> None:
    answer(commands, name, "Project ABC is closed", ends)
    (tmp_path / "job.sh").touch()
    with pytest.raises(ShoalError, match="Project ABC is closed"):
        scheduler.submit(anywhere(scheduler), tmp_path / "job.sh")


@pytest.mark.parametrize(
    ("scheduler", "name", "said", "ends", "alive"),
    [
        (slurm, "squeue", "RUNNING, 1:00 of 2:00:00, 2 nodes n[1-2]", 0, True),
        (slurm, "squeue", "COMPLETING, 1:00 of 2:00:00, 2 nodes n[1-2]", 0, True),
        (slurm, "squeue", "TIMEOUT, 2:00:00 of 2:00:00, 2 nodes n[1-2]", 0, False),
        (slurm, "squeue", "slurm_load_jobs error: Invalid job id specified", 1, False),
        (slurm, "squeue", "", 0, False),
        (lsf, "bjobs", "PEND 0 second(s)", 0, True),
        (lsf, "bjobs", "EXIT 20 second(s)", 0, False),
        (lsf, "bjobs", "Job <7> is not found", 255, False),
    ],
)
def test_what_a_state_means(
    commands: Path, scheduler: ModuleType, name: str, said: str, ends: int, alive: bool
) -> None:
    answer(commands, name, said, ends)
    assert scheduler.state("7").alive == alive


def test_a_scheduler_that_does_not_answer_is_no_ended_job(commands: Path) -> None:
    answer(commands, "squeue", "slurm_load_jobs error: Unable to contact slurm controller", 1)
    with pytest.raises(ShoalError, match="Unable to contact"):
        slurm.state("7")


def test_nothing_is_submitted_where_it_cannot_be(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    batch = ask("slurm-generic", CONFIG, run, python="python3")
    with monkeypatch.context() as patch, pytest.raises(InputError, match="sbatch is not on PATH"):
        patch.setenv("PATH", str(commands))
        submit(batch)
    assert not run.exists()
    answer(commands, "sbatch", "17")
    answer(commands, "squeue", "PENDING, 0:00")
    assert submit(batch) == "17"
    with pytest.raises(InputError, match="job 17 on slurm-generic is at work"):
        submit(batch)
    assert list(status(run)) == ["job 17 on slurm-generic: PENDING, 0:00", f"run {run}: not begun"]
    answer(commands, "squeue", "CANCELLED, 0:00")
    (run / "config.toml").write_text("seed = 7\n")
    with pytest.raises(InputError, match="holds a run of another config"):
        submit(batch)
    (run / "config.toml").unlink()
    assert cancel(run) == "job 17 has ended already (CANCELLED, 0:00); none will follow it"
    assert (run / "cancelled").exists()
    assert submit(batch) == "17" and not (run / "cancelled").exists()
    (run / "DONE").touch()
    with pytest.raises(InputError, match="is done"):
        submit(batch)
    with pytest.raises(InputError, match="no job was submitted"):
        cancel(tmp_path)


@pytest.mark.parametrize("missing", [{"stage": "no.tar"}, {"python": "./no/python"}])
def test_what_the_job_would_miss_is_missed_before(commands: Path, tmp_path: Path, missing: dict[str, str]) -> None:
    answer(commands, "sbatch", "17")
    with pytest.raises(InputError, match="is not there"):
        submit(ask("slurm-generic", CONFIG, tmp_path / "run", **missing))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("line", ["echo it's", "}", "if true"])
def test_a_script_that_bash_cannot_read_is_not_submitted(commands: Path, tmp_path: Path, line: str) -> None:
    answer(commands, "sbatch", "17")
    with pytest.raises(InputError, match="bash cannot read") as raised:
        submit(ask("slurm-generic", CONFIG, tmp_path / "run", setup=(line,)))
    assert "\n" not in str(raised.value) and not (tmp_path / "run").exists()


LOGIN = """
import sys
for name in ("mpi4py", "cupy", "matplotlib"):
    sys.modules[name] = None
from shoal.cli import commands
for words in {lines!r}:
    commands(words, standalone_mode=False)
"""


def test_a_login_node_needs_no_mpi_no_gpu_and_no_matplotlib(commands: Path, tmp_path: Path) -> None:
    answer(commands, "sbatch", "17")
    answer(commands, "squeue", "RUNNING, 0:10")
    answer(commands, "scancel", "")
    config, run = str(CONFIG), str(tmp_path / "run")
    lines = [["render", name, config, *(["-A", "a"] if name != "local" else [])] for name in machine.names()]
    lines += [["submit", "frontier", config, "-A", "a", "--out", run], ["status", run], ["cancel", run]]
    lines += [["schedule", config]]
    ended = subprocess.run(
        [sys.executable, "-c", LOGIN.format(lines=lines)], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("#!/bin/bash") == len(machine.names())
    assert "job 17 on frontier: RUNNING" in ended.stdout and "learner-steps" in ended.stdout
