"""Lengths of time as schedulers write them. Inside they are whole seconds.

parse_time     "90m", "2h", "1d12h", "1:30:00", "1-12:00:00"; not "1:30", which Slurm and LSF read differently
slurm_time     d-hh:mm:ss
lsf_time       h:mm, rounded up: LSF has no seconds
"""

from __future__ import annotations

import re

from shoal.errors import InputError

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_time(text: str) -> int:
    """Seconds, at least 1. Raises InputError."""
    written = text.strip()
    if colons := re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", written):
        days, hours, minutes, seconds = (int(part or 0) for part in colons.groups())
        total = 86400 * days + 3600 * hours + 60 * minutes + seconds
    elif re.fullmatch(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?", written):
        total = sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([dhms])", written))
    else:
        total = 0
    if not 1 <= total <= 366 * 86400:
        raise InputError(f"the time {text!r} cannot be used; write e.g. 90m, 2h, 1d12h or 1:30:00 (h:mm:ss)")
    return total


def slurm_time(seconds: int) -> str:
    """For --time."""
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:{rest:02}"


def lsf_time(seconds: int) -> str:
    """For -W."""
    minutes = lsf_minutes(seconds)
    return f"{minutes // 60}:{minutes % 60:02}"


def lsf_minutes(seconds: int) -> int:
    """Whole minutes, for -wt."""
    return -(-seconds // 60)
