"""Key-value caches of transformers as arguments of equal layers.

By default (`use_cache=True`) a model passes one cache to all its layers. Each layer puts its keys
and values into its own entry of the cache. So a call changes an argument. If the entry was empty,
its new state can be recorded like a result. While a call is recorded, a `CacheOfOneLayer` takes the
place of the cache, so that the cache and the number of the layer do not matter.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.simulate.module_kinds import Comparison, NotComparable


class CacheOfOneLayer:
    """Stores the keys and values of one layer. Other uses of a cache raise `NotComparable`.

    Attributes:
        entry: the entry of the layer.
    """

    def __init__(self, cls: type, entry: Any) -> None:
        self._cls, self.entry = cls, entry
        self._before = dict(vars(entry))

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() reads it
        return self._cls

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> Any:
        """Store keys and values, as `Cache.update` does."""
        return self.entry.update(keys, values, *args, **kwargs)

    def take_changes(self) -> dict[str, Any]:
        """Return the new attributes of the entry, and remove the entry."""
        missing = object()
        after = vars(self.entry).items()
        del self.entry
        return {name: v for name, v in after if v is not self._before.get(name, missing)}

    def __getattr__(self, name: str) -> Any:
        raise NotComparable

    def __len__(self) -> int:
        raise NotComparable


class Caches:
    """The caches among the arguments of a layer, and the layer's entries in them.

    Attributes:
        key: what decides how the entries store keys and values.
    """

    def __init__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Find the caches.

        Raises:
            NotComparable: an entry has contents, or the layer has several numbers or none.
        """
        leaves = tree_leaves((args, kwargs))
        self._caches = list({id(leaf): leaf for leaf in leaves if _is_cache(leaf)}.values())
        self._arguments = args, kwargs
        self._entries = [_empty_entry(cache, module) for cache in self._caches]
        self.key: Hashable = tuple(map(_key, self._entries))

    def arguments(self, new: list[Any] | None = None) -> tuple[Args, Kwargs]:
        """Return the arguments of the layer with other objects, or their numbers, as caches."""
        if not self._caches:
            return self._arguments
        places = {id(cache): i for i, cache in enumerate(self._caches)}

        def other(leaf: object) -> Any:
            number = places.get(id(leaf))
            return leaf if number is None else number if new is None else new[number]

        args, kwargs = tree_map(other, self._arguments)
        return args, kwargs

    def stand_ins(self) -> list[CacheOfOneLayer]:
        """Return a cache of one layer for each cache, with a copy of the entry."""
        pairs = zip(self._caches, self._entries, strict=True)
        return [CacheOfOneLayer(type(cache), copy.copy(entry)) for cache, entry in pairs]

    def change(self, changes: list[dict[str, Any]]) -> None:
        """Change the entries as the layer does."""
        for cache, entry, new in zip(self._caches, self._entries, changes, strict=True):
            vars(entry).update(new)
            if not any(entry is other for other in cache.layers):
                cache.layers.append(entry)


def _is_cache(value: object) -> bool:
    """Return True for a cache that a model creates for a step of training."""
    module: Any = sys.modules.get("transformers.cache_utils")
    return module is not None and type(value) is module.DynamicCache


def _empty_entry(cache: Any, module: nn.Module) -> Any:
    """Return a layer's entry in a cache. If the cache has none, create one outside of the cache."""
    numbers = {m.layer_idx for m in module.modules() if hasattr(m, "layer_idx")}
    number = numbers.pop() if len(numbers) == 1 else None
    entries, new = cache.layers, cache.layer_class_to_replicate
    if cache.offloading or not isinstance(number, int):
        raise NotComparable
    if number == len(entries) and new is not None:
        return new()
    # Entries of linear attention have no keys, and no such attribute.
    if not 0 <= number < len(entries) or getattr(entries[number], "is_initialized", True):
        raise NotComparable
    return entries[number]


def _key(entry: object) -> Hashable:
    settings = {name: v for name, v in vars(entry).items() if not isinstance(v, Tensor)}
    return type(entry), Comparison().of(settings)
