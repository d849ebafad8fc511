"""Fit a training step into a budget: choose what each layer recomputes.

`units.py` finds the *layers* of a model. A saved plan knows them by their `fingerprint.py`.
`storage_ops/simulate/module_kinds.py` decides which of them are equal. `record.py` simulates a step
with stand-ins for the layers, to find the memory besides them. `heads.py` finds the losses whose
budget is part of a plan. `probe.py` simulates one layer with an *action* (`actions.py`).
`choices.py` chooses the actions to try, `step.py` has the ledger of both simulations, and
`roofline.py` the time of ops. `loss_variants.py` combines these numbers, once for each way to
compute the loss, and `solve.py` finds the fastest plan from them. `search.py` simulates the whole
step with the plan, and returns it (`plan.py`). A plan holds under some `conditions.py`.
`entries.py` checks the values of a saved plan. `fit.py` has the public function. `largest.py`
repeats the search for batches of other sizes, or for other GPUs.

`calibrate.py` measures the times of ops in the steps of small models (`samples.py`), and the host's
time for actions. `calibration.py` keeps them in a file and finds the one of a device.
"""
