"""Remember attributes and items of containers, and restore them for the recompute.

A tensor with an autograd history is remembered without its graph, which would keep earlier regions
alive. The recompute uses the same tensor if it still exists, and else a new tensor with its bytes.
Other objects may reference a graph too, so they are not remembered if the forward replaces them.
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

from storage_ops.checkpoint.saved.matching import ORIGIN, origin_of
from storage_ops.checkpoint.saved.outputs import SavedOutput, producer_of
from storage_ops.checkpoint.state.containers import MISSING, Undo, copy_of, has, put, set_item
from storage_ops.foundation.values import (
    CONTAINERS,
    LONG,
    MAPPINGS,
    PLAIN,
    cached_by_class,
    kind_of,
    slots_of,
    values_in,
)

_DEEP = 4  # nested containers that are searched
_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)


class Attributes:
    """The attributes of a module or another object at the start of a forward.

    Tensors, plain values such as numbers, and tuples and containers of these are always restored.
    Other values are restored only if the forward did not replace them, but later code did.
    """

    __slots__ = ("_attributes", "_before", "_code", "_ignored", "_replaced")

    def __init__(
        self,
        attributes: dict[str, Any],
        before: dict[str, Any],
        code: Iterable[Container[str]] | None,
    ) -> None:
        """Remember attributes.

        Args:
            attributes: the dictionary of the attributes.
            before: a copy of the dictionary.
            code: sets of names that the code of the region uses; None for all names.
        """
        self._attributes, self._before, self._code = attributes, before, code
        self._ignored: set[str] = set()
        self._replaced: set[str] = set()  # names of values other than tensors, by the forward

    def finish(self) -> list[Any]:
        """Drop references to graphs, and to objects that the forward itself has replaced.

        Returns:
            The containers with tensors that the forward has replaced.
        """
        attributes, before = self._present(), self._before
        replaced: list[Any] = []
        if not has(attributes, before):
            for name in {**before, **attributes}:
                then, now = before.get(name, MISSING), attributes.get(name, MISSING)
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
        """Restore the attributes. Append functions to `undo` that restore the present values."""
        attributes, before = self._present(), self._before
        if has(attributes, before):
            return
        for name in {**before, **attributes}:
            then, now = before.get(name, MISSING), attributes.get(name, MISSING)
            if is_same(then, now) or name in self._ignored:
                continue
            if running:
                replaced = then is MISSING or _is_plain(then)
            else:
                replaced = name in self._replaced or self._is_used(name)
            if replaced or _was_state(then) or is_state(now):
                self._set(name, value_of(then), undo)

    def _present(self) -> dict[str, Any]:
        return self._attributes

    def _set(self, name: str, value: object, undo: Undo) -> None:
        set_item(self._attributes, name, value, undo)

    def _is_used(self, name: str) -> bool:
        return self._code is None or any(name in names for names in self._code)


class SlotAttributes(Attributes):
    """The attributes of an object that its class stores in `__slots__`."""

    __slots__ = ("_object",)

    def __init__(self, value: object, before: dict[str, Any], code: None) -> None:
        """Remember the slots of an object, and a dictionary `before` of their values."""
        super().__init__({}, before, code)
        self._object = value

    def _present(self) -> dict[str, Any]:
        return dict(slots_of(self._object))

    def _set(self, name: str, value: object, undo: Undo) -> None:
        # The methods of `object` also set the slots of a frozen dataclass.
        now = getattr(self._object, name, MISSING)
        if now is value:
            return
        undo.append(lambda: self._set(name, now, []))
        if value is MISSING:
            object.__delattr__(self._object, name)
        else:
            object.__setattr__(self._object, name, value)


class Items:
    """The items of a list or mapping that contains tensors at the start of a forward.

    Items that were replaced or removed are restored. Items that were added stay.
    """

    __slots__ = ("_before", "_container")

    def __init__(self, container: Any, before: Any) -> None:
        """Remember the container, and a copy `before` of its items."""
        self._container, self._before = container, before

    def is_of(self, containers: Iterable[Any]) -> bool:
        """Return True if the container is one of `containers`."""
        return any(self._container is other for other in containers)

    @staticmethod
    def may_be_replaced(container: object) -> bool:
        """Return True if the items of a container can be set, and there may be tensors in it."""
        if type(container) is not list and type(container) not in MAPPINGS:
            return False
        return _may_hold_state(values_in(container))

    def finish(self) -> None:
        """Drop references to graphs."""
        self._before = _map(remembered, self._before)

    def restore(self, undo: Undo) -> None:
        """Restore the items. Append functions to `undo` that restore the present items."""
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
    """All contents of a container that is an attribute of a module or object.

    All items are restored. There is one exception: if the forward has replaced items, and some
    items are neither tensors nor plain values, only tensors are restored, as `Items` does.
    """

    __slots__ = ("_restores_all",)

    def __init__(self, container: Any, before: Any) -> None:
        """Remember the container, and a copy `before` of its items."""
        super().__init__(container, before)
        self._restores_all = True

    def finish(self) -> None:
        """Drop references to graphs, and to objects that the forward itself has replaced."""
        before = self._before
        if not has(self._container, before) and not _has_no_objects(before):
            self._restores_all = False
            if not self.may_be_replaced(self._container):
                self._before = type(before)()
        if _may_hold_state(values_in(before)):
            super().finish()

    def restore(self, undo: Undo) -> None:
        """Restore the items. Append a function to `undo` that restores the present items."""
        container, before = self._container, self._before
        if not self._restores_all:
            super().restore(undo)
        elif not _are_same(before, container):
            undo.append(functools.partial(put, container, copy_of(container)))
            put(container, _map(value_of, before))


def _map(fn: Callable[[Any], Any], contents: dict[Any, Any] | list[Any]) -> Any:
    """Return the result of `copy_of` with `fn` applied to each value."""
    if type(contents) is dict:
        return {key: fn(value) for key, value in contents.items()}
    return list(map(fn, contents))


def _are_same(before: Collection[Any], container: Collection[Any]) -> bool:
    """Return True if a container has the items of `before`, in the same order."""
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
        self._origin = origin_of(t)
        # If a region can recompute the tensor, no reference here must keep its bytes.
        self._use = None if producer is None else SavedOutput(t, producer)
        self._value = t.detach() if producer is None else None

    def is_(self, now: object) -> bool:
        """Return True if a value is this tensor."""
        return now is not None and self._ref() is now

    def read(self) -> Tensor:
        """Return the tensor, or a new tensor with its bytes if it was freed."""
        value = self._value if self._use is None else self._use.read()
        assert value is not None
        t = self._ref()
        if t is None:
            t = value.detach().requires_grad_(self._needs_grad)
            vars(t)[ORIGIN] = self._origin
        return t


class _RememberedTuple:
    """A tuple that contains tensors."""

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
        self._contents = _map(remembered, copy_of(container))
        self._empty = copy.copy(container)  # keeps a deque's `maxlen` or a default factory
        self._empty.clear()

    def is_(self, now: object) -> bool:
        """Return False: `read` returns another container."""
        return False

    def read(self) -> Any:
        """Return an equal container."""
        container = copy.copy(self._empty)
        put(container, _map(value_of, self._contents))
        return container


_Remembered = (Remembered, _RememberedTuple, _RememberedContainer)


def remembered(value: object) -> Any:
    """Return a value, or an object that represents the value without its graph."""
    if isinstance(value, Tensor):
        return Remembered(value) if value.grad_fn is not None or producer_of(value) else value
    if isinstance(value, tuple) and is_state(value):
        return _RememberedTuple(value)
    return value


def value_of(value: object) -> Any:
    """Return the original value for a result of `remembered`."""
    return value.read() if isinstance(value, _Remembered) else value


def is_same(value: object, now: object) -> bool:
    """Return True if `now` is the original value for `value`, a result of `remembered`."""
    if isinstance(value, _Remembered):
        return value.is_(now)
    return value is now


def is_state(value: object) -> bool:
    """Return True for a tensor, or a tuple with a tensor, such as a recurrent layer's state."""
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(is_state, value)))


def _was_state(value: object) -> bool:
    return isinstance(value, _Remembered) or is_state(value)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return True for a plain value such as a number or text, or a container of plain values."""
    cls: Any = type(value)
    if _is_kind_of_plain(cls):
        return True
    if depth == _DEEP or not (cls in CONTAINERS or isinstance(value, (tuple, frozenset))):
        return False
    return len(value) <= LONG and all(_is_plain(v, depth + 1) for v in values_in(value))


def _has_no_objects(container: object) -> bool:
    """Return True if a container of any length contains only tensors and plain values."""
    return all(is_state(value) or _is_plain(value) for value in values_in(container))


@cached_by_class
def _is_kind_of_plain(kind: type) -> bool:
    return kind_of(kind) == PLAIN or issubclass(kind, _PLAIN)


def _may_hold_state(values: Iterable[object]) -> bool:
    return any(map(_is_kind_of_state, set(map(type, values))))


@cached_by_class
def _is_kind_of_state(kind: type) -> bool:
    return issubclass(kind, (Tensor, tuple))
