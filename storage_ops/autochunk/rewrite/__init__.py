"""A span of nodes becomes one op that runs chunk by chunk.

`body.py` copies the nodes into a graph for one chunk. `replace.py` puts the op in the place of the
span. `joint_sums.py` merges ops whose results are added to each other.
"""
