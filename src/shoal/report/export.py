"""The trained model out of a checkpoint: by parameter name for other programs, or as one digest.

A checkpoint holds the anchor flat; its meta JSON says under "tensors" where each tensor lies:
[name, shape, offset, kind, dtype], parameters first, then statistics; dtype is what a tensor has outside of it. A
tensor with several names has a row for each.
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

SAFETENSORS_DTYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    "uint8": "U8",
    "bool": "BOOL",
}


def export(directory: Path, output: Path, warn: Callable[[str], None] = warnings.warn) -> Path:
    """Write the newest anchor of a run to `output`, a .npz, .safetensors or .pt file; returns its path.

    The .pt is a state_dict: of a PyTorch module that was trained it has all names, shapes and dtypes.

    `warn` is told if the newest checkpoint is damaged and an older one is taken."""
    output = Path(output)
    writers: dict[str, Callable[[Path, Mapping[str, np.ndarray]], None]] = {
        ".npz": _write_npz,
        ".safetensors": _write_safetensors,
        ".pt": _write_state_dict,
    }
    if output.suffix not in writers:
        raise InputError(
            f"cannot export to {output}: the format {output.suffix!r} is not known, so give a name "
            "that ends in .npz, .safetensors or .pt"
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
    """The anchor's tensors by name, in layout order, each of its own shape: views of the flat array, but for those
    of whole numbers."""
    anchor = _array(arrays, "anchor", path)
    tensors = {}
    try:
        for name, shape, offset, _kind, *dtype in json.loads(meta)["tensors"]:
            size = int(np.prod(shape, dtype=np.int64))
            tensor = anchor[offset : offset + size].reshape(shape)
            whole = dtype and np.dtype(dtype[0]).kind != "f"
            tensors[str(name)] = np.asarray(np.rint(tensor), dtype[0]) if whole else tensor
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


def _write_state_dict(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise InputError(
            "a .pt needs PyTorch, which is not installed: pip install 'shoal[torch]', or export to .safetensors"
        ) from error
    torch.save({name: torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}, path)


def _array(arrays: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    if name not in arrays:
        raise InputError(
            f"the checkpoint {path} holds no {name} but {', '.join(sorted(arrays)) or 'nothing'}; "
            "it is not a checkpoint of a training run, so give another"
        )
    return arrays[name].reshape(-1)


def _little_endian(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
