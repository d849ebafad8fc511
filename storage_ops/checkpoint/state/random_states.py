"""The states of random number generators of Python and numpy, which torch does not know."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

State = tuple[Callable[[], Any], Callable[[Any], object]]
"""How to get and set the state of a generator."""


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
