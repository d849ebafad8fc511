"""Policies: which results of ops a region saves instead of computing them again.

`policies.py` has the ones that the package names, `selective.py` runs a region with one. Policies
that are sets of ops run without Python code for each op: `native.py` says where. Results that a
policy *offloads* wait in host memory (`offload.py`). A copy engine of a GPU, of a simulation or of
a link that the CPU simulates carries them (`copies.py`). `flops.py` counts the work of ops.
"""
