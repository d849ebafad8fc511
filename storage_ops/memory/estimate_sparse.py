"""Sparse tensors of a simulated run: a pair of fake tensors, indices and values, behind a shell.

Fake tensors of torch forget how many elements a sparse tensor has. So ops on sparse tensors are
simulated here, as the CUDA kernels do them, with what they only take while they run left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from storage_ops.memory.estimate_assume import name_of, users_line

_aten = torch.ops.aten
# Ops that act on the values alone, out of place and in place.
_ON_VALUES = {"mul", "div", "neg", "clone", "abs", "sqrt", "pow", "square", "to_copy"}

_METADATA = {"sparse_dim", "dense_dim", "_dimI", "_dimV", "size"}


@dataclass
class Parts:
    """What a sparse tensor consists of.

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
        """`paused`: runs an op unseen. `distinct`: how many columns differ. `temporary`: books."""
        self._paused, self._distinct, self._temporary = paused, distinct, temporary
        self._parts = WeakTensorKeyDictionary()

    def new(self, indices: Tensor, values: Tensor, size: Any, coalesced: bool) -> Tensor:
        """Return a sparse tensor of these parts."""
        shell: Tensor = self._paused(
            _aten._sparse_coo_tensor_with_dims.default, len(indices), values.dim() - 1, size,
            dtype=values.dtype, layout=torch.sparse_coo, device=values.device,
        )  # fmt: skip
        self._parts[shell] = Parts(indices, values, coalesced)
        return shell

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that takes or makes a sparse tensor; NotImplemented if it does neither."""
        name = func._schema.name.removeprefix("aten::")
        if name in ("_sparse_coo_tensor_with_dims_and_tensors", "sparse_coo_tensor"):
            return self._construct(name, func, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        if func.namespace == "prim" or name in _METADATA:
            return NotImplemented
        if not any(isinstance(leaf, Tensor) and leaf.layout == torch.sparse_coo for leaf in leaves):
            return NotImplemented
        found = getattr(self, name.strip("_") + "_of", None)
        own = self._parts.get(args[0]) if isinstance(args[0], Tensor) else None
        if found is not None:
            return found(func, *args, **kwargs)
        if own is not None and name.strip("_") in _ON_VALUES:
            values = func(own.values, *args[1:], **kwargs)
            if func._schema.is_mutable:
                return args[0]
            indices = own.indices.clone() if name == "clone" else own.indices
            return self.new(indices, values, args[0].shape, own.coalesced)
        raise RuntimeError(
            f"estimate: fn calls {name_of(func)} with a sparse tensor at {users_line(_here())}, "
            "which is not simulated; leave that part out of fn"
        )

    def _construct(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        at = 3 if name[0] == "_" else 0
        if name[0] != "_" and func._overloadname != "indices_size":
            return NotImplemented
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
        given.update(kwargs)
        size = args[at - 1] if at else given["size"]
        return self.new(
            given["indices"], given["values"], size, bool(given.get("is_coalesced", False))
        )

    def indices_of(self, func: Any, t: Tensor) -> Tensor:
        return self._parts[t].indices.detach()

    def values_of(self, func: Any, t: Tensor) -> Tensor:
        return self._parts[t].values.detach()

    def nnz_of(self, func: Any, t: Tensor) -> int:
        return len(self._parts[t].values)

    def is_coalesced_of(self, func: Any, t: Tensor) -> bool:
        return self._parts[t].coalesced

    def coalesced_of(self, func: Any, t: Tensor, coalesced: bool) -> Tensor:
        self._parts[t].coalesced = coalesced
        return t

    def coalesce_of(self, func: Any, t: Tensor) -> Tensor:
        own = self._parts[t]
        if own.coalesced:
            return t
        n = self._distinct(func, own.indices)
        indices = own.indices.new_empty((len(own.indices), n))
        return self.new(indices, own.values.new_empty((n, *own.values.shape[1:])), t.shape, True)

    def detach_of(self, func: Any, t: Tensor) -> Tensor:
        own = self._parts[t]
        return self.new(own.indices, own.values, t.shape, own.coalesced)

    alias_of = detach_of

    def zero_of(self, func: Any, t: Tensor) -> Tensor:
        own = self._parts[t]
        empty = own.values.new_empty((0, *own.values.shape[1:]))
        self._parts[t] = Parts(own.indices.new_empty((len(own.indices), 0)), empty, True)
        return t

    def sparse_mask_of(self, func: Any, t: Tensor, mask: Tensor) -> Tensor:
        own = self._parts[mask]
        values = torch.empty_like(own.values, dtype=t.dtype)
        self._temporary(values, str(func))  # the rows, before they are multiplied by the mask
        return self.new(own.indices.clone(), values, t.shape, own.coalesced)

    def to_dense_of(self, func: Any, t: Tensor, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
        own = self._parts[t]
        return own.values.new_empty(t.shape, dtype=dtype or t.dtype)

    def add_of(self, func: Any, t: Tensor, other: Tensor, *, alpha: Any = 1) -> Tensor:
        """A sparse one to a dense one, or two sparse ones: the elements of both, in one list."""
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


def _here() -> Any:
    import sys

    return sys._getframe(2)
