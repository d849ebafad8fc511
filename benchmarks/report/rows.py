"""Reads the rows of a result: their shapes, times, peaks and curves.

A row with a `shape`, a `time / ...` and a `peak (MiB)` is a point in the picture of its shape. A
list of pairs in a row is a curve of memory over time, [seconds, MiB] each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from storage_ops import quantities
from storage_ops.quantities import MIB

Result = dict[str, Any]
Row = dict[str, Any]
IN_MIB = "(MiB)"  # suffix of the names of memory columns
PEAK = f"peak {IN_MIB}"
# A case is ours if it begins with one of these, or has a feature of ours, as in "compile+all".
OURS = ("storage_ops", "discard")
OUR_FEATURES = {
    "all", "linear_cross_entropy", "output_discard", "selective_checkpoint", "full_checkpoint",
    "autochunk",
}  # fmt: skip
HEAD = ("stem", "commit", "day", "hardware", "torch", "storage_ops", "python")


def load(paths: Iterable[Path]) -> list[Result]:
    """Return the results in files, each with one result or a list of them."""
    results: list[Result] = []
    for path in paths:
        content = json.loads(path.read_text())
        results += content if isinstance(content, list) else [content]
    return results


def head(result: Result) -> Row:
    """Return the entries that all rows of a result share."""
    return {key: result[key] for key in HEAD if key in result}


def is_ours(case: str) -> bool:
    """Return True if a case is ours, and not a peer or a floor."""
    parts = case.split("+")
    return case.startswith(OURS) or ("liger" not in parts and not OUR_FEATURES.isdisjoint(parts))


def shapes(result: Result) -> dict[str, list[Row]]:
    """Return rows by shape, in order."""
    by_shape: dict[str, list[Row]] = {}
    for row in result["rows"]:
        by_shape.setdefault(row.get("shape", ""), []).append(row)
    return by_shape


def at(rows: list[Row], case: str) -> Row | None:
    """Return the row of a case, or None."""
    return next((row for row in rows if row["case"] == case), None)


def time_of(row: Row) -> str | None:
    """Return the first column that compares times."""
    return next((key for key in row if key.startswith("time / ")), None)


def curve_of(row: Row) -> list[list[float]]:
    """Return the curve in a row, or an empty list."""
    lists = (value for value in row.values() if isinstance(value, list))
    return next((values for values in lists if isinstance(values[0], list)), [])


def points(rows: list[Row]) -> list[tuple[str, float, float]]:
    """Return case, MiB and time of the rows that have both numbers."""
    with_both = []
    for row in rows:
        column = time_of(row)
        if column and isinstance(row.get(PEAK), float) and isinstance(row[column], float):
            with_both.append((row["case"], row[PEAK], row[column]))
    return with_both


def unit_of(rows: Iterable[Row]) -> tuple[str, float]:
    """Return the common unit of the memory columns of rows, and its MiB."""
    sizes = (value for row in rows for key, value in row.items() if key.endswith(IN_MIB))
    most = max((size for size in sizes if isinstance(size, (int, float))), default=0)
    unit, size = quantities.unit_of(most * MIB)
    return unit, size / MIB


def in_readable_units(rows: list[Row]) -> list[Row]:
    """Return rows whose memory columns are in GiB, with four digits, if one exceeds 10,000 MiB."""
    unit, size = unit_of(rows)
    if size == 1:
        return rows

    def cell(key: str, value: Any) -> tuple[str, Any]:
        if not key.endswith(IN_MIB):
            return key, value
        number = isinstance(value, (int, float))
        return key.replace("MiB", unit), float(f"{value / size:.4g}") if number else value

    return [dict(cell(key, value) for key, value in row.items()) for row in rows]


def columns(rows: list[dict[str, Any]]) -> list[str]:
    """Return the columns of a table of these rows: all keys whose values are no lists."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if not any(isinstance(row.get(key), list) for row in rows)]
