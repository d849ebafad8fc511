"""Restore the attributes and items of objects and containers around a call for its recompute."""

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
    SlotAttributes,
    is_same,
    value_of,
)
from storage_ops.checkpoint.state.reachable import Surroundings
from storage_ops.checkpoint.state.registered import named_tensors
from storage_ops.foundation.values import MAPPINGS, slots_of, values_in

_MANY = 4096  # items of a container beyond which it is data


class Holders:
    """The variables, attributes, items and buffers around one call, as they are before it."""

    def __init__(
        self, surroundings: Surroundings, contents_of: Callable[[Any], Any] = copy_of
    ) -> None:
        """Remember the values. Call `finish` when the forward has run.

        Args:
            surroundings: the surroundings of the call.
            contents_of: returns a copy of a container's contents before the call.
        """
        self._names = [(place, name, _named(value)) for place, name, value in surroundings.names]
        self._contents = [
            (c, contents_of(c)) for c in surroundings.argument_state if len(c) <= _MANY
        ]
        self._attributes = [
            Attributes(attributes, contents_of(attributes), surroundings.code)
            for attributes in surroundings.attributes
        ]
        self._attributes += [
            Attributes(attributes, contents_of(attributes), None)
            for attributes in surroundings.objects
        ]
        self._attributes += [
            SlotAttributes(value, dict(slots_of(value)), None) for value in surroundings.slotted
        ]
        self._items = list(_items(surroundings, contents_of))
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = []
        self.parameters: list[Tensor] = []
        self._children: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in surroundings.modules:
            if type(module._modules) in MAPPINGS and module._modules:  # not of TorchScript
                self._children.append((module._modules, contents_of(module._modules)))
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
        """Drop values that need no restore, after the forward has run."""
        self._running = False
        replaced = [value for attributes in self._attributes for value in attributes.finish()]
        if replaced:  # these containers may reference graphs of earlier steps
            self._items = [items for items in self._items if not items.is_of(replaced)]
        for items in self._items:
            items.finish()
        changes = [(buffers, _changed(before, buffers)) for buffers, before in self._buffers]
        self._buffers = [(buffers, changed) for buffers, changed in changes if changed]
        # A module that the forward has created belongs to the recompute, too.
        self._children = [(now, before) for now, before in self._children if has(now, before)]

    def finish_unchanged(self) -> None:
        """Note that the forward has changed nothing. Other code may have changed values since."""
        self._running, self._buffers = False, []

    def exchanged(self) -> list[Tensor]:
        """Return the parameters and buffers that were replaced or removed since."""
        return [t for tensors, name, t in self._slots if tensors.get(name) is not t]

    def restore_tensors(self, undo: Undo) -> None:
        """Give variables, submodules, parameters and buffers their earlier values."""
        for children, modules in () if self._running else self._children:
            if not has(children, modules):
                undo.append(partial(put, children, copy_of(children)))
                put(children, modules)
        for place, name, value in self._names:
            if not is_same(value, _value_of(place, name)):
                _set_name(place, name, value_of(value), undo)
        for tensors, name, t in self._slots:
            now = tensors.get(name)
            if now is t or now is None:
                continue
            # A tensor with another DTensor spec was sharded or gathered. The code that did so
            # also restores it.
            if getattr(now, "_spec", None) == getattr(t, "_spec", None):
                set_item(tensors, name, t, undo)

    def restore_contents(self, undo: Undo) -> None:
        """Give attributes and containers their earlier values."""
        for attributes in self._attributes:
            attributes.restore(undo, self._running)
        for items in self._items:
            items.restore(undo)
        for buffers, before in self._buffers:
            changed = _changed(before, buffers) if self._running else before
            for name, value in changed.items():
                set_item(buffers, name, value, undo)
        for container, contents in self._contents:
            if not has(container, contents):
                undo.append(partial(put, container, copy_of(container)))
                put(container, contents)


def _named(value: Any) -> Any:
    is_output = isinstance(value, Tensor) and producer_of(value) is not None
    return Remembered(value) if is_output else value


def is_uninitialized(t: Tensor | None) -> bool:
    """Return True for a lazy parameter that has no shape yet."""
    # The class is tested first, because isinstance is slow with a Parameter's metaclass.
    return type(t) is not nn.Parameter and isinstance(t, nn.UninitializedParameter)


def _items(surroundings: Surroundings, contents_of: Callable[[Any], Any]) -> Iterator[Items]:
    """Yield the items of containers: `AllItems` for containers in attributes, else `Items`."""
    if not surroundings.containers:
        return
    dictionaries = (*surroundings.attributes, *surroundings.objects)
    state = {id(value) for attributes in dictionaries for value in attributes.values()}
    state |= {id(value) for holder in surroundings.slotted for _, value in slots_of(holder)}
    for container in surroundings.containers:  # an outer container comes before those in it
        if id(container) in state:
            state.update(map(id, values_of(container)))
            yield AllItems(container, contents_of(container))
        elif Items.may_be_replaced(container):
            yield Items(container, contents_of(container))


def values_of(container: Collection[Any]) -> Any:
    """Return the values of a mapping, or the items of another container; () if it is long."""
    if len(container) > _MANY:
        return ()
    return values_in(container)


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the earlier values of the buffers that were replaced, added or removed.

    The earlier value of an added buffer is `MISSING`.
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
    except ValueError:  # an empty cell
        return MISSING
