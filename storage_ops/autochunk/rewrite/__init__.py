"""Replaces a span of nodes by one op that runs chunk by chunk.

`body.py` copies the nodes into a graph for one chunk. `replace.py` replaces the span by the op.
`joint_sums.py` merges ops whose results are added to each other.
"""
