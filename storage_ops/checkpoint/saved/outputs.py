"""Outputs that a region may discard, who produced a storage, and saved tensors that need it.

A *discardable output* has a storage that the region allocated and that nobody else references when
the region returns. `producers` maps such storages to their live regions. A consumer that saves an
output keeps a `SavedOutput`, which restores the bytes when backward reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from storage_ops.checkpoint.saved.guard import storage_key
from storage_ops.checkpoint.saved.ref_counts import RefCounts
from storage_ops.checkpoint.saved.saved import fail, without_graph
from storage_ops.storage.storage import is_own, wait_for

if TYPE_CHECKING:
    from storage_ops.checkpoint.region.region import Region

_NOBODY = RefCounts(0, 0, 0)


@dataclass(slots=True, eq=False)
class DiscardableOutput:
    """An output whose storage a region allocated.

    Attributes:
        index: position among the flattened outputs.
        key: identifies the storage.
        handle: an alias that keeps the storage, not the graph.
        output: the tensor that the caller got, as long as it exists.
        version: the version of the tensor when the region returned.
        first_counts: references to the output when the region returned.
        is_referenced: whether code other than consumers references it, so that it is kept.
    """

    index: int
    key: int
    handle: Tensor
    output: weakref.ref[Tensor]
    version: int
    first_counts: RefCounts = _NOBODY
    is_referenced: bool = False

    @property
    def is_modified(self) -> bool:
        """Return True if the output was modified in place since, which no recompute restores."""
        return self.handle._version != self.version


def discardable_outputs(
    leaves: list[Any], attributes: dict[str, Any], inputs: Iterable[Tensor], start: int | None
) -> list[DiscardableOutput]:
    """Return the outputs of a region whose storage is referenced by nothing else.

    Args:
        leaves: the leaves of the result; the region has no other reference to them.
        attributes: attributes of the result, since an object may have a leaf as an item and as an
            attribute.
        inputs: tensors that the region was given.
        start: sequence number of the region's first autograd node; None if nothing needs grad.
    """
    outputs = _candidates(leaves, {None, *map(storage_key, inputs)}, start)
    referenced = _held(outputs, leaves, attributes) if outputs else set()
    return [entry for entry in outputs if entry.key not in referenced]


def _candidates(
    leaves: list[Any], outside: set[int | None], start: int | None
) -> list[DiscardableOutput]:
    for leaf in leaves:
        wait_for(leaf)  # the end of a collective is a modification, and until then it holds bytes
    outputs: list[DiscardableOutput] = []
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
        outputs.append(
            DiscardableOutput(index, key, leaf.detach(), weakref.ref(leaf), leaf._version)
        )
    return outputs


def _held(
    found: list[DiscardableOutput], leaves: list[Any], attributes: dict[str, Any]
) -> set[int]:
    """Return the storages of outputs that a module, a caller or a policy references already.

    The same count reveals tensors that came from outside the region: a parameter, a cache, a
    tensor that the region was to fill.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    names = [*map(id, tensors), *map(id, tensors), *map(id, attributes.values())]
    roots = {id(t): t for leaf in tensors for t in (leaf, leaf._base) if t is not None}
    del tensors
    keys = {at: key for at, t in roots.items() if (key := storage_key(t)) is not None}
    counts = {at: RefCounts.counted(key, weakref.ref(roots[at])) for at, key in keys.items()}
    # One more name is in `roots`.
    referenced = {key for at, key in keys.items() if counts[at].names > names.count(at) + 1}
    handles = [m.key for m in found for t in (m.handle, m.handle._base) if t is not None]
    own = [*keys.values(), *handles]
    for entry in found:
        entry.first_counts = counts[id(leaves[entry.index])]
        if entry.first_counts.tensors > own.count(entry.key):
            referenced.add(entry.key)
    return referenced


def _origin(output: Tensor) -> Any:
    """Return the autograd node that tells where an output's storage came from.

    That is the node of the base. A view of a tensor without a history is the exception: Autograd
    Functions return such views, as DTensor's `to_local` does.
    """
    base = output._base
    if base is None or (base.grad_fn is None and not base.requires_grad):
        return output.grad_fn
    return base.grad_fn


# The live region that produced a storage. A region removes its storages when it can no longer
# recompute them, or is gone.
producers: dict[int, weakref.ref[Region]] = {}


def producer_of(t: object) -> Region | None:
    """Return the region that can recompute the storage of a tensor; None if no region can."""
    return producer_of_storage(storage_key(t)) if producers else None


def producer_of_storage(key: int | None) -> Region | None:
    """Return the region that can recompute a storage; None if no region can."""
    region = None if key is None else producers.get(key)
    return None if region is None else region()


class SavedTensor:
    """A saved tensor and its version, which torch does not compare for tensors packed by a hook."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = without_graph(tensor)  # autograd puts the node back
        self.version = tensor._version

    def read(self) -> Tensor:
        """Return the tensor; raise if it was modified in place."""
        if self.tensor._version != self.version:
            fail(
                f"a tensor of shape {tuple(self.tensor.shape)} that a consumer has saved was "
                f"modified in place. It is at version {self.tensor._version}, expected "
                f"{self.version}. Modify a clone instead."
            )
        return self.tensor


class SavedOutput(SavedTensor):
    """A saved tensor that shares the storage of an output, and the region that produced it."""

    __slots__ = ("key", "region")

    def __init__(self, tensor: Tensor, region: Region) -> None:
        super().__init__(tensor.detach())  # of the bytes only, not of the tensor that others have
        self.key = storage_key(tensor) or 0
        region.uses[self.key] = region.uses.get(self.key, 0) + 1
        self.region = region

    def __del__(self) -> None:
        if hasattr(self, "region"):  # an error in __init__ has counted nothing
            self.region.uses[self.key] -= 1

    def read(self) -> Tensor:
        """Return the tensor. The first read recomputes its bytes."""
        self.region.restore()
        return super().read()
