"""Copy the contents of containers, and restore them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from storage_ops.foundation.values import MAPPINGS

MISSING = object()  # the value of an item that does not exist
Undo = list[Callable[[], object]]


def copy_of(container: Any) -> Any:
    """Return a copy of the contents of a container: a dictionary for a mapping, else a list."""
    return dict(container) if type(container) in MAPPINGS else list(container)


def has(container: Any, contents: Any) -> bool:
    """Return True if the items of a container are the same objects as `contents`, in this order."""
    if len(container) != len(contents):
        return False
    if type(container) in MAPPINGS:
        if any(map(operator.is_not, container, contents)):
            return False
        return all(map(operator.is_, container.values(), contents.values()))
    return all(map(operator.is_, container, contents))


def put(container: Any, contents: Any) -> None:
    """Set the contents of a container to a copy that `copy_of` returned, in the same order.

    Items of a mapping that do not differ are not removed in between. The mapping may be the
    `__dict__` of an object that another thread reads.
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


def set_item(mapping: dict[str, Any], name: str, value: object, undo: Undo) -> None:
    """Set an item, or delete it if `value` is `MISSING`. Append a function that undoes it."""
    now = mapping.get(name, MISSING)
    if now is not value:
        undo.append(lambda: set_item(mapping, name, now, []))
        if value is MISSING:
            del mapping[name]
        else:
            mapping[name] = value
