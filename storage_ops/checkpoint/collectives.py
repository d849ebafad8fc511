"""Collectives in a region: every rank has to repeat them, and in the same order.

One rank may need an output that another has no use for, whose consumer is frozen. So where a region
has communicated, each rank repeats all of it, at the latest when the gradient of an output comes.
"""

from __future__ import annotations

from typing import Any

import torch

_WORLD: Any = None
if torch.distributed.is_available():
    _WORLD = torch.distributed.distributed_c10d._world


def number_issued() -> int:
    """How many collectives this process has begun, in groups whose backend counts them."""
    total = 0
    for group in _WORLD.pg_map if _WORLD is not None else ():
        try:
            total += group._get_sequence_number_for_group()
        except RuntimeError:  # a backend without ranks to wait for, such as "fake"
            continue
    return total
