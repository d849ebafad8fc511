"""How much the ops return whose sizes depend on values that are not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from storage_ops.memory.estimate_assume import Assumption, Source, unanswered
from storage_ops.memory.estimate_values import Values

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
        with torch.utils._mode_utils.no_dispatch():
            return torch.unique(real, dim=1).shape[1]

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

    def nonzero(self, func: Any, t: Tensor) -> Tensor:
        n = self._count(func, t, t.numel())
        return t.new_empty((n, t.dim()), dtype=torch.int64)

    def unique(self, func: Any, t: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        n = self._count(func, t, t.numel())
        inverse, counts = (t.new_empty(shape, dtype=torch.int64) for shape in (t.shape, (n,)))
        return t.new_empty(n), inverse, counts

    def masked_select(self, func: Any, t: Tensor, mask: Tensor) -> Tensor:
        t, mask = torch.broadcast_tensors(t, mask)
        return t[mask]

    def index(self, func: Any, t: Tensor, indices: list[Tensor | None]) -> Tensor:
        """A mask is an index for every True, as the CUDA kernel has it."""
        found: list[Tensor | None] = []
        for i in indices:
            is_mask = i is not None and i.dtype in (torch.bool, torch.uint8)
            found += i.nonzero().unbind(1) if is_mask and i is not None else [i]
        result: Tensor = _aten.index.Tensor(t, found)
        return result

    def repeat_interleave(self, func: Any, repeats: Tensor, output_size: Any = None) -> Tensor:
        return repeats.new_empty(self._length(func, repeats))

    def bincount(
        self, func: Any, t: Tensor, weights: Tensor | None = None, minlength: int = 0
    ) -> Tensor:
        dtype = torch.int64 if weights is None else torch.float64
        return t.new_empty(max(self._length(func, t), minlength), dtype=dtype)


SIZED: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: Sizes.nonzero,
    _aten._unique2.default: Sizes.unique,
    _aten.masked_select.default: Sizes.masked_select,
    _aten.index.Tensor: Sizes.index,
    _aten.repeat_interleave.Tensor: Sizes.repeat_interleave,
    _aten.bincount.default: Sizes.bincount,
}
