"""Losses that become the op of linear cross-entropy, before autograd sees them.

`recognise.py` is the entry. `dynamo_slice.py` traces a part of Dynamo's graph to ATen ops and
writes ATen ops back. `classes_last.py` rewrites losses whose classes are in dimension 1.
`per_token.py` is the part from the hidden states to a few numbers per token; `reduction.py` is the
part from there to the loss. `emit.py` writes the op.
"""
