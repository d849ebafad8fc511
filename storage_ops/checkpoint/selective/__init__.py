"""Policies: which results of ops a region saves instead of recomputing them.

`policies.py` has the policies with names. `selective.py` runs a region with a policy. Policies that
are sets of ops (`op_sets.py`) run without Python code for each op; `native.py` says when.
`collectives.py` has the collectives that write into their arguments. Results that a policy
*offloads* wait in host memory (`offload.py`). The copies are made by a copy engine of a GPU, of a
simulation or of a link that a CPU simulates (`copies.py`).
"""
