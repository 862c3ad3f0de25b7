"""The predictor against published figures (published.toml): allreduces at scales left out of the fit, and training.

Fitting and checking on the same rows shows nothing: each number of ranks is left out in turn, the parameters are fitted
on the others, and the times on the one left out are predicted. Sizes that were measured at one scale only are left out
of the check. What ships in jobs/machines is fitted on all scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from shoal import config as configs
from shoal.comm.network import Buffers, Library, Network
from shoal.report.fitting import Fit, fit
from shoal.report.predict import Load, Site, weak_efficiency

FILE = Path(__file__).with_name("published.toml")
NAMES = ("start_s", "short_s", "short_byte_s", "long_s", "long_byte_s")
NODE_NAMES = ("node_s", "node_byte_s")
ABCI_LINK = 25.0
"""GB/s out of a node of ABCI V, by its two links"""
POINTS = 0.08
"""how far a predicted efficiency may be off"""


class Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of one library on one system in us, a list for each number of ranks; nan where there is none."""

    system: str
    library: str
    what: str
    source: str
    per_node: int
    form: str
    guess: tuple[float, ...]
    sizes: tuple[float, ...]
    times: dict[str, tuple[float, ...]]

    def points(self) -> np.ndarray:
        """(n, 3): ranks, bytes, seconds."""
        rows = [
            (int(ranks), s, 1e-6 * t) for ranks, row in self.times.items() for s, t in zip(self.sizes, row, strict=True)
        ]
        found = np.array(rows)
        return found[np.isfinite(found[:, 2])]


class Training(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published efficiency of weak scaling, with what is stated or assumed of the load; see published.toml."""

    work: str
    source: str
    ranks: int
    per_node: int
    link: float
    batch: int
    images_s: float
    parameters: float
    efficiency: float
    base: int = 1
    bytes: int = 4
    hidden: float = 2 / 3
    at_least: bool = False


class Published(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    allreduce: tuple[Table, ...]
    training: tuple[Training, ...]


@dataclass(frozen=True)
class LeftOut:
    """The relative errors at one scale, predicted from the others; no less than one."""

    table: Table
    ranks: int
    sizes: np.ndarray
    errors: np.ndarray


def published() -> Published:
    """What is in the file."""
    return configs.convert(configs.read_toml(FILE), Published, str(FILE))


def fitted(table: Table, points: np.ndarray) -> tuple[Library, Fit]:
    """The form of the table with the parameters that describe these points (n, 3) best."""
    names = NODE_NAMES if table.form == "node" else NAMES

    def library(values: np.ndarray) -> Library:
        zeros = dict.fromkeys(NAMES, 0.0)
        form = "doubling" if table.form == "node" else table.form
        return configs.convert(
            {**zeros, "form": form, **dict(zip(names, values.tolist(), strict=True))}, Library, "fit"
        )

    def times(values: np.ndarray) -> np.ndarray:
        made = library(values)
        return np.array([made.seconds(s, int(n), -(-int(n) // table.per_node)) for n, s, _ in points])

    found = fit(times, points[:, 2], 1e-6 * np.array(table.guess))
    return library(found.parameters), found


def left_out(table: Table) -> Iterator[LeftOut]:
    """Each scale in turn, if there are more than one."""
    points = table.points()
    scales, sizes = np.unique(points[:, 0]), points[:, 1]
    for scale in scales if len(scales) > 1 else ():
        kept, away = points[points[:, 0] != scale], points[points[:, 0] == scale]
        away = away[np.isin(away[:, 1], sizes[points[:, 0] != scale])]
        library, _ = fitted(table, kept)
        nodes = -(-int(scale) // table.per_node)
        errors = np.array([library.seconds(s, int(scale), nodes) / t - 1 for _, s, t in away])
        yield LeftOut(table, int(scale), away[:, 1], errors)


def on_link(library: Library, link: float) -> Library:
    """ABCI's parameters for a node with another link: what long messages take goes with its bandwidth."""
    return replace(library, long_byte_s=library.long_byte_s * ABCI_LINK / link)


def efficiency(row: Training, library: Library, jitter: float = Network().jitter) -> float:
    """What is predicted for a published row; library: that of ABCI."""
    buffers = Buffers(origin="ABCI", allreduce=on_link(library, row.link))
    site = Site(row.work, Network(nccl=buffers, jitter=jitter), row.per_node, "nccl")
    load = Load(row.batch / row.images_s, row.batch, int(row.parameters), 0, 0)
    return weak_efficiency(load, site, (row.base, row.ranks), row.hidden, row.bytes)


def nccl_of_abci(tables: tuple[Table, ...]) -> Library:
    """Fitted on all scales, one node too."""
    parts = {t.form: fitted(t, t.points())[0] for t in tables if t.system == "abci-v"}
    return replace(parts["rings"], node_s=parts["node"].node_s, node_byte_s=parts["node"].node_byte_s)


def met(row: Training, predicted: float) -> bool:
    """Within 8 points; a published bound is met from above."""
    return abs(predicted - row.efficiency) <= POINTS or (row.at_least and predicted >= row.efficiency)
