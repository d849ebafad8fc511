"""Saved tensors and outputs of regions, and who references them.

A tensor that autograd saves in the forward is compared with the one of the recompute (`saved.py`),
and with `debug=True` the ops are compared too. `matching.py` does that, and finds the results that
a policy saved among the ops of the recompute. A region may discard the outputs whose storage it
allocated: `outputs.py` has those outputs, their producers, and saved tensors that share their
storage. `ref_counts.py` counts the references to an output. `guard.py` identifies storages and
reports reads of discarded ones. `snapshots.py` copies inputs that compiled code overwrites.
"""
