"""The demo's picture: training losses, and the memory of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from storage_ops.measure.measurement import Measurement
from storage_ops.measure.plot import PALETTE, plot_timelines


def draw(
    path: Path, losses: Mapping[str, Sequence[float]], memory: Mapping[str, Measurement]
) -> None:
    """Draw into a PNG.

    Args:
        losses: label -> the loss of every step; without losses, this half of the picture is left
            out.
        memory: label -> the memory of one step.
    """
    # A small picture with large letters, because people also read it on a phone.
    figure = Figure(figsize=(11 if losses else 6.4, 4), dpi=150, layout="constrained")
    *left, right = figure.subplots(1, 2 if losses else 1, squeeze=False)[0]
    for axes in (*left, right):
        axes.set_prop_cycle(color=PALETTE)
        axes.tick_params(labelsize=11)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_size(12)
    for axes in left:
        for k, (label, values) in enumerate(losses.items()):
            # The first curve is drawn below the others and wider, so that equal curves are visible.
            axes.plot(values, alpha=1 if k else 0.4, linewidth=1.2 if k else 4, label=label)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.legend(loc="upper right", frameon=False)
    plot_timelines(right, memory)
    # Kept results have no device.
    devices = {f" on {m.device}" for m in memory.values() if m.device}
    right.set_xlabel(f"share of a training step{''.join(devices)} (%)")
    # The legend is above the axes, because the curves need their whole height.
    right.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        ncols=2,
        frameon=False,
        columnspacing=1,
        fontsize=11,
    )
    right.set_ylim(bottom=0)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
    # Without matplotlib's version, the same curves give the same file.
    figure.savefig(path, metadata={"Software": None})
