"""Restore the state that a region reads and writes besides its inputs, before the recompute.

* `reachable.py` finds the objects that the code of a region may read. `code_writes.py` tells from
  that code if it may write tensors. `known_walks.py` saves later calls the search if its result
  would be the same.
* `snapshot.py` notes the state before a forward, in C++ where it can.
* `execution.py` restores random numbers, settings, Python modes (`modes.py`) and the hooks of
  modules (`calls.py`).
* `effects.py` restores state that the region may write: bytes (`contents.py`), attributes and items
  (`holders.py`, `places.py`, `containers.py`), and if a parameter is frozen (`parameters.py`).
  `registered.py` lists the parameters and buffers of modules.
* `repeated_writes.py` leaves out or refuses writes that the recompute must not run again.
* `caches.py` removes empty key-value caches from the arguments of layers in training.
* `unchanged.py` restores modules, objects and random generators after a run on fake tensors, and
  `left_behind.py` removes fake tensors from caches.
"""
