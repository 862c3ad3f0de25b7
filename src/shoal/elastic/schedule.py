"""The learner schedule as its author writes it: from which epoch on, how many learners.

    "0:1, 3:2, 6.5:4"      from epoch 0 one learner, from epoch 3 two, ...
    "0:2, 50%:8"           a share of the whole training
    "paper-II"             a preset, with p and r from the config

`parse` and `str` are inverse to each other. A list of tables may also set steps, momentum and batch from
a stage on; what a stage does not set keeps the value of the config.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from shoal.config import Config
from shoal.config import Stage as StageTable
from shoal.errors import InputError

PRESETS = {
    "paper-I": "0:{p}",
    "paper-II": "0:{p}, 50%:{rp}",
    "paper-III": "0:{rp}, 50%:{p}",
    "paper-IV": "0:{rp}",
    "paper-V": "0:{p}, 10%:{mid}, 20%:{rp}",
}
"""Schedules I-V of Cong (ICMLA 2021), *reconstructed*: the paper's definitions are not public. r = large over
small; V ramps over the geometric mean of p and r*p (2p for r = 4)."""

_WAY_OUT = 'write e.g. "0:1, 3:2, 50%:4"'


@dataclass(frozen=True)
class Start:
    """Where a stage begins: an exact number of epochs, or (relative) a share of the whole training."""

    value: Fraction
    relative: bool = False

    def epochs(self, total: Fraction) -> Fraction:
        """In epochs, of a training of `total` epochs."""
        return self.value * total if self.relative else self.value

    def __str__(self) -> str:
        return f"{_decimal(self.value * 100)}%" if self.relative else _decimal(self.value)

    @staticmethod
    def parse(text: str | float) -> Start:
        """From "3", 3, "1.5" or "30%". Raises InputError."""
        written = (f"{Decimal(repr(text)):f}" if isinstance(text, float) else str(text)).strip()
        number = written.removesuffix("%").strip()
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,15})?|\.[0-9]{1,15}", number):
            raise InputError(f"schedule: a stage starts at {written!r}, which is no epoch or share; {_WAY_OUT}")
        value = Fraction(number)
        if written.endswith("%"):
            if value >= 100:
                raise InputError(f"schedule: a stage starts at {written}, which is not before the end; {_WAY_OUT}")
            return Start(value / 100, relative=True)
        return Start(value)


@dataclass(frozen=True)
class Stage:
    """From `start` on, `learners` learners; None keeps the config's value."""

    start: Start
    learners: int
    steps: int | None = None
    momentum: float | None = None
    batch: int | None = None


@dataclass(frozen=True)
class Schedule:
    """The stages in order; the first starts at 0."""

    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        """The short form; `Schedule.parse` reads it back. What stages set beside learners has no short form."""
        return ", ".join(f"{stage.start}:{stage.learners}" for stage in self.stages)

    @staticmethod
    def of(config: Config) -> Schedule:
        """The schedule of a config. Raises InputError."""
        written = config.learners.schedule
        if isinstance(written, str):
            return Schedule.parse(written, config.learners.p, config.learners.r)
        return Schedule.from_tables(written)

    @staticmethod
    def parse(text: str, p: int = 2, r: int = 4) -> Schedule:
        """From "epoch:learners, ..." or the name of a preset. Raises InputError."""
        name = text.strip()
        if name in PRESETS:
            name = PRESETS[name].format(p=p, rp=r * p, mid=round(p * math.sqrt(r)))
        elif name.startswith("paper"):
            raise InputError(f"schedule {name!r} is not a preset; the presets are {', '.join(PRESETS)}")
        stages = []
        for part in name.split(","):
            start, colon, learners = part.partition(":")
            if not colon or not re.fullmatch(r"\s*[0-9]{1,9}\s*", learners):
                raise InputError(f"schedule: {part.strip()!r} in {text!r} is not epoch:learners; {_WAY_OUT}")
            stages.append(Stage(Start.parse(start), int(learners)))
        return _checked(stages)

    @staticmethod
    def from_tables(tables: Sequence[StageTable]) -> Schedule:
        """From the tables of a config. Raises InputError."""
        return _checked([Stage(Start.parse(t.at), t.learners, t.steps, t.momentum, t.batch) for t in tables])


def _checked(stages: Sequence[Stage]) -> Schedule:
    if not stages:
        raise InputError(f"schedule: it has no stage; {_WAY_OUT}")
    if stages[0].start.value != 0:
        raise InputError(f"schedule: it starts at epoch {stages[0].start}, and must start at 0; {_WAY_OUT}")
    for stage in stages:
        if stage.learners < 1:
            raise InputError(f"schedule: the stage at {stage.start} has {stage.learners} learners; give 1 or more")
    return Schedule(tuple(stages))


def _decimal(value: Fraction) -> str:
    """An exact decimal; every value that `parse` makes has one."""
    text = f"{Decimal(value.numerator) / Decimal(value.denominator):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
