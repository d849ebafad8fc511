"""The live region that made a storage, for those that read it later."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from storage_ops.checkpoint.guard import storage_key

if TYPE_CHECKING:
    from storage_ops.checkpoint.region import Region

makers: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()


def maker_of(t: Any) -> Region | None:
    """The region that can make the bytes of a tensor again, if one can."""
    if not makers.data:  # type: ignore[attr-defined]  # asking for the length takes long
        return None
    key = storage_key(t)
    return None if key is None else makers.get(key)
