"""Collectives in a region: every rank must repeat them, and in the same order.

Saved tensors can differ between ranks: a rank without tokens skips its experts, and a rank with a
frozen consumer does not need an output. So the first saved tensor that backward reads may lie
before a collective on one rank and behind it on another. The same is true of the last tensor that
the recompute must reach. Each rank therefore repeats the whole region if the region has
communicated. It does so when the gradient of the first output comes, before any node of the region
runs its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

GROUPS: Any = ()
if torch.distributed.is_available():
    GROUPS = torch.distributed.distributed_c10d._world.pg_map  # torch only adds and removes items


def number_issued() -> int:
    """Return how many collectives this process has begun, in groups whose backend counts them."""
    total = 0
    for group in GROUPS:
        try:
            total += group._get_sequence_number_for_group()
        except RuntimeError:  # a backend that does not count collectives, such as "fake"
            continue
    return total


def call_before_backward(outputs: Iterable[Any], fn: Callable[[Any], None]) -> None:
    """Call `fn` with the gradients of each node that created an output, before the node runs.

    Hooks of the outputs run before that. FSDP uses them to gather parameters.
    """
    nodes = [t.grad_fn for t in outputs if isinstance(t, Tensor) and t.grad_fn is not None]
    for node in dict.fromkeys(nodes):
        node.register_prehook(fn)
