"""Storage ops: free the bytes of a storage, and bind other bytes into it in place.

`storage.py` has the public functions, and applies them to subclasses of tensors. They call ops of
three kinds: a native *binding* for the exact torch minor, an *alias*, whose data pointer
torch >= 2.12 swaps in, and a *copy* in plain torch (`reference.py`). `kernels.py` registers the
last two, which native kernels outrank, and the fakes. The *guard* is torch's error for reads of a
discarded storage. If torch has none, `check_discarded` finds these reads.
"""
