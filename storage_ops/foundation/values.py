"""Facts about single values: their kind, the package of their class, and what they contain.

A walk (`walk.py`) and the code that regions, traced steps and simulations have of their own agree
by these functions on what a module, a container or an object is.
"""

from __future__ import annotations

import collections
import functools
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from storage_ops._subclass import is_parametrization

T = TypeVar("T")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.dtype)
MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)
CONTAINERS = (list, set, collections.deque, *MAPPINGS)  # whose contents can change
LONG = 256
_MANY = 4096  # most classes for which a function caches results
TORCH_HOLDERS = (Optimizer, GradScaler, LRScheduler)
# Packages whose objects contain nothing that a user trains, or manage it themselves. Namespaces and
# user dictionaries belong to the user.
_MANAGED = {"torch", "storage_ops", "deepspeed"}
OPAQUE = frozenset(_MANAGED | sys.stdlib_module_names - {"collections", "types"})
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# The kind of a value depends on its class alone. Reading `value.__class__` may run a user's code.
PLAIN, TENSOR, PARTIAL, METHOD, FUNCTION, MODULE, CONTAINER, TUPLE, GENERATOR, REFERENCE, OBJECT = (
    range(11)
)
_KINDS = (
    (_PLAIN, PLAIN),
    (Tensor, TENSOR),
    (functools.partial, PARTIAL),
    (MethodType, METHOD),
    (FunctionType, FUNCTION),
    (nn.Module, MODULE),
    (tuple, TUPLE),
    (torch.Generator, GENERATOR),
    (random.SystemRandom, PLAIN),  # has no state
    (random.Random, GENERATOR),
    (weakref.ref, REFERENCE),
)


class _ByClass(dict[type, T]):
    """The results of a function for classes. No class is kept that references a module."""

    def __init__(self, fn: Callable[[Any], T]) -> None:
        super().__init__()
        self._fn = fn

    def __missing__(self, cls: type) -> T:
        result = self._fn(cls)
        if not is_parametrization(cls):
            if len(self) >= _MANY:
                self.clear()
            self[cls] = result
        return result


def cached_by_class(fn: Callable[[Any], T]) -> Callable[[Any], T]:
    """Cache the results of a function of a class."""
    return _ByClass(fn).__getitem__


def _find_kind(cls: type) -> int:
    if cls in CONTAINERS:
        return CONTAINER
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and issubclass(cls, (numpy.Generator, numpy.RandomState)):
        return GENERATOR
    return next((kind for classes, kind in _KINDS if issubclass(cls, classes)), OBJECT)


kind_of: Callable[[Any], int] = cached_by_class(_find_kind)
"""Return the kind of the values of a class, such as `TENSOR`."""


def is_of_torch(defined: type | FunctionType) -> bool:
    """Return True if torch defines a class or a function."""
    return (defined.__module__ or "").startswith("torch.")


def is_module_of_torch(cls: type) -> bool:
    """Return True if torch defines a class of modules, and has not put it on top of another one.

    FSDP2, `replicate` and parametrizations put classes of torch on top of a user's class.
    """
    return is_of_torch(cls) and all(
        is_of_torch(base) or package_of(base) == "storage_ops" for base in cls.__mro__[1:-1]
    )


def package_of(defined: object) -> str:
    """Return the name of the top-level package that defines a function or class."""
    return str(getattr(defined, "__module__", "")).partition(".")[0]


def package_with(variables: dict[str, Any]) -> str:
    """Return the top-level package of a Python module with these variables.

    Reading the attribute `__name__` would load a module that a lazy loader has not loaded yet.
    """
    return str(variables.get("__name__", "")).partition(".")[0]


def _find_opaque(cls: type) -> bool:
    return package_of(cls) in OPAQUE and not issubclass(cls, TORCH_HOLDERS)


is_opaque: Callable[[Any], bool] = cached_by_class(_find_opaque)
"""Return True if a walk does not look into the objects of a class."""


def is_data(container: Any) -> bool:
    """Return True for a container of more than `LONG` items, none of them a tensor or module."""
    if len(container) <= LONG:
        return False
    first = next(iter(container))
    kinds = {kind_of(type(first))}
    if type(container) in MAPPINGS:
        kinds.add(kind_of(type(container[first])))
    return not kinds & {TENSOR, MODULE}


def values_in(container: object) -> Any:
    """Return the values of a mapping, and another container itself."""
    return container.values() if isinstance(container, dict) else container


def items_of(container: Any) -> list[Any]:
    """Return the items of a container, or the values of a mapping. Data containers return []."""
    return [] if is_data(container) else list(values_in(container))


def attributes_of(value: object) -> dict[str, Any]:
    """Return the entries of an object's `__dict__` without running code of its class."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes


def slots_of(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the slots of an object."""
    cls: Any = type(value)
    for name in names_of_slots(cls):
        try:
            yield name, object.__getattribute__(value, name)
        except AttributeError:
            continue


@cached_by_class
def names_of_slots(cls: type) -> tuple[str, ...]:
    """Return the names of the slots that a class and its bases define."""
    slots = [vars(c).get("__slots__", ()) for c in cls.__mro__]
    return tuple(n for s in slots for n in ((s,) if isinstance(s, str) else s) if n[:2] != "__")


def is_leaf(t: Tensor) -> bool:
    """Return `t.is_leaf`, and False where torch raises an error instead.

    torch raises for views that an op such as `chunk` returned, after the base was written in place.
    FSDP1 leaves such views in modules.
    """
    try:
        return t.is_leaf
    except RuntimeError:
        return False
