"""A ledger of real ops, with live memory and earlier tensors of models and optimizers."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from storage_ops._op_arguments import tensors_in
from storage_ops.foundation.ledger import Block, Ledger
from storage_ops.foundation.op_names import Overload
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.foundation.values import is_leaf
from storage_ops.measure.calls import outermost
from storage_ops.simulate.estimate import share_copies
from storage_ops.simulate.values.wrappers import inside, is_wrapper, is_wrapper_type

_OPS = torch.ops.storage_ops


class LiveLedger(Ledger):
    """A ledger of live memory, which forgets freed memory.

    Attributes:
        level: bytes in memory now.
        live: the blocks in memory now.
    """

    def __init__(self) -> None:
        super().__init__(round_up=int)
        self.level = 0
        self.live: dict[Block, None] = {}

    def _event(self, block: Block, taken: bool) -> None:
        self.level += block.nbytes if taken else -block.nbytes
        if taken:
            self.live[block] = None
        else:
            self.live.pop(block)


class Tracking(TorchDispatchMode):
    """Records the storages that ops create on one device, in forward and backward.

    An earlier storage counts from the moment when an op uses it, or uses another tensor of the same
    model or optimizer.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = LiveLedger()
        self._before = 0  # the level at the start of the last op
        self._device = device
        self._copies = share_copies()
        gc.collect()  # garbage of earlier code is not in memory
        self.look_for_holders()
        self._groups: dict[int, list[nn.Module | Optimizer]] = {}
        for holder in (*self.roots, *self.optimizers):
            for t in tensors_of(holder):
                if self.counts(t):
                    self._groups.setdefault(t.untyped_storage()._cdata, []).append(holder)

    def look_for_holders(self) -> None:
        """Find all existing models and optimizers."""
        objects = gc.get_objects()
        self.roots = outermost([o for o in objects if _is_initialized(o, nn.Module, "_modules")])
        self.optimizers = [o for o in objects if _is_initialized(o, Optimizer, "param_groups")]

    def counts(self, t: object) -> bool:
        """Return True if a value is a tensor whose bytes are on the device."""
        return (
            isinstance(t, Tensor)
            and not is_lazy(t)
            and t.layout == torch.strided
            and t.device.type == self._device.type
            and self._device.index in (None, t.device.index)
            and not isinstance(t, FakeTensor)
            and not is_wrapper(t)
        )

    def __torch_dispatch__(
        self, func: Overload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if any(map(is_wrapper_type, types)):
            return NotImplemented  # torch then calls this method again for the inner tensors
        counted = list(filter(self.counts, tensors_in((args, kwargs))))
        for t in counted:
            self._meet(t)
        self._before = self.ledger.level
        out = func(*args, **(kwargs or {}))
        if func is _OPS.discard_storage.default and counted:
            self.ledger.discard(counted[0])
        elif func is _OPS.share_storage.default and len(counted) == 2:
            self.ledger.share(counted[0], counted[1], self._copies)
        elif func._schema.is_mutable:
            for t in counted:
                self.ledger.follow_resize(t.untyped_storage())
        for t in tensors_in(out):
            if self.counts(t):
                self.ledger.see(t, str(func))
        return out

    def follow_resize(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized, which is not an op."""
        self.ledger.follow_resize(storage)

    def _meet(self, t: Tensor) -> None:
        """Record an argument of an op, and all earlier tensors of its model or optimizer."""
        self.ledger.see(t, "input")
        holders = self._groups.pop(t.untyped_storage()._cdata, ())
        for holder in holders:
            for other in tensors_of(holder):
                if self.counts(other):
                    self._meet(other)


def _is_initialized(o: object, kind: type, attribute: str) -> bool:
    """Return True if an object is of a class and its `__init__` has set an attribute."""
    return issubclass(type(o), kind) and attribute in vars(o)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def tensors_of(holder: nn.Module | Optimizer) -> Iterator[Tensor]:
    """Yield parameters, gradients, and buffers or state. Wrappers yield their inner tensors."""
    if isinstance(holder, Optimizer):
        parameters: Iterable[Any] = tree_leaves([group["params"] for group in holder.param_groups])
        others: Iterable[Any] = tree_leaves(list(holder.state.values()))
    else:
        parameters, others = holder.parameters(), holder.buffers()
    for p in filter(_is_tensor, parameters):
        yield from inside(p)
        if is_leaf(p) and p.grad is not None:
            yield from inside(p.grad)
    for t in filter(_is_tensor, others):
        yield from inside(t)
