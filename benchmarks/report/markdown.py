"""A report on results: a section for each, with its pictures and tables, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.rows import Result, Row, columns, is_ours, points, shapes

if TYPE_CHECKING:
    from rich.console import Console

# Titles of columns with words instead of numbers.
WORDS = ("shape", "case", "on", "plan", "because of", "class", "batch", "answer")


def table(titles: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table without its empty columns."""
    used = [k for k in range(len(titles)) if k == 0 or any(line[k] != "" for line in lines)]
    rules = ["---" if k == 0 or titles[k] in WORDS else "---:" for k in used]
    cells = [[line[k] for k in used] for line in (titles, *lines)]
    return "".join(map(_line, [cells[0], rules, *cells[1:]]))


def _line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"


def table_of_rows(rows: list[Row], drop: tuple[str, ...] = ()) -> str:
    """Return rows as a table whose titles are their keys."""
    names = [name for name in columns(rows) if name not in drop]
    return table(names, [[row.get(name, "") for name in names] for row in rows])


def ratio_line(rows: list[Row]) -> str:
    """Return ours over the best peer of one shape, or "" without a peer.

    The fastest of ours is compared with the fastest peer, the smallest with the smallest peer.
    """
    all_points = points(rows)
    ours = [p for p in all_points if is_ours(p[0])]
    peers = [p for p in all_points if not is_ours(p[0]) and not p[0].startswith("floor")]
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
    """Return the hardware and versions of a result."""
    peers = ", ".join(f"{k} {v}" for k, v in result.get("packages", {}).items())
    return (
        f"{result['hardware']}, torch {result['torch']}, storage_ops {result['storage_ops']} at "
        f"{result['commit']}, {result.get('day', '')}; storage path {result['storage_path']}, row "
        f"kernel {result['row_kernel']}{f'; {peers}' if peers else ''}.\n"
    )


def section(result: Result, drawn: list[Path]) -> str:
    """Return the section of one benchmark: pictures, a table per shape, and the skipped cases."""
    text = [f"## {result['stem']}\n", provenance_line(result)]
    if result.get("stale"):
        text.append("**Stale**: the code has changed since.\n")
    if result.get("note"):
        text.append(f"{result['note']}\n")
    if "running" in result:
        text.append(f"**It did not reach its end**; it stopped at: {result['running']}.\n")
    text += [f"![{picture.stem}]({picture.name})\n" for picture in drawn]
    for shape, rows in shapes(result).items():
        text.append(f"### {shape}\n" if shape else "")
        text.append(table_of_rows(rows, ("shape",)))
        text.append(ratio_line(rows))
    if result.get("skipped"):
        text.append("Left out:\n")
        text.append("".join(f"- {k}: {v}\n" for k, v in result["skipped"].items()))
    return "\n".join(part for part in text if part)


def write(out: Path, results: list[Result], console: Console) -> None:
    """Write report.md, and its pictures if matplotlib is installed."""
    try:
        from benchmarks.report import pictures
    except ImportError as error:
        console.print(f"no pictures: {error}; run: pip install matplotlib")
        drawn: dict[str, list[Path]] = {}
    else:
        drawn = {result["stem"]: pictures.draw(out, result) for result in results}
    sections = [section(result, drawn.get(result["stem"], [])) for result in results]
    where = f" on {results[0]['hardware']}" if results else ""
    (out / "report.md").write_text(f"# Benchmarks{where}\n\n" + "\n".join(sections))
