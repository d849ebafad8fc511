"""Tiles of logits that stay in memory between a forward and its backward: one on each device.

A later call, which needs memory for its own tile, frees the tile of an earlier call. The backward
of that call then computes all of its logits again. So all calls together use one budget at a time,
in whatever order several heads or micro-batches run. A tile belongs to the first caller that takes
its token from the table: its own backward, or a later forward, perhaps in another thread.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import TensorWeakRef

from storage_ops.storage.storage import GUARD, is_own

_kept: dict[object, tuple[tuple[bool, torch.device], TensorWeakRef]] = {}


def _place(t: Tensor) -> tuple[bool, torch.device]:
    """Return a key of a tile: its device, and whether it is simulated."""
    return isinstance(t, FakeTensor), t.device


def make_room(like: Tensor) -> None:
    """Free the tiles that earlier calls keep on a tensor's device."""
    place = _place(like)
    for token in [token for token, (other, _) in list(_kept.items()) if other == place]:
        entry = _kept.pop(token, None)
        tile = None if entry is None else entry[1]()
        if tile is not None:
            free(tile)


def free(tile: Tensor) -> None:
    """Free a tile's memory. Later reads of the tile raise an error.

    Memory that torch cannot resize is freed with the last reference to the tile.
    """
    storage = tile.untyped_storage()
    if tile.numel() and storage.nbytes() and is_own(tile):
        torch.ops.storage_ops.discard_storage(tile, GUARD)


def keep(tile: Tensor) -> object:
    """Register a tile, and return its token."""
    token = object()
    _kept[token] = _place(tile), TensorWeakRef(tile)
    return token


def take(token: object) -> bool:
    """Remove a token from the table, and return True if it was there."""
    return _kept.pop(token, None) is not None
