"""Simulates a call or a training step on fake tensors, as on a GPU, and counts its memory.

    estimate, simulate_step, ... -> simulating -> Simulation -- each op --> Ledger
                                        |-> Captured: what exists before the call
                                        `-> patches and ranks: what runs differently
    Ledger, Roles of its blocks -> Estimate, StepEstimate

Terms:

* The *simulation* is a dispatch mode. It runs each op on fake tensors, which have no bytes.
* The *ledger* (`foundation/ledger.py`) has the *blocks* of memory, and the *events* that allocate
  and free them.
* A *twin* is the fake tensor in place of a tensor from outside, which does not change.
* The *role* of a block is an owner that is known beforehand, such as "parameters". Other blocks
  belong to the calls of modules that allocate them.
* Values of a tensor are *known* if they determine sizes and follow from real tensors. For others,
  the caller passes an *assumption*.
* Modules of one *kind* do the same. The first call of a kind is recorded, and later ones are
  *replayed* from the recording.

Where things are:

* `estimate.py` simulates a function, `step.py` a training step, `evaluate.py` an evaluation during
  training, and `serve.py` a model that generates text. `will_it_fit.py` compares a peak with a
  budget. `advice.py` warns of arguments that callers rarely mean.
* `roles.py` has the owners of blocks, and their bytes at the peak.
* `mode.py` is the dispatch mode, `fakes.py` the mode of fake tensors below it, and `twins.py` has
  the twins. `captured.py` finds the tensors, modules and optimizers that exist before the call.
  `gradients.py` has the gradients of earlier batches.
* `rates.py` describes the simulated device: its speed, its memory, and how it rounds sizes.
* `compiled.py` simulates a loss that is compiled with `backend="storage_ops"`.
* `module_kinds.py` and `plain_values.py` decide which modules do the same. `layers/` records and
  replays their calls.
* `values/` has the values that determine sizes.
* `kernels/` has temporary memory of kernels, and results that fake tensors get wrong.
* `patches/` has functions of torch and transformers that run differently in a simulation.
* `ranks/` has one rank of several: collectives, FSDP2 and DDP.
"""
