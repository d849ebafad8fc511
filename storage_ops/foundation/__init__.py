"""What every other package may import: facts and marks that several of them share.

`walk.py` visits all that a function, module, object or container reaches, and has the rules for it.
`regions.py` marks the nodes of a graph under trace. `ledger.py` records which block of memory lives
from when to when; `lifetimes.py` fills a ledger from a graph whose nodes are known before it runs.
`op_names.py` has the dispatcher's names of ops, `ops.py` the table of what is known of each op.
`tensor_spec.py` describes a tensor without its bytes.
"""
