"""The relation of each node of a graph to a chunk of tokens. No graph is changed here.

`rules.py` is the table of ops: which dimensions of arguments and result belong together.
`layouts.py` has the layouts that follow from the rules: some rows, a term of a sum, or the whole
value. `spans.py` follows the tokens from a product. `passes.py` orders the results of a span.
`predict.py` computes the peak memory of a graph, `op_plan.py` that of linear cross-entropy.
"""
