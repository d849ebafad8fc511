"""How much the ops return whose sizes depend on values that are not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from storage_ops.simulate.values.assume import Assumption, Source, unanswered
from storage_ops.simulate.values.known import Values

_aten = torch.ops.aten


class Sizes:
    """Makes results of the sizes that values or an assumption say."""

    def __init__(self, values: Values, assumption: Assumption) -> None:
        self._values, self._assumption = values, assumption

    def distinct(self, func: Any, indices: Tensor) -> int:
        """How many columns of `indices` differ."""
        real = self._values.read(indices)
        if real is None:
            return self._count(func, indices, indices.shape[-1])
        with no_dispatch():
            return len(torch.unique(real, dim=1)[0])

    def _count(self, func: Any, t: Tensor, total: int) -> int:
        here = Source.here(func, "size")
        count = self._assumption.count(here, total)
        if count is None:
            raise unanswered(here, self._values.source(t))
        return count

    def _length(self, func: Any, t: Tensor) -> int:
        here = Source.here(func, "length")
        length = self._assumption.length(here)
        if length is None:
            raise unanswered(here, self._values.source(t))
        return length

    def _nonzero(self, func: Any, t: Tensor) -> Tensor:
        n = self._count(func, t, t.numel())
        return t.new_empty((n, t.dim()), dtype=torch.int64)

    def _unique(
        self, func: Any, t: Tensor, sorted: bool = True, return_inverse: bool = False,
        return_counts: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        n = self._count(func, t, t.numel())
        inverse = t.new_empty(t.shape if return_inverse else 0, dtype=torch.int64)
        return t.new_empty(n), inverse, t.new_empty(n if return_counts else 0, dtype=torch.int64)

    def _unique_consecutive(
        self, func: Any, t: Tensor, return_inverse: bool = False, return_counts: bool = False,
        dim: int | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if dim is None:
            return self._unique(func, t, True, return_inverse, return_counts)
        return self._unique_dim(func, t, dim, True, return_inverse, return_counts)

    def _unique_dim(
        self, func: Any, t: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False,
        return_counts: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        total = t.shape[dim]
        n = self._count(func, t, total)
        shape = list(t.shape)
        shape[dim] = n
        inverse = t.new_empty(total if return_inverse else 0, dtype=torch.int64)
        counts = t.new_empty(n if return_counts else 0, dtype=torch.int64)
        return t.new_empty(shape), inverse, counts

    def _masked_select(self, func: Any, t: Tensor, mask: Tensor) -> Tensor:
        t, mask = torch.broadcast_tensors(t, mask)
        return t[mask]

    def _index(self, func: Any, t: Tensor, indices: list[Tensor | None]) -> Tensor:
        """A mask is an index for every True, as the CUDA kernel has it."""
        found: list[Tensor | None] = []
        for i in indices:
            is_mask = i is not None and i.dtype in (torch.bool, torch.uint8)
            found += i.nonzero().unbind(1) if is_mask and i is not None else [i]
        result: Tensor = _aten.index.Tensor(t, found)
        return result

    def _repeat_interleave(self, func: Any, repeats: Tensor, output_size: Any = None) -> Tensor:
        return repeats.new_empty(self._length(func, repeats))

    def _bincount(
        self, func: Any, t: Tensor, weights: Tensor | None = None, minlength: int = 0
    ) -> Tensor:
        dtype = torch.int64 if weights is None else torch.float64
        return t.new_empty(max(self._length(func, t), minlength), dtype=dtype)


SIZED: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: Sizes._nonzero,
    _aten._unique2.default: Sizes._unique,
    _aten.unique_dim.default: Sizes._unique_dim,
    _aten.unique_consecutive.default: Sizes._unique_consecutive,
    _aten.masked_select.default: Sizes._masked_select,
    _aten.index.Tensor: Sizes._index,
    _aten.repeat_interleave.Tensor: Sizes._repeat_interleave,
    _aten.bincount.default: Sizes._bincount,
}
