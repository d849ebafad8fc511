"""One walk over the values that functions, modules, objects and containers reach.

Regions, traced steps and simulations must know what user code can reach: tensors, modules,
optimizers, containers. They share these rules:

* Strings, numbers, classes, Python modules and random generators contain no other values.
* A function reaches its closure and its defaults. It also reaches the globals that its code names,
  if it is defined in the package that the walk began in. Globals of other packages lead everywhere.
* A container reaches its items, unless it has more than `LONG` items that are all data (`is_data`).
* A module reaches its parameters, buffers and submodules, and the attributes that are not torch's.
* A tensor reaches its gradient, its hooks and the attributes that Python code gave it.
* Another object reaches its attributes, unless `is_opaque` is true for its class.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from storage_ops.foundation.functions import names_of_globals
from storage_ops.foundation.values import (
    CONTAINER,
    FUNCTION,
    GENERATOR,
    METHOD,
    MODULE,
    OF_EVERY_MODULE,
    OPAQUE,
    PARTIAL,
    PLAIN,
    REFERENCE,
    TENSOR,
    TORCH_HOLDERS,
    TUPLE,
    attributes_of,
    is_data,
    is_leaf,
    is_opaque,
    kind_of,
    package_of,
    slots_of,
)

_DEEP = 6  # most objects, containers and functions between a root or a module and a value
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Access(NamedTuple):
    """The way to get from a value to a value inside it.

    Attributes:
        name: returns the name of the inner value, from the name of the outer one and the key.
        read: returns the inner value, from a function that returns the outer one, and the key.
        write: sets the inner value; None if it cannot be set.
    """

    name: Callable[[str, Any], str]
    read: Callable[[Callable[[], Any], Any], Any]
    write: Callable[[Callable[[], Any], Any, Any], object] | None = None


def _item_name(name: str, key: object) -> str:
    return f"{name}[{key!r}]" if isinstance(key, (str, int)) else f"{name}[...]"


_ATTRIBUTE = Access(
    lambda name, key: f"{name}.{key}",
    lambda holder, key: getattr(holder(), key),
    lambda holder, key, value: setattr(holder(), key, value),
)
_FIXED_ATTRIBUTE = _ATTRIBUTE._replace(write=None)
_ITEM = Access(
    _item_name,
    lambda holder, key: holder()[key],
    lambda holder, key, value: operator.setitem(holder(), key, value),
)
_FIXED_ITEM = _ITEM._replace(write=None)
# Parameters, buffers and submodules. The key is the registry of the module, and the name in it.
REGISTERED = Access(
    lambda name, key: f"{name}.{key[1]}",
    lambda holder, key: getattr(holder(), key[0])[key[1]],
    lambda holder, key, value: operator.setitem(getattr(holder(), key[0]), key[1], value),
)
# Variables of enclosing functions: the key is the cell and the name. Globals: the scope, the name.
CELL = Access(
    lambda name, key: str(key[1]),
    lambda holder, key: key[0].cell_contents,
    lambda holder, key, value: setattr(key[0], "cell_contents", value),
)
GLOBAL = Access(
    lambda name, key: str(key[1]),
    lambda holder, key: key[0][key[1]],
    lambda holder, key, value: operator.setitem(key[0], key[1], value),
)
_SELF = Access(lambda name, key: "self", lambda holder, key: holder().__self__)
_FUNCTION = Access(lambda name, key: name, lambda holder, key: holder().__func__)
_REFERENT = Access(lambda name, key: name, lambda holder, key: holder()())
# Items of sets, the `__call__` of a class, and hooks: the key is the value.
_UNNAMED = Access(lambda name, key: name, lambda holder, key: key)
_HOOK = _UNNAMED._replace(name=lambda name, key: f"a hook of {name}")
GRADIENT = Access(lambda name, key: f"{name}.grad", lambda holder, key: holder().grad)


class Visit:
    """A value that a walk reaches, and the way to it.

    Attributes:
        value: the value; it may be visited at several places.
        kind: its kind.
        parent: the visit of the value that contains it; None for a root.
        access: how to read the value from its parent.
        key: the argument of `access`; for a root, its name.
        is_first: whether this is the first visit of the value.
    """

    __slots__ = ("_depth", "_package", "access", "is_first", "key", "kind", "parent", "value")

    def __init__(self, value: object, parent: Visit | None, access: Access, key: object) -> None:
        self.value: Any = value
        self.parent, self.access, self.key = parent, access, key
        self.kind, self.is_first = kind_of(type(value)), True
        self._depth, self._package = 0, ""
        if parent is not None:
            self._depth, self._package = parent._depth + 1, parent._package
        if self.kind == MODULE or isinstance(value, TORCH_HOLDERS):
            self._depth = 0
        if not self._package:
            package = package_of(value)
            self._package = "" if package in OPAQUE else package

    @property
    def name(self) -> str:
        """Return the expression of the user's program for the value, such as `model.weight`."""
        if self.parent is None:
            return str(self.key)
        return self.access.name(self.parent.name, self.key)

    def read(self) -> Any:
        """Return the current value at this place."""
        if self.parent is None:
            return self.value
        return self.access.read(self.parent.read, self.key)

    @property
    def is_writable(self) -> bool:
        """Return True if the value at this place can be replaced."""
        return self.access.write is not None

    def write(self, value: object) -> None:
        """Replace the value at this place."""
        assert self.access.write is not None and self.parent is not None
        self.access.write(self.parent.read, self.key, value)


def walk(roots: Iterable[tuple[str, Any]], into_functions: bool = True) -> Iterator[Visit]:
    """Visit every place that named values reach, depth first.

    Args:
        roots: names and values.
        into_functions: whether to visit the closures and globals of functions.

    Example:
        >>> from storage_ops.foundation.walk import walk
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> [v.name for v in walk([("model", model)]) if isinstance(v.value, torch.Tensor)]
        ['model.0.weight', 'model.0.bias']
    """
    seen: dict[int, Any] = {}  # holds the values, so that no identity is used again
    for name, root in roots:
        stack = [Visit(root, None, _FIXED_ATTRIBUTE, name)]
        while stack:
            visit = stack.pop()
            value, kind = visit.value, visit.kind
            visit.is_first = id(value) not in seen
            yield visit
            if kind == PLAIN or not visit.is_first:
                continue
            seen[id(value)] = value
            if visit._depth > _DEEP or (kind == FUNCTION and not into_functions):
                continue
            parts = list(_inside(value, kind, visit._package))
            stack += [Visit(child, visit, access, key) for child, access, key in reversed(parts)]


Part = tuple[Any, Access, Any]


def _inside(value: Any, kind: int, package: str) -> Iterable[Part]:
    if kind in (CONTAINER, TUPLE):
        return _inside_container(value)
    if kind == MODULE:
        return _inside_module(value)
    if kind == FUNCTION:
        return _inside_function(value, package)
    if kind == TENSOR:
        return _inside_tensor(value)
    if kind == METHOD:
        return (value.__func__, _FUNCTION, None), (value.__self__, _SELF, None)
    if kind == PARTIAL:
        return [(getattr(value, n), _FIXED_ATTRIBUTE, n) for n in ("func", "args", "keywords")]
    if kind == REFERENCE:
        return [(value(), _REFERENT, None)]
    return () if kind == GENERATOR or is_opaque(type(value)) else _inside_object(value)


def _inside_container(value: Any) -> Iterator[Part]:
    if is_data(value):
        return
    if isinstance(value, dict):
        yield from [(child, _ITEM, key) for key, child in list(dict.items(value))]
    elif isinstance(value, set):
        yield from [(child, _UNNAMED, child) for child in list(value)]
    else:
        access = _FIXED_ITEM if isinstance(value, tuple) else _ITEM
        yield from [(child, access, place) for place, child in enumerate(list(value))]


def _inside_module(value: nn.Module) -> Iterator[Part]:
    for registry in ("_parameters", "_buffers", "_modules"):
        for key, child in getattr(value, registry).items():
            yield child, REGISTERED, (registry, key)
    for hooks in _HOOKS:
        yield from [(hook, _HOOK, hook) for hook in getattr(value, hooks).values()]
    for key, child in list(vars(value).items()):
        if key not in OF_EVERY_MODULE:
            yield child, _ATTRIBUTE, key


def _inside_function(fn: FunctionType, package: str) -> Iterator[Part]:
    for place, cell in enumerate(fn.__closure__ or ()):
        try:
            yield cell.cell_contents, CELL, (cell, fn.__code__.co_freevars[place])
        except ValueError:  # a name that is not bound yet
            continue
    if package and package_of(fn) == package:
        scope = fn.__globals__
        for name in names_of_globals(fn.__code__):
            if name in scope:
                yield scope[name], GLOBAL, (scope, name)
    if fn.__defaults__ or fn.__kwdefaults__:
        yield fn.__defaults__, _FIXED_ATTRIBUTE, "__defaults__"
        yield fn.__kwdefaults__, _FIXED_ATTRIBUTE, "__kwdefaults__"


def _inside_tensor(t: Tensor) -> Iterator[Part]:
    if is_leaf(t) and t.grad is not None:
        yield t.grad, GRADIENT, None
    hooks = t._backward_hooks, getattr(t, "_post_accumulate_grad_hooks", None)
    for hooks_by_id in hooks:
        yield from [(hook, _HOOK, hook) for hook in (hooks_by_id or {}).values()]
    if not is_traceable_wrapper_subclass(t):
        yield from [(child, _ATTRIBUTE, key) for key, child in list(vars(t).items())]


def _inside_object(value: object) -> Iterator[Part]:
    call = type(value).__call__ if callable(value) else None
    if isinstance(call, FunctionType):
        yield call, _UNNAMED, call
    if isinstance(value, (dict, list, set, collections.deque)):  # a subclass
        yield from _inside_container(value)
    for key, child in [*attributes_of(value).items(), *slots_of(value)]:
        yield child, _ATTRIBUTE, key
