"""The outputs that a region made itself: bytes that it may discard and make again."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from storage_ops.checkpoint.guard import storage_key
from storage_ops.checkpoint.holders import Holders
from storage_ops.storage.storage import wait_for

_NOBODY = Holders(0, 0, 0)


@dataclass(slots=True, eq=False)
class Made:
    """An output that a region made.

    Attributes:
        index: its place among the flattened outputs.
        key: what identifies its storage.
        handle: an alias that keeps the storage, not the graph.
        output: the tensor that the caller was given, as long as somebody has it.
        version: how often it was modified in place when the region returned.
        holders: how many held it then: nobody but the caller.
        is_held: whether something else does that has no use of the region, so that it is kept.
    """

    index: int
    key: int
    handle: Tensor
    output: weakref.ref[Tensor]
    version: int
    holders: Holders = _NOBODY
    is_held: bool = False


def find_made(
    leaves: list[Any], others: Iterable[Tensor], start: int | None, is_counted: bool
) -> list[Made]:
    """The outputs of a region that nobody else has the bytes of.

    Args:
        leaves: what it returned.
        others: tensors from outside.
        start: the number of its first autograd node; None if nothing needs grad.
        is_counted: whether something in it may hold an output, so that holders are counted.
    """
    found: list[Made] = []
    outside = {None, *map(storage_key, others)}
    for leaf in leaves:
        wait_for(leaf)  # the end of a collective is a modification, and until then it holds bytes
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        key = storage_key(leaf)
        if key is None or key in outside:
            continue
        if start is not None:
            node, is_told = _origin(leaf)
            # A parameter, or a view of a tensor from outside, must not be freed.
            if leaf.layout is not torch.strided or node is None or node._sequence_nr() < start:
                continue
            is_counted = is_counted or not is_told
        found.append(Made(index, key, leaf.detach(), weakref.ref(leaf), leaf._version))
    for made in found:
        made.holders = Holders.counted(made.key, made.output)
    return _without_held(found) if is_counted else found


def _without_held(found: list[Made]) -> list[Made]:
    """Leave alone outputs whose storage somebody else holds already: a policy, a module."""
    outputs = [made.output() for made in found]
    roots = {id(t): t for o in outputs if o is not None for t in (o, o._base) if t is not None}
    kept = list(found)
    for made in found:
        own = sum(storage_key(t) == made.key for t in roots.values())
        own += sum(other.key == made.key for other in kept)
        output = made.output()
        base = None if output is None else output._base
        if base is not None:  # named here, among the roots, and by nobody else
            own -= Holders.counted(made.key, weakref.ref(base)).names > 2
        if made.holders.tensors > own:
            kept.remove(made)
    return kept


def _origin(output: Tensor) -> tuple[Any, bool]:
    """The autograd node to ask for the origin of an output's bytes, and whether it tells.

    It does not for a view of a tensor without a history. Autograd Functions return such views, as
    DTensor's `to_local` does.
    """
    base = output._base
    if base is None:
        return output.grad_fn, True
    if base.grad_fn is None and not base.requires_grad:
        return output.grad_fn, False
    return base.grad_fn, True
