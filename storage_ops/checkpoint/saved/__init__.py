"""Saved tensors and outputs of regions, and who holds them.

A tensor that autograd saves in the forward is compared with the one of the recompute (`saved.py`,
`versions.py`, `op_log.py`). `matching.py` finds the results that a policy saved among the ops of
the recompute. A region may discard the *outputs* whose storage it allocated (`made.py`).
`makers.py` knows which region that was, `uses.py` keeps outputs that a backward reads, and
`holders.py` counts the references to an output. `guard.py` identifies storages and reports reads of
discarded ones. `snapshots.py` copies inputs that compiled code overwrites.
"""
