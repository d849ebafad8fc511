"""Out of memory: limit the memory of a block, and explain who held it.

`tracking.py` keeps a ledger of the real ops of a block. `limit.py` raises where the ledger exceeds
a size, `explain_oom.py` reports who held what, and `advice.py` asks `fit` for a plan that fits.
"""
