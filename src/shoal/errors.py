"""What can go wrong, and the exit status that says so.

0 done, 2 bad input, 75 try again, 99 stopped on request; anything else is an error of the program.
An InputError's text is one sentence that names the thing, its value, the rule and the way out.
"""

from __future__ import annotations

DONE = 0
ERROR = 1
BAD_INPUT = 2
TRY_AGAIN = 75
STOPPED = 99


class ShoalError(Exception):
    """The root of shoal's exceptions; `status` is the exit status the run ends with."""

    status = ERROR
    agreed = False


class InputError(ShoalError):
    """The user's input cannot be used; nothing was trained or overwritten because of it.

    `agreed`: all ranks raise it together, so that all can leave in order; else it came up on one rank only.
    """

    status = BAD_INPUT

    def __init__(self, text: str, agreed: bool = False) -> None:
        super().__init__(text)
        self.agreed = agreed


class Stopped(ShoalError):  # noqa: N818 - it is no error
    """The run was asked to stop and has saved a checkpoint; all ranks raise it together."""

    status = STOPPED
    agreed = True


class DeadlineError(ShoalError):
    """A wait passed its deadline; the text names the world ranks that are missing."""


class RankLost(ShoalError):  # noqa: N818 - what comes of it depends on who is left
    """A rank of the world died or was excluded. Training goes on without it, unless this is `final`."""

    status = TRY_AGAIN

    def __init__(self, text: str, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class LeaseError(ShoalError):
    """Another process holds, or has taken over, the run directory."""

    status = TRY_AGAIN

    def __init__(self, text: str, agreed: bool = False) -> None:
        super().__init__(text)
        self.agreed = agreed
