"""Draws memory over time. Drawing libraries are imported only when something is drawn."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage_ops.measure.owners import BUFFERS, GRADIENTS, PARAMETERS, STATE, kind_of
from storage_ops.optional import check_drawable
from storage_ops.quantities import readable, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from storage_ops.measure.measurement import Life, Measurement

_COLOURS = 7  # the number of owners with a colour of their own
_OTHERS = "others"
_LASTING = (PARAMETERS, BUFFERS, STATE, GRADIENTS)
_FAR = 4  # a budget above this multiple of the peak is not drawn
_MOMENTS = 1500  # the most moments of a timeline to draw
# Colours that people with red-green blindness can distinguish (Okabe and Ito, 2008), and grey.
PALETTE = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999",
)  # fmt: skip


def plot_timelines(axes: Axes, measurements: Mapping[str, Measurement]) -> None:
    """Draw the memory of several measurements as step curves on one pair of axes.

    Args:
        axes: where to draw. x is the share of the block's time in per cent, so that blocks of
            different length can be compared. y is MiB above the level at entry, or GiB if a peak
            exceeds 10,000 MiB.
        measurements: label -> measurement.

    Example:
        >>> figure, axes = matplotlib.pyplot.subplots()
        >>> with storage_ops.memory.measure() as m:
        ...     _ = torch.empty(1 << 20)
        >>> storage_ops.memory.plot_timelines(axes, {"one tensor": m})
    """
    unit, size = unit_of(max((m.peak_bytes for m in measurements.values()), default=0))
    for label, measurement in measurements.items():
        timeline = measurement.timeline
        length = timeline[-1].seconds if timeline else 0.0
        x = [100 * sample.seconds / (length or 1.0) for sample in timeline]
        y = [sample.nbytes / size for sample in timeline]
        digits = 1 if unit == "GiB" else 0
        peak = f"peak {measurement.peak_bytes / size:.{digits}f} {unit}"
        axes.step(x, y, where="post", label=f"{label} ({peak})")
    axes.set_xlabel("share of the step (%)")
    axes.set_ylabel(f"{unit} above the level at entry")
    axes.legend(loc="upper right", fontsize="small")


def title_of(measurement: Measurement) -> str:
    """Return the title of a picture: subject, device and peak."""
    device = f"on {measurement.device}" if measurement.device else ""
    where = " ".join(filter(None, (measurement.subject or "memory", device)))
    return f"{where}: peak {readable(measurement.peak_bytes, up=True)}"


def save(measurement: Measurement, path: str | os.PathLike[str], budget: int | None = None) -> None:
    """Write a measurement in the format of the path's ending; see `Measurement.plot`."""
    if not measurement.lives:
        raise ValueError("plot: nothing was allocated. Expected a measurement of some code.")
    check_drawable(path)
    ending = Path(path).suffix.lower()
    if ending == ".pickle":
        Path(path).write_bytes(pickle.dumps(_snapshot(measurement)))
    elif ending == ".html":
        _page(stack_of(measurement), path, budget)
    else:
        _image(stack_of(measurement), path, budget)


@dataclass(frozen=True)
class Stack:
    """Stacked areas: memory of each owner at some moments, in per cent of all changes.

    Areas and the peak are in `unit`, which has `size` bytes.
    """

    title: str
    moments: list[float]
    areas: dict[str, list[float]]
    peak: float
    unit: str
    size: int


def stack_of(measurement: Measurement) -> Stack:
    """Return the areas of a measurement, for its largest owners."""
    lives, timeline = measurement.lives, measurement.timeline
    levels = [sample.nbytes for sample in timeline]
    peak = max(range(len(levels)), key=levels.__getitem__)
    unit, size = unit_of(levels[peak])
    kinds = {owner: kind_of(owner) or "not known" for owner in {life.owner for life in lives}}
    shown = _largest(lives, kinds, peak)
    steps: list[Counter[str]] = [Counter() for _ in range(len(levels) + 1)]
    for life in lives:
        kind = kinds[life.owner]
        owner = kind if kind in shown else _OTHERS
        steps[life.start][owner] += life.nbytes
        if life.end is not None:
            steps[life.end][owner] -= life.nbytes
    areas: dict[str, list[float]] = {owner: [] for owner in shown}
    now: Counter[str] = Counter()
    moments = _moments(levels)
    drawn = set(moments)
    for at in range(len(levels)):
        now.update(steps[at])
        if at in drawn:
            for owner, area in areas.items():
                area.append(now[owner] / size)
    shares = [100 * at / max(len(levels) - 1, 1) for at in moments]
    return Stack(title_of(measurement), shares, areas, levels[peak] / size, unit, size)


def _largest(lives: list[Life], kinds: Mapping[str, str], peak: int) -> list[str]:
    """Return the kinds of owners to draw, from below: those with most bytes at the peak first."""
    size: dict[str, tuple[int, int]] = {}
    for life in lives:
        is_at_peak = life.start <= peak and (life.end is None or life.end > peak)
        kind = kinds[life.owner]
        most, all_ = size.get(kind, (0, 0))
        size[kind] = (most + life.nbytes * is_at_peak, all_ + life.nbytes)
    order = sorted(size, key=lambda kind: size[kind], reverse=True)
    shown = order if len(order) <= _COLOURS + 1 else order[:_COLOURS]
    # Memory that never changes is drawn below memory that comes and goes.
    stacked = [kind for kind in _LASTING if kind in shown]
    stacked += [kind for kind in shown if kind not in stacked]
    return stacked if len(shown) == len(order) else [*stacked, _OTHERS]


def _moments(levels: list[int]) -> list[int]:
    """Return the samples to draw: both ends, and the highest of each stretch of the timeline."""
    stretch = -(-len(levels) // _MOMENTS)
    ranges = (range(i, min(i + stretch, len(levels))) for i in range(0, len(levels), stretch))
    highest = {max(stretch_range, key=levels.__getitem__) for stretch_range in ranges}
    return sorted(highest | {0, len(levels) - 1})


def _is_far(stack: Stack, budget: int) -> bool:
    """Return True if the areas would be flat below a line at the budget."""
    return budget / stack.size > _FAR * stack.peak


def budget_label(stack: Stack, budget: int) -> str:
    """Return the label of the line at the budget."""
    return f"budget {readable(budget)}" + (", far above" if _is_far(stack, budget) else "")


def top_of(stack: Stack, budget: int) -> float:
    """Return the upper end of the axis: above the peak, and above the budget if it is near."""
    return 1.05 * (stack.peak if _is_far(stack, budget) else max(stack.peak, budget / stack.size))


def _image(stack: Stack, path: str | os.PathLike[str], budget: int | None) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(
        stack.moments, *stack.areas.values(), labels=list(stack.areas), colors=PALETTE, step="post"
    )
    axes.set(
        title=stack.title, ylabel=stack.unit, xlabel="share of allocations and releases (%)",
        xlim=(0, 100),
    )  # fmt: skip
    if budget is not None:
        axes.axhline(
            budget / stack.size, color="black", linestyle="--", label=budget_label(stack, budget)
        )
        axes.set_ylim(0, top_of(stack, budget))
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right upper", fontsize="small", frameon=False
    )
    figure.savefig(path, dpi=150)


def _page(stack: Stack, path: str | os.PathLike[str], budget: int | None) -> None:
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for (owner, area), colour in zip(stack.areas.items(), PALETTE, strict=False):
        figure.add_scatter(
            x=stack.moments, y=area, name=owner, stackgroup="all", mode="lines", fillcolor=colour,
            line={"width": 0, "shape": "hv", "color": colour},
            hovertemplate=f"%{{y:,.1f}} {stack.unit}",
        )  # fmt: skip
    figure.update_layout(
        title=stack.title, template="plotly_white", hovermode="x unified", yaxis_title=stack.unit,
        xaxis_title="share of allocations and releases (%)", legend_traceorder="reversed",
    )  # fmt: skip
    if budget is not None:
        label = budget_label(stack, budget)
        figure.add_hline(y=budget / stack.size, line_dash="dash", annotation_text=label)
        figure.add_scatter(x=[None], y=[None], name=label, mode="lines", line_dash="dash")
        figure.update_yaxes(range=[0, top_of(stack, budget)])
    figure.write_html(path)


def _snapshot(measurement: Measurement) -> dict[str, Any]:
    """Return the format of torch.cuda.memory._snapshot(). Each allocation has a new address.

    The format is described at https://docs.pytorch.org/docs/stable/torch_cuda_memory.html.
    """
    changes: list[tuple[int, str, int, Life]] = []
    address = 0
    for life in measurement.lives:
        changes.append((life.start, "alloc", address, life))
        if life.end is not None:
            changes.append((life.end, "free_completed", address, life))
        address += life.nbytes
    changes.sort(key=lambda change: change[0])
    trace = [
        {
            "action": action, "addr": addr, "size": life.nbytes, "stream": 0,
            "time_us": int(measurement.timeline[at].seconds * 1e6),
            "frames": [{"name": life.owner or "not known", "filename": "storage_ops", "line": 0}],
        }
        for at, action, addr, life in changes
    ]  # fmt: skip
    return {"segments": [], "device_traces": [trace]}
