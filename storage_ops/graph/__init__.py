"""Training steps as one graph in which checkpointed regions are recomputed.

A *step* is a function of tensors that may call `backward` and an optimizer. `tracing/` records it:
tensors that the function reaches become inputs, and each call is checked against the trace.

While a step is recorded, every node gets a *mark*: the regions around it, and its backward pass
(`foundation/regions.py`; `checkpoint/region/torch_checkpoint.py` for torch's checkpoints).
`recompute/` reads the marks. It copies the nodes of a region to just before the first backward node
that reads one of their results. Graphs of other tracers have no marks, so `recompute/` finds their
regions.

Where things are:

* `nodes.py`: facts about single nodes of a graph.
* `schedule.py`: the memory of a graph over time.
* `recompute/`: recomputes the marked regions of a graph: `remat`, `capturable`.
* `tracing/`: turns a function into a `TracedStep`: `trace_step`.
"""

from storage_ops.foundation import regions
from storage_ops.graph.recompute.capture import capturable
from storage_ops.graph.recompute.remat import remat
from storage_ops.graph.schedule import Schedule, schedule
from storage_ops.graph.tracing.trace import TracedStep, trace_step

__all__ = ["Schedule", "TracedStep", "capturable", "regions", "remat", "schedule", "trace_step"]
