"""Measure, simulate and explain the memory of a call or a training step.

The names are defined in `storage_ops.measure`, `storage_ops.simulate` and `storage_ops.oom`.
"""

from storage_ops.measure.measurement import Life, Measurement, Sample, measure
from storage_ops.measure.plot import plot_timelines
from storage_ops.oom.explain_oom import OomReport, explain_oom
from storage_ops.oom.limit import limit
from storage_ops.simulate.estimate import Estimate, estimate
from storage_ops.simulate.step import StepEstimate, simulate_step
from storage_ops.simulate.will_it_fit import FitReport, will_it_fit

__all__ = [
    "Estimate",
    "FitReport",
    "Life",
    "Measurement",
    "OomReport",
    "Sample",
    "StepEstimate",
    "estimate",
    "explain_oom",
    "limit",
    "measure",
    "plot_timelines",
    "simulate_step",
    "will_it_fit",
]
