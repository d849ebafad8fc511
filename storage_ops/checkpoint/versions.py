"""Whether the parameters that a region has read are what they were in forward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from storage_ops.checkpoint.saved import fail_modified


class Versions:
    """How often tensors that a region has read had been modified in place when it had run.

    Args:
        outputs: of the region.
        start: number of the first node of its graph; other threads have other numbers.
        given: its inputs, which autograd compares.
        captured: tensors that it may have read without being given them.
    """

    def __init__(
        self, outputs: Iterable[Any], start: int, given: list[Tensor], captured: list[Tensor]
    ) -> None:
        ends = {t.grad_fn for t in (*given, *captured)} - {None}
        leaves, before = _edges(outputs, start, ends)
        read = [t for t in captured if t.grad_fn in before]
        # Weak, for a region must not keep them alive.
        self._seen = [(weakref.ref(t), t._version) for t in (*leaves, *read)]

    def check(self, name: str) -> None:
        """Raise if one of them was modified since."""
        for ref, version in self._seen:
            t = ref()
            if t is not None and t._version != version:
                fail_modified(name, t)


def _edges(outputs: Iterable[Any], start: int, ends: set[Any]) -> tuple[list[Tensor], set[Any]]:
    """What a graph from a node on, no farther than `ends`, reads: leaves, and nodes of before."""
    stack = [t.grad_fn for t in outputs if isinstance(t, Tensor)]
    seen: set[Any] = {None}
    leaves, before = [], set()
    while stack:
        node: Any = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        elif node in ends or node._sequence_nr() < start:
            before.add(node)
        else:
            stack += [following for following, _ in node.next_functions]
    return leaves, before
