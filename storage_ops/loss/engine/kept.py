"""Tiles of logits that stay between a forward and its backward: one on each device.

A later call, which needs memory of its own, takes the place of an earlier one, whose backward then
forms all of its logits again. So all calls together hold one budget at a time, whatever the order
of several heads or micro-batches and their backwards. The first to take a tile's token out of the
table decides what becomes of the tile: its own backward, or a later forward, perhaps in another
thread.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import TensorWeakRef

from storage_ops.storage.storage import GUARD, is_own

_kept: dict[object, tuple[tuple[bool, torch.device], TensorWeakRef]] = {}


def _place(t: Tensor) -> tuple[bool, torch.device]:
    """Return whether a tile is simulated, and its device: simulations keep theirs apart."""
    return isinstance(t, FakeTensor), t.device


def make_room(like: Tensor) -> None:
    """Free what calls on a tensor's device keep."""
    place = _place(like)
    for token in [token for token, (other, _) in list(_kept.items()) if other == place]:
        entry = _kept.pop(token, None)
        tile = None if entry is None else entry[1]()
        if tile is not None:
            free(tile)


def free(tile: Tensor) -> None:
    """Give a tile's memory back; whoever reads it after that gets an error.

    Memory that torch cannot resize is given back when nobody holds the tile any more.
    """
    storage = tile.untyped_storage()
    if tile.numel() and storage.nbytes() and is_own(tile):
        torch.ops.storage_ops.discard_storage(tile, GUARD)


def keep(tile: Tensor) -> object:
    """Remember a tile, and return a token for it."""
    token = object()
    _kept[token] = _place(tile), TensorWeakRef(tile)
    return token


def take(token: object) -> bool:
    """Return True if a tile is still there; nobody else gets it from now on."""
    return _kept.pop(token, None) is not None
