"""Tensor values that determine sizes in a simulation.

* `known.py` follows known values, such as masks and sequence lengths, from op to op.
* `assume.py` has the caller's assumptions about all other values, as shares.
* `supposed.py` has values that follow from assumptions, or from the op alone.
* `sizes.py` computes the sizes of results from both.
* `sparse.py` simulates sparse tensors, and `wrappers.py` finds the tensors in tensor subclasses.
* `leaves.py` keeps the gradients, flags and hooks of leaf tensors.
"""
