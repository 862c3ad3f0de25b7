"""The paper's claims, checked on runs: what holds, what does not, and what the seeds cannot tell.

Each claim is about a difference, taken seed by seed. It holds, or fails, when the difference is larger
than its standard error; a smaller one is "within one s.e." and decides nothing. The claims are findings
to report, not properties of shoal: the paper's set-up is not public and the schedules are reconstructed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.report.compare import Value, cost_to, final_accuracy, fraction, over_seeds, paired, total
from shoal.report.curves import Estimate, estimate
from shoal.report.runs import Group, momentum, schedule_text
from shoal.report.tables import value_and_error

SPEEDUP = 1.6
"""Serial steps of schedule I over those of II at equal epochs, for p -> 4p at half the epochs."""
ABOUT = 0.1
"""How far from SPEEDUP, relatively, still counts as about."""

Groups = Mapping[tuple[str, float], Group]
"""(schedule "I".."V", mu) -> the runs."""


@dataclass(frozen=True)
class Claim:
    """One claim; `holds` is None where the runs cannot tell, `evidence` has the numbers."""

    text: str
    holds: bool | None
    evidence: str

    def __str__(self) -> str:
        verdict = {True: "holds", False: "does not hold", None: "undecided"}[self.holds]
        return f"{verdict:13}  {self.text}: {self.evidence}"


def by_schedule(groups: Iterable[Group]) -> dict[tuple[str, float], Group]:
    """The groups of preset schedules paper-I .. paper-V, by (roman numeral, mu); others are left out."""
    found: dict[tuple[str, float], Group] = {}
    for group in groups:
        names = (schedule_text(group.config), str(group.runs[0].header.get("name", "")))
        for name in names:
            match = re.search(r"paper-(III|II|IV|I|V)(?![A-Za-z])", name)
            if match:
                found.setdefault((match.group(1), momentum(group.config)), group)
                break
    return found


def check(groups: Groups, target: float | None = None, mu: float = 0.5) -> list[Claim]:
    """The claims on `groups`; those on a target are left out where `target` (as in compare) is None."""
    claims = [
        _best("II is the best of I-IV at mu = 0", groups, ("II", "I", "III", "IV"), 0.0),
        _speedup(groups),
    ]
    if target is not None:
        goal = fraction(target)
        claims += [
            _cheaper(groups, "I", "serial_steps", goal, SPEEDUP),
            _cheaper(groups, "IV", "serial_steps", goal),
            _cheaper(groups, "IV", "learner_steps", goal),
        ]
    claims += [
        _best(f"V is the best of the five at mu = {mu:g}", groups, ("V", "I", "II", "III", "IV"), mu),
        _momentum_helps(groups, mu),
    ]
    return claims


def _best(text: str, groups: Groups, names: Sequence[str], mu: float) -> Claim:
    """Whether names[0] has a higher final test accuracy than each of the others."""
    if missing := _missing(groups, [(name, mu) for name in names]):
        return Claim(text, None, missing)
    ours = groups[names[0], mu]
    parts, verdicts = [f"{names[0]} {value_and_error(over_seeds(ours.runs, final_accuracy), 2)}%"], []
    for name in names[1:]:
        gap = paired(ours, groups[name, mu]).difference
        level = over_seeds(groups[name, mu].runs, final_accuracy)
        parts.append(f"{name} {value_and_error(level, 2)}% (ahead by {_difference(gap)})")
        verdicts.append(_positive(gap))
    return Claim(text, _all(verdicts), ", ".join(parts))


def _speedup(groups: Groups) -> Claim:
    """Serial steps of I over II at equal epochs: a property of the schedules alone."""
    text = f"II takes about {SPEEDUP} times fewer serial steps than I at equal epochs"
    if missing := _missing(groups, [("I", 0.0), ("II", 0.0)]):
        return Claim(text, None, missing)
    one, two = (over_seeds(groups[name, 0.0].runs, total("serial_steps")).mean for name in ("I", "II"))
    if not two > 0:
        return Claim(text, None, "no rounds were run")
    return Claim(text, abs(one / two / SPEEDUP - 1) <= ABOUT, f"{one:,.0f} / {two:,.0f} = {one / two:.2f}")


def _cheaper(groups: Groups, other: str, field: str, target: float, factor: float | None = None) -> Claim:
    """Whether II reaches the target at mu = 0 at less cost than `other`, by about `factor` if given."""
    cost = field.replace("_", " ") if field == "serial_steps" else "learner-steps"
    about = f"at least about {factor} times " if factor else ""
    text = f"II reaches {100 * target:g}% in {about}fewer {cost} than {other} at mu = 0"
    if missing := _missing(groups, [("II", 0.0), (other, 0.0)]):
        return Claim(text, None, missing)
    value = cost_to(target, field)
    ours, theirs = groups["II", 0.0], groups[other, 0.0]
    evidence = f"II {_reached(ours, value)}, {other} {_reached(theirs, value)}"
    gap = paired(theirs, ours, value).difference
    if gap.n == 0:
        n, m = (over_seeds(group.runs, value).n for group in (ours, theirs))
        return Claim(text, None if bool(n) == bool(m) else n > 0, evidence)
    evidence += f"; {other} - II over {gap.n} common seeds {_difference(gap, 0)}"
    if factor is None:
        return Claim(text, _positive(gap), evidence)
    ratio = _ratio(theirs, ours, value)
    evidence += f"; ratio {value_and_error(ratio, 2)}"
    short = Estimate(ratio.mean - factor * (1 - ABOUT), ratio.error, ratio.n)
    return Claim(text, _positive(short) if _positive(gap) else _positive(gap), evidence)


def _momentum_helps(groups: Groups, mu: float) -> Claim:
    text = f"momentum (mu = {mu:g}) helps more where learners are many (IV) than where they are few (I)"
    needed = [("I", 0.0), ("I", mu), ("IV", 0.0), ("IV", mu)]
    if missing := _missing(groups, needed):
        return Claim(text, None, missing)
    accuracy = [{run.seed: final_accuracy(run) for run in groups[key].runs} for key in needed]
    common = sorted(set.intersection(*({s for s, a in seeds.items() if a is not None} for seeds in accuracy)))
    table = np.array([[seeds[seed] for seed in common] for seeds in accuracy], np.float64)
    few, many = table[1] - table[0], table[3] - table[2]
    gap = estimate(list(many - few))
    if gap.n == 0:
        return Claim(text, None, "no seed was run with all four")
    gains = f"gain with IV {_difference(estimate(list(many)))}, with I {_difference(estimate(list(few)))}"
    return Claim(text, _positive(gap), f"{gains}; difference {_difference(gap)}")


def _ratio(a: Group, b: Group, value: Value) -> Estimate:
    """The ratio a / b of `value`, seed by seed."""
    left = {run.seed: value(run) for run in a.runs}
    right = {run.seed: value(run) for run in b.runs}
    pairs = [(left[seed], right[seed]) for seed in sorted(left.keys() & right.keys())]
    return estimate([x / y for x, y in pairs if x is not None and y])


def _positive(gap: Estimate) -> bool | None:
    """True or False where the difference is larger than its standard error; None where it is not."""
    if gap.n < 2 or abs(gap.mean) <= gap.error:
        return None
    return gap.mean > 0


def _all(verdicts: Sequence[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _difference(gap: Estimate, digits: int = 2) -> str:
    if gap.n == 0:
        return "no common seed"
    text = f"{gap.mean:+,.{digits}f}"
    if gap.n == 1:
        return f"{text} with one seed, so no s.e."
    within = ", within one s.e." if abs(gap.mean) <= gap.error else ""
    return f"{text} ± {gap.error:,.{digits}f}{within}"


def _reached(group: Group, value: Value) -> str:
    cost = over_seeds(group.runs, value)
    if cost.n == 0:
        return f"never (0/{len(group.runs)})"
    return f"{value_and_error(cost, 0)} ({cost.n}/{len(group.runs)} seeds)"


def _missing(groups: Groups, needed: Iterable[tuple[str, float]]) -> str:
    absent = [f"{name} at mu = {mu:g}" for name, mu in needed if (name, mu) not in groups]
    return f"no runs of {', '.join(absent)}" if absent else ""
