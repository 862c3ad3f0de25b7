"""The trained model out of a checkpoint: by parameter name for other programs, or as one digest.

A checkpoint holds the anchor flat; its meta JSON says under "tensors" where each tensor lies:
[name, shape, offset, kind], parameters first, then statistics.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import InputError
from shoal.record import checkpoint
from shoal.record.durable import beside, publish

SAFETENSORS_DTYPES = {"float16": "F16", "float32": "F32", "float64": "F64"}


def export(directory: Path, output: Path, warn: Callable[[str], None] = warnings.warn) -> Path:
    """Write the newest anchor of a run to `output`, a .npz or .safetensors file; returns its path.

    `warn` is told if the newest checkpoint is damaged and an older one is taken."""
    output = Path(output)
    writers: dict[str, Callable[[Path, Mapping[str, np.ndarray]], None]] = {
        ".npz": _write_npz,
        ".safetensors": _write_safetensors,
    }
    if output.suffix not in writers:
        raise InputError(
            f"cannot export to {output}: the format {output.suffix!r} is not known, so give a name "
            "that ends in .npz or .safetensors"
        )
    path, arrays, meta = checkpoint.newest_loadable(Path(directory), warn)
    tensors = named_tensors(arrays, meta, path)
    written = beside(output)
    try:
        writers[output.suffix](written, tensors)
        publish(written, output)
    except OSError as error:
        raise InputError(
            f"cannot export to {output} ({error.strerror}); give a directory that exists and is writable"
        ) from error
    finally:
        written.unlink(missing_ok=True)
    return output


def digest(directory: Path) -> str:
    """sha256 (hex) over the little-endian bytes of the anchor, then the velocity, of checkpoint.h5."""
    path = Path(directory) / checkpoint.NEWEST
    arrays, _ = checkpoint.load(path)
    result = hashlib.sha256()
    for name in ("anchor", "velocity"):
        result.update(_little_endian(_array(arrays, name, path)).tobytes())
    return result.hexdigest()


def named_tensors(arrays: Mapping[str, np.ndarray], meta: bytes, path: Path) -> dict[str, np.ndarray]:
    """The anchor's tensors by name, in layout order: views of the flat array, each of its own shape."""
    anchor = _array(arrays, "anchor", path)
    tensors = {}
    try:
        for name, shape, offset, _kind in json.loads(meta)["tensors"]:
            size = int(np.prod(shape, dtype=np.int64))
            tensors[str(name)] = anchor[offset : offset + size].reshape(shape)
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(
            f"the checkpoint {path} does not say where its tensors lie ({error}); "
            "it is of another shoal, so use the one that wrote it"
        ) from error
    return tensors


def _write_npz(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **tensors)


def _write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """8 bytes of header length (little-endian), the header in JSON padded to 8 bytes, the data end to end."""
    header: dict[str, Any] = {"__metadata__": {"format": "shoal"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(_little_endian(tensor).tobytes())


def _array(arrays: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    if name not in arrays:
        raise InputError(
            f"the checkpoint {path} holds no {name} but {', '.join(sorted(arrays)) or 'nothing'}; "
            "it is not a checkpoint of a training run, so give another"
        )
    return arrays[name].reshape(-1)


def _little_endian(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
