"""A region: a call whose saved tensors are freed, and recomputed by a second call in backward.

    forward    keep inputs, note state -> call -> keep only a description of each saved tensor
    backward   a saved tensor is read -> restore inputs and state -> call -> its tensor again

* `region.py` tells this story. Where the call is usual, C++ does the same (`plain_region.py`).
  `options.py` has the settings of a region.
* `inputs.py` keeps the inputs as autograd keeps tensors. `outputs.py` has the outputs that can be
  discarded and bound back.
* `rows.py` keeps the outputs of consecutive regions that are not worth freeing. `sharing.py` copies
  modules that several layers share.
* `lowering.py` turns a region into a mark in the graph of compiled and traced code, and
  `torch_checkpoint.py` does so for the checkpoints of torch.
* `reentrant.py` is the older form of torch's checkpoint.
* `call_in.py` calls a function in contexts. `backward_pass.py` knows the running backward, and
  `errors.py` has the errors of a recompute.
"""
