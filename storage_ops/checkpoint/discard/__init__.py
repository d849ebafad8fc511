"""Regions whose outputs are freed in the forward and bound back in the backward.

`output_discard.py` and `chain.py` are the public classes. `consumers.py` finds the modules that
saved an output: it is freed once they have run. `scope.py` is the same for a module around layers
that a config chose.
"""
