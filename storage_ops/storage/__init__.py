"""Storage ops: free the bytes of a storage, and bind other bytes into it in place.

`storage.py` has the public functions, and applies them to tensor subclasses. Their ops have three
implementations. A native *binding* is compiled for the exact torch minor. An *alias* swaps data
pointers in torch >= 2.12. A *copy* is plain torch (`reference.py`). `kernels.py` registers the last
two, and the fakes. Native kernels override them. The *guard* is torch's error for reads of a
discarded storage. If torch has none, `check_discarded` finds these reads.
"""
