"""Checks the values of a saved plan. A wrong one raises a TypeError or a ValueError."""

from __future__ import annotations

import math
from typing import Any

_WORDS = {
    str: "a text", int: "an integer", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip


def checked(value: object, name: str, kind: type) -> Any:
    """Return a value of the JSON type `kind`. A list may be a tuple, as before it was saved."""
    if type(value) not in ((list, tuple) if kind is list else (kind,)):
        raise TypeError(f"`{name}` is {value!r}. Expected {_WORDS[kind]}.")
    return value


def texts(value: object, name: str) -> tuple[str, ...]:
    """Return a list of texts as a tuple."""
    return tuple(checked(item, name, str) for item in checked(value, name, list))


def count(value: object, name: str) -> int:
    """Return a number of bytes or other things."""
    number: int = checked(value, name, int)
    if number < 0:
        raise ValueError(f"`{name}` is {number}. Expected 0 or more.")
    return number


def seconds(value: object, name: str) -> float:
    """Return a finite time. A difference of times may be negative."""
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"`{name}` is {value!r}. Expected a finite number of seconds.")
    return float(value)  # type: ignore[arg-type]
