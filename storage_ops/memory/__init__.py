"""Measure, and draw, what a block of code allocates."""

from storage_ops.memory.measure import Measurement, Sample, measure
from storage_ops.memory.plot import plot_timelines

__all__ = ["Measurement", "Sample", "measure", "plot_timelines"]
