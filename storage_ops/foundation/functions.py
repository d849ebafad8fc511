"""The variables that functions and their code refer to: cells, globals and names."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from storage_ops.foundation.values import OPAQUE, PLAIN, attributes_of, kind_of, package_with

T = TypeVar("T")
_MANY = 4096  # most code objects for which a function caches results
_OF_GLOBALS = {"LOAD_GLOBAL", "STORE_GLOBAL"}

Name = tuple[Any, str, Any]  # a cell or the globals, the name in it, and the value under the name


def cells_of(fn: FunctionType) -> Iterator[Name]:
    """Yield the variables of enclosing functions that a function refers to and that have a value.

    Each item is a cell, the attribute that has the value, and the value.
    """
    for cell in fn.__closure__ or ():
        try:
            yield cell, "cell_contents", cell.cell_contents
        except ValueError:  # a name that is not bound yet
            continue


def globals_of(fn: FunctionType) -> Iterator[Name]:
    """Yield the globals in `scopes_of` of a function, except for plain values."""
    for values, names in scopes_of(fn):
        for name in names:
            if name in values and kind_of(type(values[name])) != PLAIN:
                yield values, name, values[name]


def scopes_of(fn: FunctionType) -> Iterator[tuple[dict[str, Any], Iterable[str]]]:
    """Yield the dictionaries with the globals that a function names, and these names.

    The first is the function's own. The others belong to Python modules that it names, such as
    `stats` in `stats.count(x)`. Modules of `OPAQUE` packages are left out.
    """
    names: Iterable[str] = names_of_globals(fn.__code__)
    yield fn.__globals__, names
    found = _python_modules(fn.__globals__, names)
    if found:
        attributes = names_of_code(fn.__code__)
        for module in found:  # the loop appends to the list
            variables = attributes_of(module)
            yield variables, attributes
            inner = _python_modules(variables, attributes)
            found += [each for each in inner if each not in found]


def _python_modules(values: dict[str, Any], names: Iterable[str]) -> list[ModuleType]:
    # pytest lets an `assert` of a test name modules of pytest, under names such as `@pytest_ar`.
    named = [values.get(name) for name in names if name.isidentifier()]
    found: list[Any] = [value for value in named if issubclass(type(value), ModuleType)]
    return [module for module in found if package_with(attributes_of(module)) not in OPAQUE]


def cached_by_code(fn: Callable[[CodeType], T]) -> Callable[[CodeType], T]:
    """Cache the results of a function by the identity of code, because the hash of code is slow."""
    results: dict[int, tuple[CodeType, T]] = {}

    @functools.wraps(fn)
    def cached(code: CodeType) -> T:
        known = results.get(id(code))
        if known is None:
            if len(results) >= _MANY:
                results.clear()
            known = results[id(code)] = code, fn(code)
        return known[1]

    return cached


@cached_by_code
def names_of_globals(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals that code and the functions in it read or set."""
    return tuple(sorted(_find_globals(code)))


def _find_globals(code: CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= _find_globals(const)
    return names


@cached_by_code
def names_of_code(code: CodeType) -> frozenset[str]:
    """Return the names of attributes and globals that code uses."""
    inner = (names_of_code(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*inner)
