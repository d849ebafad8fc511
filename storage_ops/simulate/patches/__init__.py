"""Functions that run differently in a simulation.

`gpu.py` replaces CPU kernels by the memory behaviour of GPU kernels. `functions.py` replaces
functions of torch that are not ops. `autocast.py` replaces autocast, `packed.py` packed sequences,
`prods.py` the backward of products and extrema, and `hf.py` functions of transformers that read
masks and token ids.
"""
