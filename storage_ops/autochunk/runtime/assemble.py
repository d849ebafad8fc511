"""Cuts the inputs of chunks, and assembles the results of chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from storage_ops import matmul
from storage_ops.autochunk.fx_graph.nodes import are_one
from storage_ops.autochunk.runtime.program import Output, Slice
from storage_ops.loss.planning.devices import device_kind, on_gpu
from storage_ops.loss.planning.problem import parts
from storage_ops.loss.planning.schedule import unpadded
from storage_ops.matmul import aten, packed, scratch

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_PIECE = 1024  # rows of a 16-bit product that are computed at a time before they are added in fp32
_DEEP = 128  # products with a smaller depth are limited by memory bandwidth


class Input:
    """A tensor of which every chunk reads a slice, without a copy if strides allow it."""

    def __init__(self, tensor: Tensor, cut: Slice | None, per: int):
        self.cut, self.per = cut, per
        self.lo = 0 if cut is None else cut.lo
        if cut is None:
            # Below autograd an alias has no base. Dynamo would guard the sizes of the base of a
            # caller's view, and fail, because these are no arguments of the body.
            self.tensor: Tensor = torch.ops.aten.alias.default(tensor)
        else:
            # Leading dimensions of size 1 are skipped, so that strides do not depend on them.
            # Otherwise such a chunk would be compiled again.
            while self.lo and tensor.shape[self.lo - 1] == 1:
                self.lo -= 1
            self.rows = tensor.shape[self.lo : cut.hi]
            # If the strides do not allow one dimension of rows, each chunk copies its own rows.
            self.copies = not are_one(tensor, self.lo, cut.hi)
            self.tensor = tensor if self.copies else tensor.flatten(self.lo, cut.hi - 1)

    def __call__(self, begin: int, end: int) -> Tensor:
        """Return the slice for the groups from begin to end."""
        if self.cut is None:
            return self.tensor
        first, last = begin * self.per, end * self.per
        if self.copies:
            places = torch.arange(first, last, device=self.tensor.device)
            index = [slice(None)] * self.lo + list(torch.unravel_index(places, self.rows))
            part = self.tensor[tuple(index)]
        else:
            part = self.tensor.narrow(self.lo, first, last - first)
        for _ in range(self.cut.hi - self.lo - 1):
            part = part.unsqueeze(self.lo)
        return part


class Product:
    """A large product of a chunk, in memory that all chunks share."""

    def __init__(self, places: tuple[int, ...], waiting: Waiting | None) -> None:
        """Store the positions of (bias,) left and right among the inputs."""
        self.places, self.waiting = places, waiting
        self.buffer: Tensor | None = None

    def group_bytes(self, tensors: list[Tensor], begin: int, end: int) -> int:
        """Return the bytes of the product for each group."""
        *_, left, right = (tensors[i] for i in self.places)
        return len(left) * right.shape[1] * left.element_size() // (end - begin)

    def __call__(self, tensors: list[Tensor], begin: int, end: int, largest: int) -> Tensor:
        """Return the product for the groups from begin to end, at most `largest` of them.

        `tensors` are the inputs of these groups.
        """
        *bias, left, right = (tensors[i] for i in self.places)
        if self.buffer is None:
            rows = math.ceil(len(left) * (largest / (end - begin)))
            self.buffer = left.new_empty(rows, right.shape[1])
        out = self.buffer[: len(left)]
        if self.waiting is not None:
            self.waiting.take(begin, end, out)
        else:
            form(left, right, out, bias)
        return out


class Result:
    """One result while it is assembled."""

    def __init__(self, spec: Output, shape: list[int], per: int, device: torch.device):
        self.spec, self.per = spec, per
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.total: Tensor | None = None
        self.out: Tensor | None = None
        self.shape, self.device = shape, device
        if spec.rows is not None:
            self.out = torch.empty(shape, dtype=self.dtype, device=device)
            self.flat = self.out.flatten(spec.rows.lo, spec.rows.hi - 1)

    def _slot(self, begin: int, end: int) -> Tensor:
        assert self.spec.rows is not None
        return self.flat.narrow(self.spec.rows.lo, begin * self.per, (end - begin) * self.per)

    def put(self, value: Tensor, begin: int, end: int) -> None:
        """Add or store a chunk's value."""
        if self.out is not None:
            slot = self._slot(begin, end)
            slot.copy_(value.reshape(slot.shape))
        elif self.total is None:
            self.total = value.to(_WIDE.get(self.dtype, self.dtype), copy=True)
        else:
            self.total += value

    def multiply(self, left: Tensor, right: Tensor, begin: int, end: int) -> None:
        """Compute a product of a chunk in place."""
        if self.out is not None:
            deep = len(right) > scratch.one_pass()
            multiply = _products_of(left).input_gradient if deep else _multiply
            multiply(left, right, self._slot(begin, end), False)
            return
        first = self.total is None
        if first:
            wide = _WIDE.get(self.dtype, self.dtype)
            self.total = torch.empty(self.shape, dtype=wide, device=self.device)
        _accumulate(self.total, left, right, first)  # type: ignore[arg-type]

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add a product of all chunks to the earlier ones."""
        assert self.out is not None
        first = self.total is None
        if first:
            wide = _WIDE.get(self.dtype, self.dtype)
            self.total = self.out if wide == self.dtype else torch.empty_like(self.out, dtype=wide)
        _products_of(left).input_gradient(left, right, self.total, not first)  # type: ignore[arg-type]

    def finish(self) -> Tensor:
        """Return the result."""
        if self.out is None:
            if self.total is None:  # there are no tokens
                return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            return self.total.to(self.dtype)
        return self.out if self.total is None else self.out.copy_(self.total)


class Waiting:
    """A sum of products whose left factors wait in the sum's own memory until all exist.

    Then the sum is computed by one product for each slice of its rows. This reads and writes the
    sum once, and needs no fp32 sums. There is room for as many tokens as a row of the result has
    numbers.

    Chunks may overwrite their large product by left factors. Then that product also waits in this
    memory, computed for all tokens at once. Other products of the same factors are computed at
    once, too. So no large tensor is read, or multiplied, once per chunk.
    """

    def __init__(self, spec: Output, shape: list[int], per: int, right: Tensor, chunks: int):
        self.spec, self.per, self.right = spec, per, right
        self.out = right.new_empty(shape, dtype=getattr(torch, spec.dtype))
        self.others: list[tuple[Result, Tensor]] = []
        # Slices of the result's rows, all of the same width except the last. A matrix (tokens,
        # rows) waits in the memory of each slice.
        tokens, width = len(right), unpadded(parts(shape[0], chunks))
        memory = self.out.view(right.dtype)
        whole = shape[0] // width
        self.split = whole * width
        slices = memory[: self.split].view(whole, width * memory.shape[1])
        self.slices = slices[:, : tokens * width].view(whole, tokens, width)
        last = memory[self.split :]
        self.last = last.view(-1)[: tokens * len(last)].view(tokens, len(last))

    def form(self, left: Tensor, right: Tensor, bias: list[Tensor]) -> None:
        """Compute the large product for all tokens."""
        for rows, tile in self.tiles():
            form(left, right[:, rows], tile, [b.expand(*b.shape[:-1], len(self.out))[..., rows]
                                              for b in bias])  # fmt: skip

    def take(self, begin: int, end: int, out: Tensor) -> None:
        """Copy a chunk's part of the waiting product."""
        for part, memory in self._parts(out, begin, end):
            part.copy_(memory)

    def multiply(self, left: Tensor, right: Tensor, begin: int, end: int) -> None:
        """Store the factors of a chunk's product."""
        for part, memory in self._parts(left.t(), begin, end):
            memory.copy_(part)

    def settle(self) -> None:
        """Compute the sum, and other products of the same factors."""
        scratch = self.right.new_empty(max(tile.numel() for _, tile in self.tiles()))
        for rows, tile in self.tiles():
            for result, right in self.others:
                result.add(tile, right[rows])
            left = scratch[: tile.numel()].view(tile.shape).copy_(tile)
            _products_of(left).weight_gradient(left, self.right, self.out[rows], False)

    def finish(self) -> Tensor:
        """Return the result."""
        return self.out

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Return slices of the result's rows, with the factors that wait in their memory."""
        width = self.slices.shape[2]
        for index, tile in enumerate(self.slices):
            yield slice(index * width, (index + 1) * width), tile
        if self.split < len(self.out):
            yield slice(self.split, len(self.out)), self.last

    def _parts(self, chunk: Tensor, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Return parts of a chunk (tokens, rows of the result), and the memory where they wait."""
        tokens, shape = slice(begin * self.per, end * self.per), self.slices.shape
        whole = chunk[:, : self.split].unflatten(1, (shape[0], shape[2])).transpose(0, 1)
        return [(whole, self.slices[:, tokens]), (chunk[:, self.split :], self.last[tokens])]


def form(left: Tensor, right: Tensor, out: Tensor, bias: list[Tensor]) -> None:
    """Compute out = left @ right, plus the bias if there is one."""
    if bias:
        out.copy_(bias[0])
    _multiply(left, right, out, bool(bias))


def _products_of(t: Tensor) -> matmul.Matmul:
    return matmul.of(t.dtype, device_kind(t), torch.get_num_threads())


def _multiply(left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
    """Compute out = left @ right, or out += left @ right, with little scratch memory."""
    (rows, depth), columns = left.shape, right.shape[1]
    slots = scratch.packed_slots(rows, columns, depth, torch.get_num_threads())
    if out.dtype != left.dtype or (depth >= _DEEP and 8 * slots <= out.numel()):
        ours = _products_of(left)
        wide = isinstance(ours, packed.Packed) and out.dtype == torch.float32
        (ours.multiply if wide else aten.multiply)(left, right, out, add)  # type: ignore[attr-defined]
    elif add:
        torch.addmm(out, left, right, out=out)
    else:
        torch.mm(left, right, out=out)


def _accumulate(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Add a product to a sum, which may have a wider dtype. The first term replaces the sum."""
    if total.dtype == left.dtype or isinstance(_products_of(left), packed.Packed):
        _multiply(left, right, total, not first)
        return
    for begin in range(0, len(total), _PIECE):
        rows = slice(begin, begin + _PIECE)
        if on_gpu(left):
            part = torch.ops.aten.mm.dtype(left[rows], right, total.dtype)
        else:
            part = torch.mm(left[rows], right)
        if first:
            total[rows] = part
        else:
            total[rows] += part
        del part  # otherwise two parts are alive at a time
