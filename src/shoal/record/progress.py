"""What a person watching a run sees: one live line on a terminal, plain columns in a batch log.

A Progress is fed with the run log's events (`on_event`, the interface of a user's own callback too), so
it shows nothing that the log does not hold. Rates come from the events since the last resize: before it
the run had another speed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

Event = Mapping[str, Any]

COLUMNS = (
    ("epoch", 8),
    ("learners", 9),
    ("ranks", 6),
    ("loss", 9),
    ("test acc", 9),
    ("samples/s", 10),
    ("left", 8),
)
WINDOW_S = 20.0
REFRESH_S = 0.2


@dataclass(frozen=True)
class View:
    """The figures of a progress line; None where nothing is known yet."""

    epoch: float = 0.0
    learners: int | None = None
    ranks: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None

    def cells(self) -> list[str]:
        """The figures as text, in the order of COLUMNS."""
        return [
            f"{self.epoch:.2f}",
            _text(self.learners, "d"),
            _text(self.ranks, "d"),
            _text(self.loss, ".4f"),
            "-" if self.accuracy is None else f"{100 * self.accuracy:.2f}%",
            _text(self.samples_per_s, ",.0f"),
            _duration(self.left_s),
        ]


class Progress:
    """Shows a run of `total_epochs` on `stream`.

    On a terminal of `width` columns one line is redrawn in place; with width 0 a plain line is printed at each
    evaluation and resize, and otherwise at most every `interval_s`. A rank cannot tell which is right: Open MPI
    gives it a pseudo-terminal in a batch job too, MPICH a pipe on a terminal. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        total_epochs: float,
        stream: TextIO,
        width: int = 0,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracker = _Tracker(total_epochs)
        self._display: _Terminal | _Lines
        if width:
            self._display = _Terminal(total_epochs, stream, width, clock)
        else:
            self._display = _Lines(stream, interval_s, clock)

    def on_event(self, event: Event) -> None:
        """Take in one event of the run log; events and fields not known are passed over."""
        view = self._tracker.update(event)
        self._display.show(view, _note(event), important=event["event"] in ("evaluation", "resize", "end"))

    def close(self) -> None:
        """Leave the terminal as it was; a second call does nothing."""
        self._display.close()


class _Tracker:
    """Turns events into a View."""

    def __init__(self, total_epochs: float) -> None:
        self.total_epochs = total_epochs
        self.figures: dict[str, Any] = {}
        self.window: deque[tuple[float, float, int, float]] = deque()

    def update(self, event: Event) -> View:
        kind, figures = event["event"], self.figures
        if kind == "round":
            for name in ("epoch", "learners", "ranks", "loss"):
                figures[name] = event[name]
            self.window.append((event["time"], event["epoch"], event["consumed"], event["train_s"]))
            while self.window[-1][0] - self.window[0][0] > WINDOW_S:
                self.window.popleft()
        elif kind == "evaluation":
            figures["epoch"] = event["epoch"]
            figures["accuracy"] = (event.get("test") or {}).get("accuracy")
        elif kind == "resize":
            figures["learners"], figures["ranks"] = event["learners"][1], event["ranks"][1]
            self.window.clear()
        elif kind == "stage":
            figures["epoch"], figures["learners"] = event["epoch"], event["learners"]
        return View(**{**figures, **self._rates()})

    def _rates(self) -> dict[str, float]:
        """samples_per_s of training time, left_s of wall time; empty while too little is known."""
        if len(self.window) < 2:
            return {}
        time_0, epoch_0, consumed_0, train_0 = self.window[0]
        time_1, epoch_1, consumed_1, train_1 = self.window[-1]
        rates = {}
        if train_1 > train_0:
            rates["samples_per_s"] = (consumed_1 - consumed_0) / (train_1 - train_0)
        if epoch_1 > epoch_0:
            pace_s = (time_1 - time_0) / (epoch_1 - epoch_0)
            rates["left_s"] = max(0.0, self.total_epochs - epoch_1) * pace_s
        return rates


class _Lines:
    """Aligned plain lines, without control characters."""

    def __init__(self, stream: TextIO, interval_s: float, clock: Callable[[], float]) -> None:
        self.stream, self.interval_s, self.clock = stream, interval_s, clock
        self.shown_at = clock()
        self.headed = False

    def show(self, view: View, note: str, important: bool) -> None:
        if not (important or note or self.clock() - self.shown_at >= self.interval_s):
            return
        alone = note.startswith("run ") or (bool(note) and view.learners is None)
        if not self.headed and not alone:
            self._print("".join(f"{name:>{width}}" for name, width in COLUMNS))
            self.headed = True
        if alone:
            self._print(note)
        else:
            cells = zip(view.cells(), COLUMNS, strict=True)
            row = "".join(f"{cell:>{width}}" for cell, (_, width) in cells)
            self._print(f"{row}  {note}".rstrip())
        self.shown_at = self.clock()

    def close(self) -> None:
        self.stream.flush()

    def _print(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


class _Terminal:
    """One line redrawn in place by rich, from the caller's thread only; notes scroll above it."""

    def __init__(self, total_epochs: float, stream: TextIO, width: int, clock: Callable[[], float]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self.clock = clock
        self.drawn_at = clock()
        console = Console(file=stream, width=width, force_terminal=True)
        wide = console.width >= 110
        self.per_s = "samples/s" if wide else "/s"
        self.bar = Bar(
            TextColumn("epoch {task.completed:.2f}/{task.total:g}"),
            *([BarColumn(bar_width=16)] if wide else []),
            TextColumn("{task.fields[line]}"),
            console=console,
            auto_refresh=False,
        )
        self.task = self.bar.add_task("", total=total_epochs, line="")
        self.bar.start()

    def show(self, view: View, note: str, important: bool) -> None:
        if note:
            self.bar.console.print(note, markup=False, highlight=False)
        now = self.clock()
        if important or note or now - self.drawn_at >= REFRESH_S:
            _, learners, ranks, loss, accuracy, rate, left = view.cells()
            line = (
                f"[bold]{learners}[/] learners [bold]{ranks}[/] ranks "
                f"loss {loss} test [bold]{accuracy}[/] {rate} {self.per_s} {left} left"
            )
            self.bar.update(self.task, completed=view.epoch, line=line)
            self.bar.refresh()
            self.drawn_at = now

    def close(self) -> None:
        self.bar.stop()


def _note(event: Event) -> str:
    """What an event says beyond the columns; empty for most."""
    kind = event["event"]
    if kind == "header":
        parts = [f"run {event.get('name', '')}, seed {event.get('seed', '?')}"]
        for field, unit in (
            ("world", "ranks"),
            ("samples", "training samples"),
            ("parameters", "parameters"),
        ):
            if field in event:
                parts.append(f"{event[field]:,} {unit}")
        return ", ".join([*parts, *([event["caption"]] if event.get("caption") else [])])
    if kind == "resume":
        return f"resumed at round {event['round']}"
    if kind == "resize":
        (a, b), (c, d) = event["learners"], event["ranks"]
        return f"resize: {a} -> {b} learners, {c} -> {d} ranks, stall {event['stall_ms']:.1f} ms"
    if kind == "wish":
        wish = " and ".join(f"{event[what]} {what}" for what in ("ranks", "learners") if what in event)
        return f"{event['source']}: {wish}"
    if kind == "world":
        came = "came" if event["action"] == "grow" else "left"
        return f"a rank {came}: {event['world']} ranks, switch {event['switch_ms']:.1f} ms"
    if kind == "recovery":
        lost, (before, now) = ", ".join(map(str, event["lost"])), event["ranks"]
        return f"lost rank {lost}: {before} -> {now} ranks, recovered in {event['recovery_ms']:.0f} ms"
    if kind == "stage" and event["round"]:
        return f"stage: {event['learners']} learners, K {event['steps']}, batch {event['batch']}"
    if kind == "warning":
        return f"warning: {event.get('text', '')}"
    if kind in ("stop", "failure"):
        return f"{kind} at round {event['round']}: {event['reason']}"
    if kind == "end":
        return f"done: {event['serial_steps']:,} serial steps, {event['learner_steps']:,} learner-steps"
    return ""


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    """1:02:03, or 2:03 under an hour."""
    if seconds is None:
        return "-"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"
