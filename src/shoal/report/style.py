"""How shoal's figures look: a colour-blind-safe palette and few lines.

Colours are Okabe and Ito's; the paper's schedules I to V have the first five.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shoal.errors import InputError

PALETTE = ("#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
SCHEDULES = dict(zip(("I", "II", "III", "IV", "V"), PALETTE, strict=False))
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
"""Once the palette is used up, it is gone through again with the next dash."""

RC: Any = {
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.labelsize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "lines.linewidth": 1.7,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.dpi": 100.0,
    "savefig.dpi": 160.0,
}


def line_style(index: int) -> dict[str, Any]:
    """Colour and dash of the index-th group."""
    return {"color": PALETTE[index % len(PALETTE)], "linestyle": DASHES[index // len(PALETTE) % len(DASHES)]}


def thousands(value: float, _position: int = 0) -> str:
    """A tick label: 1500 -> "1.5k", 2000000 -> "2M"."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def save(figure: Any, output: Path) -> Path:
    """Write the figure in the format that its name's ending asks for; InputError where that is none."""
    output = Path(output)
    known = figure.canvas.get_supported_filetypes()
    if not re.fullmatch(r"\.\w+", output.suffix) or output.suffix[1:].lower() not in known:
        raise InputError(
            f"cannot draw {output}: {output.suffix or 'no ending'} is not a figure's format, so give a name "
            f"that ends in one of {', '.join(sorted(known))}"
        )
    try:
        figure.savefig(output, facecolor="white")
    except OSError as error:
        raise InputError(
            f"cannot draw {output} ({error.strerror}); give a directory that exists and is writable"
        ) from error
    return output
