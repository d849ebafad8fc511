"""Equal layers: the first call is simulated and recorded, the others are replayed.

`simulate/module_kinds.py` decides which modules and arguments are equal. `variants.py` finds out
which numbers and strings of a layer may differ. `recording.py` records
what a call does to the ledger, `replay.py` repeats that, and `replay_cache.py` keeps the
recordings. `casts.py` says where autocast allows that.
"""
