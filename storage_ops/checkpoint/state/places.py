"""Attributes and items of containers: what a region finds in them, and again for its recompute.

A tensor with a history is remembered without its graph, which would hold the regions before it. The
tensor itself is used for the recompute while others hold it, and else its bytes. Other objects may
hold a graph too, so they are not remembered where the forward replaces them.
"""

from __future__ import annotations

import copy
import enum
import functools
import operator
import weakref
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any

import torch
from torch import Tensor

from storage_ops.checkpoint.saved.matching import ORIGIN
from storage_ops.checkpoint.saved.outputs import SavedOutput, producer_of
from storage_ops.checkpoint.state.containers import MISSING, Undo, copy_of, has, put, set_item
from storage_ops.foundation.walk import CONTAINERS, LONG, MAPPINGS, PLAIN, kind_of, values_in

_DEEP = 4  # containers in containers
_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)


class Attributes:
    """The attributes of a module or another object at the start of a forward.

    Tensors, plain values such as numbers, and tuples and containers of these are restored whoever
    replaced them. Other values are restored if the forward left them alone: the caller has set them
    around the forward.
    """

    __slots__ = ("_before", "_code", "_held", "_ignored", "_replaced")

    def __init__(
        self,
        held: dict[str, Any],
        before: dict[str, Any],
        code: Iterable[Container[str]] | None,
    ) -> None:
        """Remember attributes.

        Args:
            held: the dictionary of the attributes.
            before: a copy of it.
            code: the names that the code of the region uses; None for all names.
        """
        self._held, self._before, self._code = held, before, code
        self._ignored: set[str] = set()
        self._replaced: set[str] = set()  # by the forward, other than tensors

    def finish(self) -> list[Any]:
        """Let go of graphs, and of objects that the forward itself has replaced.

        Returns:
            The containers with tensors that it has replaced.
        """
        held, before = self._held, self._before
        replaced: list[Any] = []
        if not has(held, before):
            for name in {**before, **held}:
                then, now = before.get(name, MISSING), held.get(name, MISSING)
                if then is now or is_state(then):
                    continue
                if then is MISSING or _is_plain(then):
                    self._replaced.add(name)
                elif type(then) in CONTAINERS and _has_no_objects(then):
                    self._replaced.add(name)
                    replaced.append(then)
                    before[name] = _RememberedContainer(then)
                elif not is_state(now):
                    self._ignored.add(name)
                    del before[name]
        if _may_hold_state(before.values()):
            self._before = {name: remembered(value) for name, value in before.items()}
        return replaced

    def restore(self, undo: Undo, running: bool) -> None:
        """Set the attributes to their earlier values; `undo` gets what puts back those of now."""
        held, before = self._held, self._before
        if has(held, before):
            return
        for name in {**before, **held}:
            then, now = before.get(name, MISSING), held.get(name, MISSING)
            if is_same(then, now) or name in self._ignored:
                continue
            if running:
                replaced = then is MISSING or _is_plain(then)
            else:
                replaced = name in self._replaced or self._is_used(name)
            if replaced or _was_state(then) or is_state(now):
                set_item(held, name, value_of(then), undo)

    def _is_used(self, name: str) -> bool:
        return self._code is None or any(name in names for names in self._code)


class Items:
    """The items of a list or mapping that holds tensors at the start of a forward.

    Items that were replaced or removed are restored. Items that were added stay.
    """

    __slots__ = ("_before", "_container")

    def __init__(self, container: Any, before: Any) -> None:
        """Remember the items, of which `before` is a copy."""
        self._container, self._before = container, before

    def is_of(self, containers: Iterable[Any]) -> bool:
        """Return True if the container is one of these."""
        return any(self._container is each for each in containers)

    @staticmethod
    def may_be_replaced(container: object) -> bool:
        """Return True if a container has items that can be set, and tensors among them."""
        if type(container) is not list and type(container) not in MAPPINGS:
            return False
        return _may_hold_state(values_in(container))

    def finish(self) -> None:
        """Let go of graphs."""
        self._before = _each(remembered, self._before)

    def restore(self, undo: Undo) -> None:
        """Set the items to their earlier values; `undo` gets what puts back those of now."""
        container, before = self._container, self._before
        if type(before) is dict:
            for key, then in before.items():
                if _was_state(then) and not is_same(then, container.get(key, MISSING)):
                    set_item(container, key, value_of(then), undo)
            return
        if len(container) < len(before):
            undo.append(functools.partial(container.__setitem__, slice(None), list(container)))
            container += map(value_of, before[len(container) :])
        for index, then in enumerate(before):
            now = container[index]
            if _was_state(then) and not is_same(then, now):
                undo.append(functools.partial(_set_index, container, index, now))
                container[index] = value_of(then)


class AllItems(Items):
    """The contents of a container in an attribute of a module or object, which are its state.

    All of them are restored. If the forward itself has replaced other objects than tensors and
    plain values in the container, only its tensors are, as in other containers.
    """

    __slots__ = ("_restores_all",)

    def __init__(self, container: Any, before: Any) -> None:
        """Remember the items, of which `before` is a copy."""
        super().__init__(container, before)
        self._restores_all = True

    def finish(self) -> None:
        """Let go of graphs, and of objects that the forward itself has replaced."""
        before = self._before
        if not has(self._container, before) and not _has_no_objects(before):
            self._restores_all = False
            if not self.may_be_replaced(self._container):
                self._before = type(before)()
        if _may_hold_state(values_in(before)):
            super().finish()

    def restore(self, undo: Undo) -> None:
        """Give the container its earlier items; `undo` gets what puts back those of now."""
        container, before = self._container, self._before
        if not self._restores_all:
            super().restore(undo)
        elif not _are_same(before, container):
            undo.append(functools.partial(put, container, copy_of(container)))
            put(container, _each(value_of, before))


def _each(fn: Callable[[Any], Any], contents: dict[Any, Any] | list[Any]) -> Any:
    """Apply a function to each value of what `copy_of` returned."""
    if type(contents) is dict:
        return {key: fn(value) for key, value in contents.items()}
    return list(map(fn, contents))


def _are_same(before: Collection[Any], container: Collection[Any]) -> bool:
    """Return True if a container holds the items, in their order, that `before` is kept of."""
    if len(before) != len(container):
        return False
    if type(before) is dict and any(map(operator.is_not, before, container)):
        return False
    return all(map(is_same, values_in(before), values_in(container)))


def _set_index(container: list[Any], index: int, value: object) -> None:
    if index < len(container):
        container[index] = value


class Remembered:
    """A tensor that is remembered without its graph."""

    __slots__ = ("_needs_grad", "_origin", "_ref", "_use", "_value")

    def __init__(self, t: Tensor) -> None:
        producer = producer_of(t)
        self._ref, self._needs_grad = weakref.ref(t), t.requires_grad
        node = (t if t._base is None else t._base).grad_fn
        self._origin = None if node is None else node.name()
        # An output that another region can make again is remembered, and not held.
        self._use = None if producer is None else SavedOutput(t, producer)
        self._value = t.detach() if producer is None else None

    def is_(self, now: object) -> bool:
        """Return True if a value is this tensor."""
        return now is not None and self._ref() is now

    def read(self) -> Tensor:
        """Return the tensor, or another one with its bytes."""
        value = self._value if self._use is None else self._use.read()
        assert value is not None
        t = self._ref()
        if t is None:
            t = value.detach().requires_grad_(self._needs_grad)
            vars(t)[ORIGIN] = self._origin
        return t


class _RememberedTuple:
    """A tuple with tensors in it."""

    __slots__ = ("_kind", "_parts")

    def __init__(self, value: tuple[Any, ...]) -> None:
        self._kind: Any = type(value)
        self._parts = list(map(remembered, value))

    def is_(self, now: Any) -> bool:
        """Return True if a value is a tuple of the same values."""
        if type(now) is not self._kind or len(now) != len(self._parts):
            return False
        return all(map(is_same, self._parts, now))

    def read(self) -> Any:
        """Return an equal tuple."""
        parts = map(value_of, self._parts)
        return self._kind(*parts) if hasattr(self._kind, "_fields") else self._kind(parts)


class _RememberedContainer:
    """A container of tensors and plain values that the forward has replaced by another value."""

    __slots__ = ("_contents", "_empty")

    def __init__(self, container: Any) -> None:
        self._contents = _each(remembered, copy_of(container))
        self._empty = copy.copy(container)  # has the length or the default of its kind
        self._empty.clear()

    def is_(self, now: object) -> bool:
        """Return False: `read` returns another container."""
        return False

    def read(self) -> Any:
        """Return an equal container."""
        container = copy.copy(self._empty)
        put(container, _each(value_of, self._contents))
        return container


_Kept = (Remembered, _RememberedTuple, _RememberedContainer)


def remembered(value: object) -> Any:
    """Return a value, or an object that stands for it without a graph."""
    if isinstance(value, Tensor):
        return Remembered(value) if value.grad_fn is not None or producer_of(value) else value
    if isinstance(value, tuple) and is_state(value):
        return _RememberedTuple(value)
    return value


def value_of(kept: object) -> Any:
    """Return the value of which `remembered` returned this."""
    return kept.read() if isinstance(kept, _Kept) else kept


def is_same(kept: object, now: object) -> bool:
    """Return True if a value is the one of which `remembered` returned `kept`."""
    if isinstance(kept, _Kept):
        return kept.is_(now)
    return kept is now


def is_state(value: object) -> bool:
    """Return True for a tensor, or a tuple with some in it, as a recurrent layer's state is."""
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(is_state, value)))


def _was_state(kept: object) -> bool:
    return isinstance(kept, _Kept) or is_state(kept)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return True for a number, a name and the like, and for a container of them alone."""
    cls: Any = type(value)
    if _is_kind_of_plain(cls):
        return True
    if depth == _DEEP or not (cls in CONTAINERS or isinstance(value, (tuple, frozenset))):
        return False
    return len(value) <= LONG and all(_is_plain(v, depth + 1) for v in values_in(value))


def _has_no_objects(container: object) -> bool:
    """Return True if a container has tensors and plain values alone, of which it may hold many."""
    return all(is_state(value) or _is_plain(value) for value in values_in(container))


@functools.lru_cache(maxsize=4096)
def _is_kind_of_plain(kind: type) -> bool:
    return kind_of(kind) == PLAIN or issubclass(kind, _PLAIN)


def _may_hold_state(values: Iterable[object]) -> bool:
    return any(map(_is_kind_of_state, set(map(type, values))))


@functools.lru_cache(maxsize=4096)
def _is_kind_of_state(kind: type) -> bool:
    return issubclass(kind, (Tensor, tuple))
