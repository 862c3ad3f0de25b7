"""Run a command of the scheduler."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import InputError, ShoalError

LIMIT_S = 120.0
FORGOTTEN = "no longer known to the scheduler"


class SchedulerError(ShoalError):
    """The scheduler refused, or said something that cannot be read; the text has its own words."""


def run(command: Sequence[str], stdin: Path | None = None) -> tuple[int, str]:
    """Exit status, and what it wrote, standard output first. InputError if there is no such command."""
    source = subprocess.DEVNULL if stdin is None else stdin.open("rb")
    try:
        ended = subprocess.run(
            command, stdin=source, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False
        )
    except FileNotFoundError:
        raise InputError(f"{command[0]} is not on PATH; run this where the scheduler's commands are") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{' '.join(command)} did not answer within {LIMIT_S:g} s") from None
    finally:
        if not isinstance(source, int):
            source.close()
    return ended.returncode, ended.stdout + ended.stderr


def tell(command: Sequence[str], stdin: Path | None = None) -> str:
    """`run`, but a status other than 0 is a SchedulerError."""
    status, said = run(command, stdin)
    if status:
        raise SchedulerError(f"{' '.join(command)} ended with status {status}:\n{said.rstrip()}")
    return said


@dataclass(frozen=True)
class State:
    """What a scheduler says of a job."""

    alive: bool
    """it waits or runs"""
    words: str
