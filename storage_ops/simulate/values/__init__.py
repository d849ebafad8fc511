"""Tensor values that determine sizes in a simulation.

`known.py` follows known values, such as masks and sequence lengths. For other values the caller
assumes a share (`assume.py`). `supposed.py` has values that follow from assumptions or from the op
alone. `sizes.py` computes the sizes of results from both. `sparse.py` simulates sparse tensors,
`wrappers.py` tensor subclasses, and `leaves.py` the gradients, flags and hooks of leaf tensors.
"""
