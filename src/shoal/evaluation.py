"""Evaluation: loss and accuracy of the anchor, each sample counted once, the same bits at any number of ranks.

A set is cut into chunks of sample indices that the samples' shape alone decides (a matrix product over another
number of rows gives other bits). All living ranks take part, reserves too; the chunks' float64 sums are added in
one fixed tree.
"""

from __future__ import annotations

import math

import numpy as np

from shoal.comm.collectives import gather
from shoal.comm.tree import sum_scalars
from shoal.comm.world import World
from shoal.data.batches import BatchSource
from shoal.data.keyed import permutation
from shoal.data.mapstyle import MapData, MapSplit
from shoal.data.sets import DataSet, Split
from shoal.model.trainable import Trainable

FLAT_CHUNK, FLAT_BYTES = 256, 4 << 20
IMAGE_CHUNK, IMAGE_BYTES = 64, 384 << 10
LEAST_CHUNK = 8
"""Samples at a time, and bytes of their inputs in float32. Matrix products like many rows; of images the layers leave
a hundred times the input behind, so more of them cost memory and are no faster."""
RECALIBRATED = 512
"""training samples that give fresh batch-norm statistics"""

Scores = dict[str, dict[str, float]]


def chunk_size(sample_shape: tuple[int, ...]) -> int:
    """How many samples of this shape are evaluated at a time."""
    most, most_bytes = (FLAT_CHUNK, FLAT_BYTES) if len(sample_shape) == 1 else (IMAGE_CHUNK, IMAGE_BYTES)
    return max(LEAST_CHUNK, min(most, most_bytes // (4 * math.prod(sample_shape))))


def evaluate(world: World, model: Trainable, batches: BatchSource, data: DataSet | MapData) -> Scores:
    """{"test": {"accuracy", "loss"}, "validation": ...} of the model's bound weights, on the master.

    Collective over the world; the weights are the same on all ranks. Elsewhere the result is incomplete.
    """
    splits: dict[str, Split | MapSplit] = {"test": data.test}
    if data.validation is not None:
        splits["validation"] = data.validation
    size = chunk_size(data.sample_shape)
    chunks = [(name, start) for name, split in splits.items() for start in range(0, len(split), size)]
    mine = np.zeros((-(-len(chunks) // world.size), 2))
    for i, (name, start) in enumerate(chunks[world.rank :: world.size]):
        x, y = batches.chunk(splits[name], start, min(start + size, len(splits[name])))
        mine[i] = model.evaluate(x, y)
    rows = gather(world.transport, mine.reshape(-1)).reshape(world.size, -1, 2)
    sums = {chunk: rows[i % world.size, i // world.size] for i, chunk in enumerate(chunks)}
    return {name: _score(len(split), [sums[c] for c in chunks if c[0] == name]) for name, split in splits.items()}


def recalibrate(model: Trainable, batches: BatchSource, samples: int, seed: int) -> None:
    """Fresh batch-norm statistics through the bound weights, from a fixed, keyed set of training samples."""
    chosen = permutation(seed, "recalibration", 0, samples)[:RECALIBRATED]
    size = min(IMAGE_CHUNK, chunk_size(model.sample_shape))
    whole = max(size, len(chosen) // size * size)
    model.recalibrate(batches.chosen(chosen[i : i + size])[0] for i in range(0, whole, size))


def _score(samples: int, chunks: list[np.ndarray]) -> dict[str, float]:
    loss = sum_scalars([float(chunk[0]) for chunk in chunks]) / samples
    return {"accuracy": sum(int(chunk[1]) for chunk in chunks) / samples, "loss": loss}
