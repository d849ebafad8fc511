"""Tell from the names and instructions of a region's code if it may write tensors in place.

It takes time and memory to copy and compare bytes. So parameters and large tensors are checked only
if Python code of the region may write them. Such code assigns to items, calls a method whose name
ends with an underscore, or reads `.data`.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Collection, Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from torch import nn

from storage_ops.foundation.functions import cached_by_code, names_of_code
from storage_ops.foundation.values import (
    attributes_of,
    cached_by_class,
    is_of_torch,
    package_of,
    package_with,
)

# How code may write tensors. These are bits of an integer, which are fast to combine.
IN_PLACE = 1  # by an op that increments the version of the tensor
UNSEEN = 2  # through `.data`, which does not increment the version
WITHOUT_GRAD = 4  # the code disables grad mode, so it can write parameters

_UNSEEN = {"data", "numpy", "data_ptr", "untyped_storage", "from_dlpack"}
_WITHOUT_GRAD = {"no_grad", "set_grad_enabled", "inference_mode"}
# Code names of functions that torch.no_grad() decorates: `decorate_context` before torch 2.15.
_DECORATED = _WITHOUT_GRAD | {"decorate_context"}
_MANY = 4096  # cached results of `elsewhere_of`
_ENTRIES = ("forward", "__call__")
# Packages that are not searched, because their functions do not write tensors of a model unseen.
_NOT_SEARCHED = frozenset(
    {"torch", "numpy", "peft", "safetensors", "storage_ops", *sys.stdlib_module_names}
)


def may_write_parameters(writes: int) -> bool:
    """Return True if code that writes tensors in these ways can write parameters."""
    without_grad = IN_PLACE | WITHOUT_GRAD
    return writes & UNSEEN != 0 or writes & without_grad == without_grad


class Facts(NamedTuple):
    """Facts about a code object.

    Attributes:
        writes: how the code may write tensors: `IN_PLACE`, `UNSEEN` and `WITHOUT_GRAD`, combined.
        names: the names of the attributes and globals that the code uses.
    """

    writes: int
    names: frozenset[str]


@cached_by_code
def facts_of(code: CodeType) -> Facts:
    """Return the facts about a code object."""
    return Facts(of_code(code), names_of_code(code))


@cached_by_code
def of_code(code: CodeType) -> int:
    """Return how code may write tensors, including the functions that it defines."""
    writes = 0
    names = set(code.co_names)
    unseen = names & _UNSEEN
    if unseen and not (unseen == {"numpy"} and _imports_numpy(code)):
        writes |= UNSEEN
    if names & _WITHOUT_GRAD or code.co_name in _DECORATED:
        writes |= WITHOUT_GRAD
    if any(n.endswith("_") and not n.endswith("__") for n in names) or _assigns(code):
        writes |= IN_PLACE
    for const in code.co_consts:
        if isinstance(const, CodeType):
            writes |= of_code(const)
        elif isinstance(const, tuple) and "out" in const:  # the names of keyword arguments
            writes |= IN_PLACE
        elif isinstance(const, tuple) and "max_norm" in const:  # torch.nn.functional.embedding
            writes |= IN_PLACE | WITHOUT_GRAD
    return writes


def _imports_numpy(code: CodeType) -> bool:
    """Return True if code uses the name `numpy` only to import a package, such as jax.numpy."""
    named = (i.opname for i in dis.get_instructions(code) if i.argval == "numpy")
    return all(name.startswith("IMPORT_") for name in named)


def _assigns(code: CodeType) -> bool:
    for i in dis.get_instructions(code):
        if i.opname == "STORE_SUBSCR" or i.opname.startswith("INPLACE_"):
            return True
        if i.opname == "BINARY_OP" and i.argrepr.endswith("="):
            return True
    return False


@functools.lru_cache(maxsize=4096)
def of_calls(
    classes: tuple[Any, ...],
    called: tuple[frozenset[str], ...] = (),
    elsewhere: tuple[Any, ...] = (),
) -> int:
    """Return how the methods that a region can run may write tensors.

    These are the methods that run when an object is called, and methods whose names appear in other
    code that may run. All other methods of a class are left out, because some of them write
    tensors but do not run in a forward. An example is a method that saves a model.

    Args:
        classes: the classes of the objects and modules that the region reaches.
        called: for each function that the region reaches, the names that the function uses.
        elsewhere: the results of `elsewhere_of` for these functions.
    """
    known = dict.fromkeys(classes)
    names = set[str]().union(*called)
    writes, seen = 0, set[FunctionType]()
    stack: list[Any] = [*elsewhere, *(fn for cls in classes for fn in run_by(cls))]
    stack += _called(known, names)
    while stack:
        fn = stack.pop()
        if fn in seen or fn in known:
            continue
        if isinstance(fn, type):
            known[fn] = None
            stack += [*run_by(fn), *_called((fn,), names)]
            stack += [m for name, m in _methods(fn).items() if name == "__init__"]
            continue
        seen.add(fn)
        inner = getattr(fn, "__wrapped__", None)
        if isinstance(inner, FunctionType):
            stack.append(inner)
        if is_of_torch(fn):
            continue
        writes |= of_code(fn.__code__)
        used = names_of_code(fn.__code__)
        new = used - names
        names |= new
        stack += [*_called(known, new), *elsewhere_of(fn)]
        values = (fn.__globals__.get(name) for name in used)
        stack += [value for value in values if type(value) is FunctionType and _is_code(value)]
    return writes


def _called(classes: Iterable[Any], names: Collection[str]) -> list[FunctionType]:
    methods = (item for cls in classes for item in _methods(cls).items())
    return [fn for name, fn in methods if name in names and name != "__init__"]


_elsewhere: dict[tuple[int, int], tuple[CodeType, tuple[Any, ...]]] = {}


def elsewhere_of(fn: FunctionType) -> tuple[Any, ...]:
    """Return the classes that a function uses, and functions and classes of other Python modules.

    Subclasses of `nn.Module` are left out: a region calls instances of them, which are found by
    other means.
    """
    key = id(fn.__code__), id(fn.__globals__)
    known = _elsewhere.get(key)
    if known is None:
        if len(_elsewhere) >= _MANY:
            _elsewhere.clear()
        known = _elsewhere[key] = fn.__code__, _find_elsewhere(fn)
    return known[1]


def _find_elsewhere(fn: FunctionType) -> tuple[Any, ...]:
    names, found = names_of_code(fn.__code__), []
    for name in names:
        value = fn.__globals__.get(name)
        if isinstance(value, ModuleType):
            variables = attributes_of(value)
            if package_with(variables) not in _NOT_SEARCHED:
                found += [v for n in names if _is_code(v := variables.get(n))]
        elif type(value) is not FunctionType and _is_code(value):
            found.append(value)
    return tuple(found)


def _is_code(value: object) -> bool:
    kind = type(value)  # isinstance() reads `__class__`, which loads a module of a lazy loader
    is_class = issubclass(kind, type)
    if is_class and issubclass(cast(type, value), nn.Module):
        return False
    return (is_class or kind is FunctionType) and package_of(value) not in _NOT_SEARCHED


@cached_by_class
def run_by(cls: type) -> tuple[FunctionType, ...]:
    """Return the Python methods that run when an object is called, except those of torch."""
    methods = _methods(cls)
    bases = [vars(c) for c in cls.__mro__ if not is_of_torch(c)]
    found = [fn for c in bases for name in _ENTRIES if (fn := _function(c.get(name)))]
    for fn in found:  # the loop appends to the list
        codes = [fn.__code__]
        if isinstance(inner := getattr(fn, "__wrapped__", None), FunctionType):
            codes.append(inner.__code__)
        for name in {name for code in codes for name in names_of_code(code)}:
            if name in methods and methods[name] not in found:
                found.append(methods[name])
    return tuple(found)


@cached_by_class
def _methods(cls: type) -> dict[str, FunctionType]:
    bases = [c for c in reversed(cls.__mro__) if not is_of_torch(c)]
    return {n: fn for c in bases for n, value in vars(c).items() if (fn := _function(value))}


@functools.lru_cache(maxsize=4096)
def names_of_classes(classes: tuple[Any, ...]) -> frozenset[str]:
    """Return the names of attributes and globals that the methods of classes use."""
    methods = {fn.__code__ for cls in classes for fn in (*_methods(cls).values(), *run_by(cls))}
    return frozenset[str]().union(*map(names_of_code, methods))


def _function(value: object) -> FunctionType | None:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, FunctionType) else None
