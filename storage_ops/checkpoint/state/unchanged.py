"""Put back what modules and other objects hold, after a run on fake tensors.

A module that runs on fake tensors stores them where it would store real ones. Examples are a cache
that it fills at the first call, and a state for the next. Training that finds them goes on with
them, and computes nothing.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from storage_ops.checkpoint.state.containers import Undo, copy_of, put
from storage_ops.foundation.walk import (
    CONTAINER,
    CONTAINERS,
    GENERATOR,
    MODULE,
    OBJECT,
    TENSOR,
    attributes_of,
    is_opaque,
    walk,
)

# How to get and set the state of a generator.
State = tuple[Callable[[], Any], Callable[[Any], object]]


@contextlib.contextmanager
def unchanged(*roots: object) -> Iterator[None]:
    """Let objects hold afterwards what they hold now, whatever happens in between.

    This covers the attributes of modules, with all modules in them, of tensors, and of other
    objects except torch's and Python's own. It covers the contents of containers, the states of
    generators of Python and numpy, with those of the process, and all that of what these hold.
    Tensors keep what is written to them.
    """
    undo = [*undo_changes(roots), *undo_draws_of_process()]
    try:
        with without_cached_parametrizations():
            yield
    finally:
        for each in undo:
            each()


def undo_changes(roots: Iterable[Any]) -> Undo:
    """Return functions that give objects their attributes and items of now back."""
    found: Undo = []
    for value in _reached(roots):
        if isinstance(value, CONTAINERS):
            found.append(partial(put, value, copy_of(value)))
        elif (undo := undo_draws(value)) is not None:
            found.append(undo)
    return found


def _reached(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the containers and generators that are reached, each once.

    The attributes of an object are a container.
    """
    seen = set[int]()
    for visit in walk((("", root) for root in roots), into_functions=False):
        value, found = visit.value, list[Any]()
        if visit.kind == CONTAINER:
            found = [value]
        elif visit.kind == MODULE:
            attributes = vars(value)
            found = [attributes, *(v for v in attributes.values() if type(v) in CONTAINERS)]
        elif visit.kind == GENERATOR:
            found = [value]
        elif visit.kind == TENSOR or (visit.kind == OBJECT and not is_opaque(type(value))):
            found = [attributes_of(value)]
        for each in found:
            if id(each) not in seen:
                seen.add(id(each))
                yield each


def without_cached_parametrizations() -> contextlib.AbstractContextManager[None]:
    """Let parametrized weights be computed at each use, and nothing of it be remembered.

    Weights that `torch.nn.utils.parametrize.cached` remembers belong to the parameters and the
    graph that were there, and to no others.
    """
    return _cached_parametrizations(0)


def own_cached_parametrizations() -> contextlib.AbstractContextManager[None]:
    """Let a block that may run in `torch.nn.utils.parametrize.cached` remember its own weights."""
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
    """Return the places of a module that have tensors: where each is, its name and the tensor.

    Parameters come first, then buffers. Each place is there once, however many names it has; a
    tensor in several places is there several times.
    """
    modules = list(module.modules())
    held: list[dict[str, Any]] = [*(m._parameters for m in modules), *(m._buffers for m in modules)]
    return [(where, name, t) for where in held for name, t in where.items() if t is not None]


@contextlib.contextmanager
def replaced(places: Iterable[Place]) -> Iterator[None]:
    """Have other tensors in places of a module."""
    before: list[Place] = []
    try:
        with without_cached_parametrizations():
            for where, name, t in places:
                before.append((where, name, where[name]))
                where[name] = t
            yield
    finally:
        for where, name, t in reversed(before):
            where[name] = t


def state_of(value: object) -> State | None:
    """Return how to get and set the state of a generator; None for other values.

    Args:
        value: a `random.Random`, a `numpy.random.Generator` or a `numpy.random.RandomState`.
    """
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
    """Return a function that gives a generator its state of now back; None for other values."""
    found = state_of(value)
    if found is None:
        return None
    get, put = found
    return partial(put, get())


def undo_draws_of_process() -> list[Callable[[], None]]:
    """Return functions that give `random` and `numpy.random` their states of now back."""
    state = random.getstate()
    found: list[Callable[[], None]] = [lambda: random.setstate(state)]
    numpy: Any = sys.modules.get("numpy.random")
    if hasattr(numpy, "get_state"):
        of_numpy = numpy.get_state()
        found.append(lambda: numpy.set_state(of_numpy))
    return found
