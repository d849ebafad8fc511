"""Facts and marks that several packages share. Every other package may import them.

* Python objects: `walk.py` visits the values that a function, module, object or container reaches.
  `values.py` has the facts about a single value, and `functions.py` the variables that a function
  refers to.
* Ops: `ops.py` is the table of the known facts of each op. `op_names.py` has the dispatcher's
  names of ops.
* Memory: `ledger.py` records which block of memory lives from when to when. `lifetimes.py` fills a
  ledger from a graph whose nodes are known before it runs. `tensor_spec.py` describes a tensor
  without its bytes.
* Graphs: `regions.py` marks the nodes of a graph under trace. `eager.py` keeps Dynamo from
  functions and from blocks of code.
* Ranks: `collectives.py` and `fsdp.py` keep ranks in step when a region runs again.
* `autocast.py` returns the dtype of autocast.
"""
