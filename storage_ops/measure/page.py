"""One HTML page about memory: a picture, tables and text, without other files or scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from storage_ops.measure.plot import PALETTE, Stack, budget_label, stack_of, top_of
from storage_ops.quantities import readable

if TYPE_CHECKING:
    from storage_ops.measure.measurement import Measurement
    from storage_ops.tables import Grid

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 360, 80, 30
_STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #ccc; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #181818; --line: #444; } }
body { color: var(--ink); background: var(--paper); font: 16px/1.4 sans-serif; margin: 2em auto;
  max-width: 60em; padding: 0 1em; }
svg { width: 100%; } svg text { fill: var(--ink); font-size: 13px; }
svg .axis { stroke: var(--line); } svg .budget { stroke: var(--ink); stroke-dasharray: 6 4; }
table { border-collapse: collapse; margin: 2em 0 0; } caption { font-weight: bold; }
th, td { border-bottom: 1px solid var(--line); padding: .2em .8em; }
li { list-style: none; } li span { display: inline-block; width: 1em; height: 1em; }
pre { white-space: pre-wrap; }
"""


def of(measurement: Measurement, budget: int, tables: Sequence[Grid], advice: str = "") -> str:
    """Return a page with memory over time by owner, the tables, and advice below them."""
    stack = stack_of(measurement)
    title = escape(stack.title)
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        _picture(stack, budget),
        _legend(stack),
        *(table.html() for table in tables),
        f"<pre>{escape(advice)}</pre>" if advice else "",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _picture(stack: Stack, budget: int) -> str:
    """Return stacked areas as SVG, with a line at the budget if it is near."""
    top = top_of(stack, budget)
    right, height = _WIDTH - 10, _HEIGHT - _BOTTOM

    def x(share: float) -> str:
        return f"{_LEFT + share / 100 * (right - _LEFT):.1f}"

    def y(level: float) -> str:
        return f"{height * (1 - level / top):.1f}"

    lines = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><title>{escape(stack.title)}</title>'
    ]
    below = [0.0] * len(stack.moments)
    for (owner, area), colour in zip(stack.areas.items(), PALETTE, strict=False):
        above = [low + more for low, more in zip(below, area, strict=True)]
        points = _steps(stack.moments, above) + _steps(stack.moments, below)[::-1]
        path = " ".join(f"{x(share)},{y(level)}" for share, level in points)
        lines.append(f'<polygon points="{path}" fill="{colour}"><title>{escape(owner)}</title>')
        lines.append("</polygon>")
        below = above
    for part in range(5):
        level = top * part / 4
        label = readable(int(level * stack.size))
        lines.append(
            f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{y(level)}" y2="{y(level)}"/>'
        )
        lines.append(
            f'<text x="{_LEFT - 6}" y="{y(level)}" dy="1em" text-anchor="end">{label}</text>'
        )
    if budget / stack.size <= top:
        at = y(budget / stack.size)
        lines.append(f'<line class="budget" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
    words = f"allocations and releases of the step, in order; {budget_label(stack, budget)}"
    lines.append(f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{escape(words)}</text></svg>')
    return "\n".join(lines)


def _steps(moments: Sequence[float], levels: Sequence[float]) -> list[tuple[float, float]]:
    """Return the corners of a line that stays at each level until the next moment."""
    corners: list[tuple[float, float]] = []
    for moment, level in zip(moments, levels, strict=True):
        if corners:
            corners.append((moment, corners[-1][1]))
        corners.append((moment, level))
    return corners


def _legend(stack: Stack) -> str:
    items = [
        f'<li><span style="background: {colour}"></span> {escape(owner)}</li>'
        for owner, colour in zip(stack.areas, PALETTE, strict=False)
    ]
    return "<ul>" + "\n".join(reversed(items)) + "</ul>"
