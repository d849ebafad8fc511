"""The demo's table and picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from storage_ops.demo.train import Run
from storage_ops.memory.plot import MIB, plot_timelines


def table(plain: Run, ours: Run, info: dict[str, Any]) -> Table:
    """Compare the two trainings."""
    result = Table(title="The same GPT, trained twice from the same seed")
    for column, justify in (("", "left"), (plain.label, "right"), (ours.label, "right")):
        result.add_column(column, justify=justify)  # type: ignore[arg-type]
    result.add_column("difference", justify="right")
    apart = max(abs(a - b) for a, b in zip(plain.losses, ours.losses, strict=True))
    peaks = plain.memory.peak_bytes, ours.memory.peak_bytes
    times = plain.step_seconds, ours.step_seconds
    finals = (f"{r.losses[-1]:.4f}" for r in (plain, ours))
    result.add_row("final loss", *finals, f"{apart:.1e} at most")
    result.add_row(
        "peak memory of a step",
        *(f"{peak / MIB:.0f} MiB" for peak in peaks),
        f"{100 * (1 - peaks[1] / peaks[0]):.0f} % saved",
    )
    result.add_row(
        "time of a step (median)",
        *(f"{1000 * t:.0f} ms" for t in times),
        f"x {times[1] / times[0]:.2f}",
    )
    result.caption = (
        "memory above parameters and optimizer state, gradients included\n"
        f"storage path: {info['storage_path']}, guard: {'on' if info['guard'] else 'none'}, "
        f"row kernel: {info['row_kernel']}"
    )
    return result


def picture(plain: Run, ours: Run, path: Path) -> None:
    """Draw the loss curves and the memory over one step into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left.plot(plain.losses, color="C0", linewidth=4, alpha=0.4, label=plain.label)
    left.plot(ours.losses, color="C1", linewidth=1.2, label=ours.label)
    left.set_xlabel("step")
    left.set_ylabel("training loss")
    left.legend()
    left.set_title("Training loss")
    plot_timelines(right, {plain.label: plain.memory, ours.label: ours.memory})
    right.set_title("Memory over one training step")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.set_ylim(bottom=0 if axes is right else None)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
