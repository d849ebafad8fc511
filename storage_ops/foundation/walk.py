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
import dis
import functools
import operator
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from storage_ops._subclass import is_parametrization

T = TypeVar("T")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.dtype)
MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)
CONTAINERS = (list, set, collections.deque, *MAPPINGS)  # whose contents can change
LONG = 256
_DEEP = 6  # most objects, containers and functions between a root or a module and a value
_MANY = 4096  # most classes or code objects for which a function caches results
_OF_GLOBALS = {"LOAD_GLOBAL", "STORE_GLOBAL"}
_TORCH_HOLDERS = (Optimizer, GradScaler, LRScheduler)
# Packages whose objects contain nothing that a user trains, or manage it themselves. Namespaces and
# user dictionaries belong to the user.
_MANAGED = {"torch", "storage_ops", "deepspeed"}
OPAQUE = frozenset(_MANAGED | sys.stdlib_module_names - {"collections", "types"})
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
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
    return package_of(cls) in OPAQUE and not issubclass(cls, _TORCH_HOLDERS)


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


@functools.lru_cache(maxsize=4096)
def names_of_slots(cls: type) -> tuple[str, ...]:
    """Return the names of the slots that a class and its bases define."""
    slots = [vars(c).get("__slots__", ()) for c in cls.__mro__]
    return tuple(n for s in slots for n in ((s,) if isinstance(s, str) else s) if n[:2] != "__")


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


@functools.lru_cache(maxsize=4096)
def names_of_code(code: CodeType) -> frozenset[str]:
    """Return the names of attributes and globals that code uses."""
    inner = (names_of_code(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*inner)


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
        if self.kind == MODULE or isinstance(value, _TORCH_HOLDERS):
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


def is_leaf(t: Tensor) -> bool:
    """Return `t.is_leaf`, and False where torch raises an error instead.

    torch raises for views that an op such as `chunk` returned, after the base was written in place.
    FSDP1 leaves such views in modules.
    """
    try:
        return t.is_leaf
    except RuntimeError:
        return False


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
