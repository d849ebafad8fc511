"""Draws the pictures of docs/how-it-works.md: `python -m build_tools.drawings`, from the root.

Memory over time is measured, and tiles are those of real schedules. Only the boxes of the first
picture are drawn by hand. Colors and background are those of the benchmarks' pictures. Each picture
has a narrow variant for phones with the same measurements.
"""

import functools
from pathlib import Path

import matplotlib
import torch
from matplotlib.patches import Rectangle
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import storage_ops
from benchmarks.report.pictures import COLORS, INK, NARROW, OURS, PAPER
from storage_ops import matmul
from storage_ops.loss.planning.problem import Problem
from storage_ops.loss.planning.schedule import (
    RUNNING_RESCALE,
    TOKEN_CHUNKED,
    VOCAB_SLICED,
    Schedule,
)
from storage_ops.memory import measure, plot_timelines

OUT = Path(__file__).resolve().parent.parent / "docs" / "drawings"
STYLE = {
    "svg.hashsalt": "storage_ops",  # the same picture gives the same file
    "svg.fonttype": "none",  # text stays text
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.prop_cycle": matplotlib.cycler(color=[COLORS[-1], COLORS[0], OURS]),
    "text.color": INK,
    "font.size": 9,
}


def storage(figure, is_narrow):
    """Draw a tensor and its view, before and after its bytes are freed, and with other bytes."""
    axes = figure.subplots()
    stages = [
        ("at first", "64 MiB", COLORS[0]),
        ("discard_storage(h)", "0 bytes", PAPER),
        ("share_storage(h, other)", "64 MiB, those of other", OURS),
    ]
    across, down = (0, -4) if is_narrow else (4.2, 0)
    for i, (title, content, color) in enumerate(stages):
        x, y = across * i, down * i
        axes.text(x + 1.7, y + 3.3, title, ha="center", family="monospace")
        _box(axes, x, y + 2.2, 1.4, "h")
        _box(axes, x + 2, y + 2.2, 1.4, "view = h[1:]")
        _box(axes, x + 0.4, y + 1.1, 2.6, "one storage")
        _box(axes, x + 0.2, y, 3, content, color)
        for start, end in ((x + 0.7, x + 1.2), (x + 2.7, x + 2.2)):
            axes.annotate("", (end, y + 1.6), (start, y + 2.2), arrowprops={"arrowstyle": "->"})
        axes.annotate("", (x + 1.7, y + 0.5), (x + 1.7, y + 1.1), arrowprops={"arrowstyle": "->"})
    axes.set(xlim=(-0.1, 2 * across + 3.6), ylim=(2 * down - 0.2, 3.7))
    axes.set_axis_off()


def _box(axes, x, y, width, text, color=PAPER):
    axes.add_patch(Rectangle((x, y), width, 0.5, facecolor=color, edgecolor=INK, alpha=0.8))
    axes.text(x + width / 2, y + 0.25, text, ha="center", va="center", fontsize=8)


def discarding(figure, is_narrow):
    """Draw memory of four blocks whose wide activation is kept, checkpointed, or freed."""
    _curves(figure.subplots(), _of_blocks(), is_narrow)


def _curves(axes, measured, is_narrow):
    """Draw memory over a step, with the legend above the curves."""
    plot_timelines(axes, measured)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=1 if is_narrow else 3,
                frameon=False)  # fmt: skip


@functools.cache
def _of_blocks():
    """Measure four blocks for each handling of their wide activation."""
    ups, downs = ([nn.Linear(*size) for _ in range(4)] for size in ((256, 2048), (2048, 256)))
    x = torch.randn(2048, 256, requires_grad=True)

    def run(block):
        with measure() as measurement:
            y = x
            for up, down in zip(ups, downs, strict=True):
                y = block(lambda a, up=up: F.gelu(up(a)), down, y)
            y.sum().backward()
        x.grad = None
        for parameter in (p for layer in (*ups, *downs) for p in layer.parameters()):
            parameter.grad = None
        return measurement

    cases = {
        "plain": lambda act, down, a: down(act(a)),
        "activation checkpointed": lambda act, down, a: down(
            checkpoint(act, a, use_reentrant=False)
        ),
        "output discarded": lambda act, down, a: storage_ops.output_discard(act, down)(a),
    }
    return {name: run(way) for name, way in cases.items()}


def schedules(figure, is_narrow):
    """Draw the tiles of three schedules, numbered in the order of their computation."""
    tiles_of = {TOKEN_CHUNKED: (16, 240), VOCAB_SLICED: (64, 60), RUNNING_RESCALE: (64, 60)}
    panels = figure.subplots(*((3, 1) if is_narrow else (1, 3)))
    for axes, (name, (rows, columns)) in zip(panels, tiles_of.items(), strict=True):
        grads = (True, name != RUNNING_RESCALE, False)  # the running rescale is for a frozen weight
        problem = Problem(64, 32, 240, matmul.of(torch.float32, "cpu"), grads=grads)
        steps = Schedule(problem, name, rows, columns, columns, 0).steps()
        tiles = {}
        for number, step in enumerate((s for s in steps if s.classes.stop > s.classes.start), 1):
            tiles.setdefault((step.rows.start, step.classes.start), []).append((number, step))
        for (row, column), visits in tiles.items():
            step = visits[0][1]
            size = step.classes.stop - column, step.rows.stop - row
            style = {"facecolor": OURS, "edgecolor": INK, "alpha": 0.5 / len(visits)}
            axes.add_patch(Rectangle((column, row), *size, **style))
            text = ", ".join(str(number) for number, _ in visits)
            axes.text(column + size[0] / 2, row + size[1] / 2, text, ha="center", va="center")
        axes.set(xlim=(0, 240), ylim=(64, 0), xticks=[], yticks=[], xlabel="classes", title=name)
        if is_narrow or axes is panels[0]:
            axes.set_ylabel("tokens")


def chunks(figure, is_narrow):
    """Draw memory of a focal loss, as written and in eight chunks."""
    _curves(figure.subplots(), _of_focal_losses(), is_narrow)


@functools.cache
def _of_focal_losses():
    """Measure a focal loss in eager mode, compiled, and compiled in chunks."""
    head, x, t = nn.Linear(256, 8192), torch.randn(1024, 256), torch.randint(8192, (1024,))

    def focal(x, t):
        p = torch.log_softmax(head(x), -1).gather(1, t[:, None])
        return -((1 - p.exp()) ** 2 * p).mean()

    def run(loss):
        for _ in range(2):  # the first one compiles
            head.zero_grad()
            with measure() as measurement:
                loss(x, t).backward()
        return measurement

    options = {"num_chunks": 8}
    cases = {
        "eager": focal,
        "Inductor": torch.compile(focal),
        "in 8 chunks": torch.compile(focal, backend="storage_ops", options=options),
    }
    return {name: run(way) for name, way in cases.items()}


# The heights of the pictures and of their narrow variants, in inches.
HEIGHTS = {storage: (3, 7), discarding: (3, 3.4), schedules: (2.4, 6), chunks: (3, 3.4)}


def main() -> None:
    """Draw all pictures."""
    from matplotlib.figure import Figure

    OUT.mkdir(exist_ok=True)
    torch.manual_seed(0)
    with matplotlib.rc_context(STYLE):
        for draw, (height, narrow_height) in HEIGHTS.items():
            for ending, size in (("", (7.5, height)), (NARROW, (3.75, narrow_height))):
                figure = Figure(figsize=size, layout="constrained")
                draw(figure, is_narrow=ending == NARROW)
                figure.savefig(OUT / f"{draw.__name__}{ending}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
