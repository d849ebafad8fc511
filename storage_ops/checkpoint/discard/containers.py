"""Containers in which regions return outputs, and whether a consumer stored what is in them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from storage_ops.checkpoint.saved.guard import storage_key
from storage_ops.checkpoint.saved.ref_counts import variables

_OWN_NAMES = 0  # what counting adds to the references of a container; measured at the end


class Counts(NamedTuple):
    """The counted references of a container.

    Attributes:
        holders: objects that hold it. The containers around it do not count, nor do the variables
            of running functions, by which a caller names what is to be freed.
        items: how often it holds each item, by identity.
    """

    holders: int
    items: Counter[int]


class Containers:
    """The containers that regions returned, which the caller hands to consumers.

    A consumer that stores such a container reads its outputs later, so they must be kept. The
    outputs' own references do not change then, so those of the containers are counted.

    The containers are held until `clear`. They hold the graphs of their outputs, so nothing that a
    graph holds may have this object.
    """

    def __init__(self) -> None:
        self._all: list[object] = []
        self._first: dict[int, Counter[int]] = {}  # their items as the regions returned
        self._inner: set[int] = set()  # those in others

    def add(self, outputs: object) -> None:
        """Note the outputs of a region, and the containers in them."""
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
        """Let go of the containers."""
        self._all, self._first, self._inner = [], {}, set()

    def count(self) -> dict[int, Counts]:
        """Count the holders and the items of each container that another object holds."""
        if not self._all:  # as for regions that return a tensor
            return {}
        count = len(self._all) + 1
        while len(self._all) < count:  # a container may have held the last reference to another
            count = len(self._all)
            references = self._references()
            self._all = [value for value in self._all if references[id(value)] > 0]
        names, named = self._names(), Counter(map(id, variables()))
        return {
            id(value): Counts(names[id(value)] - named[id(value)], Counter(map(id, _items(value))))
            for value in self._all
        }

    def stored(self, before: dict[int, Counts]) -> set[int]:
        """Return the keys of the storages in containers that have more holders than before.

        Args:
            before: what `count` returned. A container that is not in there had one holder, the
                caller, be it a variable or an attribute; one in another container had none.
        """
        keys: set[int] = set()
        if not self._all:
            return keys
        now, names = self.count(), self._names()
        for value in self._all:
            at = id(value)
            if at in before:
                is_stored = now[at].holders > before[at].holders
            else:
                is_stored = now[at].holders > 0 and (names[at] > 1 or at in self._inner)
            if is_stored:
                keys.update(k for leaf in tree_leaves(value) if (k := storage_key(leaf)))
        return keys

    def taken(self, t: Tensor | None, before: dict[int, Counts]) -> int:
        """Return how many times the containers do not hold an item any more that they held before.

        Args:
            t: the item.
            before: what `count` returned.
        """
        taken = 0
        for value in self._all:
            at = id(value)
            items = before[at].items if at in before else self._first[at]
            taken += items[id(t)] - sum(item is t for item in _items(value))
        return taken

    def _names(self) -> Counter[int]:
        """Return the number of references to each container, those in other containers left out."""
        names = self._references()
        for value in self._all:
            names.subtract(map(id, _items(value)))
        return names

    def _references(self) -> Counter[int]:
        """Return the number of references to each container that others have."""
        references: Counter[int] = Counter()
        for value in self._all:
            references[id(value)] = sys.getrefcount(value) - _OWN_NAMES
        return references


def _items(value: object) -> list[object]:
    """Return the items of a container; none for another object."""
    inside: Iterable[object] = tree_leaves(value, is_leaf=lambda part: part is not value)
    return [item for item in inside if item is not value]


def _measure() -> int:
    """Return the count of holders for a container that has one name, less this one."""
    only = [0]
    containers = Containers()
    containers.add(only)
    return containers._references()[id(only)] - 1


_OWN_NAMES = _measure()
