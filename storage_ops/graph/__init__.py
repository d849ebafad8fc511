"""Training steps as one graph, in which checkpointed regions really are recomputed."""

from storage_ops.graph import regions
from storage_ops.graph.capture import capturable
from storage_ops.graph.remat import remat
from storage_ops.graph.schedule import Schedule, schedule
from storage_ops.graph.trace import TracedStep, trace_step

__all__ = ["Schedule", "TracedStep", "capturable", "regions", "remat", "schedule", "trace_step"]
