"""Find out from names and instructions whether a region's code may write tensors in place.

Comparing and copying bytes takes time and memory. So parameters and large tensors are checked only
if Python code that the region runs can write them. Such code assigns to items, calls a
method whose name ends in an underscore, or reads `.data`.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Collection, Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from storage_ops.foundation.walk import cached_by_code, is_of_torch, package_of

# How code may write tensors. Plain integers, which are fast to combine.
IN_PLACE = 1  # by an op that moves the version
UNSEEN = 2  # through `.data`, which moves no version
WITHOUT_GRAD = 4  # the code switches the grad mode off, so it can write parameters

_UNSEEN = {"data", "numpy", "data_ptr", "untyped_storage", "from_dlpack"}
_WITHOUT_GRAD = {"no_grad", "set_grad_enabled", "inference_mode"}
# The names of functions that torch.no_grad() decorates. Since torch 2.15 they keep their own name.
_DECORATED = _WITHOUT_GRAD | {"decorate_context"}
_MANY = 4096  # cached results of `elsewhere_of`
_ENTRIES = ("forward", "__call__")
# Packages whose functions write no tensor of a model through `.data`, unless the code says so.
_PASSED_OVER = frozenset(
    {"torch", "numpy", "peft", "safetensors", "storage_ops", *sys.stdlib_module_names}
)


class Facts(NamedTuple):
    """Facts that the instructions of a code object show.

    Attributes:
        writes: how it may write tensors.
        names: of the attributes and globals that it uses.
    """

    writes: int
    names: frozenset[str]


@cached_by_code
def facts_of(code: CodeType) -> Facts:
    """Return the facts of code."""
    return Facts(of_code(code), names_of_code(code))


@functools.lru_cache(maxsize=4096)
def of_code(code: CodeType) -> int:
    """Return how code, with the functions that are defined in it, may write tensors."""
    found = 0
    names = set(code.co_names)
    unseen = names & _UNSEEN
    if unseen and not (unseen == {"numpy"} and _imports_numpy(code)):
        found |= UNSEEN
    if names & _WITHOUT_GRAD or code.co_name in _DECORATED:
        found |= WITHOUT_GRAD
    if any(n.endswith("_") and not n.endswith("__") for n in names) or _assigns(code):
        found |= IN_PLACE
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found |= of_code(const)
        elif isinstance(const, tuple) and "out" in const:  # names of arguments
            found |= IN_PLACE
        elif isinstance(const, tuple) and "max_norm" in const:  # torch.nn.functional.embedding
            found |= IN_PLACE | WITHOUT_GRAD
    return found


def _imports_numpy(code: CodeType) -> bool:
    """Return True if code has the name `numpy` only to import a package, such as jax.numpy."""
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

    These are the methods that calls of an object run, and methods whose names other code that runs
    refers to. A library defines more methods, for saving a model, for example, which write too.

    Args:
        classes: the classes of the objects and modules that the region reaches.
        called: for each function that the region reaches, the names that the function uses.
        elsewhere: the results of `elsewhere_of` for these functions.
    """
    known = dict.fromkeys(classes)
    names = set[str]().union(*called)
    found, seen = 0, set[FunctionType]()
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
        found |= of_code(fn.__code__)
        used = names_of_code(fn.__code__)
        new = used - names
        names |= new
        stack += [*_called(known, new), *elsewhere_of(fn)]
        here = (fn.__globals__.get(name) for name in used)
        stack += [value for value in here if isinstance(value, FunctionType) and _is_code(value)]
    return found


def _called(classes: Iterable[Any], names: Collection[str]) -> list[FunctionType]:
    methods = (item for cls in classes for item in _methods(cls).items())
    return [fn for name, fn in methods if name in names and name != "__init__"]


_elsewhere: dict[tuple[int, int], tuple[CodeType, tuple[Any, ...]]] = {}


def elsewhere_of(fn: FunctionType) -> tuple[Any, ...]:
    """Return the classes that a function names, and its names in other Python modules.

    Classes of modules are left out: the region calls an instance, which it reaches.
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
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _PASSED_OVER:
            found += [v for n in names if _is_code(v := vars(value).get(n))]
        elif isinstance(value, type) and _is_code(value):
            found.append(value)
    return tuple(found)


def _is_code(value: object) -> bool:
    if isinstance(value, type) and issubclass(value, nn.Module):
        return False
    return isinstance(value, (type, FunctionType)) and package_of(value) not in _PASSED_OVER


@functools.lru_cache(maxsize=4096)
def run_by(cls: type) -> tuple[FunctionType, ...]:
    """Return the methods that calls of an object run in Python, except those of torch."""
    methods = _methods(cls)
    mine = [vars(c) for c in cls.__mro__ if not is_of_torch(c)]
    found = [fn for c in mine for name in _ENTRIES if (fn := _function(c.get(name)))]
    for fn in found:  # grows
        codes = [fn.__code__]
        if isinstance(inner := getattr(fn, "__wrapped__", None), FunctionType):
            codes.append(inner.__code__)
        for name in {name for code in codes for name in names_of_code(code)}:
            if name in methods and methods[name] not in found:
                found.append(methods[name])
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _methods(cls: type) -> dict[str, FunctionType]:
    mine = [c for c in reversed(cls.__mro__) if not is_of_torch(c)]
    return {n: fn for c in mine for n, value in vars(c).items() if (fn := _function(value))}


@functools.lru_cache(maxsize=4096)
def names_of_code(code: CodeType) -> frozenset[str]:
    """Return the names of attributes and globals that code uses."""
    inner = (names_of_code(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*inner)


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
