"""The launcher's end: mpiexec does not outlive the ranks for long."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from shoal.jobs import launch

HANGS = """#!/bin/sh
echo $$ > {folder}/pid
printf 75 > "$SHOAL_STATUS_FILE"
trap '' TERM
while true; do sleep 1; done
"""
ENDS = """#!/bin/sh
printf 99 > "$SHOAL_STATUS_FILE"
exit 1
"""


def mpiexec(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Take a script for mpiexec."""
    path = folder / "mpiexec"
    path.write_text(script.format(folder=folder))
    path.chmod(0o755)
    monkeypatch.setattr(launch, "find_mpiexec", lambda library: path)
    for name in ("TOLD_LOOK_S", "TOLD_LIMIT_S", "END_S"):
        monkeypatch.setattr(launch, name, 0.1)


def test_an_mpiexec_that_hangs_when_all_is_told_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpiexec(tmp_path, monkeypatch, HANGS)
    assert launch.launch(1, ["true"], stop_file=None) == 75
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(int((tmp_path / "pid").read_text()), 0)
            time.sleep(0.1)


def test_what_the_ranks_tell_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpiexec(tmp_path, monkeypatch, ENDS)
    assert launch.launch(1, ["true"], stop_file=None) == 99
