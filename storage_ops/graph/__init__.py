"""Training steps as one graph, in which checkpointed regions really are recomputed.

A *step* is a function of tensors that may call `backward` and an optimizer. `trace.py` records it:
tensors that it closes over become inputs (`lift.py`, found by `slots.py`), optimizers are watched
(`optimizers.py`), its results leave as a flat list (`packing.py`), and each call is checked against
what the trace has fixed (`arguments.py`). DDP and FSDP2 communicate by ops of the graph
(`data_parallel.py`, `fully_sharded.py`); what it cannot hold is refused by name (`refusals.py`).

While it is recorded, every node gets a *mark*: the regions around it, and the backward pass that it
belongs to (`foundation/regions.py`; `checkpoint/region/torch_checkpoint.py` for those of torch).
`remat.py` reads the marks and makes what a backward pass needs of a region again, just before it is
first read there: in-place ops are rewritten for that (`functionalize.py`), random ops run again
with the numbers they drew (`rng.py`, for CUDA graphs `capture.py`), and `verify.py` compares with
what eager mode computes.
Graphs that others recorded have no marks: `repair.py` finds the regions in those of `make_fx`,
`tags.py` in those of torch.compile.

`schedule.py` is the memory of a graph over time. `nodes.py` has facts about single nodes.
"""

from storage_ops.foundation import regions
from storage_ops.graph.recompute.capture import capturable
from storage_ops.graph.recompute.remat import remat
from storage_ops.graph.schedule import Schedule, schedule
from storage_ops.graph.tracing.trace import TracedStep, trace_step

__all__ = ["Schedule", "TracedStep", "capturable", "regions", "remat", "schedule", "trace_step"]
