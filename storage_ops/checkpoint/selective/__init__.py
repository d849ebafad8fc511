"""Policies: which results of ops a region saves instead of recomputing them.

`policies.py` has the policies with names. `selective.py` runs a region with a policy. Policies that
are sets of ops run without Python code for each op; `native.py` says when. Results that a policy
*offloads* wait in host memory (`offload.py`). The copies are made by a copy engine of a GPU, of a
simulation or of a link that a CPU simulates (`copies.py`).
"""
