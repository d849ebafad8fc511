"""Predicted against measured times of steps, by the table of devices and by a calibration."""

from __future__ import annotations

import argparse
import copy
import ctypes
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import storage_ops
from benchmarks._harness import group_done, interleave, milliseconds, ratios, skip, tick
from benchmarks.fit.models import Parts, Step, loss_of, placed
from benchmarks.fit.ways import NONE, saved
from storage_ops.fitting.actions import Action
from storage_ops.fitting.calibration import Calibration
from storage_ops.fitting.search import NothingFits, Search
from storage_ops.fitting.units import units_of

FULL = "full checkpoint"
TABLE, CALIBRATED = "device table", "calibrated"
# Budgets between the peaks with full checkpoints, 0, and without checkpoints, 1.
BUDGETS = (0.1, 0.4, 0.7)
QUICK_SECONDS, SECONDS = 1.0, 45.0
# Parameters of glibc's mallopt, and the values that let it keep freed memory.
_KEEPING = {-1: -1, -4: 0}  # M_TRIM_THRESHOLD: never trim. M_MMAP_MAX: map no block by itself.


def keep_freed_memory() -> None:
    """Let glibc keep freed memory.

    By default it returns memory to the system after a step, and each step takes page faults anew:
    up to a tenth of a step without checkpoints. `fit` does not predict them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _KEEPING.items():
            mallopt(parameter, value)


@functools.cache
def calibration(device: str, seconds: float) -> Calibration:
    """Calibrate once for all models, and keep the result out of the user's cache directory."""
    tick("calibrate", 0.0)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(
        "os.environ", XDG_CACHE_HOME=folder
    ):  # fmt: skip
        return storage_ops.calibrate(device, seconds)


def step_of(model: nn.Module, batch: Any, loss: Any) -> Step:
    """Return a function that runs forward and backward, which is what `fit` predicts."""

    def run() -> None:
        loss_of(model, batch, loss).backward()
        model.zero_grad()

    return run


def searches(parts: Parts, made: Calibration) -> dict[str, Search]:
    """Return the search by the table of devices, and the one by a calibration."""
    model, batch, loss = parts
    found = {}
    for source, used in ((TABLE, None), (CALIBRATED, made)):
        with mock.patch("storage_ops.fitting.search.calibration_of", lambda _, used=used: used):
            found[source] = Search(model, batch, loss)
    return found


def predictions(
    kind: str, make: Callable[[], Parts], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model: times of full checkpoints and of plans, with predictions."""
    device = arguments.device
    keep_freed_memory()
    made = calibration(device, QUICK_SECONDS if arguments.quick else SECONDS)
    if arguments.json is not None:  # to keep the points beside the table of devices
        replace(made, path=arguments.json.with_name("calibration.json")).save()
    torch.manual_seed(0)
    parts = model, batch, loss = placed(make(), device)
    models, predicted = {NONE: copy.deepcopy(model), FULL: copy.deepcopy(model)}, {}
    for unit in units_of(models[FULL]):
        Action("full").apply(unit.module)
    with tempfile.TemporaryDirectory() as folder:
        for source, search in searches(parts, made).items():
            plan = search.plan(1 << 50)
            high, (low, seconds) = plan.peak_bytes, plan.totals[FULL]
            predicted[FULL, source] = 1 + seconds / plan.step_seconds
            for share in BUDGETS:
                name = f"storage_ops, {source}, {share:.0%}"
                try:
                    plan = search.plan(int(low + share * (high - low)))
                except NothingFits as error:
                    skip(f"{kind}: {name}", str(error))
                    continue
                models[name] = saved(plan, Path(folder) / "fit.json")(copy.deepcopy(model))
                predicted[name, source] = 1 + plan.seconds / plan.step_seconds
    cases = {name: step_of(each, batch, loss) for name, each in models.items()}
    runs = interleave(cases, arguments.repeats, device, kind)
    for name, (median, least, most) in ratios(runs, NONE).items():
        row = {
            "shape": kind, "case": name, f"time / {NONE}": round(median, 3),
            "least - most": f"{least:.2f} - {most:.2f}", "ms": milliseconds(runs[name]),
        }  # fmt: skip
        for source in (TABLE, CALIBRATED):
            if (name, source) in predicted:
                value = predicted[name, source]
                row[f"{source}"] = round(value, 3)
                row[f"{source}, off by (points)"] = round(100 * (value - median), 1)
        yield row
    group_done()
