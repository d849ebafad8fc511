"""Restore what a region reads and writes besides its inputs, before the recompute.

`reachable.py` finds it by following what the code of the region names; `code_writes.py` tells from
that code whether it may write tensors. `known_walks.py` spares later calls this search where it
would find the same. `execution.py` restores random numbers, settings and Python modes (`modes.py`),
and how modules are called (`calls.py`). `effects.py` restores what the region may write: bytes
(`contents.py`), attributes and items (`holders.py`, `places.py`, `containers.py`), and whether a
parameter is frozen (`parameters.py`). A write that cannot be repeated is left out or refused
(`repeated_writes.py`). `caches.py` leaves out key-value caches that nobody reads in training.

A run on fake tensors leaves nothing behind: `unchanged.py` restores modules, objects and random
generators, and `left_behind.py` removes fake tensors from caches.
"""
