"""Finding who uses an output: by what was saved while its consumers ran, and by counting."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from storage_ops.checkpoint.guard import storage_key, uses
from storage_ops.checkpoint.region import Made, Region, maker_of
from storage_ops.checkpoint.saved import fail


class _Kept:
    """A saved tensor as it is; torch does not look at the versions of what a hook has packed."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def read(self) -> Tensor:
        """The tensor, unless it was modified in place."""
        if self.tensor._version != self.version:
            fail(
                f"a tensor of shape {tuple(self.tensor.shape)} that a consumer has saved was "
                f"modified in place: it is at version {self.tensor._version}, expected "
                f"{self.version}"
            )
        return self.tensor


class _Use(_Kept):
    """A saved tensor that shares the storage of an output, and the region that made it."""

    __slots__ = ("key", "region")

    def __init__(self, tensor: Tensor, region: Region) -> None:
        super().__init__(tensor.detach())  # of the bytes only, not of the tensor that others have
        self.key = storage_key(tensor) or 0
        self.region = region
        region.uses[self.key] = region.uses.get(self.key, 0) + 1

    def __del__(self) -> None:
        self.region.uses[self.key] -= 1

    def read(self) -> Tensor:
        """The tensor with its bytes, which are recomputed when they are needed first."""
        self.region.restore()
        return super().read()


class _Handed:
    """A saved tensor that was handed to the hooks around this consumer."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed, self.unpack = packed, unpack

    def read(self) -> Tensor:
        """What those hooks make of it."""
        return self.unpack(self.packed)


def _read(packed: _Kept | _Handed) -> Tensor:
    return packed.read()


class ConsumerHooks:
    """Context manager around consumers of regions' outputs.

    What they save of an output is kept as a use of its region; all else goes to the saved-tensor
    hooks that were there before, if there are any.
    """

    def __init__(self, regions: list[Region]) -> None:
        """Remember the regions; the list may grow in the block."""
        self._regions = regions

    def __enter__(self) -> ConsumerHooks:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(t: Tensor) -> _Kept | _Handed:
            region = maker_of(t)
            if region is not None:
                return _Use(t, region)
            return _Kept(t) if outer is None else _Handed(outer[0](t), outer[1])

        self.start = torch._C._autograd._get_sequence_nr()
        self._before = {id(m): _holders(r, m) for r in self._regions for m in r.made}
        self._hooks = saved_tensors_hooks(pack, _read)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self.end = torch._C._autograd._get_sequence_nr()
        if error[0] is not None:
            return
        # Somebody keeps an output, or a view of it, by other means than a saved tensor: an
        # attribute of a custom Function's context, hooks set inside of the consumer, a variable.
        for region in self._regions:
            for made in region.made:
                one = (made.storage_uses, _ONE_HOLDER)  # a region of this block
                before = self._before.get(id(made), one)
                if any(now > n for now, n in zip(_holders(region, made), before, strict=True)):
                    self._cover_all_roots()
                    return

    def _cover_all_roots(self) -> None:
        """Restore the outputs before the backward of anything that began in this block."""
        for t in _live_tensors():
            node = t.grad_fn
            if node is not None and self.start <= node._sequence_nr() < self.end:
                for region in self._regions:
                    node.register_prehook(region.trigger())


def _references(ref: Callable[[], Any]) -> int:
    held = ref()
    return 0 if held is None else sys.getrefcount(held)


_ANYTHING = object()
_ONE_HOLDER = _references(lambda: _ANYTHING)


def _holders(region: Region, made: Made) -> tuple[int, int]:
    """How many hold the storage, and the tensor in Python, in ways that saved tensors do not."""
    shared = uses(made.key, None)[0] - region.uses.get(made.key, 0)
    return shared, _references(made.output)


def _live_tensors() -> Iterator[Tensor]:
    # Not isinstance(): it would call __class__ of lazy objects.
    return (t for t in gc.get_objects() if issubclass(type(t), Tensor))


def verify(region: Region, blocks: Iterable[ConsumerHooks]) -> None:
    """Raise if the graph saved an output of a region outside of the blocks around its consumers.

    Counting settles the common case: nobody holds the storage but the caller's tensors, the region
    and its uses. Else the caller's views are told from what only the graph holds.
    """
    for made in region.made:
        output = made.output()
        storage_uses, tensor_uses = uses(made.key, output)
        more = storage_uses - made.storage_uses - region.uses.get(made.key, 0)
        again = tensor_uses - made.tensor_uses if output is not None else 0
        if more <= 0 and again <= 0:
            continue
        known = {id(use.tensor) for use in gc.get_objects() if type(use) is _Use}
        outputs = [o for m in region.made if (o := m.output()) is not None]
        known |= {id(t) for o in outputs for t in (o, o._base)} | {
            id(m.handle) for m in region.made
        }
        mine = [t for t in _live_tensors() if id(t) not in known and storage_key(t) == made.key]
        views = sum(t._base is output for t in mine) if output is not None else 0
        saved = more > len(mine) or again > views
        if saved or any(t._use_count() > 1 for t in mine):  # type: ignore[attr-defined]
            names = _users(region, output, blocks)
            fail(
                f"output {made.index} of {region.name} is also saved by {names}, outside of "
                "consumer(); every use that autograd saves must run inside of it before the "
                "discard; nothing was freed"
            )


def _users(region: Region, output: Tensor | None, blocks: Iterable[ConsumerHooks]) -> str:
    """Names of the nodes that read an output outside of the blocks, as far as they can be found."""
    target = None if output is None else output.grad_fn
    covered = [(block.start, block.end) for block in blocks]
    found: set[str] = set()
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
            found.add(node.name())
        stack += parents
    return " and ".join(sorted(found)) or "something"
