"""Rewrites that change no value of a graph, so that it can be cut along its tokens.

`decompose.py` replaces ops without a rule, and `split_reductions.py` reductions over all tokens.
`indexed.py` replaces an index of one class per token by a gather.
`reorder.py` reorders small tensors instead of large ones. `class_dimension.py` moves the classes
into the last dimension. `ranges.py` computes a product in the ranges of tokens that are used.
`selections.py` finds the tokens that an op selects, and `token_ranges.py` where they are in each
value.
"""
