"""Plans of `fit` for a compiled model against torch.compile with an activation memory budget.

For each model, a whole step (forward, backward, AdamW) compiled as it is, compiled with activation
memory budgets, and compiled with the plan of `fit` that comes closest to the measured peak of each
of the latter. Every case is a process of its own: in one process, Dynamo would run what it compiled
for one case for another that is alike, whatever its budget was. The processes take turns. Times are
over those of the compiled model as it is; peaks are everything that is on the device in a step from
the second on, by allocation events.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import storage_ops
from benchmarks._harness import (
    Clock,
    Runs,
    group_done,
    milliseconds,
    ratios,
    skip,
    tick,
)
from benchmarks.fit import MIB, Made, measured, models, placed
from benchmarks.fit_plans import SIZES, SLACK, run_models, step_of
from storage_ops.fitting.fit import NothingFits, Search

WHOLE = "torch.compile"
BUDGETS = (0.5,)  # activation memory budgets of torch.compile
LOOKS = 3  # plans for a peak
Facts = dict[str, Any]


def made(kind: str, size: str) -> tuple[nn.Module, Any, Any]:
    """A model, a batch and a loss, the same in every process."""
    torch.manual_seed(0)
    return placed(models(**SIZES[size])[kind](), device_of(size))


def device_of(size: str) -> str:
    """Where models of a size are."""
    return "cuda" if size == "cuda" else "cpu"


def serve(
    pipe: Connection, kind: str, size: str, threads: int, budget: float, plan: str | None
) -> None:
    """Compile a model, tell its peak, and run a step whenever asked.

    Args:
        pipe: to whom asks.
        kind, size: which model.
        threads: of torch.
        budget: the activation memory budget.
        plan: the path of a plan that is applied before.
    """
    torch.set_num_threads(threads)
    try:
        model, batch, loss = made(kind, size)
        if plan is not None:
            storage_ops.load_fit(plan, model).apply()
        run: Any = torch.compile(model, dynamic=False)
        with torch._functorch.config.patch(activation_memory_budget=budget):
            step_of(run, batch, loss)()  # compiled now, with this budget
        pipe.send(measured(run, batch, loss))
        step = step_of(run, batch, loss)
        step()
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error)[:200]}")
        return
    while True:
        pipe.recv()
        clock = Clock(next(model.parameters()).device.type)
        step()
        pipe.send(clock.stop())


class Process:
    """A case in a process of its own; it compiles as soon as it is made, beside others."""

    def __init__(self, kind: str, size: str, budget: float, plan: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = theirs, kind, size, torch.get_num_threads(), budget, plan
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    @functools.cached_property
    def _compiled(self) -> int | str:
        """The peak, or why there is none; once it has compiled."""
        found: int | str = self._pipe.recv()
        return found

    @property
    def error(self) -> str:
        """Why it does not run; empty if it does."""
        return self._compiled if isinstance(self._compiled, str) else ""

    @property
    def peak(self) -> int:
        """Bytes; 0 if it does not run."""
        return 0 if isinstance(self._compiled, str) else self._compiled

    def step(self) -> tuple[float, float]:
        """Run a step: seconds as of a `Clock`."""
        self._pipe.send(None)
        seconds: tuple[float, float] = self._pipe.recv()
        return seconds

    def end(self) -> None:
        """End the process; what compiled for it would keep it from ending by itself."""
        self._process.kill()
        self._process.join()


def in_turn(cases: dict[str, Process], repeats: int) -> dict[str, Runs]:
    """As `interleave`, of processes."""
    seconds: dict[str, Runs] = {name: [] for name in cases}
    for round_ in range(repeats):
        for name in list(cases) if round_ % 2 == 0 else list(reversed(cases)):
            seconds[name].append(cases[name].step())
    return seconds


def started(kind: str, size: str, folder: Path) -> Iterator[tuple[str, Process, Facts]]:
    """All cases of a model, and what is known of their plans."""
    names = {1.0: WHOLE} | {b: f"{WHOLE}, activation memory budget {b:g}" for b in BUDGETS}
    processes = {name: Process(kind, size, budget) for budget, name in names.items()}
    for name, process in processes.items():
        yield name, process, {}
    model, batch, loss = made(kind, size)
    compiled: Any = torch.compile(model)
    search = Search(compiled, batch, loss, torch.optim.AdamW)
    peaks = {name: process.peak for name, process in processes.items()}
    for of, peak in list(peaks.items())[1:]:
        name = f"storage_ops, fit for the peak of {of}, compiled"
        try:
            yield name, *fitted(kind, size, search, peak, folder / f"{len(of)}.json")
        except NothingFits as error:
            skip(f"{kind}: {name}", str(error))


def fitted(kind: str, size: str, search: Search, peak: int, path: Path) -> tuple[Process, Facts]:
    """The plan whose compiled step comes closest to a peak from below.

    What is simulated is eager mode, and Inductor keeps other tensors. So the first plan has the
    peak as its budget, and each later one that and what the one before left of it, or took more.
    """
    tried: list[tuple[Process, Facts]] = []
    budget = peak + SLACK[device_of(size)]
    for look in range(LOOKS):
        try:
            plan = search.plan(budget)
        except NothingFits as error:
            if look == 0:
                raise
            plan = search.plan(error.smallest_bytes)
        plan.save(path)
        process = Process(kind, size, 1.0, str(path))
        facts = {
            "budget (MiB)": round(budget / MIB, 2),
            "simulated (MiB)": round(plan.peak_bytes / MIB, 2),
        }
        tried.append((process, facts))
        budget += peak - process.peak
    best = max(tried, key=lambda t: t[0].peak if t[0].peak <= peak else -t[0].peak)
    for process, _ in tried:
        if process is not best[0]:
            process.end()
    return best


def rows_of(kind: str, _: Made, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All ways for one model, which each process makes for itself."""
    size = "quick" if arguments.quick else arguments.device
    cases: dict[str, Process] = {}
    facts: dict[str, Facts] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, process, known in started(kind, size, Path(folder)):
                tick(f"{kind}: {name}", 0.0)
                cases[name], facts[name] = process, known
                if process.error:
                    skip(f"{kind}: {name}", process.error)
            running = {name: process for name, process in cases.items() if not process.error}
            seconds = in_turn(running, arguments.repeats)
    finally:
        for process in cases.values():
            process.end()
    times = ratios(seconds, WHOLE)
    for name, process in running.items():
        median, least, most = times[name]
        yield {
            "shape": kind, "case": name, f"time / {WHOLE}": round(median, 3),
            "least - most": f"{least:.2f} - {most:.2f}", "ms": milliseconds(seconds[name]),
            "peak (MiB)": round(process.peak / MIB, 2), **facts[name],
        }  # fmt: skip
    group_done()


if __name__ == "__main__":
    run_models("fit_compiled", __doc__, rows_of)
