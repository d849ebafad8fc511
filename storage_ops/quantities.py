"""Reads and writes bytes and other quantities, and tables of them."""

from __future__ import annotations

import io
import math
import re
from fractions import Fraction

from storage_ops.optional import required

WIDTH = 110  # characters of a table without a terminal, as wide as a page of the docs
MIB = 1 << 20
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_NUMBER = r"(\d+\.?\d*|\.\d+)(E[+-]?\d+)?"
_FORM = re.compile(rf"\s*{_NUMBER}\s*([KMGT]?)((?<=[KMGT])IB?|B?)\s*", re.IGNORECASE)


def next_multiple(size: int, step: int) -> int:
    """Return the smallest multiple of a step that is at least this size."""
    return -(-size // step) * step


def parse_bytes(value: int | float | str, argument: str) -> int:
    """Return the number of bytes of a number or a text such as "400MiB", "0.5 GiB" or "2e8".

    "GB" is decimal, but "G" means GiB, as usual for memory. A number without a unit is rounded
    down, so that `0.9 * total` works. Below 1 KiB it must be whole, because 1.5 probably lacks a
    unit.

    Raises:
        TypeError, ValueError: the value is not a number of bytes. The error begins with `argument`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(
            f"{argument} is {value!r}. Expected a number of bytes, or text such as '400MiB'."
        )
    match = _FORM.fullmatch(str(value))
    parts = match.groups(default="") if match is not None else ("nan", "", "", "")
    number, exponent, prefix, ending = parts
    size = float(number + exponent)
    if not prefix and size < 1024 and not size.is_integer() and math.isfinite(size):
        raise ValueError(
            f"{argument} is {value!r}. Expected a whole number of bytes, or text with a unit, "
            f"such as '{number}{exponent}GiB'. A share of the memory is not a budget."
        )
    if not math.isfinite(size):
        raise ValueError(
            f"{argument} is {value!r}. Expected a number of bytes, 0 or more, with or without a "
            "unit, such as 400MiB, 0.5GiB or 2e8."
        )
    if not size:  # a fraction of 0e99999999 or 1e-99999999 would have that many digits
        return 0
    unit = (1000 if ending.upper() == "B" else 1024) ** _POWERS[prefix.upper()]
    return int(Fraction(number + exponent) * unit)


def readable(count: int, up: bool = False) -> str:
    """Return a number of bytes with a unit. With `up`, round up."""
    power = min((max(count, 1).bit_length() - 1) // 10, 4)
    unit = 1024**power
    scale = 100 if count < 10 * unit else 10
    # Use integers, because a float would round the count.
    scaled = -(-count * scale // unit) if up else (2 * count * scale + unit) // (2 * unit)
    return f"{scaled / scale:.15g} {('', 'Ki', 'Mi', 'Gi', 'Ti')[power]}B"


def unit_of(most: float) -> tuple[str, int]:
    """Return the unit of an axis or a table whose largest value is `most` bytes, and its size."""
    return ("GiB", 1 << 30) if most > 10_000 * MIB else ("MiB", MIB)


def metric(value: float, unit: str) -> str:
    """Return a quantity with four digits and a decimal prefix. Long times stay in seconds."""
    most = 0 if unit == "s" else 5
    power = math.floor(math.log10(abs(value)) / 3 + 1e-9) if value else 0
    power = max(-2, min(power, most))
    return f"{value / 1000.0**power:.4g} {'µm kMGTP'[power + 2].strip()}{unit}"


class Tabular:
    """An object that prints as the table of its `__rich__`. A notebook shows it as HTML."""

    def __str__(self) -> str:
        Console = required("rich.console", "a table").Console

        console = Console(file=io.StringIO(), width=WIDTH, no_color=True)
        console.print(self)
        return console.file.getvalue()  # type: ignore[no-any-return]

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        from storage_ops.tables import html_of

        return html_of(self.__rich__())  # type: ignore[attr-defined]


class InLines:
    """An object whose text is a title and lines of columns. A notebook shows a table."""

    def _repr_html_(self) -> str:
        required("rich", "a table")
        from storage_ops.tables import html_of_lines

        return html_of_lines(str(self))
