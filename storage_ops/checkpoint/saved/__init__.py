"""Saved tensors and outputs of regions, and who references them.

* `saved_tensors.py` describes the tensors that autograd saves, and `saved.py` compares those of the
  forward with those of the recompute. `checksums.py` has the checksums of their bytes.
* `matching.py` compares the ops with `debug=True`. It also finds, for an op of the recompute, the
  result that a policy saved. `light_mode.py` is the base of modes that see the ops.
* `outputs.py` has the outputs whose storage a region allocated, which it may discard. It also has
  their producers, and saved tensors that share their storage.
* `ref_counts.py` counts the references to an output.
* `guard.py` identifies storages, and reports reads of discarded outputs.
* `snapshots.py` copies inputs that compiled code overwrites.
"""
