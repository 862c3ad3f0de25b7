"""Whole-program tests: they start ranks (see ranks.py), and never initialise MPI themselves."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks

TRAIN_MANY = Path(__file__).with_name("train_many.py")


@dataclass(frozen=True)
class Trained:
    """Runs by name: the events of each, and its final parameters by tensor name."""

    histories: Mapping[str, list[dict[str, Any]]]
    parameters: Mapping[str, Mapping[str, np.ndarray]]

    def digest(self, name: str) -> str:
        return str(self.histories[name][-1]["digest"])


@pytest.fixture(scope="session", autouse=True)
def leftovers() -> Iterator[None]:
    """What an MPI leaves behind when it is killed (session folders, shared segments) goes with this folder."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("TMPDIR", "OMPI_MCA_btl_sm_backing_directory"):
            patch.setenv(name, folder)
        yield


@pytest.fixture(scope="session")
def train_many(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """train_many(n, {name: config tree}): all of them trained by one job of n ranks; nodes: see train_many.py."""

    def train(n: int, cases: Mapping[str, Any], nodes: str = "", **how: Any) -> Trained:
        folder = tmp_path_factory.mktemp(f"trained-by-{n}")
        (folder / "cases.json").write_text(json.dumps(cases))
        ranks.run(n, [str(TRAIN_MANY), str(folder / "cases.json"), str(folder / "out"), *nodes.split()], **how)
        parameters: dict[str, dict[str, np.ndarray]] = {}
        with np.load(folder / "out.npz") as arrays:
            for key in arrays.files:
                name, tensor = key.split("/")
                parameters.setdefault(name, {})[tensor] = arrays[key]
        return Trained(json.loads((folder / "out.json").read_text()), parameters)

    return train
