"""Logits that stay in memory between a forward and its backward: those of one call on each device.

A call keeps its last tile. With a deferred schedule, it also keeps logits in the memory of the
weight's gradient, which the forward has allocated. A later call, which needs memory for its own
tile, frees the memory of an earlier call. The backward of that call then computes all of its logits
again. So all calls together use one budget at a time, in whatever order several heads or
micro-batches run. The memory belongs to the first caller that takes its token from the table: its
own backward, or a later forward, perhaps in another thread.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import TensorWeakRef

from storage_ops.storage.storage import GUARD, is_own

_kept: dict[object, tuple[tuple[bool, torch.device], list[TensorWeakRef]]] = {}


def _place(t: Tensor) -> tuple[bool, torch.device]:
    """Return a key of a tile: its device, and whether it is simulated."""
    return isinstance(t, FakeTensor), t.device


def make_room(like: Tensor) -> None:
    """Free the tiles that earlier calls keep on a tensor's device."""
    place = _place(like)
    for token in [token for token, (other, _) in list(_kept.items()) if other == place]:
        entry = _kept.pop(token, None)
        free(*(reference() for reference in ([] if entry is None else entry[1])))


def free(*tensors: Tensor | None) -> None:
    """Free the memory of tensors. Later reads of it raise an error.

    Memory that torch cannot resize is freed with the last reference to its tensor.
    """
    for t in tensors:
        if t is not None and t.numel() and t.untyped_storage().nbytes() and is_own(t):
            torch.ops.storage_ops.discard_storage(t, GUARD)


def keep(*tensors: Tensor) -> object:
    """Register the tensors of a call, all on one device, and return their token."""
    token = object()
    _kept[token] = _place(tensors[0]), [TensorWeakRef(t) for t in tensors]
    return token


def take(token: object) -> bool:
    """Remove a token from the table, and return True if it was there."""
    return _kept.pop(token, None) is not None


def gradient_in(parked: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a weight (V, D), in the memory in which logits are parked."""
    strides = weight.shape[1], 1
    return parked.new_empty(0).set_(parked.untyped_storage(), 0, weight.shape, strides)
