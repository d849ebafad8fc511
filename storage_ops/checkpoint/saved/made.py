"""The outputs that a region made itself: bytes that it may discard and make again."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from storage_ops.checkpoint.saved.guard import storage_key
from storage_ops.checkpoint.saved.holders import Holders
from storage_ops.storage.storage import is_own, wait_for

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

    @property
    def is_modified(self) -> bool:
        """Whether it was modified in place since, so that a recompute could not restore it."""
        return self.handle._version != self.version


def find_made(
    leaves: list[Any], attributes: dict[str, Any], inputs: Iterable[Tensor], start: int | None
) -> list[Made]:
    """The outputs of a region that nobody else has the bytes of.

    Args:
        leaves: the leaves of what it returned; nothing else of the region's names them but that.
        attributes: those of what it returned: an object may have a leaf as an item and as one.
        inputs: tensors that it was given.
        start: the number of its first autograd node; None if nothing needs grad.
    """
    found = _candidates(leaves, {None, *map(storage_key, inputs)}, start)
    held = _held(found, leaves, attributes) if found else set()
    return [made for made in found if made.key not in held]


def _candidates(leaves: list[Any], outside: set[int | None], start: int | None) -> list[Made]:
    for leaf in leaves:
        wait_for(leaf)  # the end of a collective is a modification, and until then it holds bytes
    found: list[Made] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        key = storage_key(leaf)
        if key is None or key in outside or not is_own(leaf):
            continue
        if start is not None:
            node = _origin(leaf)
            # A parameter, or a view of a tensor from outside, must not be freed.
            if leaf.layout is not torch.strided or node is None or node._sequence_nr() < start:
                continue
        found.append(Made(index, key, leaf.detach(), weakref.ref(leaf), leaf._version))
    return found


def _held(found: list[Made], leaves: list[Any], attributes: dict[str, Any]) -> set[int]:
    """The storages of outputs that somebody else holds already: a module, a caller, a policy.

    What is from outside is told by that too, whatever it is: a parameter, a cache, a tensor that
    the region was to fill.
    """
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    names = [*map(id, given), *map(id, given), *map(id, attributes.values())]
    roots = {id(t): t for leaf in given for t in (leaf, leaf._base) if t is not None}
    del given
    keys = {at: key for at, t in roots.items() if (key := storage_key(t)) is not None}
    counts = {at: Holders.counted(key, weakref.ref(roots[at])) for at, key in keys.items()}
    # One more name is in `roots`.
    held = {key for at, key in keys.items() if counts[at].names > names.count(at) + 1}
    handles = [m.key for m in found for t in (m.handle, m.handle._base) if t is not None]
    own = [*keys.values(), *handles]
    for made in found:
        made.holders = counts[id(leaves[made.index])]
        if made.holders.tensors > own.count(made.key):
            held.add(made.key)
    return held


def _origin(output: Tensor) -> Any:
    """The autograd node to ask for the origin of an output's bytes.

    It is that of the base, but for a view of a tensor without a history. Autograd Functions return
    such views, as DTensor's `to_local` does.
    """
    base = output._base
    if base is None or (base.grad_fn is None and not base.requires_grad):
        return output.grad_fn
    return base.grad_fn
