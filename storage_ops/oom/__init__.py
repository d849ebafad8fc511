"""Out of memory: limits the memory of a block, and explains what was in memory.

`tracking.py` keeps a ledger of the real ops of a block. `limit.py` raises an error if the ledger
exceeds a size. `explain_oom.py` reports the owners of memory. `advice.py` asks `fit` for a plan.
"""
