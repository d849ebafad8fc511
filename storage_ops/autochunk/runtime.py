"""The op that works through the tokens chunk by chunk."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from storage_ops import _schemas
from storage_ops.autochunk.program import Factor, Output, Program, Slice, decode_graph

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_PIECE = 1024  # rows of a 16-bit product that are formed at a time before they are summed in fp32


_in_body: ContextVar[bool] = ContextVar("in_body", default=False)


def in_body() -> bool:
    """Whether what is compiled now is a chunk."""
    return _in_body.get()


class Body:
    """The span for one chunk, compiled at its first call."""

    def __init__(self, text: str):
        self.program = Program.decode(text)
        self._compiled: dict[bool, Callable[..., Any]] = {}

    def __call__(self, tensors: list[Tensor], ints: Sequence[int], dynamic: bool) -> list[Tensor]:
        """The values of one chunk."""
        run = self._compiled.get(dynamic)
        if run is None:
            graph = decode_graph(self.program.body)
            run = self._compiled[dynamic] = torch.compile(graph, dynamic=None if dynamic else False)
        if dynamic:
            for tensor, cut in zip(tensors, self.program.inputs, strict=True):
                if cut is not None:
                    torch._dynamo.maybe_mark_dynamic(tensor, cut.hi - 1)
        mark = _in_body.set(True)
        try:
            return list(run(*tensors, *ints))
        finally:
            _in_body.reset(mark)


@functools.lru_cache(maxsize=64)
def body_of(text: str) -> Body:
    """The body of a program, one per text."""
    return Body(text)


class _Input:
    """A tensor that every chunk reads a slice of, without a copy where strides allow it."""

    def __init__(self, tensor: Tensor, cut: Slice | None, per: int):
        self.cut, self.per = cut, per
        self.tensor = tensor if cut is None else tensor.flatten(cut.lo, cut.hi - 1)

    def __call__(self, begin: int, end: int) -> Tensor:
        """The slice for the groups from begin to end."""
        if self.cut is None:
            return self.tensor
        part = self.tensor.narrow(self.cut.lo, begin * self.per, (end - begin) * self.per)
        for _ in range(self.cut.hi - self.cut.lo - 1):
            part = part.unsqueeze(self.cut.lo)
        return part


class _Result:
    """One output while it comes together."""

    def __init__(self, spec: Output, shape: list[int], per: int, device: torch.device):
        self.spec, self.per = spec, per
        dtype = getattr(torch, spec.dtype)
        self.dtype = dtype
        self.total: Tensor | None = None
        self.out: Tensor | None = None
        self.shape, self.device = shape, device
        if spec.rows is not None:
            self.out = torch.empty(shape, dtype=dtype, device=device)
            self.flat = self.out.flatten(spec.rows.lo, spec.rows.hi - 1)

    def _slot(self, begin: int, end: int) -> Tensor:
        assert self.spec.rows is not None
        return self.flat.narrow(self.spec.rows.lo, begin * self.per, (end - begin) * self.per)

    def put(self, value: Tensor, begin: int, end: int) -> None:
        """Take a chunk's value."""
        if self.out is not None:
            slot = self._slot(begin, end)
            slot.copy_(value.reshape(slot.shape))
        elif self.total is None:
            self.total = value.to(_WIDE.get(self.dtype, self.dtype), copy=True)
        else:
            self.total += value

    def multiply(self, left: Tensor, right: Tensor, begin: int, end: int) -> None:
        """Take a product of a chunk, formed in place."""
        if self.out is not None:
            torch.mm(left, right, out=self._slot(begin, end))
            return
        first = self.total is None
        if first:
            wide = _WIDE.get(self.dtype, self.dtype)
            self.total = torch.empty(self.shape, dtype=wide, device=self.device)
        accumulate(self.total, left, right, first)  # type: ignore[arg-type]

    def finish(self) -> Tensor:
        """The result."""
        if self.out is not None:
            return self.out
        assert self.total is not None
        return self.total.to(self.dtype)


def accumulate(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Add a product to a sum that may be wider; its first term replaces it."""
    if total.dtype == left.dtype:
        if first:
            torch.mm(left, right, out=total)
        else:
            torch.addmm(total, left, right, out=total)
        return
    for begin in range(0, len(total), _PIECE):
        rows = slice(begin, begin + _PIECE)
        if left.is_cuda:
            part = torch.ops.aten.mm.dtype(left[rows], right, total.dtype)
        else:
            part = torch.mm(left[rows], right)
        if first:
            total[rows] = part
        else:
            total[rows] += part
        del part  # or two of them are alive at a time


def _number(reference: int, ints: Sequence[int]) -> int:
    return reference if reference >= 0 else ints[-1 - reference]


def shapes_of(program: Program, sizes: Sequence[Any]) -> list[list[Any]]:
    """The shape of every output from the flat list."""
    shapes, place = [], 0
    for spec in program.outputs:
        shapes.append(list(sizes[place : place + spec.rank]))
        place += spec.rank
    return shapes


def chunked_span(
    inputs: list[Tensor], ints: Sequence[int], sizes: Sequence[int], groups: int, program: str
) -> list[Tensor]:
    """Evaluate a program on all chunks of the tokens, one after another."""
    body = body_of(program)
    p = body.program
    ends = p.bounds(groups)
    dynamic = len({end - begin for begin, end in itertools.pairwise(ends)}) > 1
    cuts = [_Input(t, c, 1 if c is None else _number(c.per, ints))
            for t, c in zip(inputs, p.inputs, strict=True)]  # fmt: skip
    device = next(t.device for t in inputs)
    results = [
        _Result(spec, shape, 1 if spec.rows is None else _number(spec.rows.per, ints), device)
        for spec, shape in zip(p.outputs, shapes_of(p, sizes), strict=True)
    ]
    # Below autograd whoever calls: compiled chunks are guarded by what dispatch would see.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    below = torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(keys)
    with below[0], below[1], torch.no_grad(), torch.autocast(device.type, enabled=False):
        for begin, end in itertools.pairwise(ends):
            _run_chunk(body, cuts, ints, results, begin, end, dynamic or p.dynamic)
    return [result.finish() for result in results]


def _run_chunk(
    body: Body, cuts: list[_Input], ints: Sequence[int], results: list[_Result],
    begin: int, end: int, dynamic: bool,
) -> None:  # fmt: skip
    """One chunk. Its values die on return, before the next chunk makes its own."""
    tensors = [cut(begin, end) for cut in cuts]
    values = body(tensors, ints, dynamic)

    def factor(f: Factor) -> Tensor:
        found = (values if f.source == "value" else tensors)[f.index]
        return found.t() if f.transposed else found

    for result in results:
        spec = result.spec
        if spec.factors is not None:
            result.multiply(factor(spec.factors[0]), factor(spec.factors[1]), begin, end)
        else:
            assert spec.value is not None
            result.put(values[spec.value], begin, end)


_schemas.library.impl("_chunked_span", chunked_span, "CompositeExplicitAutograd")


@register_fake("storage_ops::_chunked_span", lib=_schemas.library)
def _(
    inputs: list[Tensor], ints: Sequence[int], sizes: Sequence[Any], groups: Any, program: str
) -> list[Tensor]:
    p = Program.decode(program)
    return [
        inputs[0].new_empty(shape, dtype=getattr(torch, spec.dtype))
        for spec, shape in zip(p.outputs, shapes_of(p, sizes), strict=True)
    ]
