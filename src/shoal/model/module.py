"""What of a PyTorch module goes where in a flat buffer.

All that is in its state_dict is one of the layout's tensors: trained parameters, which decay or need not; frozen ones
and buffers as statistics. A tensor with several names is there once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shoal.errors import InputError
from shoal.model.flat import Kind, Tensor

_EXACT = 2**24
"""up to here float32 holds every whole number"""


@dataclass(frozen=True)
class Buffer:
    """A buffer of the module `owner`, which knows it as `key`."""

    owner: nn.Module
    key: str
    tensor: torch.Tensor

    def settle(self) -> None:
        """Where the owner has put another tensor in its place, take that one's values and be it again."""
        new = self.owner._buffers[self.key]
        if new is not self.tensor and new is not None:
            self.tensor.data.copy_(new)
            self.owner._buffers[self.key] = self.tensor


def buffers(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[Buffer]:
    """The buffers in the state_dict `tensors`, under each of their names."""
    owners = [(module.get_submodule(name.rpartition(".")[0]), name) for name in tensors]
    known = [(owner, name.rpartition(".")[2], tensors[name]) for owner, name in owners]
    return [Buffer(owner, key, tensor) for owner, key, tensor in known if key in owner._buffers]


def declared(module: nn.Module, tensors: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of the state_dict for a Layout, those of one dtype together. Raises InputError."""
    found: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or nn.parameter.is_lazy(tensor):
            raise InputError(
                f"{name} of the module is a {type(tensor).__name__}, and cannot be averaged or saved: run one batch "
                "through a lazy module first; leave other state out of the state_dict"
            )
        if id(tensor) in found:
            found[id(tensor)] = replace(found[id(tensor)], aliases=(*found[id(tensor)].aliases, name))
        else:
            _check_tensor(name, tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[id(tensor)] = Tensor(name, tuple(tensor.shape), _kind(module, name, tensor), dtype=dtype)
    if all(one.kind == "statistic" for one in found.values()):
        raise InputError("the module has no parameter that requires a gradient; there is nothing to train")
    return sorted(found.values(), key=lambda one: "" if one.dtype == "float32" else one.dtype)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise InputError(f"{name} of the module is on {tensor.device}; move it: module.cpu()")
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype != torch.float32):
        raise InputError(f"{name} of the module is {tensor.dtype}, and shoal trains float32: module.float()")
    if not tensor.is_floating_point() and tensor.numel() and int(tensor.long().abs().max()) > _EXACT:
        raise InputError(
            f"{name} of the module holds a number beyond {_EXACT}, which float32 cannot hold; "
            "register it with persistent=False if it is constant"
        )


def _kind(module: nn.Module, name: str, tensor: torch.Tensor) -> Kind:
    """Biases, norms, and whatever has one axis or none need not decay."""
    path, _, own = name.rpartition(".")
    if not tensor.requires_grad:
        return "statistic"
    if own.endswith("bias"):
        return "bias"
    return "norm" if tensor.ndim < 2 or isinstance(module.get_submodule(path), nn.LayerNorm) else "weight"
