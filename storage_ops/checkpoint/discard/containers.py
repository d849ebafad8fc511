"""Detects consumers that store the containers in which regions return outputs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from storage_ops.checkpoint.saved.guard import storage_key
from storage_ops.checkpoint.saved.ref_counts import variables

_OWN_NAMES = 0  # references to a container that counting itself adds; measured at import


class Counts(NamedTuple):
    """The counted references of a container.

    Attributes:
        holders: references to it. Containers around it do not count, nor do variables of running
            functions, which callers need to name the outputs to free.
        items: how often it contains each item, by identity.
    """

    holders: int
    items: Counter[int]


class Containers:
    """The containers that regions returned and that the caller passes to consumers.

    A consumer that stores such a container reads its outputs later, so they must be kept. Storing
    it does not change the reference counts of the outputs. So references to the containers are
    counted.

    The containers are referenced until `clear`. They reference the graphs of their outputs, so no
    graph may reference this object.
    """

    def __init__(self) -> None:
        self._all: list[object] = []
        self._first: dict[int, Counter[int]] = {}  # their items when the regions returned
        self._inner: set[int] = set()  # containers in other containers

    def add(self, outputs: object) -> None:
        """Record the outputs of a region, and the containers in them."""
        stack = [] if isinstance(outputs, Tensor) else [outputs]
        while stack:
            value = stack.pop()
            inside = _items(value)
            if inside and not isinstance(value, Tensor):
                self._all.append(value)
                self._first[id(value)] = Counter(map(id, inside))
                self._inner.update(map(id, inside))
                stack += inside

    def clear(self) -> None:
        """Drop all references to containers."""
        self._all, self._first, self._inner = [], {}, set()

    def count(self) -> dict[int, Counts]:
        """Count the references to each container that other code references, and its items."""
        if not self._all:  # as for regions that return a tensor
            return {}
        count = len(self._all) + 1
        while len(self._all) < count:  # a container may have had the last reference to another
            count = len(self._all)
            references = self._references()
            self._all = [value for value in self._all if references[id(value)] > 0]
        names, named = self._names(), Counter(map(id, variables()))
        return {
            id(value): Counts(names[id(value)] - named[id(value)], Counter(map(id, _items(value))))
            for value in self._all
        }

    def stored(self, before: dict[int, Counts]) -> set[int]:
        """Return the keys of the storages in containers that have more references than before.

        Args:
            before: the result of `count`. A container that is not in it had one reference, from a
                variable or an attribute of the caller. A container inside another one had none.
        """
        keys: set[int] = set()
        if not self._all:
            return keys
        now, names = self.count(), self._names()
        for value in self._all:
            key = id(value)
            if key in before:
                is_stored = now[key].holders > before[key].holders
            else:
                is_stored = now[key].holders > 0 and (names[key] > 1 or key in self._inner)
            if is_stored:
                keys.update(k for leaf in tree_leaves(value) if (k := storage_key(leaf)))
        return keys

    def taken(self, t: Tensor | None, before: dict[int, Counts]) -> int:
        """Return how many times an item was removed from the containers since `before`.

        Args:
            t: the item.
            before: the result of `count`.
        """
        removed = 0
        for value in self._all:
            key = id(value)
            items = before[key].items if key in before else self._first[key]
            removed += items[id(t)] - sum(item is t for item in _items(value))
        return removed

    def _names(self) -> Counter[int]:
        """Return the number of references to each container, except those of other containers."""
        names = self._references()
        for value in self._all:
            names.subtract(map(id, _items(value)))
        return names

    def _references(self) -> Counter[int]:
        """Return the number of references to each container from other code."""
        references: Counter[int] = Counter()
        for value in self._all:
            references[id(value)] = sys.getrefcount(value) - _OWN_NAMES
        return references


def _items(value: object) -> list[object]:
    """Return the items of a container, or none for another object."""
    inside: Iterable[object] = tree_leaves(value, is_leaf=lambda part: part is not value)
    return [item for item in inside if item is not value]


def _measure() -> int:
    """Return the reference count of a container with one name, minus this name."""
    only = [0]
    containers = Containers()
    containers.add(only)
    return containers._references()[id(only)] - 1


_OWN_NAMES = _measure()
