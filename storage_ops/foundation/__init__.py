"""Facts and marks that several packages share. Every other package may import them.

`walk.py` visits the values that a function, module, object or container reaches, by one set of
rules. `values.py` has the facts about a single value, and `functions.py` the variables that a
function refers to. `regions.py` marks the nodes of a graph under trace. `ledger.py` records which
block of memory lives from when to when. `lifetimes.py` fills a ledger from a graph whose nodes are
known before it runs. `op_names.py` has the dispatcher's names of ops. `ops.py` is the table of the
known facts of each op. `tensor_spec.py` describes a tensor without its bytes. `autocast.py` returns
the dtype of autocast. `collectives.py` and `fsdp.py` keep ranks in step when a region runs again.
`eager.py` excludes functions from Dynamo.
"""
