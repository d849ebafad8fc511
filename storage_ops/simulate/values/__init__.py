"""Values of tensors that decide sizes in a simulation.

`known.py` follows the values that are known, such as masks and sequence lengths. For the others the
caller assumes a share (`assume.py`), and `sizes.py` turns both into the sizes of results.
`sparse.py` simulates sparse tensors, `wrappers.py` tensor subclasses, and `leaves.py` the
gradients, flags and hooks of leaf tensors.
"""
