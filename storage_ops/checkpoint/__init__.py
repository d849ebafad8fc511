"""Checkpointing: regions that run again in backward, and layers of a model chosen by a config.

A *region* is one call that runs again in the backward. These packages build on each other, from the
lowest to the highest:

* `saved/`: saved tensors and outputs, the regions that created them, and other references to them.
* `state/`: state that a region reads and writes besides its inputs, restored for the recompute.
* `region/`: the region itself, from the call to the recompute.
* `discard/`: regions whose outputs are freed too, after their *consumers* have run.
* `selective/`: policies that save the results of some ops in a region.
* `layers/`: layers of a model that become regions, chosen by a config.
"""
