"""Key-value caches of transformers as arguments of equal layers.

By default (`use_cache=True`) a model passes one cache to all its layers. Each layer puts its keys
and values into its own entry of the cache. So a call changes an argument. If the entry was empty,
its new state can be recorded like a result. While a call is recorded, a `CacheOfOneLayer` takes the
place of the cache, so that the cache and the number of the layer do not matter.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Hashable, Sequence
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

    def __init__(self, cls: type, entry: Any, is_filled: bool | None = None) -> None:
        self._cls, self.entry, self._is_filled = cls, entry, is_filled
        self._before = dict(vars(entry))

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() reads it
        return self._cls

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> Any:
        """Store keys and values, as `Cache.update` does."""
        return self.entry.update(keys, values, *args, **kwargs)

    def get_seq_length(self, layer_idx: int) -> int:
        """Return the number of tokens whose keys and values are stored."""
        return int(self.entry.get_seq_length())

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

    def __bool__(self) -> bool:
        if self._is_filled is None:
            raise NotComparable
        return self._is_filled or self.entry.is_initialized


class _IsUpdated:
    """Whether the cross-attention of one layer has stored keys. Its number does not matter."""

    def __init__(self) -> None:
        self.value = False

    def get(self, layer_idx: int) -> bool:
        return self.value

    def __setitem__(self, layer_idx: int, value: bool) -> None:
        self.value = value


class PairOfOneLayer:
    """Two caches of one layer, for attention to its own and to the encoder's tokens.

    Attributes:
        self_attention_cache, cross_attention_cache: the caches.
        is_updated: whether the cross-attention has stored its keys.
    """

    def __init__(self, cls: type, caches: list[CacheOfOneLayer]) -> None:
        self._cls, self._caches = cls, caches
        self.self_attention_cache, self.cross_attention_cache = caches
        self.is_updated = _IsUpdated()

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() reads it
        return self._cls

    def get_seq_length(self, layer_idx: int) -> int:
        """Return the number of the layer's own tokens whose keys and values are stored."""
        return self.self_attention_cache.get_seq_length(layer_idx)

    def take_changes(self) -> list[Any]:
        """Return the new attributes of both entries, and `is_updated`."""
        return [*(cache.take_changes() for cache in self._caches), self.is_updated.value]

    def __getattr__(self, name: str) -> Any:
        raise NotComparable

    def __len__(self) -> int:
        raise NotComparable


StandIns = Sequence[CacheOfOneLayer | PairOfOneLayer]


class _Slot:
    """The entry of a layer in a cache.

    Attributes:
        key: what decides how the entry stores keys and values.
    """

    def __init__(self, cache: Any, number: int) -> None:
        self._cache, self._entry = cache, _empty_entry(cache, number)
        settings = {n: v for n, v in vars(self._entry).items() if not isinstance(v, Tensor)}
        self.key: Hashable = type(self._entry), Comparison().of(settings)

    def stand_in(self, is_filled: bool | None = None) -> CacheOfOneLayer:
        """Return a cache of one layer with a copy of the entry."""
        return CacheOfOneLayer(type(self._cache), copy.copy(self._entry), is_filled)

    def change(self, changes: dict[str, Any]) -> None:
        """Change the entry as the layer does."""
        vars(self._entry).update(changes)
        if not any(self._entry is other for other in self._cache.layers):
            self._cache.layers.append(self._entry)


class _PairOfSlots:
    """The entries of a layer in an `EncoderDecoderCache`, as `_Slot` is in a `DynamicCache`."""

    def __init__(self, pair: Any, number: int) -> None:
        caches = pair.self_attention_cache, pair.cross_attention_cache
        if pair.is_updated.get(number) or not all(map(_is_cache, caches)):
            raise NotComparable
        self._pair, self._number = pair, number
        self._slots = [_Slot(cache, number) for cache in caches]
        self._are_filled = [bool(cache) for cache in caches]  # layers of Whisper read it
        self.key: Hashable = (*(slot.key for slot in self._slots), *self._are_filled)

    def stand_in(self) -> PairOfOneLayer:
        """Return a pair of caches of one layer."""
        each = zip(self._slots, self._are_filled, strict=True)
        caches = [slot.stand_in(is_filled) for slot, is_filled in each]
        return PairOfOneLayer(type(self._pair), caches)

    def change(self, changes: list[Any]) -> None:
        """Change the entries as the layer does."""
        for slot, new in zip(self._slots, changes[:2], strict=True):
            slot.change(new)
        self._pair.is_updated[self._number] = changes[2]


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
        self._caches = list({id(v): v for v in leaves if _is_cache(v) or _is_pair(v)}.values())
        self._arguments = args, kwargs
        self._slots = [
            (_PairOfSlots if _is_pair(cache) else _Slot)(cache, _number_of(module))
            for cache in self._caches
        ]
        self.key: Hashable = tuple(slot.key for slot in self._slots)

    def arguments(self, new: Sequence[Any] | None = None) -> tuple[Args, Kwargs]:
        """Return the arguments of the layer with other objects, or their numbers, as caches."""
        if not self._caches:
            return self._arguments
        places = {id(cache): i for i, cache in enumerate(self._caches)}

        def other(leaf: object) -> Any:
            number = places.get(id(leaf))
            return leaf if number is None else number if new is None else new[number]

        args, kwargs = tree_map(other, self._arguments)
        return args, kwargs

    def stand_ins(self) -> StandIns:
        """Return a cache of one layer for each cache, with a copy of the entry."""
        return [slot.stand_in() for slot in self._slots]

    def change(self, changes: list[Any]) -> None:
        """Change the entries as the layer does."""
        for slot, new in zip(self._slots, changes, strict=True):
            slot.change(new)


def _is_a(value: object, name: str) -> bool:
    """Return True for a cache of transformers whose class has this name, and no subclass of it."""
    module: Any = sys.modules.get("transformers.cache_utils")
    return module is not None and type(value) is getattr(module, name)


def _is_cache(value: object) -> bool:
    """Return True for a cache that a model creates for a step of training."""
    return _is_a(value, "DynamicCache")


def _is_pair(value: object) -> bool:
    """Return True for a cache that a decoder with an encoder creates for a step of training."""
    return _is_a(value, "EncoderDecoderCache")


def _number_of(module: nn.Module) -> int:
    """Return the number of a layer."""
    numbers = {m.layer_idx for m in module.modules() if hasattr(m, "layer_idx")}
    number = numbers.pop() if len(numbers) == 1 else None
    if not isinstance(number, int):
        raise NotComparable
    return number


def _empty_entry(cache: Any, number: int) -> Any:
    """Return a layer's entry in a cache. If the cache has none, create one outside of the cache."""
    entries, new = cache.layers, cache.layer_class_to_replicate
    if cache.offloading:
        raise NotComparable
    if number == len(entries) and new is not None:
        return new()
    # Entries of linear attention have no keys, and no such attribute.
    if not 0 <= number < len(entries) or getattr(entries[number], "is_initialized", True):
        raise NotComparable
    return entries[number]
