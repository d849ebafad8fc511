"""Losses that are replaced by the op of linear cross-entropy, before autograd sees them.

`recognise.py` is the entry point. `dynamo_slice.py` traces a part of Dynamo's graph to ATen ops and
writes ATen ops back. `classes_last.py` rewrites losses whose classes are in dimension 1.
`per_token.py` has the part from the hidden states to a few numbers per token. `reduction.py` has
the part from these numbers to the loss. `emit.py` writes the op.
"""
