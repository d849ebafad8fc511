"""Regions whose outputs are freed in the forward and bound back in the backward.

`output_discard.py` and `chain.py` have the public classes. `consumers.py` finds the modules that
saved an output, which is freed after they have run. `containers.py` detects modules that store the
container of an output. `scope.py` does the same for a module around layers that a config chose.
"""
