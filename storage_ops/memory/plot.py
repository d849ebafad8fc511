"""Draw memory over time. matplotlib is imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from storage_ops.memory.measure import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 1 << 20


def plot_timelines(axes: Axes, measurements: Mapping[str, Measurement]) -> None:
    """Draw the memory of several measurements as step curves on one pair of axes.

    Args:
        axes: where to draw; x is the share of the block's time in per cent, so that blocks of
            different length can be compared, y is MiB above the level at entry.
        measurements: label -> measurement.

    Example:
        >>> figure, axes = matplotlib.pyplot.subplots()
        >>> with storage_ops.memory.measure() as m:
        ...     _ = torch.empty(1 << 20)
        >>> storage_ops.memory.plot_timelines(axes, {"one tensor": m})
    """
    for label, measurement in measurements.items():
        timeline = measurement.timeline
        length = timeline[-1].seconds if timeline else 0.0
        x = [100 * sample.seconds / (length or 1.0) for sample in timeline]
        y = [sample.nbytes / MIB for sample in timeline]
        peak = f"peak {measurement.peak_bytes / MIB:.0f} MiB"
        axes.step(x, y, where="post", label=f"{label} ({peak})")
    axes.set_xlabel("share of the step (%)")
    axes.set_ylabel("MiB above the level at entry")
    axes.legend(loc="upper right", fontsize="small")
