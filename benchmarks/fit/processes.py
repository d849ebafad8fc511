"""Plans of `fit` for a compiled model against torch.compile with activation memory budgets.

Every case runs in a separate process. In one process, Dynamo would reuse the compiled code of one
case for another that looks equal, even with another budget. The processes alternate. Budgets for
`fit` are the measured peaks of the budgets of torch.compile.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import storage_ops
from benchmarks._harness import Clock, Runs, group_done, skip, tick
from benchmarks.fit.models import Parts, facts_of, measured, models, placed, step_of
from benchmarks.fit.ways import SLACK, Facts, rows_of, size
from storage_ops.fitting.search import NothingFits, Search

WHOLE = "torch.compile"


def parts_of(kind: str, arguments: argparse.Namespace) -> tuple[nn.Module, Any, Any]:
    """Return a model, a batch and a loss, the same in every process."""
    torch.manual_seed(0)
    return placed(models(**size(kind, arguments))[kind](), arguments.device)


def serve(
    pipe: Connection, kind: str, arguments: argparse.Namespace, threads: int, budget: float,
    plan: str | None,
) -> None:  # fmt: skip
    """Compile a model, send its peak, and run a step for each message.

    Args:
        pipe: connection to the parent process.
        kind, arguments: the model.
        threads: number of torch's threads.
        budget: the activation memory budget.
        plan: the path of a plan to apply first.
    """
    torch.set_num_threads(threads)
    try:
        model, batch, loss = parts_of(kind, arguments)
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
        clock = Clock(arguments.device)
        step()
        pipe.send(clock.stop())


class Process:
    """A case in a separate process, which compiles at once."""

    def __init__(
        self, kind: str, arguments: argparse.Namespace, budget: float, plan: str | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        passed = theirs, kind, arguments, torch.get_num_threads(), budget, plan
        self._process = context.Process(target=serve, args=passed, daemon=True)
        self._process.start()
        theirs.close()

    @functools.cached_property
    def _compiled(self) -> int | str:
        """Return the peak in bytes, or an error, once the model is compiled."""
        received: int | str = self._pipe.recv()
        return received

    @property
    def error(self) -> str:
        """Return why the case does not run, or an empty string."""
        return self._compiled if isinstance(self._compiled, str) else ""

    @property
    def peak(self) -> int:
        """Return the peak in bytes, or 0 if the case does not run."""
        return 0 if isinstance(self._compiled, str) else self._compiled

    def step(self) -> tuple[float, float]:
        """Run a step, and return its seconds as a `Clock` does."""
        self._pipe.send(None)
        seconds: tuple[float, float] = self._pipe.recv()
        return seconds

    def end(self) -> None:
        """Kill the process, which workers of the compiler would keep alive."""
        self._process.kill()
        self._process.join()


def in_turn(cases: dict[str, Process], repeats: int) -> dict[str, Runs]:
    """Run the processes as `interleave` runs functions."""
    seconds: dict[str, Runs] = {name: [] for name in cases}
    for round_ in range(repeats):
        for name in list(cases) if round_ % 2 == 0 else list(reversed(cases)):
            seconds[name].append(cases[name].step())
    return seconds


def started(
    kind: str, arguments: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, Process, Facts]]:
    """Yield all cases of a model, with the known facts about their plans."""
    names = {1.0: WHOLE} | {b: f"{WHOLE}, activation memory budget {b:g}" for b in arguments.shares}
    processes = {name: Process(kind, arguments, budget) for budget, name in names.items()}
    for name, process in processes.items():
        yield name, process, {}
    model, batch, loss = parts_of(kind, arguments)
    compiled: Any = torch.compile(model)
    search = Search(compiled, batch, loss, torch.optim.AdamW)
    peaks = {name: process.peak for name, process in processes.items()}
    for budgeted, peak in list(peaks.items())[1:]:
        name = f"storage_ops, fit for the peak of {budgeted}, compiled"
        try:
            yield name, *fitted(kind, arguments, search, peak, folder / f"{peak}.json")
        except NothingFits as error:
            skip(f"{kind}: {name}", str(error))


def fitted(
    kind: str, arguments: argparse.Namespace, search: Search, peak: int, path: Path
) -> tuple[Process, Facts]:
    """Return the plan whose compiled step has the largest peak of at most `peak` bytes.

    The simulation is of eager mode, and Inductor saves other tensors. So the first plan has `peak`
    as its budget, and each later one corrects the budget by the last difference.
    """
    tried: list[tuple[Process, Facts]] = []
    budget = peak + SLACK[arguments.device]
    for look in range(arguments.looks):
        try:
            plan = search.plan(budget)
        except NothingFits as error:
            if look == 0:
                raise
            plan = search.plan(error.smallest_bytes)
        plan.save(path)
        process = Process(kind, arguments, 1.0, str(path))
        tried.append((process, facts_of(plan, budget)))
        budget += peak - process.peak
    best = max(tried, key=lambda t: t[0].peak if t[0].peak <= peak else -t[0].peak)
    for process, _ in tried:
        if process is not best[0]:
            process.end()
    return best


def compiled(
    kind: str, _: Callable[[], Parts], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model, which each process builds."""
    cases: dict[str, Process] = {}
    facts: dict[str, Facts] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, process, known in started(kind, arguments, Path(folder)):
                tick(f"{kind}: {name}", 0.0)
                cases[name], facts[name] = process, known
                if process.error:
                    skip(f"{kind}: {name}", process.error)
            running = {name: process for name, process in cases.items() if not process.error}
            seconds = in_turn(running, arguments.repeats)
    finally:
        for process in cases.values():
            process.end()
    peaks = {name: process.peak for name, process in running.items()}
    yield from rows_of(kind, WHOLE, seconds, peaks, facts)
    group_done()
