"""Spare later calls the search for the objects that a region may read.

A *walk* is such a search (`reachable.py`). Training calls the same layers again in each step, and
the walk usually finds the same objects. So one walk notes the containers and objects that it
reads. For later calls, the library of saved tensors compares these reads with the present objects,
and returns the result of the walk without Python code. The walk is then *known*.

The library can compare code, modules, plain values and containers of them. A walk that finds hooks,
or tensors other than parameters and buffers, never becomes known.

Nested functions, bound methods and partials are *temporary*: they are often created anew for each
call. They are equal to earlier ones if they have the same code, and their variables and arguments
the same values.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from storage_ops import _library
from storage_ops._subclass import is_parametrization
from storage_ops.checkpoint.state.calls import HOOKS_OF_ALL_MODULES
from storage_ops.checkpoint.state.code_writes import may_write_parameters
from storage_ops.checkpoint.state.containers import copy_of
from storage_ops.foundation.functions import cells_of
from storage_ops.foundation.values import (
    FUNCTION,
    LONG,
    METHOD,
    MODULE,
    PARTIAL,
    PLAIN,
    TENSOR,
    kind_of,
    values_in,
)

# Kinds of reads, with the numbers of csrc/checkpoint/walk.cpp: all items of a container, all
# entries of an object's `__dict__`, some attributes of an object, some items of a dictionary.
_ITEMS, _VARS, _ATTRIBUTES, _NAMES = range(4)
_COMPARED = (list, dict, defaultdict, set, deque)  # containers whose order the library can compare
_OF_FUNCTION = ("__code__", "__globals__", "__closure__", "__defaults__", "__kwdefaults__")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MANY = 4096  # the number of walks that can be known at the same time
_ATTEMPTS = 3  # walks that are noted, without a later call that finds the same, before giving up


class Reads:
    """The reads of one walk, in their order.

    Attributes:
        entries: for each read its kind, the object, names, whether its values are restored for the
            recompute, whether the object outlives the model, and whether it is temporary.
        are_complete: whether the library can compare all reads.
    """

    def __init__(self) -> None:
        """Begin with the hooks that torch calls for every module."""
        self.entries: list[tuple[int, Any, Sequence[str], bool, bool, bool]] = []
        self.entries += [(_ITEMS, hooks, (), True, True, False) for hooks in HOOKS_OF_ALL_MODULES]
        self.are_complete = True

    def _add(
        self,
        kind: int,
        holder: object,
        names: Sequence[str] = (),
        restored: bool = False,
        temporary: bool = False,
    ) -> None:
        self.entries.append((kind, holder, names, restored, False, temporary))

    def give_up(self) -> None:
        """Note that the walk depends on an object that the library cannot compare."""
        self.are_complete = False

    def own(self, functions: Iterable[Any]) -> None:
        """Note functions that classes determine, and that therefore outlive the model."""
        self.entries += [(_ATTRIBUTES, function, (), False, True, False) for function in functions]

    def add_class(self, cls: type) -> None:
        """Note the attributes of a class."""
        (attributes,) = gc.get_referents(vars(cls))  # the dictionary behind the mappingproxy
        self.entries.append((_ITEMS, attributes, (), False, True, False))

    def add_container(self, container: Any, restored: bool, temporary: bool = False) -> None:
        """Note the items of a container, which are restored if `restored`."""
        kind = type(container)
        is_ordered = kind in _COMPARED or (kind is OrderedDict and not container)
        if len(container) > LONG or not (is_ordered or isinstance(container, tuple)):
            self.give_up()
        self._add(_ITEMS, container, (), restored, temporary)

    def add_object(self, value: object) -> None:
        """Note the attributes of an object."""
        self._add(_VARS, value, (), True)

    def add_method(self, method: object) -> None:
        """Note the object and the function of a bound method."""
        self._add(_ATTRIBUTES, method, ("__self__", "__func__"), temporary=True)

    def add_partial(self, call: Any) -> None:
        """Note the function and the arguments of a `functools.partial`."""
        if type(call) is not functools.partial:  # a subclass may run code to get an attribute
            self.give_up()
        self._add(_ATTRIBUTES, call, ("func", "args", "keywords"), temporary=True)
        self.add_container(call.args, False, temporary=True)
        self.add_container(call.keywords, False, temporary=True)

    def add_function(self, fn: Any, scopes: Iterable[tuple[dict[str, Any], Iterable[str]]]) -> None:
        """Note the code, the closure, the defaults and some globals of a function.

        Args:
            fn: the function.
            scopes: dictionaries with globals, and names in them, as `scopes_of` returns.
        """
        temporary = _is_nested(fn)
        self._add(_ATTRIBUTES, fn, _OF_FUNCTION, temporary=temporary)
        for values, names in scopes:
            outlives = values is not fn.__globals__  # the variables of another Python module
            self.entries.append((_NAMES, values, tuple(names), False, outlives, False))
        if fn.__closure__:
            self._add(_ITEMS, fn.__closure__, temporary=temporary)
            for cell in fn.__closure__:
                self._add(_ATTRIBUTES, cell, ("cell_contents",), temporary=temporary)
        for defaults in (fn.__defaults__, fn.__kwdefaults__):
            if defaults:
                self.add_container(defaults, False, temporary)

    def add_module(self, module: nn.Module) -> None:
        """Note the attributes, the parameters, the buffers and the submodules of a module."""
        if "forward" in vars(module) or not isinstance(module._parameters, dict):
            self.give_up()
        if is_parametrization(type(module)):
            self.give_up()  # the class references the module, and a known walk keeps classes
        if any(isinstance(value, Tensor) for value in vars(module).values()):
            self.give_up()  # the tensor may have a graph
        self.add_object(module)
        for children in (module._modules, module._parameters, module._buffers):
            self.add_container(children, True)
        for name in _HOOKS:
            hooks = getattr(module, name)
            if hooks:
                self.give_up()
            self._add(_ITEMS, hooks)
        if any(isinstance(p, nn.UninitializedParameter) for p in module._parameters.values()):
            self.give_up()

    def add_values(self, container: Any) -> None:
        """Note the tuples among attributes or items. Give up if there are tensors."""
        for value in values_in(container):
            if isinstance(value, tuple):
                self._add(_ITEMS, value)
                if any(kind_of(type(item)) != PLAIN for item in value):
                    self.give_up()
            elif isinstance(value, Tensor):
                self.give_up()


class Facts(NamedTuple):
    """What a walk has found besides objects. It does not change between calls.

    Attributes:
        names: the names of the variables whose values are modules.
        code, writes: as in `Surroundings`.
        trusted: for each buffer in `Objects`, whether every write to it increments its version.
        has_others: whether Python must copy the bytes of other tensors before each call. Parameters
            that the code may write in place are copied only until it is known if it does.
    """

    names: list[str]
    code: list[frozenset[str]]
    writes: int
    trusted: tuple[bool, ...]
    has_others: bool


class Objects(NamedTuple):
    """The objects that a walk has found.

    Attributes:
        modules, objects, containers: as in `Surroundings`.
        parameters: the parameters of the modules.
        buffers: the buffers that the library copies before a call.
        scopes: the scopes of the variables whose values are modules.
        values: the values of these variables.
    """

    modules: list[nn.Module]
    parameters: list[Tensor]
    buffers: list[Tensor]
    objects: list[dict[str, Any]]
    containers: list[Any]
    scopes: list[Any]
    values: list[Any]


class Entry:
    """A walk that may be known.

    Args:
        roots: functions and modules where it begins.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._modules = [weakref.ref(root) for root in roots if isinstance(root, nn.Module)]
        self.walk: Any = None
        self.facts = Facts([], [], 0, (), False)
        self.attempts = 0  # the number of walks noted since a call last found the same
        self.are_looked_at = False  # whether the modules are known to be in `contents.looked_at`

    @property
    def is_of_deleted(self) -> bool:
        """Return True if a module was deleted, so that another one can have its place in a key."""
        return any(reference() is None for reference in self._modules)


class KnownWalk:
    """The result of a known walk for one call."""

    __slots__ = ("_seen", "facts", "is_unchanged")

    def __init__(self, seen: Any, facts: Facts) -> None:
        self._seen, self.facts = seen, facts
        self.is_unchanged: Callable[[], bool] = seen.is_unchanged

    def contents(self, container: Any) -> Any:
        """Return a copy of a container's contents before the call."""
        contents = self._seen.contents(container)
        # A container that the walk has not read has replaced another one since.
        return copy_of(container) if contents is None else contents

    @property
    def has_bytes(self) -> bool:
        """Return True if there may be tensors whose bytes must be copied."""
        facts = self.facts
        return bool(facts.trusted or facts.has_others or may_write_parameters(facts.writes))

    def noted(self) -> Any:
        """Return the result of `parameters.noted` for the parameters."""
        return self._seen.noted()

    def objects(self) -> Objects:
        """Return the objects that the walk has found."""
        return Objects(*map(self._seen.group, range(len(Objects._fields))))


class Start(NamedTuple):
    """Where a walk begins.

    Attributes:
        roots: functions and modules.
        key: is equal for later calls whose walks may find the same.
    """

    roots: list[Any]
    key: tuple[int, ...]


_known: dict[tuple[int, ...], Entry] = {}


def start_of(fn: Callable[..., Any], arguments: list[Any]) -> Start | None:
    """Return where the walk of a call begins; None if it cannot become known.

    Args:
        fn: the function of the region. A bound method or a partial is split into its parts.
        arguments: the arguments that are not tensors.
    """
    if _native is None:
        return None
    if arguments and any(kind_of(type(value)) != PLAIN for value in arguments):
        return None
    roots: list[Any] = []
    nested: list[Any] = []
    key: list[int] = []
    stack: list[Any] = [fn]
    while stack:
        value = stack.pop()
        kind = kind_of(type(value))
        if kind == MODULE:
            roots.append(value)
            key.append(id(value))
        elif kind == FUNCTION:
            roots.append(value)
            if _is_nested(value):
                nested.append(value)
            else:
                key.append(id(value))
        elif kind in (PARTIAL, METHOD):
            stack += _parts(value, kind)
        elif type(value) is BuiltinFunctionType:  # such as torch.sin, in which a walk reads nothing
            stack.append(value.__self__)
            key.append(id(value))
        elif kind != PLAIN:
            return None
    if nested and not _add_keys(nested, key):
        return None
    # In the order in which a walk puts the parts of a call on its stack.
    return Start(roots[::-1], tuple(key))


def _is_nested(fn: FunctionType) -> bool:
    """Return True if a function was defined in another one, which may define it in each call."""
    return bool(fn.__code__.co_flags & inspect.CO_NESTED)


def _parts(value: Any, kind: int) -> Iterable[Any]:
    """Return the values that a temporary object consists of."""
    if kind == PARTIAL:
        return (value.func, *value.args, *value.keywords.values())
    if kind == METHOD:
        return (value.__self__, value.__func__)
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return (*(content for _, _, content in cells_of(value)), *defaults)


def _add_keys(functions: list[Any], key: list[int]) -> bool:
    """Add the parts of a key that stand for nested functions.

    Returns:
        Whether walks from these functions may become known.
    """
    seen = set()  # functions may reference themselves
    stack = functions
    while stack:
        value = stack.pop()
        kind = kind_of(type(value))
        if kind == TENSOR:
            return False
        if kind in (METHOD, PARTIAL) or (kind == FUNCTION and _is_nested(value)):
            if kind == FUNCTION:
                key.append(id(value.__code__))
            if id(value) not in seen:
                seen.add(id(value))
                stack += _parts(value, kind)
        elif kind != PLAIN:
            key.append(id(value))
    return True


def known_from(start: Start) -> Entry | None:
    """Return the entry of a known walk that begins here; None if Python must copy bytes for it."""
    entry = _known.get(start.key)
    has_others = entry is None or entry.walk is None or entry.facts.has_others
    return None if has_others else entry


def find(start: Start) -> tuple[KnownWalk | None, Reads | None]:
    """Return the known walk that begins here, if there is one.

    Returns:
        The known walk, or None; and an empty `Reads` if the caller must walk and note its reads.
    """
    key = start.key
    known = _known.get(key)
    if known is None or known.is_of_deleted:
        if len(_known) >= _MANY:
            _known.clear()
        known = _known[key] = Entry(start.roots)
    elif known.walk is not None:
        seen = known.walk.see(start.roots)
        if seen is not None:
            known.attempts = 0
            return KnownWalk(seen, known.facts), None
        known.walk = None
    elif known.attempts < _ATTEMPTS and not any(HOOKS_OF_ALL_MODULES):
        return None, Reads()  # never in the first call, which may be the only one
    return None, None


def know(start: Start, reads: Reads, objects: Objects, facts: Facts) -> None:
    """Make a walk known.

    Args:
        start: where it began.
        reads: the reads of the walk.
        objects, facts: the result of the walk.
    """
    known = _known[start.key]
    known.attempts += 1
    if not reads.are_complete:
        known.attempts = _ATTEMPTS
    else:
        known.walk = _native.Walk(kind_of, start.roots, reads.entries, objects)
        known.facts = facts


_native: Any = sys.modules.get(_library.SAVED_TENSORS)
