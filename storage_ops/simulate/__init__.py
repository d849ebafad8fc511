"""Simulate a call or a whole training step on fake tensors, as on a GPU, and count its memory.

Every op passes a dispatch mode (`mode.py`) that enters the storages it allocates into a *ledger*
(`foundation/ledger.py`). `captured.py` finds the tensors, modules and optimizers that exist before
the call. The packages below have the details:

* `values/`: sizes that depend on the values of tensors, which are known or assumed.
* `kernels/`: memory that kernels take beyond their results, and results that fake tensors get
  wrong.
* `patches/`: functions of torch and transformers that run differently in a simulation.
* `ranks/`: one rank of several: collectives, FSDP2 and DDP.
* `layers/`: equal layers (`module_kinds.py`) are simulated once; the others are replayed from a
  recording.

`estimate.py` simulates a function, `step.py` a training step of a model, and `will_it_fit.py`
compares its peak with a budget. A loss that is compiled with `backend="storage_ops"` is simulated
in its compiled form (`compiled.py`). `rates.py` says how fast the simulated device is.
"""
