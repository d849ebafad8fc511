"""Records a training step as one graph.

`trace.py` records it and calls it. Tensors that the function reaches become inputs: `slots.py`
finds their places, and `lift.py` replaces them in the trace. `arguments.py` has the stand-ins of
arguments, their checks at each call, and the results. `optimizers.py` checks optimizers, and
`autocast.py` the autocast around a call. `overlaps.py` finds arguments that share memory.
`data_parallel.py` and `fully_sharded.py` write the communication of DDP and FSDP2 as ops.
`refusals.py` raises errors for functions that no graph can represent. `cleanup.py` drops redundant
nodes.
"""
