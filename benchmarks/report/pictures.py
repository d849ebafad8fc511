"""Pictures of benchmark results.

Their background is opaque, so that they are readable on a light and a dark page. The picture of
memory over time at the start of the README also has a variant for a dark page. A picture with
several panels has a narrow variant for phones. Colors are those of Okabe and Ito, which differ even
without color vision, and every peer has its own marker.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path as Curve
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import Bbox

from benchmarks.report.rows import (
    PEAK,
    Result,
    Row,
    curve_of,
    is_ours,
    points,
    shapes,
    time_of,
    unit_of,
)  # fmt: skip
from benchmarks.report.sizes import spelled_out
from storage_ops.cli.demo import picture
from storage_ops.measure.measurement import Measurement, Sample
from storage_ops.quantities import MIB

Point = tuple[str, float, float]
PAPER, INK, OURS = "#fbfaf7", "#222222", "#009e73"
NARROW = "-narrow"  # suffix of pictures that the site shows on a phone


class Page(NamedTuple):
    """Colors of a picture for a light or a dark page."""

    paper: str
    ink: str
    grid: str


LIGHT, DARK = Page(PAPER, INK, "#dddddd"), Page("#1e2129", "#e2e4e9", "#3a3f4b")
COLORS = ("#0072b2", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
FLOOR = "_"  # a line across the panel, not a point
# Possible offsets of a label from its point, in points, nearest first.
PLACES = [(dx * far, dy * far) for far in (1, 1.6, 2.4) for dx, dy in
          ((7, 6), (-7, 6), (7, -7), (-7, -7), (9, 0), (-9, 0), (0, 10), (0, -10))]  # fmt: skip
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "*", "h")


def draw(out: Path, result: Result) -> list[Path]:
    """Draw all pictures of a result into a folder. Return those for a light page."""
    panels = {shape: rows for shape, rows in shapes(result).items() if _has_both(rows)}
    drawn = []
    if panels:
        # One panel is small, with large letters, because people also read it on a phone.
        with rc_context({"font.size": 12} if len(panels) == 1 else {}):
            drawn.append(_save(_tradeoffs(panels), out / f"{result['stem']}.png"))
        if len(panels) > 1:
            figure = _tradeoffs(panels, is_narrow=True)
            _save(figure, out / f"{result['stem']}{NARROW}.png")
    curved = ([row for row in rows if curve_of(row)] for rows in shapes(result).values())
    curves = next(filter(None, curved), [])  # of one shape, because memory differs between shapes
    if len(curves) > 2:  # draw only the first case and our smallest
        ours = [row for row in curves if is_ours(row["case"])]
        curves = [curves[0], min(ours, key=lambda row: row[PEAK])]
    trained = [row for row in result["rows"] if "shares" in row]
    if trained:
        drawn.append(_save(_training(trained), out / f"{result['stem']}.png"))
    if curves:
        drawn.append(_save(_timelines(curves, LIGHT), out / f"{result['stem']}-memory.png"))
        _save(_timelines(curves, DARK), out / f"{result['stem']}-memory-dark.png", DARK.paper)
    return drawn


def demo(path: Path, result: Result) -> None:
    """Draw the demo's picture from its stored result, with losses if the result has them."""
    rows = list(shapes(result).values())[-1]
    losses = {row["case"]: row["losses"] for row in rows if "losses" in row}
    picture.draw(path, losses, {row["case"]: _measured(row) for row in rows})


def _measured(row: Row) -> Measurement:
    samples = [Sample(seconds, round(mib * MIB)) for seconds, mib in curve_of(row)]
    return Measurement(round(row[PEAK] * MIB), samples[-1].nbytes, samples)


def _has_both(rows: list[Row]) -> bool:
    """Return True if there is one of ours and another case with different memory."""
    all_points = points(rows)
    sizes = [mib for _, mib, _ in all_points]
    return len({is_ours(case) for case, _, _ in all_points}) == 2 and max(sizes) > 1.1 * min(sizes)


def _save(figure: Figure, path: Path, paper: str = PAPER) -> Path:
    # Without the version of matplotlib, the same results give the same file.
    figure.savefig(path, facecolor=paper, metadata={"Software": None})
    return path


def _tradeoffs(panels: dict[str, list[Row]], is_narrow: bool = False) -> Figure:
    """Draw time against peak memory, a panel per shape. Narrow panels are below each other."""
    wide = 1 if len(panels) == 1 or is_narrow else 2 if len(panels) <= 8 else 3
    tall = -(-len(panels) // wide)
    points_by_shape = {shape: points(rows) for shape, rows in panels.items()}
    peers = dict.fromkeys(
        case for each in points_by_shape.values() for case, _, _ in each if not is_ours(case)
    )
    floors = [case for case in peers if case.startswith("floor")]
    styles = dict.fromkeys(floors, (INK, FLOOR))
    styles |= {case: (COLORS[k % len(COLORS)], MARKERS[k % len(MARKERS)])
               for k, case in enumerate(c for c in peers if c not in floors)}  # fmt: skip
    width, height, dpi = 5.4 * wide, 3.7 * tall + 0.9, 110
    if is_narrow:  # the legend has a line for each peer
        width, height = 4.8, 3.4 * tall + 0.2 * (len(styles) + 2)
    elif wide == 1:
        width, height, dpi = 6.4, 4.6, 150
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    grid = figure.subplots(tall, wide, squeeze=False)
    for axes, (shape, rows) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, points_by_shape[shape], styles)
        axes.set_title(spelled_out(shape), fontsize="medium", color=INK)
        axes.set_ylabel(next(filter(None, map(time_of, rows)), ""))
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    handles = [Line2D([], [], color=OURS, marker="o", label="storage_ops")]
    handles += [Line2D([], [], color=color, marker="" if marker == FLOOR else marker,
                       ls="--" if marker == FLOOR else "", label=case)
                for case, (color, marker) in styles.items()]  # fmt: skip
    columns = 1 if is_narrow else 2 if wide == 1 else 3
    figure.legend(handles=handles, loc="outside lower center", ncols=columns,
                  fontsize="small", frameon=False, labelcolor=INK)  # fmt: skip
    _spread_labels(figure)
    return figure


def _panel(axes: Axes, all_points: list[Point], styles: dict[str, tuple[str, str]]) -> None:
    """Draw one shape."""
    _dress(axes)
    unit, size = unit_of({PEAK: mib} for _, mib, _ in all_points)
    all_points = [(case, mib / size, time) for case, mib, time in all_points]
    for case, mib, time in all_points:
        if case in styles:
            color, marker = styles[case]
            if marker == FLOOR:
                axes.axhline(time, color=color, lw=1.2, ls="--")
                continue
            axes.plot([mib], [time], marker=marker, color=color, ms=8, mec=INK, mew=0.5, ls="")
    ours = sorted((p for p in all_points if is_ours(p[0])), key=lambda p: (p[1], p[2]))
    front = list(_front(ours))
    axes.plot([p[1] for p in front], [p[2] for p in front], color=OURS, lw=1.6, zorder=1)
    axes.plot([p[1] for p in ours], [p[2] for p in ours], "o", color=OURS, ms=6, mec=INK, mew=0.5)
    for case, mib, time in ours if len(ours) < 8 else front:
        if len(ours) > 1:  # the legend names a single one
            axes.annotate(_label(case), (mib, time), PLACES[0], textcoords="offset points",
                          va="center", fontsize="small", color=OURS)  # fmt: skip
    sizes = [mib for case, mib, _ in all_points if styles.get(case, ("", ""))[1] != FLOOR]
    if max(sizes) > 3 * min(sizes):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.12, y=0.18)
    axes.set_xlabel(f"peak memory ({unit})")


def _label(case: str) -> str:
    """Return the name of one of our cases without the words that its neighbors share."""
    for words in ("storage_ops, ", " budget", "fit for ", " of the way to none"):
        case = case.replace(words, "")
    return case


def _spread_labels(figure: Figure) -> None:
    """Move labels so that they cover no point, line or other label, or omit them."""
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    for axes in figure.axes:
        marked = [line for line in axes.lines if line.get_marker() not in ("", "None", None)]
        # In half a point, because the size of a marker is its width. A diamond is wider.
        pixels = 1.9 * figure.dpi / 72 / 2
        taken = [Bbox.from_extents(x - r, y - r, x + r, y + r) for line in marked
                 for r in [pixels * line.get_markersize()]
                 for x, y in axes.transData.transform(line.get_xydata())]  # fmt: skip
        curves = [Curve(line.get_transform().transform(line.get_xydata())) for line in axes.lines
                  if line.get_linestyle() != "None"]  # fmt: skip
        for label in list(axes.texts):
            for x, y in PLACES:
                label.xyann = x, y  # type: ignore[attr-defined]
                label.set_horizontalalignment("left" if x > 0 else "right" if x else "center")
                box = label.get_window_extent(renderer)
                inside = axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1
                is_free = not any(box.overlaps(other) for other in taken)
                if inside and is_free and not any(c.intersects_bbox(box, False) for c in curves):
                    taken.append(box)
                    break
            else:
                label.remove()


def _front(ours: list[Point]) -> Iterator[Point]:
    """Yield points, sorted by memory, that are faster than every smaller point."""
    best = float("inf")
    for point in ours:
        if point[2] < best:
            best = point[2]
            yield point


def _timelines(curves: list[Row], page: Page) -> Figure:
    """Draw memory over one step, a curve per row."""
    # Small, with large letters, because people also read it on a phone.
    figure = Figure(figsize=(6.4, 3.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    _dress(axes, page)
    unit, size = unit_of({PEAK: mib} for row in curves for _, mib in curve_of(row))
    digits = 0 if size == 1 else 1
    for row, color in zip(curves, ("#d55e00", OURS, *COLORS), strict=False):
        at, mib = zip(*curve_of(row), strict=True)
        share: Any = [100 * a / (at[-1] or 1) for a in at]
        level: Any = [m / size for m in mib]
        label = f"{row['case']}: peak {max(level):.{digits}f} {unit}"
        axes.step(share, level, where="post", color=color, lw=1.6, label=label)
        axes.fill_between(share, level, step="post", color=color, alpha=0.12, lw=0)
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=11)
    axes.set_xlabel("share of the step (%)", fontsize=12)
    axes.set_ylabel(f"memory ({unit})", fontsize=12)
    figure.legend(
        loc="outside upper center", ncols=2, frameon=False, labelcolor=page.ink, fontsize=11
    )
    return figure


def _training(rows: list[Row]) -> Figure:
    """Draw losses and shares of classes over the steps of training runs, as means of 20 steps."""
    figure = Figure(figsize=(6.4, 5.6), dpi=150, layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    styles = (INK, *COLORS)
    for row, color in zip(rows, styles, strict=False):
        for axes, key in zip(panels, ("losses", "shares"), strict=True):
            ends = range(20, len(row[key]) + 1, 5)
            means: Any = [sum(row[key][end - 20 : end]) / 20 for end in ends]
            line = "-" if is_ours(row["case"]) else "--"
            axes.plot(list(ends), means, line, color=color, lw=1.6, label=row["case"])
    for axes, title in zip(panels, ("loss", "classes multiplied, share"), strict=True):
        _dress(axes)
        axes.set_ylabel(title)
    panels[1].set_ylim(0, 1.05)
    panels[1].set_xlabel("step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False,
                  labelcolor=INK)  # fmt: skip
    return figure


def _dress(axes: Axes, page: Page = LIGHT) -> None:
    axes.set_facecolor(page.paper)
    axes.grid(color=page.grid, lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=page.ink, labelsize="small")
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(page.ink)
    for spine in axes.spines.values():
        spine.set_color(page.ink)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
