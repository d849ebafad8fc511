"""The live region that made a storage, for those that read it later."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from storage_ops.checkpoint.saved.guard import storage_key

if TYPE_CHECKING:
    from storage_ops.checkpoint.region.region import Region

# A region strikes out what it made when it can no longer make it again, or is gone.
makers: dict[int, weakref.ref[Region]] = {}


def maker_of(t: Any) -> Region | None:
    """The region that can make the bytes of a tensor again, if one can."""
    return maker_of_storage(storage_key(t)) if makers else None


def maker_of_storage(key: int | None) -> Region | None:
    """Return the region that can make the bytes of a storage again; None if no region can."""
    region = None if key is None else makers.get(key)
    return None if region is None else region()
