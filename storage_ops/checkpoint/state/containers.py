"""Copies of the contents of containers, and giving a container its earlier contents back."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from storage_ops.foundation.walk import MAPPINGS

MISSING = object()  # in place of the value of an item that is not there
Undo = list[Callable[[], object]]


def copy_of(container: Any) -> Any:
    """Return the contents of a container: a dictionary for a mapping, else a list."""
    return dict(container) if type(container) in MAPPINGS else list(container)


def has(container: Any, contents: Any) -> bool:
    """Return True if a container holds these very objects, in this order."""
    if len(container) != len(contents):
        return False
    if type(container) in MAPPINGS:
        if any(map(operator.is_not, container, contents)):
            return False
        return all(map(operator.is_, container.values(), contents.values()))
    return all(map(operator.is_, container, contents))


def put(container: Any, contents: Any) -> None:
    """Give a container the contents that `copy_of` returned earlier, in their order.

    A mapping keeps the items that are right already: it may be the attributes of an object that
    another thread reads.
    """
    if has(container, contents):
        return
    if type(container) is list:
        container[:] = contents
    elif type(container) in MAPPINGS:
        for key in [key for key in container if key not in contents]:
            del container[key]
        if any(map(operator.is_not, container, contents)):  # new items would be out of order
            container.clear()
        for key, value in contents.items():
            if container.get(key, MISSING) is not value:
                container[key] = value
    else:
        container.clear()
        container.update(contents) if type(container) is set else container.extend(contents)


def set_item(held: dict[str, Any], name: str, value: object, undo: Undo) -> None:
    """Set an item, or delete it if `value` is `MISSING`; `undo` gets what undoes it."""
    now = held.get(name, MISSING)
    if now is not value:
        undo.append(lambda: set_item(held, name, now, []))
        if value is MISSING:
            del held[name]
        else:
            held[name] = value
