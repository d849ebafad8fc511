"""A region: a call whose saved tensors are freed, and recomputed by a second call in backward.

`region.py` tells the story from the call to the backward. Where the call is usual, C++ does the
same (`plain_region.py`). The inputs are kept as autograd keeps tensors (`inputs.py`). The outputs
can be discarded and bound back (`outputs.py`). In compiled and traced code a region becomes a mark
in the graph (`lowering.py`; `torch_checkpoint.py` for the checkpoints of torch). `reentrant.py` is
the older form of torch's checkpoint. `options.py` has the settings of a region. `rows.py` keeps the
outputs of consecutive regions that are not worth freeing, and `sharing.py` finds modules that
several layers share.
"""
