"""Walks over surroundings that a later call does not repeat in Python.

A step calls the same layers again and again, and mostly finds around them what the last step found.
The first walk notes each container and object that it reads. The library of saved tensors compares
these reads with what is there now, and takes what a walk would return. The library
can compare code, modules, plain values and containers of them. A walk that finds hooks, or tensors
besides parameters and buffers, is never known.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from storage_ops import _library
from storage_ops.checkpoint.state.calls import HOOKS_OF_ALL_MODULES
from storage_ops.checkpoint.state.containers import copy_of
from storage_ops.foundation.walk import (
    FUNCTION,
    LONG,
    METHOD,
    MODULE,
    PARTIAL,
    PLAIN,
    kind_of,
    values_in,
)

# How a read looks at an object, as in csrc/checkpoint/walk.cpp: at all items of a container, at the
# entries of its `__dict__`, or at some attributes or items.
_ITEMS, _VARS, _ATTRIBUTES, _NAMES = range(4)
_COMPARED = (list, dict, defaultdict)  # containers whose order the library sees
_OF_FUNCTION = ("__code__", "__globals__", "__closure__", "__defaults__", "__kwdefaults__")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MANY = 4096  # walks that are known at a time
_ATTEMPTS = 3  # to know a walk, of which no later call finds the same


class Reads:
    """What one walk has read, in its order.

    Attributes:
        are_complete: whether the library can compare all of it.
    """

    def __init__(self) -> None:
        """Begin with no reads."""
        # The way, the holder, names, whether it is restored, and whether it outlives the model.
        self.made: list[tuple[int, Any, Sequence[str], bool, bool]] = []
        self.made += [(_ITEMS, hooks, (), True, True) for hooks in HOOKS_OF_ALL_MODULES]
        self.are_complete = not any(HOOKS_OF_ALL_MODULES)

    def _add(
        self, way: int, holder: object, names: Sequence[str] = (), restored: bool = False
    ) -> None:
        self.made.append((way, holder, names, restored, False))

    def give_up(self) -> None:
        """Note that the walk depends on an object that the library cannot compare."""
        self.are_complete = False

    def own(self, functions: Iterable[Any]) -> None:
        """Note functions that follow from classes."""
        self.made += [(_ATTRIBUTES, function, (), False, True) for function in functions]

    def add_class(self, cls: type) -> None:
        """Note the attributes of a class."""
        (attributes,) = gc.get_referents(vars(cls))  # the dictionary that it is a view of
        self.made.append((_ITEMS, attributes, (), False, True))

    def add_container(self, container: Any, restored: bool) -> None:
        """Note the items of a list, tuple or dictionary."""
        kind = type(container)
        is_ordered = kind in _COMPARED or (kind is OrderedDict and not container)
        if len(container) > LONG or not (is_ordered or isinstance(container, tuple)):
            self.give_up()
        self._add(_ITEMS, container, (), restored)

    def add_object(self, value: object) -> None:
        """Note the attributes of an object."""
        self._add(_VARS, value, (), True)

    def add_method(self, method: object) -> None:
        """Note the object and the function of a bound method."""
        self._add(_ATTRIBUTES, method, ("__self__", "__func__"))

    def add_partial(self, call: Any) -> None:
        """Note the function and the arguments of a `functools.partial`."""
        if type(call) is not functools.partial:  # a subclass may run code for an attribute
            self.give_up()
        self._add(_ATTRIBUTES, call, ("func", "args", "keywords"))
        self.add_container(call.args, False)
        self.add_container(call.keywords, False)

    def add_function(self, fn: Any, names_of_globals: Sequence[str]) -> None:
        """Note the code, the closure, the defaults and some globals of a function."""
        self._add(_ATTRIBUTES, fn, _OF_FUNCTION)
        self._add(_NAMES, fn.__globals__, names_of_globals)
        if fn.__closure__:
            self._add(_ITEMS, fn.__closure__)
            for cell in fn.__closure__:
                self._add(_ATTRIBUTES, cell, ("cell_contents",))
        for defaults in (fn.__defaults__, fn.__kwdefaults__):
            if defaults:
                self.add_container(defaults, False)

    def add_module(self, module: nn.Module) -> None:
        """Note the attributes, the parameters, the buffers and the submodules of a module."""
        if "forward" in vars(module) or not isinstance(module._parameters, dict):
            self.give_up()
        if any(isinstance(value, Tensor) for value in vars(module).values()):
            self.give_up()  # with its graph
        self.add_object(module)
        for held in (module._modules, module._parameters, module._buffers):
            self.add_container(held, True)
        for name in _HOOKS:
            hooks = getattr(module, name)
            if hooks:
                self.give_up()
            self._add(_ITEMS, hooks)
        if any(isinstance(p, nn.UninitializedParameter) for p in module._parameters.values()):
            self.give_up()

    def add_values(self, held: Any) -> None:
        """Note the tuples among attributes or items, whose tensors are restored."""
        for value in values_in(held):
            if isinstance(value, tuple):
                self._add(_ITEMS, value)
                if any(kind_of(type(each)) != PLAIN for each in value):
                    self.give_up()
            elif isinstance(value, Tensor):
                self.give_up()


class Objects(NamedTuple):
    """What a walk has found: lists of objects, and facts of code that do not change.

    Attributes:
        modules, parameters, objects, containers: as in `Surroundings`.
        scopes, values: of the variables with modules in them.
        names: of these variables.
        code, writes: as in `Surroundings`.
        has_bytes: whether there may be tensors whose bytes are copied.
    """

    modules: list[nn.Module]
    parameters: list[Tensor]
    objects: list[dict[str, Any]]
    containers: list[Any]
    scopes: list[Any]
    values: list[Any]
    names: list[str]
    code: list[frozenset[str]]
    writes: int
    has_bytes: bool


_GROUPS = 6  # the lists of `Objects` with objects of a model


class _Known:
    """A walk that later calls may find again."""

    def __init__(self) -> None:
        self.walk: Any = None
        self.facts: tuple[Any, ...] = ()  # the fields of `Objects` without objects of a model
        self.attempts = 0  # since a call has found the same


class Found:
    """What a known walk finds around one call."""

    __slots__ = ("_facts", "_seen", "is_unchanged")

    def __init__(self, seen: Any, facts: tuple[Any, ...]) -> None:
        self._seen, self._facts = seen, facts
        self.is_unchanged: Callable[[], bool] = seen.is_unchanged

    def contents(self, container: Any) -> Any:
        """Return what `copy_of` returned for a container before the call."""
        found = self._seen.contents(container)
        return copy_of(container) if found is None else found  # it has replaced another one

    @property
    def has_bytes(self) -> bool:
        """Return True if there may be tensors whose bytes are copied."""
        return bool(self._facts[-1])

    def noted(self) -> Any:
        """Return what `parameters.noted` returns for the parameters."""
        return self._seen.noted(1)

    def objects(self) -> Objects:
        """Return the objects that the walk has found."""
        return Objects(*map(self._seen.group, range(_GROUPS)), *self._facts)


_known: dict[tuple[int, ...], _Known] = {}


def roots_of(fn: Callable[..., Any], given: list[Any]) -> list[Any] | None:
    """Return the functions and modules that a walk begins with; None if it cannot be known.

    Args:
        fn: what is called. Its parts are returned if it is a bound method or a partial.
        given: arguments that are no tensors.
    """
    if _native is None:
        return None
    if given and any(kind_of(type(value)) != PLAIN for value in given):
        return None
    found: list[Any] = []
    stack: list[Any] = [fn]
    while stack:
        value = stack.pop()
        kind = kind_of(type(value))
        if kind in (FUNCTION, MODULE):
            found.append(value)
        elif kind == PARTIAL:
            stack += (value.func, *value.args, *value.keywords.values())
        elif kind == METHOD:
            stack += (value.__self__, value.__func__)
        elif kind != PLAIN:
            return None
    return found[::-1]  # as a walk puts the parts of a call on its stack


def find(roots: list[Any]) -> tuple[Found | None, Reads | None]:
    """Return what a walk from these roots finds; if it is not known, what is to note its reads."""
    key = tuple(map(id, roots))
    known = _known.get(key)
    if known is None:
        if len(_known) >= _MANY:
            _known.clear()
        known = _known[key] = _Known()
    elif known.walk is not None:
        seen = known.walk.see(roots)
        if seen is not None:
            known.attempts = 0
            return Found(seen, known.facts), None
        known.walk = None
    elif known.attempts < _ATTEMPTS:  # not the first call, which may be the only one
        return None, Reads()
    return None, None


def know(roots: list[Any], reads: Reads, found: Objects) -> None:
    """Let later calls find what a walk from these roots has found."""
    known = _known[tuple(map(id, roots))]
    known.attempts += 1
    if not reads.are_complete:
        known.attempts = _ATTEMPTS
    else:
        known.walk = _native.Walk(kind_of, roots, reads.made, found[:_GROUPS])
        known.facts = found[_GROUPS:]


_native: Any = sys.modules.get(_library.SAVED_TENSORS)
