"""Recomputes checkpointed regions of a graph just before the backward needs them.

`remat.py` is the pass. `functionalize.py` rewrites in-place ops so that a region can run in part.
`rng.py` repeats random ops with the numbers of the forward. `capture.py` does so under CUDA graphs.
`repair.py` finds regions in graphs of `make_fx`, `tags.py` in graphs of torch.compile. `verify.py`
compares a graph with its original.
"""
