"""Attributes and items of containers: what a region finds in them, and again for its recompute.

A tensor with a history is remembered without its graph, which would hold the regions before it. The
tensor itself is used for the recompute while others hold it, and else its bytes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from storage_ops.checkpoint.containers import MISSING, Undo, copy_of, has, set_item
from storage_ops.checkpoint.makers import maker_of
from storage_ops.checkpoint.matching import ORIGIN
from storage_ops.checkpoint.uses import Use
from storage_ops.foundation.walk import MAPPINGS


class Attributes:
    """The attributes of a module or another object at the start of a forward.

    Tensors, and tuples with tensors, are restored whoever replaced them. Other values, such as a
    number, are restored if the forward left them alone: the caller has set them around the forward.
    """

    __slots__ = ("_before", "_held", "_ignored", "_reads")

    def __init__(self, held: dict[str, Any], reads: Callable[[str], bool]) -> None:
        """Remember attributes.

        Args:
            held: the dictionary of the attributes.
            reads: whether the code of the region may read an attribute of this name.
        """
        self._held, self._before, self._reads = held, dict(held), reads
        self._ignored: set[str] = set()

    def finish(self) -> None:
        """Let go of graphs, and of what the forward itself has changed other than tensors."""
        held, before = self._held, self._before
        if not has(held, before):
            for name in {**before, **held}:
                then, now = before.get(name, MISSING), held.get(name, MISSING)
                if then is not now and not (is_state(then) or is_state(now)):
                    self._ignored.add(name)
                    before.pop(name, None)
        if _may_hold_state(before.values()):
            self._before = {name: remembered(value) for name, value in before.items()}

    def restore(self, undo: Undo, running: bool) -> None:
        """Set the attributes to their earlier values; `undo` gets what puts back those of now."""
        held, before = self._held, self._before
        if has(held, before):
            return
        for name in {**before, **held}:
            then, now = before.get(name, MISSING), held.get(name, MISSING)
            if is_same(then, now) or name in self._ignored:
                continue
            if _was_state(then) or is_state(now) or (not running and self._reads(name)):
                set_item(held, name, value_of(then), undo)


class Items:
    """The items of a list or mapping that holds tensors at the start of a forward.

    Items that were replaced or removed are restored. Items that were added stay.
    """

    __slots__ = ("_before", "_container")

    def __init__(self, container: Any) -> None:
        """Remember the items."""
        self._container, self._before = container, copy_of(container)

    @staticmethod
    def may_be_replaced(container: Any) -> bool:
        """Return True if a container has items that can be set, and tensors among them."""
        if type(container) is not list and type(container) not in MAPPINGS:
            return False
        return _may_hold_state(container.values() if type(container) in MAPPINGS else container)

    def finish(self) -> None:
        """Let go of graphs."""
        before = self._before
        if type(before) is dict:
            self._before = {key: remembered(value) for key, value in before.items()}
        else:
            self._before = list(map(remembered, before))

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


def _set_index(container: list[Any], index: int, value: Any) -> None:
    if index < len(container):
        container[index] = value


class Remembered:
    """A tensor that is remembered without its graph."""

    __slots__ = ("_needs_grad", "_origin", "_ref", "_use", "_value")

    def __init__(self, t: Tensor) -> None:
        maker = maker_of(t)
        self._ref, self._needs_grad = weakref.ref(t), t.requires_grad
        node = (t if t._base is None else t._base).grad_fn
        self._origin = None if node is None else node.name()
        # To remember an output that another region can make again is not to hold it.
        self._use = None if maker is None else Use(t, maker)
        self._value = t.detach() if maker is None else None

    def is_(self, now: Any) -> bool:
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


def remembered(value: Any) -> Any:
    """Return what is kept of a value: itself, or what stands for it without a graph."""
    if isinstance(value, Tensor):
        return Remembered(value) if value.grad_fn is not None or maker_of(value) else value
    if isinstance(value, tuple) and is_state(value):
        return _RememberedTuple(value)
    return value


def value_of(kept: Any) -> Any:
    """Return the value of which `remembered` returned this."""
    return kept.read() if isinstance(kept, (Remembered, _RememberedTuple)) else kept


def is_same(kept: Any, now: Any) -> bool:
    """Return True if a value is the one of which `remembered` returned `kept`."""
    if isinstance(kept, (Remembered, _RememberedTuple)):
        return kept.is_(now)
    return kept is now


def is_state(value: Any) -> bool:
    """Whether a value is a tensor, or a tuple with some in it, as a recurrent layer's state is."""
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(is_state, value)))


def _was_state(kept: Any) -> bool:
    return isinstance(kept, (Remembered, _RememberedTuple)) or is_state(kept)


def _may_hold_state(values: Any) -> bool:
    return any(map(_is_kind_of_state, set(map(type, values))))


@functools.lru_cache(maxsize=4096)
def _is_kind_of_state(kind: Any) -> bool:
    return issubclass(kind, (Tensor, tuple))
