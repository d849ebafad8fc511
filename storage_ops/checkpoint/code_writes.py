"""Whether the code of a region may write tensors in place, as its names and instructions tell.

To compare and copy bytes takes time and memory. So parameters, and large tensors, are looked after
only where Python code that the region runs can write them: where it assigns to items, calls a
method whose name ends in an underscore, or reads `.data`.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType, FunctionType
from typing import Any

# How code may write tensors. Plain integers, which are fast to combine.
IN_PLACE = 1  # by an op that moves the version
UNSEEN = 2  # through `.data`, which moves no version
WITHOUT_GRAD = 4  # the code switches the grad mode off, so it can write parameters

_UNSEEN = {"data", "numpy", "data_ptr", "untyped_storage", "from_dlpack"}
_WITHOUT_GRAD = {"no_grad", "set_grad_enabled", "inference_mode"}
_ENTRIES = ("forward", "__call__")


@functools.lru_cache(maxsize=4096)
def of_code(code: CodeType) -> int:
    """Return how code, with the functions that are defined in it, may write tensors."""
    found = 0
    names = set(code.co_names)
    if names & _UNSEEN:
        found |= UNSEEN
    if names & _WITHOUT_GRAD or code.co_name == "decorate_context":  # torch.no_grad() over a def
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


def _assigns(code: CodeType) -> bool:
    for i in dis.get_instructions(code):
        if i.opname == "STORE_SUBSCR" or i.opname.startswith("INPLACE_"):
            return True
        if i.opname == "BINARY_OP" and i.argrepr.endswith("="):
            return True
    return False


@functools.lru_cache(maxsize=4096)
def of_class(cls: Any, called: frozenset[str] = frozenset()) -> int:
    """Return how calls of an object may write tensors.

    Args:
        cls: the class of the object.
        called: names of methods that other code calls.
    """
    methods = _methods(cls)
    more = [fn for name, fn in methods.items() if name in called and name != "__init__"]
    found, stack, seen = 0, [*run_by(cls), *more], set[FunctionType]()
    while stack:
        fn = stack.pop()
        if fn in seen:
            continue
        seen.add(fn)
        inner = getattr(fn, "__wrapped__", None)
        if isinstance(inner, FunctionType):
            stack.append(inner)
        if is_of_torch(fn):
            continue
        found |= of_code(fn.__code__)
        for name in names_of_code(fn.__code__):
            for named in (fn.__globals__.get(name), methods.get(name)):
                if isinstance(named, FunctionType):
                    stack.append(named)
    return found


@functools.lru_cache(maxsize=4096)
def run_by(cls: Any) -> tuple[FunctionType, ...]:
    """Return the methods that calls of an object run in Python, but for what torch defines."""
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
def _methods(cls: Any) -> dict[str, FunctionType]:
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


def _function(value: Any) -> FunctionType | None:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, FunctionType) else None


def is_of_torch(value: Any) -> bool:
    """Return True if torch defines a class or a function."""
    return (value.__module__ or "").startswith("torch.")
