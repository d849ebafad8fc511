"""Which tensors a region has read by its graph: those that must not change before the recompute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from storage_ops.checkpoint.saved.saved import fail_modified


def check_unread(
    name: str, modified: list[Tensor], outputs: Iterable[Any], start: int, given: list[Tensor]
) -> None:
    """Raise if a region has read one of the tensors that were modified since its forward.

    It is asked of the repetition: mostly nothing was modified, and then no graph is walked.

    Args:
        name: what the error calls the region.
        modified: leaves, and captured tensors with a history.
        outputs: of the repetition.
        start: number of the first node of its graph; other threads have other numbers.
        given: its inputs, which autograd compares.
    """
    ends = {t.grad_fn for t in (*given, *modified)} - {None}
    leaves, before = _edges(outputs, start, ends)
    read = {id(t) for t in leaves}
    for t in modified:
        if id(t) in read or (t.grad_fn is not None and t.grad_fn in before):
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
