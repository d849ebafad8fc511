"""Measure what a block of code allocates, and draw it.

`measurement.py` counts the allocations of a block: its *timeline* is the level after each of them.
`owners.py` tells whose an allocation is: parameters, gradients, activations of a module and so on.
`calls.py` follows the calls of a model's modules. `plot.py` draws timelines.
"""
