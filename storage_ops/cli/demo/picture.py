"""The demo's picture: training losses, and the memory of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from storage_ops.measure.measurement import Measurement
from storage_ops.measure.plot import plot_timelines
from storage_ops.quantities import readable


def draw(
    path: Path, losses: Mapping[str, Sequence[float]], memory: Mapping[str, Measurement]
) -> None:
    """Draw into a PNG.

    Args:
        losses: label -> the loss of every step; none leaves their half of the picture out.
        memory: label -> the memory of one step.
    """
    figure = Figure(figsize=(11 if losses else 7, 4.2), dpi=130, layout="constrained")
    *left, right = figure.subplots(1, 2 if losses else 1, squeeze=False)[0]
    for axes in left:
        for k, (label, values) in enumerate(losses.items()):
            # The first lies under the others, wider than they are, so that equal curves are seen.
            axes.plot(values, alpha=1 if k else 0.4, linewidth=1.2 if k else 4, label=label)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.legend()
        axes.set_title("Training loss")
    plot_timelines(right, memory)
    word = "peaks" if len(memory) > 1 else "peak"
    peaks = ", ".join(readable(m.peak_bytes, up=True) for m in memory.values())
    devices = {f"on {m.device}: " for m in memory.values() if m.device}  # of kept results, none
    right.set_title(f"Memory over one training step of the GPT\n{''.join(devices)}{word} {peaks}")
    right.set_ylim(bottom=0)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
    # No version of matplotlib inside, so that the same curves give the same file.
    figure.savefig(path, metadata={"Software": None})
