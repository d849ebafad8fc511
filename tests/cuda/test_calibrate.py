"""A calibration of a device, and the predictions that follow from it."""

import os
import statistics

import pytest
import torch

import storage_ops
from benchmarks._harness import Clock
from benchmarks.fit.models import models, placed
from benchmarks.fit.predictions import searches, step_of
from storage_ops.fitting.actions import Action
from storage_ops.fitting.units import units_of

from .devices import each_device

SIZES = {
    "cpu": {"tokens": 64, "width": 128, "layers": 3, "vocab": 512, "image": 64},
    "cuda": {"tokens": 1024, "width": 2048, "layers": 4, "vocab": 8192, "image": 256},
}
SECONDS = {"cpu": 5.0, "cuda": 45.0}
# Points of a step, as a share. Other processes of a CPU slow single steps.
MARGIN = {"cpu": 0.3, "cuda": 0.1}


def seconds_of(step, device):
    clock = Clock(device)
    step()
    return clock.stop()[1]


@pytest.mark.slow
@each_device
@pytest.mark.parametrize("kind", ["GPT", "UNet"])
def test_full_checkpoints_take_the_predicted_time(device, kind, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    if device == "cuda" and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("measures times, which other tests on the GPU change")
    monkeypatch.setattr("storage_ops.fitting.calibration.folder", lambda: tmp_path)
    calibration = storage_ops.calibrate(device, SECONDS[device])
    assert "aten::mm" in calibration.op_times.points
    assert calibration.host.op == 0 if device == "cuda" else calibration.host.op > 0
    torch.manual_seed(0)
    parts = placed(models(**SIZES[device])[kind](), device)
    plan = searches(parts, calibration)["calibrated"].plan(1 << 50)
    assert plan.is_calibrated
    predicted = 1 + plan.totals["full checkpoint"][1] / plan.step_seconds
    model, batch, loss = parts
    plain = step_of(model, batch, loss)
    rounds = {False: [], True: []}
    for is_full in (False, True):
        if is_full:
            for unit in units_of(model):
                Action("full").apply(unit.module)
        for _ in range(3):
            plain()
        rounds[is_full] = [seconds_of(plain, device) for _ in range(9)]
    measured = statistics.median(rounds[True]) / statistics.median(rounds[False])
    assert abs(predicted - measured) < MARGIN[device]
