"""Sparse tensors in a simulation: a pair of fake tensors, indices and values, in a wrapper.

torch's fake tensors do not store how many elements a sparse tensor has. So this module simulates
ops on sparse tensors like the CUDA kernels, without the kernels' temporary memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from storage_ops.foundation.op_names import Overload
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.simulate.values.assume import name_of, users_line

_aten = torch.ops.aten
# Ops on values alone, out of place and in place. Each takes one sparse tensor.
_ON_VALUES = {"mul", "div", "neg", "clone", "abs", "sqrt", "pow", "square", "to_copy"}

_METADATA = {_aten.sparse_dim.default, _aten.dense_dim.default}
_CONSTRUCTORS = {
    _aten._sparse_coo_tensor_with_dims_and_tensors.default,
    _aten.sparse_coo_tensor.indices_size,
}


@dataclass
class Parts:
    """The parts of a sparse tensor.

    Attributes:
        indices: positions, one column per element.
        values: elements, which may be rows.
        coalesced: whether no position occurs twice.
    """

    indices: Tensor
    values: Tensor
    coalesced: bool


class Sparse:
    """Simulates the ops on sparse tensors, for embeddings and their optimizers."""

    def __init__(
        self, paused: Callable[..., Any], distinct: Callable[[Any, Tensor], int],
        temporary: Callable[[Tensor, str], None],
    ) -> None:  # fmt: skip
        """Start without sparse tensors.

        `paused` runs an op without recording it. `distinct` counts different columns. `temporary`
        records temporary memory.
        """
        self._paused, self._distinct, self._temporary = paused, distinct, temporary
        self._parts = WeakTensorKeyDictionary()

    def new(self, indices: Tensor, values: Tensor, size: Sequence[int], coalesced: bool) -> Tensor:
        """Return a sparse tensor with these parts."""
        shell: Tensor = self._paused(
            _aten._sparse_coo_tensor_with_dims.default, len(indices), values.dim() - 1, size,
            dtype=values.dtype, layout=torch.sparse_coo, device=values.device,
        )  # fmt: skip
        self._parts[shell] = Parts(indices, values, coalesced)
        return shell

    def _of(self, t: Tensor) -> Parts:
        parts: Parts = self._parts[t]
        return parts

    def parts(self, t: Tensor) -> list[Tensor]:
        """Return the tensors with a sparse tensor's bytes."""
        return [self._of(t).indices, self._of(t).values]

    def takes(self, func: Overload, args: Args, tensors: list[Tensor]) -> bool:
        """Return True if an op on these tensors reads or creates elements of sparse tensors."""
        if func.namespace == "prim" or func in _METADATA:
            return False
        if func is _aten._embedding_bag_backward.default:
            return bool(args[9])
        return func in _CONSTRUCTORS or any(map(_is_sparse, tensors))

    def __call__(self, func: Overload, args: Args, kwargs: Kwargs) -> Any:
        """Run an op on sparse tensors."""
        if func in _CONSTRUCTORS:
            return self._construct(func, args, kwargs)
        name = func._schema.name.removeprefix("aten::").strip("_")
        simulated = getattr(self, f"_{name}_of", None)
        if simulated is not None:
            return simulated(func, *args, **kwargs)
        own = self._parts.get(args[0]) if _is_sparse(args[0]) else None
        if own is None or name not in _ON_VALUES or any(map(_is_sparse, args[1:])):
            raise RuntimeError(
                f"estimate: the simulated code calls {name_of(func)} with a sparse tensor at "
                f"{users_line(sys._getframe())}, which is not simulated. Leave that part out."
            )
        if name == "clone" and own.indices.is_contiguous() and own.values.is_contiguous():
            node = torch._C._current_autograd_node()
            if node is not None and node.name() == "torch::autograd::AccumulateGrad":
                # Without a mode, autograd takes such a gradient unchanged.
                return self.new(own.indices, own.values, args[0].shape, own.coalesced)
        values = func(own.values, *args[1:], **kwargs)
        if func._schema.is_mutable:
            return args[0]
        indices = own.indices.clone() if name == "clone" else own.indices
        return self.new(indices, values, args[0].shape, own.coalesced)

    def _construct(self, func: Overload, args: Args, kwargs: Kwargs) -> Tensor:
        arguments = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
        arguments.update(kwargs)
        coalesced = bool(arguments.get("is_coalesced", False))
        return self.new(arguments["indices"], arguments["values"], arguments["size"], coalesced)

    def _indices_of(self, func: Overload, t: Tensor) -> Tensor:
        return self._of(t).indices.detach()

    def _values_of(self, func: Overload, t: Tensor) -> Tensor:
        return self._of(t).values.detach()

    def _nnz_of(self, func: Overload, t: Tensor) -> int:
        return len(self._of(t).values)

    def _is_coalesced_of(self, func: Overload, t: Tensor) -> bool:
        return self._of(t).coalesced

    def _coalesced_of(self, func: Overload, t: Tensor, coalesced: bool) -> Tensor:
        self._of(t).coalesced = coalesced
        return t

    def _coalesce_of(self, func: Overload, t: Tensor) -> Tensor:
        own = self._of(t)
        if own.coalesced:
            return t
        n = self._distinct(func, own.indices)
        indices = own.indices.new_empty((len(own.indices), n))
        return self.new(indices, own.values.new_empty((n, *own.values.shape[1:])), t.shape, True)

    def _embedding_bag_backward_of(
        self, func: Overload, grad: Tensor, indices: Tensor, *options: Any, **_: object
    ) -> Tensor:
        """Return a gradient with a row for every index: the row of the index's bag."""
        rows = grad.new_empty((indices.numel(), grad.shape[1]))
        return self.new(indices.view(1, -1), rows, (options[4], grad.shape[1]), False)

    def _detach_of(self, func: Overload, t: Tensor) -> Tensor:
        own = self._of(t)
        return self.new(own.indices, own.values, t.shape, own.coalesced)

    _alias_of = _detach_of

    def _zero_of(self, func: Overload, t: Tensor) -> Tensor:
        own = self._of(t)
        empty = own.values.new_empty((0, *own.values.shape[1:]))
        self._parts[t] = Parts(own.indices.new_empty((len(own.indices), 0)), empty, True)
        return t

    def _sparse_mask_of(self, func: Overload, t: Tensor, mask: Tensor) -> Tensor:
        own = self._of(mask)
        values = torch.empty_like(own.values, dtype=t.dtype)
        self._temporary(values, str(func))  # the rows before they are multiplied by the mask
        return self.new(own.indices.clone(), values, t.shape, own.coalesced)

    def _to_dense_of(
        self, func: Overload, t: Tensor, dtype: torch.dtype | None = None, *_: object, **__: object
    ) -> Tensor:
        own = self._of(t)
        dense: Tensor = own.values.new_empty(t.shape, dtype=dtype or t.dtype)
        return dense

    def _add_of(self, func: Overload, t: Tensor, other: Tensor, *, alpha: object = 1) -> Tensor:
        """Add a sparse tensor to a dense one, or join the elements of two sparse ones."""
        in_place = func._schema.is_mutable
        own, added = self._parts.get(t), self._parts.get(other)
        if own is None or added is None:
            dense = t if own is None else other
            return dense if in_place else torch.empty_like(dense)
        indices = torch.cat([own.indices, added.indices], 1)
        parts = Parts(indices, torch.cat([own.values, added.values]), False)
        if in_place:
            self._parts[t] = parts
            return t
        return self.new(parts.indices, parts.values, t.shape, False)


def _is_sparse(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.sparse_coo
