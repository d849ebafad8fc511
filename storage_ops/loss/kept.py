"""Tiles of logits that stay between a forward and its backward: one on each device.

The losses of several heads or micro-batches, whose backwards come later, would hold a tile each, so
that a budget would be kept several times over. A later call takes the place of an earlier one, which
then forms all of its logits again. What becomes of a tile is decided by whoever takes its token out
of the table first: its own backward, or a later forward, perhaps in another thread.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from storage_ops.loss.tokens import same_storage

_discard = torch.ops.storage_ops.discard_storage
# Token -> where it is kept, and the tile. Simulations keep theirs apart.
_kept: dict[object, tuple[tuple[type, torch.device], TensorWeakRef]] = {}


def keep(tile: Tensor) -> object | None:
    """A token for a tile, which takes the place of any other; None for an empty one."""
    if not tile.numel():
        return None
    place = type(tile), tile.device
    for token in [token for token, (other, _) in list(_kept.items()) if other == place]:
        _, reference = _kept.pop(token, (None, None))
        earlier = None if reference is None else reference()
        if earlier is not None and not same_storage(earlier, tile):  # as where an op is cached
            _discard(earlier)
    token = object()
    _kept[token] = place, TensorWeakRef(tile)
    return token


def take(token: object) -> bool:
    """Whether a tile is still there; nobody else gets it from now on."""
    return _kept.pop(token, None) is not None
