"""The text of batch scripts: nothing is over-subscribed, every name survives, and what cannot be is refused."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.jobs import machine as machines
from shoal.jobs.render import BODY, parse, render
from shoal.jobs.spec import Batch, JobSpec, ask, place
from shoal.jobs.times import lsf_minutes, lsf_time, parse_time, slurm_time

CONFIG = Path(__file__).resolve().parents[2] / "jobs" / "experiments" / "digits.toml"
ACCOUNT = {"account": "ABC123"}
CLUSTERS = ["summit", "lassen", "frontier", "perlmutter", "juwels-booster", "leonardo", "slurm-generic", "lsf-generic"]
TEXT = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" '\"\\$`#%&|;*~"), max_size=20)


def job(name: str, /, **chosen: Any) -> Batch:
    """The digits on a machine."""
    return ask(name, CONFIG, **{**(ACCOUNT if name != "local" else {}), **chosen})


def directives(text: str) -> dict[str, str]:
    """What the scheduler reads: option and value."""
    found = {}
    for line in text.splitlines():
        if line.startswith(("#SBATCH ", "#BSUB ")):
            words = shlex.split(line.partition(" ")[2], comments=True)
            for at, word in enumerate(words):
                if word.startswith("-"):
                    name, equals, value = word.partition("=")
                    found[name] = value if equals or not words[at + 1 :] else words[at + 1]
    return found


def launched(text: str, folder: Path) -> list[str]:
    """The words that the launcher of a script is given, as bash makes them."""
    head = text.partition("# From here on")[0].replace("launch() {\n  ", "launch() {\n  show ")
    script = f"show() {{ printf '%s\\0' \"$@\"; }}\n{head}\nlaunch\n"
    ended = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    return ended.stdout.split("\0")[:-1]


def number(words: list[str], option: str) -> int:
    return int(next(word for word in words if word.startswith(f"{option}=")).partition("=")[2])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CLUSTERS), st.integers(1, 200), st.integers(1, 64), st.integers(1, 16), st.integers(0, 2))
def test_nodes_are_as_few_as_hold_the_ranks_and_none_is_overfull(
    name: str, ranks: int, per_node: int, cores: int, gpus: int
) -> None:
    machine = machines.load(name)
    fits = min(per_node, ranks) * cores <= machine.node.cores and min(per_node, ranks) * gpus <= machine.node.gpus
    limit = machine.limits.nodes or 10**9
    chosen = {"ranks": ranks, "ranks_per_node": per_node, "cores_per_rank": cores, "gpus_per_rank": gpus}
    try:
        batch = job(name, **chosen)
    except InputError:
        assert not fits or -(-ranks // min(per_node, ranks)) > limit
        return
    assert fits
    assert (batch.nodes - 1) * batch.spec.ranks_per_node < ranks <= batch.nodes * batch.spec.ranks_per_node
    text = render(batch)
    asked = directives(text)
    if machine.scheduler == "slurm":
        assert int(asked["--nodes"]) == batch.nodes and int(asked["--ntasks"]) == ranks
        assert int(asked["--ntasks-per-node"]) * int(asked["--cpus-per-task"]) <= machine.node.cores
        assert text.count(f"--cpus-per-task={cores}") == 2 and f"SRUN_CPUS_PER_TASK={cores}\n" in text
    else:
        assert ("-n" in asked) != ("-nnodes" in asked)
        assert asked.get("-nnodes", "") in ("", str(batch.nodes)) and asked.get("-n", "") in ("", str(ranks))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CLUSTERS), st.integers(1, 64), st.integers(1, 8), st.integers(1, 7) | st.none())
def test_what_a_machine_leaves_open_always_fits(
    name: str, learners: int, learners_per_rank: int, cores: int | None
) -> None:
    schedule = (f"learners.schedule=0:{learners}",)
    batch = job(name, overrides=schedule, learners_per_rank=learners_per_rank, cores_per_rank=cores)
    assert batch.spec.ranks == -(-learners // learners_per_rank)
    assert batch.spec.ranks_per_node * batch.spec.cores_per_rank <= batch.machine.node.cores
    assert batch.gpus_per_node <= batch.machine.node.gpus


@given(st.integers(1, 366 * 86400))
def test_times(seconds: int) -> None:
    assert parse_time(slurm_time(seconds)) == seconds
    assert re.fullmatch(r"\d+-[0-2]\d:[0-5]\d:[0-5]\d", slurm_time(seconds))
    hours, minutes = map(int, lsf_time(seconds).split(":"))
    assert 60 * (60 * hours + minutes) - seconds in range(60) and minutes < 60
    assert parse_time(f"{seconds}s") == seconds
    assert 60 * lsf_minutes(seconds) >= seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("1d12h", 129600), ("1:30:00", 5400), ("1-00:00:01", 86401), (" 2h ", 7200), ("100:00:00", 360000)],
)
def test_ways_to_write_a_time(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "2:30", "90", "h", "-1h", "1:60:00", "2h30", "0s", "1.5h", "400d"])
def test_no_times(text: str) -> None:
    with pytest.raises(InputError, match=r"write e\.g\."):
        parse_time(text)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CLUSTERS),
    TEXT.filter(lambda text: not re.search(r"[%\\]", text)),
    TEXT,
    st.lists(TEXT.map(lambda text: f"name={text}"), max_size=2),
)
def test_odd_names_survive(name: str, folder: str, account: str, overrides: list[str]) -> None:
    """In the directives as the scheduler reads them, and in the launcher's words as bash makes them."""
    spec = JobSpec(
        machine=name, config=f"{folder}.toml", out=f"./{folder}", name="run", ranks=2, ranks_per_node=1,
        cores_per_rank=1, time_s=3600, account=f"a{account}", overrides=tuple(overrides), python=f"./{folder}/python",
    )  # fmt: skip
    batch = place(machines.load(name), spec)
    try:
        text = render(batch)
    except InputError as error:
        assert batch.machine.scheduler == "lsf" and "no directive of LSF can hold" in str(error)
        return
    asked = directives(text)
    account_option = {"slurm": "--account", "lsf": batch.machine.request.account_option}[batch.machine.scheduler]
    assert asked[account_option] == f"a{account}"
    assert asked.get("--output", asked.get("-o")) in (f"./{folder}/job-%j.log", f"./{folder}/job-%J.log")
    words = launched(text, CONFIG.parent)
    assert f"./{folder}/python" in words and f"--out=./{folder}" in words and words[-1] == f"{folder}.toml"
    assert [word for word in words if word.startswith("--set=")] == [f"--set={text}" for text in overrides]
    assert render(parse(text, "it")) == text


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_script_is_made_again_from_itself(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*CLUSTERS, "local"]))
    draw = {
        "ranks": st.integers(1, 40), "time": st.sampled_from(["20m", "90m"]), "grace": st.sampled_from(["60s", "10m"]),
        "signal": st.sampled_from(["USR1", "URG"]), "after_limit": st.sampled_from(["none", "requeue", "chain"]),
        "max_links": st.integers(0, 9), "max_restarts": st.integers(0, 9), "name": TEXT, "setup": st.tuples(TEXT),
        "stage": st.just("environment.tar"), "recovery": st.booleans(), "directives": st.just(("-Z 1", "--odd=2")),
    }  # fmt: skip
    chosen = {key: data.draw(value) for key, value in draw.items() if data.draw(st.booleans())}
    try:
        batch = job(name, **chosen)
        text = render(batch)
    except InputError:
        return
    assert parse(text, "it") == batch and render(parse(text, "it")) == text
    subprocess.run(["bash", "-n"], input=text.encode(), check=True, timeout=20) if "setup" not in chosen else None


def test_a_script_of_somebody_else_is_refused() -> None:
    with pytest.raises(InputError, match="not made by shoal render"):
        parse("#!/bin/bash\nsrun ./mine\n", "mine.sh")
    text = render(job("frontier")).replace("#: ranks = 8", "#: rank = 8")
    with pytest.raises(InputError, match="rank is not a known key; did you mean ranks"):
        parse(text, "job.sh")
    with pytest.raises(InputError, match="are no TOML"):
        parse(text.replace("#: name = ", "#: name "), "job.sh")


def test_recovery_keeps_the_launcher_from_ending_all() -> None:
    plain, recovering = render(job("frontier")), render(job("frontier", recovery=True))
    assert "--kill-on-bad-exit=1" in plain and "--no-kill" not in plain
    assert "--kill-on-bad-exit=0" in recovering and recovering.count("--no-kill") == 2
    assert "# a rank that dies must not end the others" in recovering
    assert "--ulfm" in render(job("local", recovery=True))


def test_a_machine_can_show_all_devices_to_every_rank(tmp_path: Path) -> None:
    text = (machines.FOLDER / "summit.toml").read_text().replace('program = "jsrun"', 'program = "jsrun"\ngpus = "all"')
    (tmp_path / "mine.toml").write_text(text)
    words = launched(render(job(str(tmp_path / "mine.toml"), ranks=12)), tmp_path)
    assert [number(words, f"--{name}") for name in ("nrs", "tasks_per_rs", "cpu_per_rs", "gpu_per_rs")] == [2, 6, 42, 6]
    assert "--bind=packed:7" in words and "--smpiargs=-gpu" in words
    with pytest.raises(InputError, match="no multiple of 6"):
        job(str(tmp_path / "mine.toml"), ranks=13)


def test_directives_can_be_left_out_and_added() -> None:
    asked = directives(render(job("frontier", skip=("--signal", "-S"), directives=("--mail-type=END", "-S 0"))))
    assert "--signal" not in asked and asked["-S"] == "0" and asked["--mail-type"] == "END"
    asked = directives(render(job("summit", skip=("-wa", "-alloc_flags"))))
    assert not {"-wa", "-wt", "-alloc_flags"} & set(asked)


def test_alternatives_of_a_constraint_keep_together() -> None:
    assert directives(render(job("perlmutter", constraint="a|b")))["--constraint"] == "gpu&(a|b)"
    assert directives(render(job("slurm-generic", constraint="a|b")))["--constraint"] == "a|b"


def test_tmpdir_is_never_exported_under_lsf(tmp_path: Path) -> None:
    for name in CLUSTERS:
        assert "TMPDIR" not in render(job(name))
    (tmp_path / "mine.toml").write_text(
        (machines.FOLDER / "summit.toml").read_text() + '[environment]\nTMPDIR = "/x"\n'
    )
    with pytest.raises(InputError, match="breaks jsrun"):
        machines.load(str(tmp_path / "mine.toml"))
    setup = 'setup = ["export TMPDIR=/x"]\n'
    (tmp_path / "mine.toml").write_text(setup + (machines.FOLDER / "summit.toml").read_text())
    with pytest.raises(InputError, match="breaks jsrun"):
        job(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("name", "chosen", "words"),
    [
        ("frontier", {"account": None}, "needs an account"),
        ("frontier", {"ranks": 100_000}, "gets at most 9400"),
        ("frontier", {"ranks_per_node": 9, "ranks": 16}, "a node of frontier has"),
        ("frontier", {"gpus_per_rank": 2, "ranks_per_node": 8}, "16, and a node of frontier has 8"),
        ("frontier", {"time": "3d"}, "longer than a job on frontier may run"),
        ("frontier", {"time": "4m"}, "the grace, 240 s"),
        ("frontier", {"grace": "30s"}, "must be 60 s or more"),
        ("frontier", {"launcher": "jsrun"}, "does not start ranks under slurm"),
        ("frontier", {"name": "two\nlines"}, "control character"),
        ("frontier", {"directives": ("--nodes=9",)}, "stands in the script already"),
        ("frontier", {"directives": ("rm -rf /",)}, "does not begin with an option"),
        ("frontier", {"skip": ("--singal",)}, "cannot be skipped"),
        ("frontier", {"name": "two\u2028lines"}, "a line end"),
        ("frontier", {"out": Path("runs/\udcff")}, "no UTF-8"),
        ("frontier", {"name": ""}, "--name is empty"),
        ("frontier", {"directives": ("-N 9",)}, "skip --nodes"),
        ("frontier", {"directives": ("--requeue",)}, "skip --no-requeue"),
        ("frontier", {"out": Path("runs/100%")}, "has a %"),
        ("frontier", {"overrides": ("run.threads=8",), "cores_per_rank": 4}, "fewer than its threads"),
        ("summit", {"qos": "debug", "constraint": "gpu"}, "qos and constraint cannot be chosen"),
        ("summit", {"recovery": True}, "jsrun ends all ranks"),
        ("summit", {"setup": ("export TMPDIR=/x",)}, "breaks jsrun"),
        ("summit", {"account": 'a"b'}, "no directive of LSF can hold"),
        ("summit", {"plugin": "pmix"}, "is for srun"),
        ("summit", {"directives": ("-n 4",)}, "skip -nnodes"),
        ("summit", {"time": "5m", "grace": "4m30s"}, "whole minutes"),
        ("lsf-generic", {"name": "a[1-3]"}, "an array of jobs"),
        ("lsf-generic", {"stage": "e.tar"}, "nothing there runs once on each node"),
        ("local", {"directives": ("--mail-type=END",)}, "has no reader on local"),
        ("local", {"queue": "fast"}, "queue cannot be chosen on local"),
        ("frontiere", {}, "did you mean frontier"),
        ("./none.toml", {}, "cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(name: str, chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)) as raised:
        render(job(name, **chosen))
    assert "\n" not in str(raised.value)


def test_a_printed_script_starts_itself_anew_without_a_scheduler(tmp_path: Path) -> None:
    text = render(job("local", out=tmp_path / "run", after_limit="requeue", max_links=2))
    script = tmp_path / "any name.sh"
    script.write_text(text.replace("launch() {", "launch() { return 99", 1))
    ended = subprocess.run(["bash", script], capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode == 1 and "all 2 links are used up" in ended.stdout, ended.stderr


STUBS = """
run={run} after_limit=none max_links=1 max_restarts=0
environment() {{ :; }}
stage() {{ :; }}
preflight() {{ :; }}
end_time() {{ :; }}
launch() {{ : > "$run/started"; sleep 0.0{hundredths}; return 99; }}
"""


@pytest.mark.parametrize("hundredths", [1, 3, 5])
def test_a_storm_of_warnings_does_not_hide_how_the_launcher_ended(tmp_path: Path, hundredths: int) -> None:
    """bash may end `wait` for a signal after the signal's trap has run, so its status cannot be trusted."""
    script = STUBS.format(run=tmp_path, hundredths=hundredths) + BODY.read_text(encoding="utf-8")
    for _ in range(10):
        (tmp_path / "started").unlink(missing_ok=True)
        process = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
        while not (tmp_path / "started").exists() and process.poll() is None:
            time.sleep(0.001)
        while process.poll() is None:
            os.killpg(process.pid, signal.SIGUSR2)
            time.sleep(0.002)
        output, _ = process.communicate()
        assert process.returncode == 99 and "stopped with status 99" in output, output


@pytest.mark.parametrize("name", ["summit", "frontier", "slurm-generic", "lsf-generic", "local"])
def test_a_job_may_measure_how_training_scales(name: str) -> None:
    batch = job(name, bench="scaling", ranks=8)
    text = render(batch)
    assert "-m shoal bench scaling" in text and "-m shoal train" not in text and "shoal launch" not in text
    assert parse(text, name) == batch
