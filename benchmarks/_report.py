"""Benchmark results as Markdown and pictures.

A row with a `shape`, a `time / ...` and a `peak (MiB)` is a point in the picture of its shape; a
list of pairs in a row is a curve of memory over time, [seconds, MiB] each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Result = dict[str, Any]
Row = dict[str, Any]
PEAK = "peak (MiB)"
# Cases are ours by how they begin, or by a part that a training job has, as in "compile+all".
OURS = ("storage_ops", "discard")
OUR_FEATURES = {
    "all", "linear_cross_entropy", "output_discard", "selective_checkpoint", "full_checkpoint",
    "autochunk",
}  # fmt: skip
HEAD = ("stem", "commit", "day", "hardware", "torch", "storage_ops", "python")


def load(paths: Iterable[Path]) -> list[Result]:
    """The results in files, each of one result or a list of them."""
    found: list[Result] = []
    for path in paths:
        content = json.loads(path.read_text())
        found += content if isinstance(content, list) else [content]
    return found


def head(result: Result) -> Row:
    """What every row of a result has in common."""
    return {key: result[key] for key in HEAD if key in result}


def is_ours(case: str) -> bool:
    """Whether a case is ours, not a peer or a floor."""
    parts = case.split("+")
    return case.startswith(OURS) or ("liger" not in parts and not OUR_FEATURES.isdisjoint(parts))


def shapes(result: Result) -> dict[str, list[Row]]:
    """Rows by shape, in order."""
    found: dict[str, list[Row]] = {}
    for row in result["rows"]:
        found.setdefault(row.get("shape", ""), []).append(row)
    return found


def time_of(row: Row) -> str | None:
    """The column that compares times; the first of several."""
    return next((key for key in row if key.startswith("time / ")), None)


def curve_of(row: Row) -> list[list[float]]:
    """The curve in a row; empty if there is none."""
    lists = (value for value in row.values() if isinstance(value, list))
    return next((values for values in lists if isinstance(values[0], list)), [])


def points(rows: list[Row]) -> list[tuple[str, float, float]]:
    """Case, MiB and time of the rows that have both."""
    found = []
    for row in rows:
        column = time_of(row)
        if column and isinstance(row.get(PEAK), float) and isinstance(row[column], float):
            found.append((row["case"], row[PEAK], row[column]))
    return found


def columns(rows: list[dict[str, Any]]) -> list[str]:
    """What a table of these rows shows: all keys, but for lists."""
    found = dict.fromkeys(key for row in rows for key in row)
    return [key for key in found if not any(isinstance(row.get(key), list) for row in rows)]


def cells(values: Iterable[Any]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(str(value) for value in values) + " |\n"


def markdown_table(rows: list[Row], drop: tuple[str, ...] = ()) -> str:
    """Rows as a Markdown table, without columns that are empty."""
    names = [
        name
        for name in columns(rows)
        if name not in drop and any(row.get(name, "") != "" for row in rows)
    ]
    rules = ["---" if name in ("shape", "case", "plan") else "---:" for name in names]
    lines = [cells([row.get(name, "") for name in names]) for row in rows]
    return cells(names) + cells(rules) + "".join(lines)


def ratio_line(rows: list[Row]) -> str:
    """Ours over the best peer of one shape; empty where there is no peer.

    The best in time is the fastest; at its memory or less, ours is the fastest that fits, if one
    does. The best in memory is the smallest; at its time or less, ours is the smallest.
    """
    found = points(rows)
    ours = [p for p in found if is_ours(p[0])]
    peers = [p for p in found if not is_ours(p[0]) and not p[0].startswith("floor")]
    if not ours or not peers:
        return ""
    fastest = min(peers, key=lambda p: (p[2], p[1]))
    smallest = min(peers, key=lambda p: (p[1], p[2]))
    quick = min(ours, key=lambda p: (p[2], p[1]))
    small = min(ours, key=lambda p: (p[1], p[2]))
    return (
        f"Fastest peer: {fastest[0]}; our fastest ({quick[0]}) takes "
        f"{quick[2] / fastest[2]:.2f} of its time and {quick[1] / fastest[1]:.2f} of its memory.\n"
        f"Smallest peer: {smallest[0]}; our smallest ({small[0]}) takes "
        f"{small[1] / smallest[1]:.2f} of its memory and {small[2] / smallest[2]:.2f} of its time."
        "\n"
    )


def provenance_line(result: Result) -> str:
    """Where and with what a result was measured."""
    peers = ", ".join(f"{k} {v}" for k, v in result.get("packages", {}).items())
    return (
        f"{result['hardware']}, torch {result['torch']}, storage_ops {result['storage_ops']} at "
        f"{result['commit']}, {result.get('day', '')}; storage path {result['storage_path']}, row "
        f"kernel {result['row_kernel']}{f'; {peers}' if peers else ''}.\n"
    )


def section(result: Result, pictures: list[Path]) -> str:
    """One benchmark: its pictures, a table per shape, and what was left out."""
    text = [f"## {result['stem']}\n", provenance_line(result)]
    if result.get("stale"):
        text.append("**Stale**: the code has changed since.\n")
    if result.get("note"):
        text.append(f"{result['note']}\n")
    if "running" in result:
        text.append(f"**It did not reach its end**; it stopped at: {result['running']}.\n")
    text += [f"![{picture.stem}]({picture.name})\n" for picture in pictures]
    for shape, rows in shapes(result).items():
        text.append(f"### {shape}\n" if shape else "")
        text.append(markdown_table(rows, ("shape",)))
        text.append(ratio_line(rows))
    if result.get("skipped"):
        text.append("Left out:\n")
        text.append("".join(f"- {k}: {v}\n" for k, v in result["skipped"].items()))
    return "\n".join(part for part in text if part)


def write(out: Path, results: list[Result], console: Console) -> None:
    """Write report.md, and its pictures where matplotlib is installed."""
    try:
        from benchmarks import _pictures
    except ImportError as error:
        console.print(f"no pictures: {error}; run: pip install matplotlib")
        drawn: dict[str, list[Path]] = {}
    else:
        drawn = {result["stem"]: _pictures.draw(out, result) for result in results}
    sections = [section(result, drawn.get(result["stem"], [])) for result in results]
    where = f" on {results[0]['hardware']}" if results else ""
    (out / "report.md").write_text(f"# Benchmarks{where}\n\n" + "\n".join(sections))
