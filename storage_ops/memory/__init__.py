"""Measure, estimate and draw what a block of code allocates."""

from storage_ops.memory.estimate import Estimate, estimate
from storage_ops.memory.measure import Measurement, Sample, measure
from storage_ops.memory.plot import plot_timelines

__all__ = ["Estimate", "Measurement", "Sample", "estimate", "measure", "plot_timelines"]
