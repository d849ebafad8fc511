"""The picture of `python -m storage_ops plan --plot FILE`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from storage_ops.loss import planner, schedule
from storage_ops.loss.devices import Rates
from storage_ops.loss.planner import Plan
from storage_ops.loss.problem import Problem
from storage_ops.quantities import readable

# Told apart without colour vision, too: Okabe and Ito's palette.
COLORS: dict[str, str] = {
    schedule.TOKEN_CHUNKED: "#009e73",
    schedule.VOCAB_SLICED: "#0072b2",
    schedule.RUNNING_RESCALE: "#cc79a7",
}
SAMPLES = 160  # budgets that the curve is drawn through


def draw(
    file: Path, title: str, p: Problem, rates: Rates, floor: float, budget: int, chosen: Plan
) -> None:
    """Draw predicted time against budget, strategies by colour, and the chosen plan."""
    least = planner.smallest_budget(p)
    whole = planner.peak_bytes(p, planner.allowed(p)[0], max(p.tokens, 1), p.vocab)
    left, right = 0.7 * least, 1.5 * max(whole, least, budget)
    points = _points(p, rates, right, {least, whole, budget})
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.subplots()
    _curve(axes, points)
    floor *= 1e3
    axes.axhline(floor, color="0.3", lw=1.2, ls="--", label=f"products alone: {floor:.4g} ms")
    axes.axvspan(left, least, color="0.92", lw=0)
    axes.axvline(whole, color="0.6", lw=1, ls=":")
    axes.axvline(budget, color="#e69f00", lw=1.2, ls="--", label=f"budget: {readable(budget)}")
    for x, text in ((least, "no plan fits"), (whole, "all logits at once")):
        # Half way up, where the curve is least likely to be.
        axes.annotate(text, (x, 0.5), (-4, 0), xycoords=axes.get_xaxis_transform(),
                      textcoords="offset points", rotation=90, va="center", ha="right",
                      fontsize="small", color="0.4")  # fmt: skip
    axes.plot([budget], [chosen.seconds * 1e3], "*", ms=17, mfc="#e69f00", mec="black", zorder=5,
              label=f"plan for {readable(budget)}: {chosen.seconds * 1e3:.4g} ms")  # fmt: skip
    slowest = points[0][1].seconds * 1e3
    if slowest > 4 * floor > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"predicted time, forward{' and backward' if any(p.grads) else ''} (ms)")
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, right)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: readable(round(x))))
    axes.set_xlabel("memory budget (bytes beyond inputs, outputs and gradients)")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize="medium")
    axes.legend(fontsize="small", framealpha=1)
    # The format given, matplotlib leaves the name as it is: else a folder's gets ".png" added.
    figure.savefig(file, format=file.suffix[1:] or "png")


def _points(p: Problem, rates: Rates, most: float, exactly: set[int]) -> list[tuple[int, Plan]]:
    least = min(exactly)
    budgets = {int(least * (most / least) ** (k / SAMPLES)) for k in range(1, SAMPLES + 1)}
    return [(budget, planner.choose(p, budget, rates)) for budget in sorted(budgets | exactly)]


def _stretches(points: list[tuple[int, Plan]]) -> Iterator[list[tuple[int, Plan]]]:
    """Parts of the curve with one strategy each."""
    start = 0
    for k in range(1, len(points) + 1):
        if k == len(points) or points[k][1].strategy != points[start][1].strategy:
            yield points[start:k]
            start = k


def _curve(axes: Axes, points: list[tuple[int, Plan]]) -> None:
    seen: set[str] = set()
    corner: tuple[int, float] | None = None
    for part in _stretches(points):
        plan = part[0][1]
        budgets = [budget for budget, _ in part]
        times = [plan.seconds * 1e3 for _, plan in part]
        if corner is not None:  # the step down from one strategy to the next
            across = [corner[0], budgets[0], budgets[0]]
            axes.plot(across, [corner[1], corner[1], times[0]], color="0.6", lw=1)
        axes.step(budgets, times, where="post", color=COLORS[plan.strategy], lw=2.5,
                  label=None if plan.strategy in seen else plan.strategy)  # fmt: skip
        seen.add(plan.strategy)
        corner = budgets[-1], times[-1]
