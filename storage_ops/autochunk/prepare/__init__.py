"""Rewrites that keep every value of a graph, so that it can be cut along its tokens.

`decompose.py` replaces ops without a rule; `split_reductions.py` does so for reductions over all
tokens. `reorder.py` reorders small tensors instead of large ones. `class_dimension.py` moves the
classes into the last dimension. `ranges.py` forms a product in the ranges of tokens that are used:
`selections.py` says which tokens an op selects, `token_ranges.py` where they are in each value.
"""
