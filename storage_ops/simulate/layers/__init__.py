"""Equal layers: the first call is simulated and recorded, the others are replayed.

`simulate/module_kinds.py` decides which modules and arguments are equal. `variants.py` finds out
which numbers and strings of a layer may differ. `recording.py` records the effect of a call on the
ledger. `graph_ends.py` separates the autograd graph of the call. `replay.py` repeats the effect,
and `replay_cache.py` keeps the recordings. `casts.py` checks that autocast allows it.
`key_value_caches.py` lets layers of transformers be equal although each changes an entry of the
model's cache.
"""
