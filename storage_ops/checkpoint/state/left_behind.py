"""Remove fake tensors from caches that outlive the run on fake tensors.

A function with `functools.lru_cache`, a dictionary of masks in a Python module, or an attribute of
a class keeps the tensors of a run on fake tensors. The next real call would find them and fail.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from storage_ops.checkpoint.state.containers import MISSING, copy_of, put
from storage_ops.checkpoint.state.unchanged import undo_draws_of_process
from storage_ops.foundation.values import (
    CONTAINERS,
    MAPPINGS,
    OPAQUE,
    attributes_of,
    is_data,
    is_opaque,
    package_of,
)
from storage_ops.foundation.walk import walk

_CACHE: Any = type(functools.lru_cache(int))
_FEW = 100  # values whose holders the collector itself finds faster
_DEEP = 3  # nested tuples around a tensor that are searched for their holder
T = TypeVar("T")
IsLeft = Callable[[FakeTensor], bool]
_thaws: list[
    Callable[[], Any]
] = []  # for each `few_objects` block, a function that ends its freeze


class Left(NamedTuple):
    """A fake tensor that could not be removed, and a description of the object that has it."""

    tensor: FakeTensor
    place: str


class Namespaces:
    """The variables that code of modules and functions can set, as they are before a run.

    These are the globals of the Python modules that define the code, and the globals of functions
    among these, with the containers and objects in them. The attributes of classes, and variables
    of enclosing functions, are included too.
    """

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Any] = ()) -> None:
        self._contents: list[tuple[Any, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._caches: list[Any] = []
        self._seen: set[int] = set()
        kinds = {type(module) for module in modules}
        classes = {c for kind in kinds for c in kind.__mro__ if not is_opaque(c)}
        scopes = [vars(sys.modules[c.__module__]) for c in classes if c.__module__ in sys.modules]
        for cls in classes:
            self._classes.append((cls, dict(vars(cls))))
            self._note_values(vars(cls).values())
        plain = [getattr(function, "__func__", function) for function in functions]
        self._note_values(plain)
        scopes += [f.__globals__ for f in plain if isinstance(f, FunctionType)]
        named = [each for scope in scopes for each in self._note_scope(scope)]
        for scope in named:
            self._note_scope(scope)

    def _note_scope(self, scope: dict[str, Any]) -> list[dict[str, Any]]:
        """Note the globals of a Python module. Return the globals of the functions among them."""
        if not self._note(scope):
            return []
        self._note_values(scope.values())
        functions = [v for v in scope.values() if isinstance(v, FunctionType)]
        return [f.__globals__ for f in functions if package_of(f) not in OPAQUE]

    def _note(self, container: object) -> bool:
        """Note the contents of a container; return False if they were noted before."""
        if id(container) in self._seen:
            return False
        self._seen.add(id(container))
        self._contents.append((container, copy_of(container)))
        return True

    def _note_values(self, values: Iterable[Any]) -> None:
        for each in values:
            value: Any = each.__func__ if isinstance(each, (staticmethod, classmethod)) else each
            if isinstance(value, _CACHE):
                self._caches.append(value)
                value = value.__wrapped__
            if type(value) in CONTAINERS:
                if not is_data(value):
                    self._note(value)
            elif isinstance(value, FunctionType):
                cells = [(cell, content_of(cell)) for cell in value.__closure__ or ()]
                self._cells += cells
                self._note_values(c for _, c in cells if not isinstance(c, FunctionType))
            elif not _is_atom(value) and not is_opaque(type(value)):
                attributes = attributes_of(value)
                if attributes:
                    self._note(attributes)

    def remove(self, is_left: IsLeft) -> None:
        """Restore the variables and containers that got a fake tensor of the run."""
        for container, contents in self._contents:
            if type(container) not in MAPPINGS:
                if any(holds(value, is_left) for value in container):
                    put(container, contents)
                continue
            for key, before in _replaced(container, contents, is_left):
                if before is MISSING:
                    del container[key]
                else:
                    container[key] = before
        for cls, attributes in self._classes:
            for name, before in _replaced(vars(cls), attributes, is_left):
                if before is MISSING:
                    delattr(cls, name)
                else:
                    setattr(cls, name, before)
        for cell, before in self._cells:
            if holds(content_of(cell), is_left):
                set_content(cell, before)
        for cache in self._caches:
            _remove_from_cache(cache, is_left)


def _replaced(
    now: Mapping[Any, Any], contents: dict[Any, Any], is_left: IsLeft
) -> list[tuple[Any, Any]]:
    """Return the keys whose new values have a fake tensor of the run, with the earlier values."""
    both = [(key, value, contents.get(key, MISSING)) for key, value in now.items()]
    return [
        (k, before) for k, value, before in both if value is not before and holds(value, is_left)
    ]


def holds(value: object, is_left: IsLeft) -> bool:
    """Return True if a value is a fake tensor of the run, or contains one."""
    visits = walk([("", value)], into_functions=False)
    return any(isinstance(v.value, FakeTensor) and is_left(v.value) for v in visits)


def _is_atom(value: object) -> bool:
    return isinstance(value, (type, ModuleType, FunctionType, Tensor, nn.Module, str, int, float))


def _remove_from_cache(cache: functools._lru_cache_wrapper[Any], is_left: IsLeft) -> None:
    """Remove fake tensors from an lru_cache. A cache with a `maxsize` is cleared."""
    referents = gc.get_referents(cache)
    for results in referents:
        if type(results) is dict and results is not vars(cache):
            for key in [key for key, value in results.items() if holds((key, value), is_left)]:
                del results[key]
    if any(holds(each, is_left) for each in referents if type(each) is not dict):
        cache.cache_clear()


def remove_left_behind(
    names: Namespaces, is_left: IsLeft, is_any_left: Callable[[], bool]
) -> list[Left]:
    """Remove the fake tensors that a run left outside of its modules.

    Args:
        names: the variables as they were before the run.
        is_left: returns True for a fake tensor of the run.
        is_any_left: returns True if a fake tensor of the run may exist.

    Returns:
        The tensors that objects other than caches and containers still reference.
    """
    if not is_any_left():
        return []
    names.remove(is_left)
    if not is_any_left():
        return []
    for thaw in _thaws:  # the collector finds no references from frozen objects
        thaw()
    gc.collect(1)  # frees reference cycles of the run
    left = [t for t in gc.get_objects() if type(t) is FakeTensor and is_left(t)]
    not_removed = list(_remove(left))
    if _thaws:
        gc.freeze()
    return not_removed


def run_on_fakes(modules: Iterable[nn.Module], run: Callable[[FakeTensorMode], T]) -> T:
    """Return `run(mode)` under a mode of fake tensors, and restore caches afterwards."""
    names, modes = Namespaces(modules), [FakeTensorMode(allow_non_fake_inputs=True)]
    mode, undo = weakref.ref(modes[0]), undo_draws_of_process()
    try:
        with modes[0]:
            return run(modes[0])
    finally:
        modes.clear()
        for each in undo:
            each()
        remove_left_behind(names, lambda t: t.fake_mode is mode(), lambda: mode() is not None)


def _remove(values: list[Any], depth: int = 0) -> Iterator[Left]:
    """Remove values from every cache and container of the process. Yield their other holders."""
    pairs = _holders(values)
    mappings = [holder for holder, _ in pairs if type(holder) in MAPPINGS]
    owners = {
        id(held): owner
        for owner, attributes in (_holders(mappings) if mappings else [])
        for held in attributes
        if attributes_of(owner) is held
    }
    tuples = []
    for holder, held in pairs:
        removed = {id(value) for value in held}
        if isinstance(holder, _CACHE):
            holder.cache_clear()
        elif id(holder) in owners:
            yield from _attributes_among(removed, owners[id(holder)])
        elif type(holder) in MAPPINGS:
            for key in [k for k, value in holder.items() if {id(k), id(value)} & removed]:
                del holder[key]
        elif type(holder) in CONTAINERS:
            put(holder, [value for value in holder if id(value) not in removed])
        elif isinstance(holder, tuple):
            tuples.append(holder)
        else:
            yield from _attributes_among(removed, holder)
    del pairs, mappings, owners  # would be found as holders of the tuples
    if tuples and depth < _DEEP:
        yield from _remove(tuples, depth + 1)


def _holders(values: list[Any]) -> list[tuple[Any, list[Any]]]:
    """Return the objects that reference any of the values, each with those values.

    The collector compares each reference in the process with each value, in C. A failed run of a
    large model leaves thousands of tensors. Then a set of all values is faster, although in Python.
    """
    ids = {id(value) for value in values}
    found = (
        gc.get_referrers(*values)
        if len(ids) <= _FEW
        else [t for t in gc.get_objects() if not ids.isdisjoint(map(id, gc.get_referents(t)))]
    )
    holders = [
        each
        for each in found
        if each is not values and not isinstance(each, (FakeTensor, FrameType, CellType))
    ]
    return [(each, [v for v in gc.get_referents(each) if id(v) in ids]) for each in holders]


def _attributes_among(sought: set[int], owner: object) -> Iterator[Left]:
    """Yield the attributes of an object that are among the values with these ids."""
    for name, value in attributes_of(owner).items():
        if id(value) in sought:
            t = next((t for t in tree_leaves(value) if isinstance(t, FakeTensor)), None)
            if t is not None:
                yield Left(t, f"{type(owner).__name__}, under {name!r}")


def content_of(cell: CellType) -> Any:
    """Return the value of a closure cell, or `MISSING` if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def set_content(cell: CellType, value: object) -> None:
    """Set the value of a closure cell, or empty the cell if `value` is `MISSING`."""
    if value is MISSING:
        with contextlib.suppress(ValueError):
            del cell.cell_contents
    else:
        cell.cell_contents = value


@contextlib.contextmanager
def few_objects() -> Iterator[None]:
    """Freeze existing objects, so that garbage collections in a with block do not visit them."""
    if gc.get_freeze_count():  # the caller has frozen objects, which `gc.unfreeze` would thaw too
        yield
        return
    gc.collect()
    gc.freeze()
    _thaws.append(gc.unfreeze)
    try:
        yield
    finally:
        _thaws.pop()
        gc.unfreeze()
