"""The states of random number generators of Python and numpy, which torch does not know."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any


def undo_draws(value: object) -> Callable[[], None] | None:
    """Return a function that gives a generator its state of now back; None for other values.

    Args:
        value: a `random.Random`, a `numpy.random.Generator` or a `numpy.random.RandomState`.
    """
    if isinstance(value, random.Random):
        if isinstance(value, random.SystemRandom):  # has no state
            return None
        state = value.getstate()
        return lambda: value.setstate(state)
    numpy: Any = sys.modules.get("numpy.random")
    generator: Any = value
    if isinstance(value, getattr(numpy, "RandomState", ())):
        found = generator.get_state()
        return lambda: generator.set_state(found)
    if isinstance(value, getattr(numpy, "Generator", ())):
        bits = generator.bit_generator
        now = bits.state
        return lambda: setattr(bits, "state", now)
    return None


def undo_draws_of_process() -> list[Callable[[], None]]:
    """Return functions that give `random` and `numpy.random` their states of now back."""
    state = random.getstate()
    found: list[Callable[[], None]] = [lambda: random.setstate(state)]
    numpy: Any = sys.modules.get("numpy.random")
    if hasattr(numpy, "get_state"):
        of_numpy = numpy.get_state()
        found.append(lambda: numpy.set_state(of_numpy))
    return found
