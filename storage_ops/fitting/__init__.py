"""Fit a training step into a budget: choose what each layer recomputes.

`units.py` finds the *layers* of a model. A saved plan knows them by their `fingerprint.py`.
Which of them do the same is decided by `storage_ops/simulate/module_kinds.py`.
`record.py` simulates a step with stand-ins in their places: what is in memory besides them.
`probe.py` simulates one layer with an *action* (`actions.py`), `choices.py` says which actions are
worth it, `step.py` has the ledger of both, and `roofline.py` the time of ops. `loss_variants.py`
puts these numbers together, once for each way to compute the loss, and `solve.py` finds the fastest
plan from them. `fit.py` simulates the whole step with it; `plan.py` is what it returns.
`largest.py` repeats this for batches of other sizes, or for other GPUs.
"""
