"""Finds the users of an output, by the tensors that consumers saved and by reference counts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from storage_ops.checkpoint.discard.containers import Containers
from storage_ops.checkpoint.region import plain_region
from storage_ops.checkpoint.region.region import Region
from storage_ops.checkpoint.saved.guard import storage_key
from storage_ops.checkpoint.saved.outputs import SavedOutput, SavedTensor, producer_of
from storage_ops.checkpoint.saved.ref_counts import RefCounts, is_referenced
from storage_ops.checkpoint.saved.saved import fail
from storage_ops.foundation.eager import eager


class _Handed:
    """A saved tensor that was passed to the saved-tensor hooks around this consumer."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: object, unpack: Callable[[Any], Tensor]) -> None:
        self.packed, self.unpack = packed, unpack

    def read(self) -> Tensor:
        """Return the tensor that these hooks unpack."""
        return self.unpack(self.packed)


@eager
def _read(packed: SavedTensor | _Handed) -> Tensor:
    return packed.read()


@eager
def _pack(t: Tensor) -> SavedTensor:
    """Return the object for a tensor that a consumer saves."""
    region = producer_of(t)
    return SavedTensor(t) if region is None else SavedOutput(t, region)


class ConsumerHooks:
    """Context manager around consumers of regions' outputs.

    If consumers save tensors of an output, these are stored as uses of its region. All other saved
    tensors go to the outer saved-tensor hooks, if there are any. An output that is referenced in
    another way after the block is kept. Examples are an attribute of a custom Function's context,
    hooks set inside the consumer, and a returned object. Such references are found by counting,
    which takes microseconds.

    Args:
        regions: the regions; the list may grow in the block.
        variables: whether variables of the functions around the block do not count as references. A
            caller needs variables to name the outputs to free.
        named: whether the caller names the outputs of `regions` after the block. If not, every name
            of an output is a reference, also a dictionary that the consumer received.
        containers: the containers in which the caller has the outputs of `regions`.
    """

    def __init__(
        self,
        regions: list[Region],
        variables: bool = True,
        named: bool = True,
        containers: Containers | None = None,
    ) -> None:
        self._regions = regions
        self._containers = containers or Containers()
        self._variables = variables
        self._named = named
        self._outputs: dict[int, Tensor] = {}

    @eager
    def __enter__(self) -> ConsumerHooks:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(t: Tensor) -> SavedTensor | _Handed:
            if outer is None or producer_of(t) is not None:
                return _pack(t)
            return _Handed(outer[0](t), outer[1])

        pack.keeps_others = outer is None  # type: ignore[attr-defined]
        self.start = torch._C._autograd._get_sequence_nr()
        self._before = {
            id(m): RefCounts.of(r, m) for r in self._regions for m in r.outputs.discardable
        }
        if not self._named:  # the block names each output once, and no other code needs to
            alive = (m.output() for r in self._regions for m in r.outputs.discardable)
            self._outputs = {id(t): t for t in alive if t is not None}
            self._before = {m: now._replace(names=1) for m, now in self._before.items()}
        self._in_containers = self._containers.count()
        self._hooks: Any = saved_tensors_hooks(pack, _read)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._hooks, self._end = None, torch._C._autograd._get_sequence_nr()
        if error[0] is None:
            self.mark_referenced_outputs()
        self._outputs = {}

    @property
    def end(self) -> int:
        """Return the number of the first autograd node after the block, or of the next node."""
        return self._end if self._hooks is None else torch._C._autograd._get_sequence_nr()

    def mark_referenced_outputs(self) -> None:
        """Mark the outputs that values of the block still reference. They are kept."""
        stored = self._containers.stored(self._in_containers)
        for region in self._regions:
            for entry in region.outputs.discardable:
                now = RefCounts.of(region, entry)
                before = self._before.get(id(entry))
                if before is None:  # an output of this block's regions: one name is the caller's
                    before = entry.first_counts._replace(names=int(self._variables))
                if taken := self._containers.taken(entry.output(), self._in_containers):
                    before = before._replace(names=before.names - taken)
                entry.is_referenced = (
                    entry.is_referenced
                    or entry.key in stored
                    or is_referenced(now, before, entry, self._variables)
                )


@eager
def _packed(t: Tensor, version: int, region: Region | None) -> SavedTensor:
    """Return the object for a tensor that the library has saved for a consumer.

    Args:
        t: the tensor, without a graph.
        version: its version when it was saved.
        region: the region that restores its bytes; None if it is not an output.
    """
    saved = SavedTensor(t) if region is None else SavedOutput(t, region)
    saved.version = version
    return saved


def _finish(region: Region) -> None:
    """Discard the output of a region whose consumer has run, unless something references it."""
    for entry in region.outputs.discardable:
        before = entry.first_counts._replace(names=1)
        now = RefCounts.of(region, entry)
        entry.is_referenced = is_referenced(now, before, entry, variables=True)
    region.discard()


plain_region.set_up_consumers(_finish, _pack, _read, _packed, __name__)


def verify(region: Region, blocks: Sequence[ConsumerHooks]) -> None:
    """Raise an error if an output of a region was saved outside of its consumers' blocks.

    In the common case, the numbers of autograd nodes show that no node was created outside of the
    blocks. Otherwise references to the output are counted. If variables do not explain the count,
    references from the autograd graph (an error) are distinguished from references in Python (the
    output is kept).
    """
    made_since = torch._C._autograd._get_sequence_nr() - region.end
    if made_since <= sum(block.end - max(block.start, region.end) for block in blocks):
        return
    for entry in region.outputs.discardable:
        first = entry.first_counts._replace(names=1 << 30)  # a name is not a use by the graph
        if not is_referenced(
            RefCounts.of(region, entry), first, entry, variables=True, with_graph=True
        ):
            continue
        known = {id(use.tensor) for use in gc.get_objects() if type(use) is SavedOutput}
        output = entry.output()
        outputs = [o for m in region.outputs.discardable if (o := m.output()) is not None]
        known |= {id(t) for o in outputs for t in (o, o._base)} | {
            id(m.handle) for m in region.outputs.discardable
        }
        mine = [t for t in _live_tensors() if id(t) not in known and storage_key(t) == entry.key]
        views = sum(t._base is output for t in mine) if output is not None else 0
        now = RefCounts.of(region, entry)
        saved = now.tensors - entry.first_counts.tensors > len(mine)
        saved = saved or now.places - entry.first_counts.places > views
        if saved or any(t._use_count() > 1 for t in mine):  # type: ignore[attr-defined]
            names = _users(region, output, blocks)
            fail(
                f"output {entry.index} of {region.name} is also saved by {names}, outside of "
                "consumer(). Nothing was freed. Run every op that saves the output inside "
                "consumer(), before the discard."
            )
        entry.is_referenced = True


def _live_tensors() -> Iterator[Tensor]:
    # Do not use isinstance(), which would call __class__ of lazy objects.
    return (t for t in gc.get_objects() if issubclass(type(t), Tensor))


def _users(region: Region, output: Tensor | None, blocks: Iterable[ConsumerHooks]) -> str:
    """Return the names of nodes outside of the blocks that read an output, if they can be found."""
    target = None if output is None else output.grad_fn
    covered = [(block.start, block.end) for block in blocks]
    users: set[str] = set()
    seen: set[Node] = set()
    stack = [t.grad_fn for t in _live_tensors() if t.grad_fn is not None]
    while stack and target is not None:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        number = node._sequence_nr()
        if target in parents and not any(a <= number < b for a, b in covered):
            users.add(node.name())
        stack += parents
    return " and ".join(sorted(users)) or "something"
