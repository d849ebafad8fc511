"""The relation of each node of a graph to a chunk of tokens. No graph is changed here.

`rules.py` is the table of ops: which dimensions of arguments and result belong together.
`layouts.py` has the answers that the rules lead to: some rows, a term of a sum, or all of a value.
`spans.py` follows the tokens from a product, and `passes.py` orders the results that it finds.
`predict.py` computes the peak memory of a graph, `op_plan.py` that of linear cross-entropy.
"""
