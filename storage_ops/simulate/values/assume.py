"""The caller's assumptions about unknown values, and the lines of code that need these values."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType

import torch

from storage_ops._callers import users_place

# Ops by their usual names.
_NAMES = {
    "_local_scalar_dense": "item",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "_coalesce": "coalesce",
}
# The assumption that the caller must make, by the kind of op.
_EXPECTED = {
    "condition": "the share of its elements that is True, as a float, or their number, as an int",
    "choice": "the share of its choices that the fullest option gets, as a float, or their number",
    "size": "the share of the largest size that it takes, as a float, or its size, as an int",
    "length": "how many elements it returns, as an int",
    "value": "the number that is read",
}


@dataclass(frozen=True)
class Source:
    """An op whose outcome a simulation does not know.

    Attributes:
        name: its usual name, such as "topk".
        kind: the kind of assumption: "condition", "choice", "size", "length" or "value", or
            "nothing" if none is possible.
        line: the line of the caller's code.
    """

    name: str
    kind: str
    line: str

    @staticmethod
    def here(func: object, kind: str) -> Source:
        """Return a source for the op that runs now."""
        return Source(name_of(func), kind, users_line(sys._getframe(1)))


class Assumption:
    """The argument `assume` of `estimate`, after checks."""

    def __init__(self, assume: float | Mapping[str, float] | None) -> None:
        """Check the argument. Raise a ValueError or TypeError if it is not an assumption."""
        self._of: dict[str, float] = {}
        self._default: float | None = None
        if isinstance(assume, Mapping):
            for name, number in assume.items():
                if not (isinstance(name, str) and hasattr(torch.ops.aten, name)):
                    raise ValueError(
                        f"estimate: `assume` has the key {name!r}. Expected the name of an op of "
                        "torch, such as 'topk', 'gt', 'unique' or 'item'."
                    )
                argument = f"`assume[{name!r}]`"
                if name == "item" and not isinstance(number, (bool, int, float)):
                    raise TypeError(f"estimate: {argument} is {number!r}. Expected a number.")
                self._of[name] = number if name == "item" else _share(argument, number)
        elif assume is not None:
            self._default = _share("`assume`", assume)

    @property
    def is_empty(self) -> bool:
        """Return True if the caller assumes nothing."""
        return not self._of and self._default is None

    def count(self, source: Source, total: int) -> int | None:
        """Return how many of `total` elements an op takes. None without an assumption."""
        assumed = self._of.get(source.name, self._default)
        if assumed is None:
            return None
        if isinstance(assumed, float):
            return round(assumed * total)
        if assumed > total:
            raise ValueError(
                f"estimate: `assume` says {assumed} elements for {source.name} at {source.line}. "
                f"Expected at most the {total} that it has there."
            )
        return assumed

    def length(self, source: Source) -> int | None:
        """Return the assumed number of results of an op without an upper bound, or None."""
        assumed = self._of.get(source.name)
        return assumed if isinstance(assumed, int) else None

    def value(self) -> float | None:
        """Return the number that `item()` and similar functions return, or None."""
        return self._of.get("item")


def _share(argument: str, number: object) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(
            f"estimate: {argument} is {number!r}. Expected a share (a float from 0.0 to 1.0) or a "
            "count (an int)."
        )
    if not number >= 0 or (isinstance(number, float) and not number <= 1):
        raise ValueError(
            f"estimate: {argument} is {number!r}. Expected a share (a float from 0.0 to 1.0) or a "
            "count (an int of 0 or more)."
        )
    return number


def unanswered(source: Source, cause: Source | None) -> RuntimeError:
    """Return the error for an op that needs unknown values without an assumption."""
    reported = cause if cause is not None and cause.kind in ("condition", "choice") else source
    origin = "" if reported is source else f", which depend on {reported.name} at {reported.line}"
    key = "item" if reported.kind == "value" else reported.name
    remedy = "Leave that part out."
    if reported.kind != "nothing":
        remedy = f"Pass assume={{{key!r}: {_EXPECTED[reported.kind]}}}, or leave that part out."
    return RuntimeError(
        f"estimate: the simulated code needs the values of a tensor{origin}: {source.name} at "
        f"{source.line}. A simulation does not have them. {remedy}"
    )


def name_of(func: object) -> str:
    """Return the usual name of an op."""
    schema = getattr(func, "_schema", None)
    name = schema.name.split("::")[-1] if schema is not None else str(func)
    return _NAMES.get(name, name.rstrip("_"))


def users_line(at: FrameType | TracebackType | None) -> str:
    """Return the innermost line outside torch and this package, above a frame or in a traceback."""
    place = users_place(at)
    if place is None:
        return "a line of torch"
    file, line = place[0].f_code.co_filename, place[1]
    text = linecache.getline(file, line).strip()
    return f"{file}:{line} ({text})" if text else f"{file}:{line}"
