"""Operations on the tokens of deferred logits: slices, shapes and permutations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from storage_ops.integrations.deferred_forward import StandIn

if TYPE_CHECKING:
    from storage_ops.integrations.deferred_forward import Origin


class Tokens(StandIn):
    """Base of `DeferredLogits` with the token dimensions, which the hidden states share."""

    if TYPE_CHECKING:
        origin: Origin
        hidden: Tensor
        _row_of: tuple[Self, Any] | None

        def _like(self, **changed: Any) -> Self: ...

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.origin.classes))

    @property
    def ndim(self) -> int:
        """Return the number of dimensions of the logits."""
        return self.hidden.ndim

    @property
    def device(self) -> torch.device:
        """Return the device of the logits."""
        return self.hidden.device

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Self:
        """Return the logits themselves."""
        return self

    def is_contiguous(self) -> bool:
        """Return True, because otherwise a model may copy the logits."""
        return True

    def transpose(self, dim0: int, dim1: int) -> Self:
        """Exchange two dimensions of the tokens."""
        if self.ndim - 1 in (dim0 % self.ndim, dim1 % self.ndim):
            raise self._error(f"transpose({dim0}, {dim1})")
        return self._like(hidden=self.hidden.transpose(dim0 % self.ndim, dim1 % self.ndim))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Combine dimensions of the tokens."""
        start, end = start_dim % self.ndim, end_dim % self.ndim
        if start != end == self.ndim - 1:
            raise self._error(f"flatten({start_dim}, {end_dim})")
        return self._like(hidden=self.hidden.flatten(start, end))

    def view(self, *shape: Any) -> Self:
        """Return another shape of the tokens. The vocabulary stays the last dimension."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if sizes[-1] != self.shape[-1]:
            raise self._error(f"view{sizes}, which breaks up its {self.shape[-1]} classes,")
        hidden = self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1])
        return self._like(hidden=hidden)

    reshape = view

    def __getitem__(self, index: Any) -> Self:
        """Return some of the tokens: `logits[..., :-1, :]`, `logits[:, 0]` or `logits[mask]`."""
        if isinstance(index, Tensor) and index.dtype is torch.bool and index.ndim < self.ndim:
            return self._like(hidden=self.hidden[index])
        items = index if isinstance(index, tuple) else (index,)
        if not all(item is Ellipsis or type(item) in (slice, int) for item in items):
            raise self._error(f"the index {index}")
        if any(item is Ellipsis for item in items) or len(items) == self.ndim:
            last = items[-1]
            if last != slice(None):
                raise self._error(f"the index {index}")
        hidden = self.hidden[index]
        return self._like(hidden=hidden)

    def split(self, split_size: int | list[int], dim: int = 0) -> tuple[Self, ...]:
        """Return parts of a token dimension, of one size or of a list of sizes."""
        dim = self._of_tokens("split", dim)
        return tuple(self._like(hidden=part) for part in self.hidden.split(split_size, dim))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Self, ...]:
        """Return this many parts of a dimension of the tokens."""
        dim = self._of_tokens("chunk", dim)
        return tuple(self._like(hidden=part) for part in self.hidden.chunk(chunks, dim))

    def _of_tokens(self, what: str, dim: int) -> int:
        if dim % self.ndim == self.ndim - 1:
            raise self._error(f"{what} in dimension {dim}")
        return dim % self.ndim

    def __iter__(self) -> Iterator[Self]:
        """Yield the parts of the first token dimension. They share results for all tokens."""
        if self.ndim < 2:
            raise self._error("the operator iter")
        for row in range(self.shape[0]):
            part = self[row]
            part._row_of = self, row
            yield part
