"""Sizes of results that depend on unknown values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from storage_ops.foundation.op_names import Op
from storage_ops.foundation.ops import describe
from storage_ops.simulate.values.assume import Assumption, Source, unanswered
from storage_ops.simulate.values.known import Values

_aten = torch.ops.aten


class Sizes:
    """Creates results whose sizes follow from values or from an assumption."""

    def __init__(self, values: Values, assumption: Assumption) -> None:
        self._values, self._assumption = values, assumption

    def distinct(self, func: Op, indices: Tensor) -> int:
        """Return the number of different columns of `indices`."""
        real = self._values.read(indices)
        if real is None:
            return self._count(func, indices, indices.shape[-1])
        with no_dispatch():
            return len(torch.unique(real, dim=1)[0])

    def _count(self, func: Op, t: Tensor, total: int) -> int:
        source = Source.here(func, "size")
        count = self._assumption.count(source, total)
        if count is None:
            raise unanswered(source, self._values.source(t))
        return count

    def _length(self, func: Op, t: Tensor) -> int:
        source = Source.here(func, "length")
        length = self._assumption.length(source)
        if length is None:
            raise unanswered(source, self._values.source(t))
        return length

    def _nonzero(self, func: Op, t: Tensor) -> Tensor:
        n = self._count(func, t, t.numel())
        return t.new_empty((n, t.dim()), dtype=torch.int64)

    def _unique(
        self, func: Op, t: Tensor, sorted: bool = True, return_inverse: bool = False,
        return_counts: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        n = self._count(func, t, t.numel())
        inverse = t.new_empty(t.shape if return_inverse else 0, dtype=torch.int64)
        return t.new_empty(n), inverse, t.new_empty(n if return_counts else 0, dtype=torch.int64)

    def _unique_consecutive(
        self, func: Op, t: Tensor, return_inverse: bool = False, return_counts: bool = False,
        dim: int | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if dim is None:
            return self._unique(func, t, True, return_inverse, return_counts)
        return self._unique_dim(func, t, dim, True, return_inverse, return_counts)

    def _unique_dim(
        self, func: Op, t: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False,
        return_counts: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        total = t.shape[dim]
        n = self._count(func, t, total)
        shape = list(t.shape)
        shape[dim] = n
        inverse = t.new_empty(total if return_inverse else 0, dtype=torch.int64)
        counts = t.new_empty(n if return_counts else 0, dtype=torch.int64)
        return t.new_empty(shape), inverse, counts

    def _masked_select(self, func: Op, t: Tensor, mask: Tensor) -> Tensor:
        t, mask = torch.broadcast_tensors(t, mask)
        return t[mask]

    def _index(self, func: Op, t: Tensor, indices: list[Tensor | None]) -> Tensor:
        """Index with a mask as the CUDA kernel does, with an index for every True."""
        positions: list[Tensor | None] = []
        for i in indices:
            is_mask = i is not None and i.dtype in (torch.bool, torch.uint8)
            positions += i.nonzero().unbind(1) if is_mask and i is not None else [i]
        result: Tensor = _aten.index.Tensor(t, positions)
        return result

    def _repeat_interleave(self, func: Op, repeats: Tensor, output_size: object = None) -> Tensor:
        return repeats.new_empty(self._length(func, repeats))

    def _bincount(
        self, func: Op, t: Tensor, weights: Tensor | None = None, minlength: int = 0
    ) -> Tensor:
        dtype = torch.int64 if weights is None else torch.float64
        return t.new_empty(max(self._length(func, t), minlength), dtype=dtype)


describe("nonzero.default", sized=Sizes._nonzero)
describe("_unique2.default", sized=Sizes._unique)
describe("unique_dim.default", sized=Sizes._unique_dim)
describe("unique_consecutive.default", sized=Sizes._unique_consecutive)
describe("masked_select.default", sized=Sizes._masked_select)
describe("index.Tensor", sized=Sizes._index)
describe("repeat_interleave.Tensor", sized=Sizes._repeat_interleave)
describe("bincount.default", sized=Sizes._bincount)
# torch's fakes of these ops do not know sizes that depend only on shapes and integers.
describe(
    "_ctc_loss.default _ctc_loss.Tensor _pack_padded_sequence.default linalg_lstsq.default",
    sized_by_integers=True,
)
