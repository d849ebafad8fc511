"""Simulate and measure the peak of a function on a CPU."""

import pytest

from storage_ops.loss.planning.devices import named
from storage_ops.memory import measure
from storage_ops.simulate.captured import Captured
from storage_ops.simulate.estimate import call_simulated, simulating
from storage_ops.simulate.rates import SimulatedDevice
from storage_ops.simulate.values.assume import Assumption

CPU = SimulatedDevice(is_gpu=False, rates=named("cpu"))


def simulated_levels(run):
    """Return the bytes above the inputs at each moment of a call of `run` with CPU kernels."""
    captured = Captured(run, (), {})
    ledger = CPU.ledger()
    with simulating(ledger, captured, (), {}, Assumption(None), CPU) as (_, args, kwargs):
        out = call_simulated(run, args, kwargs)
        levels = ledger.levels()  # inside the block, whose end frees the inputs
        del out
    inputs = sum(block.nbytes for block in ledger.inputs)
    return [level - inputs for level in levels]


def simulated_peak(run):
    """Return the peak above the inputs of a call of `run` with CPU kernels."""
    return max(simulated_levels(run))


def measured_peak(run):
    """Return the measured peak of a second call of `run`. The first one may fill caches."""
    run()
    with measure() as m:
        run()
    return m.peak_bytes


def check(run, rel=0.03):
    """Assert that the simulated peak of `run` is the measured one."""
    assert simulated_peak(run) == pytest.approx(measured_peak(run), rel=rel, abs=4096)
