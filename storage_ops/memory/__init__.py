"""Measure, estimate and draw what a block of code allocates.

`measure.py` runs the block and counts the allocations that torch makes; a *timeline* is the level
after each of them. An allocation has an *owner* (`owners.py`): parameters, gradients, activations
of a module and so on. `plot.py` draws them.

`estimate.py` runs it on fake tensors, as on a GPU. Every op passes a mode that books the storages
it makes (`estimate_modes.py`) in a *ledger*, of blocks that live from when to when
(`foundation/ledger.py`). What was there before the call is found by `estimate_inputs.py`, kernels
that take other memory on a GPU are in `estimate_gpu.py`, sparse tensors in `estimate_sparse.py`.
What kernels take only while they run, their *scratch*, is in `estimate_cuda.py` and
`estimate_cpu.py`, and where torch is otherwise for fake tensors in `estimate_real.py`.
One rank of several is simulated alone (`estimate_ranks.py`, `estimate_fsdp.py`, `estimate_ddp.py`).
Sizes that depend on values are exact where the values are *known* (`estimate_values.py`); of the
others the caller *assumes* something (`estimate_assume.py`), and `estimate_sizes.py` turns that
into sizes. A loss that the package compiles is simulated as what runs (`estimate_compiled.py`). A
graph whose nodes are known before it runs is booked node by node (`foundation/lifetimes.py`),
traced steps and chunked losses among them, so that every predicted peak is a level of a ledger.

`step.py` simulates a whole training step of a model; `estimate_calls.py` tells it whose call an op
belongs to. Alike calls of modules (`alike.py`) are run once: `recording.py` writes down what the
first does to the ledger, `replay.py` carries it out for the others, `quick.py` decides which.
`will_it_fit.py` compares the peak with a budget.

`tracking.py` keeps the same ledger for real ops: `limit.py` raises where it exceeds a size, and
`explain_oom.py` says who held what, and `advice.py` what `fit` would do.
"""

from storage_ops.memory.estimate import Estimate, estimate
from storage_ops.memory.explain_oom import OomReport, explain_oom
from storage_ops.memory.limit import limit
from storage_ops.memory.measure import Life, Measurement, Sample, measure
from storage_ops.memory.plot import plot_timelines
from storage_ops.memory.step import StepEstimate, simulate_step
from storage_ops.memory.will_it_fit import FitReport, will_it_fit

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
