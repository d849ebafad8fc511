"""Restore the attributes of modules and other objects after a run on fake tensors.

A module that runs on fake tensors stores them where it would store real tensors. Examples are a
cache that the first call fills, and a state for the next call. Training would then use the fake
tensors, and compute no values.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from storage_ops.checkpoint.state.containers import Undo, copy_of, put
from storage_ops.foundation.values import (
    CONTAINER,
    CONTAINERS,
    GENERATOR,
    MODULE,
    OBJECT,
    TENSOR,
    attributes_of,
    is_opaque,
)
from storage_ops.foundation.walk import walk

# Functions that get and set the state of a generator, or another setting.
State = tuple[Callable[[], Any], Callable[[Any], object]]


@contextlib.contextmanager
def unchanged(*roots: object) -> Iterator[None]:
    """Restore the state of objects after a with block.

    This restores the attributes of modules, submodules, tensors and other objects, except torch's
    and Python's own. It also restores the contents of containers, and random generators of torch,
    Python and numpy, including the global ones. The same is done for objects that these reference.
    Values that are written to tensors stay.
    """
    undo = [*undo_changes(roots), *undo_draws_of_process()]
    try:
        with without_cached_parametrizations():
            yield
    finally:
        for restore in undo:
            restore()


def undo_changes(roots: Iterable[Any]) -> Undo:
    """Return functions that restore the present attributes and items of objects."""
    undo: Undo = []
    for value in _reached(roots):
        if isinstance(value, CONTAINERS):
            undo.append(partial(put, value, copy_of(value)))
        elif (restore := undo_draws(value)) is not None:
            undo.append(restore)
    return undo


def _reached(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the containers and generators that are reached from `roots`, each once.

    The `__dict__` of an object is such a container.
    """
    seen = set[int]()
    for visit in walk((("", root) for root in roots), into_functions=False):
        value, parts = visit.value, list[Any]()
        if visit.kind == CONTAINER:
            parts = [value]
        elif visit.kind == MODULE:
            attributes = vars(value)
            parts = [attributes, *(v for v in attributes.values() if type(v) in CONTAINERS)]
        elif visit.kind == GENERATOR:
            parts = [value]
        elif visit.kind == TENSOR or (visit.kind == OBJECT and not is_opaque(type(value))):
            parts = [attributes_of(value)]
        for part in parts:
            if id(part) not in seen:
                seen.add(id(part))
                yield part


def without_cached_parametrizations() -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which each use of a parametrized weight computes it.

    Weights that `torch.nn.utils.parametrize.cached` keeps belong to other parameters and another
    graph.
    """
    return _cached_parametrizations(0)


def own_cached_parametrizations() -> contextlib.AbstractContextManager[None]:
    """Return a context manager that gives a block its own cache of parametrized weights.

    The cache is active if the block runs inside `torch.nn.utils.parametrize.cached`.
    """
    return _cached_parametrizations(parametrize._cache_enabled)


@contextlib.contextmanager
def _cached_parametrizations(enabled: int) -> Iterator[None]:
    module: Any = parametrize
    before = module._cache_enabled, module._cache
    module._cache_enabled, module._cache = enabled, {}
    try:
        yield
    finally:
        module._cache_enabled, module._cache = before


Place = tuple[dict[str, Any], str, Any]


def places_of(module: nn.Module) -> list[Place]:
    """Return each place of a tensor in a module: the dictionary, the name and the tensor.

    Parameters come first, then buffers. The places of a shared submodule are listed once. A tensor
    in several places is listed several times.
    """
    modules = list(module.modules())
    places: list[dict[str, Any]] = [m._parameters for m in modules]
    places += [m._buffers for m in modules]
    return [(where, name, t) for where in places for name, t in where.items() if t is not None]


@contextlib.contextmanager
def replaced(places: Iterable[Place]) -> Iterator[None]:
    """Replace the tensors in some places of a module during a with block."""
    before: list[Place] = []
    try:
        with without_cached_parametrizations():
            for where, name, t in places:
                before.append((where, name, where[name]))
                where[name] = t
            yield
    finally:
        try:
            _put_back(before)
        except BaseException:  # an interrupt; a module without its parameters would not be trained
            _put_back(before)
            raise


def _put_back(places: list[Place]) -> None:
    for where, name, t in reversed(places):
        where[name] = t


def state_of(value: object) -> State | None:
    """Return functions that get and set the state of a generator; None for other values.

    Args:
        value: a `torch.Generator`, a `random.Random`, a `numpy.random.Generator` or a
            `numpy.random.RandomState`.
    """
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        has_state = not isinstance(value, random.SystemRandom)
        return (value.getstate, value.setstate) if has_state else None
    numpy: Any = sys.modules.get("numpy.random")
    generator: Any = value
    if isinstance(value, getattr(numpy, "RandomState", ())):
        return generator.get_state, generator.set_state
    if isinstance(value, getattr(numpy, "Generator", ())):
        bits = generator.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None


def undo_draws(value: object) -> Callable[[], object] | None:
    """Return a function that restores the present state of a generator; None for other values."""
    accessors = state_of(value)
    if accessors is None:
        return None
    get, put = accessors
    return partial(put, get())


def undo_draws_of_process() -> list[Callable[[], object]]:
    """Return functions that restore the present states of the global random generators.

    A run on fake tensors draws nothing from torch's, but its code may seed them.
    """
    state = random.getstate()
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    undo: list[Callable[[], object]] = [lambda: random.setstate(state)]
    undo += [partial(each.set_state, each.get_state()) for each in generators]
    numpy: Any = sys.modules.get("numpy.random")
    if hasattr(numpy, "get_state"):
        state_of_numpy = numpy.get_state()
        undo.append(lambda: numpy.set_state(state_of_numpy))
    return undo
