"""The fake twins of tensors from outside of a simulation, and the state of these tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from storage_ops.foundation.values import is_leaf
from storage_ops.simulate.fakes import SimulatedFakes
from storage_ops.simulate.values.leaves import Leaf
from storage_ops.simulate.values.sparse import Sparse
from storage_ops.simulate.values.wrappers import inside, is_wrapper, rewrapped

if TYPE_CHECKING:
    from storage_ops.simulate.mode import Simulation


class Twins:
    """The tensors from outside that a simulation has seen, each with a fake twin.

    A twin has the sizes of its tensor, and views of one storage have twins that are views of one
    storage. Gradients that autograd assigns to tensors from outside are undone by `restore_leaves`.
    """

    def __init__(self, simulation: Simulation, fake: SimulatedFakes, sparse: Sparse) -> None:
        """Start without twins. `fake` and `sparse` are parts of the simulation."""
        self._simulation, self._fake, self._sparse = simulation, fake, sparse
        # References to tensors from outside, so that their ids and those of their storages stay
        # valid. By storage: the fake tensor of which all twins with this storage are views.
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self._bytes: dict[int, Tensor] = {}
        self._exchanged: set[int] = set()  # tensors whose twins got other memory
        self._leaves: dict[int, Leaf] = {}  # by the id of a tensor from outside
        # Arguments that were moved; callers have references to them.
        self._moved: list[weakref.ref[torch.UntypedStorage]] = []

    def of(self, t: Tensor) -> Tensor:
        """Return the fake twin of a tensor from outside, and record it as an input.

        A wrapper is its own twin, because its class unwraps it.
        """
        if not self.is_from_outside(t):
            return t
        if is_wrapper(t):
            return self._wrapper(t)
        if id(t) not in self._twins:
            if t.layout == torch.sparse_coo:
                twin = self._new_sparse(t, self.of)
            else:
                twin = self._new_twin(t)
                self._simulation.ledger.see(twin, "input", is_input=True)
                self._simulation.values.offer(twin, t)
            self._twins[id(t)] = (t, twin)
            self.note_leaf(t)
        return self._twins[id(t)][1]

    def _new_twin(self, t: Tensor) -> Tensor:
        if t.layout != torch.strided:
            raise TypeError(
                f"estimate: a tensor is a {type(t).__name__} with layout {t.layout}. Expected "
                "plain strided tensors."
            )
        storage = t.untyped_storage()
        if storage._cdata not in self._bytes:
            if t.is_contiguous() and storage.nbytes() == t.numel() * t.itemsize:
                # One op creates a plain tensor, but a view of bytes takes six.
                alone: Tensor = self._simulation.unseen(
                    torch.empty_strided, t.shape, t.stride(), dtype=t.dtype, device=t.device
                )
                self._bytes[storage._cdata] = alone
                return alone
            self._bytes[storage._cdata] = self._simulation.unseen(
                torch.empty, storage.nbytes(), dtype=torch.uint8, device=t.device
            )
        whole, offset = self._bytes[storage._cdata], int(t.storage_offset())
        return self._simulation.viewed(whole, t.shape, t.stride(), offset, t.dtype)

    def _new_sparse(self, t: Tensor, new: Callable[[Tensor], Tensor]) -> Tensor:
        if isinstance(t, FakeTensor) or t.is_meta:
            raise TypeError(
                f"estimate: a sparse tensor is a {type(t).__name__} on {t.device}. Expected a real "
                "one, because others do not know how many elements they have."
            )
        with no_dispatch(), torch.no_grad():
            indices, values, coalesced = t._indices(), t._values(), t.is_coalesced()
        return self._sparse.new(new(indices), new(values), t.shape, coalesced)

    def _wrapper(self, t: Tensor) -> Tensor:
        for part in inside(t):
            self.of(part)
        self.note_leaf(t)
        return t

    def is_from_outside(self, t: Tensor) -> bool:
        """Return True if a tensor does not belong to the simulation."""
        return not (isinstance(t, FakeTensor) and t.fake_mode is self._fake)

    def exchange(self, t: Tensor, value: Tensor) -> None:
        """Replace the memory of a tensor from outside, as `t.data = value` does.

        Only the twin changes, not the tensor itself.

        Raises:
            RuntimeError: the shape or dtype would change, which a twin does not support.
        """
        with no_dispatch():
            old, new = self.of(t), self.of(value)
            if is_wrapper(t) or (old.shape, old.dtype) != (new.shape, new.dtype):
                raise RuntimeError(
                    f"estimate: the simulated code sets .data of a {tuple(t.shape)} tensor of "
                    f"{t.dtype} to a {tuple(value.shape)} one of {value.dtype}. Expected a plain "
                    "tensor and one of its shape and dtype."
                )
            if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                self._bytes.pop(t.untyped_storage()._cdata, None)
                self._twins[id(t)] = (t, new)
                self._exchanged.add(id(t))

    def is_exchanged(self, t: Tensor) -> bool:
        """Return True if the memory of a tensor from outside was replaced."""
        return id(t) in self._exchanged

    def with_values(self, t: Tensor) -> Tensor:
        """Return the tensor under which `values` knows the values of `t`: its twin, or itself."""
        return self._twins[id(t)][1] if id(t) in self._twins else t

    def moved(self, t: Tensor, device: torch.device) -> Tensor:
        """Return a fake tensor of the simulation that is like `t` but on another device."""
        if is_wrapper(t):
            other = rewrapped(t, lambda part: self.moved(part, device))
            return other.detach().requires_grad_(t.requires_grad)  # type: ignore[no-any-return]
        if t.layout == torch.sparse_coo:
            return self._new_sparse(t, lambda part: self.moved(part, device))
        new: Tensor = self._simulation.unseen(
            torch.empty_strided, t.shape, t.stride(), dtype=t.dtype, device=device
        )
        self._simulation.values.offer(new, t)
        self._simulation.ledger.see(new, "input", is_input=True)
        self._moved.append(weakref.ref(new.untyped_storage()))
        return new.requires_grad_(t.requires_grad)

    def keys_of_moved(self) -> set[int]:
        """Return the keys of the live storages that `moved` created."""
        return {s._cdata for s in (reference() for reference in self._moved) if s is not None}

    def note_leaf(self, t: Tensor) -> None:
        """Record the state of a tensor from outside before the run changes it.

        Replace its gradient by a fake one.
        """
        if not is_leaf(t) or id(t) in self._leaves:
            return
        self._leaves[id(t)] = leaf = Leaf.of(t)
        gradient = t.grad
        if isinstance(gradient, FakeTensor) and gradient.fake_mode is self._fake:
            leaf.gradient = None  # assigned in this run
        # Only the run references this twin, so it is freed when the run drops it.
        elif gradient is not None:
            t.grad = self.moved(gradient, gradient.device)

    def restore_leaves(self) -> None:
        """Restore the gradients, flags and hooks of tensors from outside."""
        for leaf in self._leaves.values():
            leaf.restore()

    def forget(self) -> None:
        """Drop all fake twins."""
        for table in (self._twins, self._bytes, self._leaves):
            table.clear()
