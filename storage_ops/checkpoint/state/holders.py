"""Objects and containers around a call: what they held before it, given back for a recompute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from storage_ops.checkpoint.saved.outputs import producer_of
from storage_ops.checkpoint.state.containers import MISSING, Undo, copy_of, has, put, set_item
from storage_ops.checkpoint.state.places import (
    AllItems,
    Attributes,
    Items,
    Remembered,
    is_same,
    value_of,
)
from storage_ops.checkpoint.state.reachable import Surroundings
from storage_ops.foundation.walk import values_in

_MANY = 4096  # items of a container beyond which it is data


class Holders:
    """The variables, attributes, items and buffers around one call, as they are before it."""

    def __init__(self, around: Surroundings, contents_of: Callable[[Any], Any] = copy_of) -> None:
        """Remember them; `finish` when the forward has run.

        Args:
            around: the surroundings of the call.
            contents_of: returns what a container held before the call.
        """
        self._names = [(place, name, _named(value)) for place, name, value in around.names]
        self._contents = [(c, contents_of(c)) for c in around.given if len(c) <= _MANY]
        self._attributes = [
            Attributes(held, contents_of(held), around.code) for held in around.attributes
        ]
        self._attributes += [Attributes(held, contents_of(held), None) for held in around.objects]
        self._items = list(_items(around, contents_of))
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = []
        self.parameters: list[Tensor] = []
        for module in around.modules:
            parameters, buffers = named_tensors(module)
            for name, t in contents_of(parameters).items():
                if t is not None and not is_uninitialized(t):
                    self._slots.append((parameters, name, t))
                    self.parameters.append(t)
            if before := contents_of(buffers):
                self._buffers.append((buffers, before))
                self._slots += [(buffers, n, b) for n, b in before.items() if b is not None]
        self._running = True

    def finish(self) -> None:
        """Let go of what the forward has left alone."""
        self._running = False
        replaced = [value for attributes in self._attributes for value in attributes.finish()]
        if replaced:  # they may hold graphs of earlier steps
            self._items = [items for items in self._items if not items.is_of(replaced)]
        for items in self._items:
            items.finish()
        changes = [(held, _changed(before, held)) for held, before in self._buffers]
        self._buffers = [(held, changed) for held, changed in changes if changed]

    def finish_unchanged(self) -> None:
        """Note that the forward has left all alone. Others may have changed it since."""
        self._running, self._buffers = False, []

    def exchanged(self) -> list[Tensor]:
        """Return the parameters and buffers that are not in their places any more."""
        return [t for held, name, t in self._slots if held.get(name) is not t]

    def restore_tensors(self, undo: Undo) -> None:
        """Give variables, parameters and buffers their earlier values."""
        for place, name, value in self._names:
            if not is_same(value, _value_of(place, name)):
                _set_name(place, name, value_of(value), undo)
        for held, name, t in self._slots:
            now = held.get(name)
            if now is t or now is None:
                continue
            # One in another layout was sharded or gathered, by code that looks after that.
            if getattr(now, "_spec", None) == getattr(t, "_spec", None):
                set_item(held, name, t, undo)

    def restore_contents(self, undo: Undo) -> None:
        """Give attributes and containers their earlier values."""
        for attributes in self._attributes:
            attributes.restore(undo, self._running)
        for items in self._items:
            items.restore(undo)
        for held, before in self._buffers:
            changed = _changed(before, held) if self._running else before
            for name, value in changed.items():
                set_item(held, name, value, undo)
        for container, contents in self._contents:
            if not has(container, contents):
                undo.append(partial(put, container, copy_of(container)))
                put(container, contents)


def _named(value: Any) -> Any:
    is_output = isinstance(value, Tensor) and producer_of(value) is not None
    return Remembered(value) if is_output else value


def is_uninitialized(t: Tensor | None) -> bool:
    """Return True for a parameter without a shape."""
    # The class is looked at first: isinstance asks a Parameter's metaclass, which takes long.
    return type(t) is not nn.Parameter and isinstance(t, nn.UninitializedParameter)


NamedTensors = tuple[dict[str, Any], dict[str, Any]]


def named_tensors(module: nn.Module) -> NamedTensors:
    """Return the parameters and the buffers of a module itself.

    They are copies where the module is TorchScript's, which exchanges none.
    """
    parameters, buffers = module._parameters, module._buffers
    if isinstance(parameters, dict):
        return parameters, buffers
    return dict(parameters.items()), dict(buffers.items())


def _items(around: Surroundings, contents_of: Callable[[Any], Any]) -> Iterator[Items]:
    """Yield the items of containers, all of those that are in attributes."""
    if not around.containers:
        return
    holders = (*around.attributes, *around.objects)
    state = {id(value) for held in holders for value in held.values()}
    for container in around.containers:  # an outer one comes before those in it
        if id(container) in state:
            state.update(map(id, values_of(container)))
            yield AllItems(container, contents_of(container))
        elif Items.may_be_replaced(container):
            yield Items(container, contents_of(container))


def values_of(held: Collection[Any]) -> Any:
    """Return the values of a mapping, or the items of another container; none if there are many."""
    if len(held) > _MANY:
        return ()
    return values_in(held)


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the earlier values of names of buffers whose value is another now.

    A name that had none is there with `MISSING`.
    """
    if has(now, before):
        return {}
    changed = {}
    for name in {**before, **now}:
        then, value = before.get(name, MISSING), now.get(name, MISSING)
        if then is not value:
            changed[name] = then
    return changed


def _set_name(place: object, name: str, value: object, undo: Undo) -> None:
    if isinstance(place, dict):
        set_item(place, name, value, undo)
        return
    now = _value_of(place, name)
    if now is not value:
        undo.append(lambda: _set_name(place, name, now, []))
        if value is MISSING:
            delattr(place, name)
        else:
            setattr(place, name, value)


def _value_of(place: object, name: str) -> Any:
    if isinstance(place, dict):
        return place.get(name, MISSING)
    try:
        return getattr(place, name)
    except ValueError:  # a cell that nothing is bound to
        return MISSING
