"""Simulates a call or a training step on fake tensors, as on a GPU, and counts its memory.

A dispatch mode (`mode.py`) sees every op and records the storages that the op allocates in a
*ledger* (`foundation/ledger.py`). Tensors from outside have fake twins (`twins.py`). `captured.py`
finds the tensors, modules and optimizers that exist before the call. `fakes.py` has the fake tensor
mode. The packages below have the details:

* `values/`: sizes that depend on the values of tensors, which are known or assumed.
* `kernels/`: temporary memory of kernels, and results that fake tensors get wrong.
* `patches/`: functions of torch and transformers that run differently in a simulation.
* `ranks/`: one rank of several: collectives, FSDP2 and DDP.
* `layers/`: the first of equal layers (`module_kinds.py`, `plain_values.py`) is simulated, and the
  others are replayed from its recording.

`estimate.py` simulates a function, `step.py` a training step of a model, and `will_it_fit.py`
compares its peak with a budget. `gradients.py` has the gradients of earlier batches. `evaluate.py`
simulates an evaluation during training, and `serve.py` a model that generates text. `advice.py`
warns of arguments that callers rarely mean. A loss that is compiled with `backend="storage_ops"` is
simulated in its compiled form (`compiled.py`). `rates.py` says how fast the simulated device is,
and how much memory it has.
"""
