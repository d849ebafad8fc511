"""FX graphs: facts about nodes, and edits.

`nodes.py` has facts about a node: its op, its value and sizes, its arguments and users. `edit.py`
adds nodes with values, sorts them and undoes changes. `joint_graph.py` protects a joint graph from
wrong second derivatives and from new random numbers.
"""
