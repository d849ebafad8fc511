"""Measures the allocations of a block of code, and draws them.

`measurement.py` counts the allocations of a block. Its *timeline* has the level after each of them.
`owners.py` finds the owner of each allocation: parameters, gradients, activations of a module and
so on. `calls.py` follows the calls of a model's modules. `plot.py` draws timelines, and `page.py`
writes HTML pages.
"""
