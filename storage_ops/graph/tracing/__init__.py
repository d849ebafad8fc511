"""Records a training step as one graph.

`trace.py` records it and calls it. Tensors that the function reaches become inputs: `slots.py`
says where they are, `lift.py` replaces them in the trace. `arguments.py` has the stand-ins of
arguments, their checks at each call, and the results. `optimizers.py` watches optimizers.
`data_parallel.py` and `fully_sharded.py` write the communication of DDP and FSDP2 as ops.
`refusals.py` raises for functions that no graph can hold. `cleanup.py` drops redundant nodes.
"""
