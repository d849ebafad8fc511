"""Memory of kernels: temporary buffers, and results that differ from those of fake tensors.

`cuda.py` and `cpu.py` have the temporary buffers of large kernels, `workspaces.py` those of matrix
products, and `scratch.py` enters them into a ledger. `fake_tensor_gaps.py` corrects results that
torch computes differently for fake tensors.
"""
