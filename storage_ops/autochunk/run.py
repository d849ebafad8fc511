"""The op that works through the tokens chunk by chunk."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch.library import register_fake

from storage_ops import _schemas
from storage_ops.autochunk import inductor
from storage_ops.autochunk.assemble import Input, Product, Result, Waiting
from storage_ops.autochunk.program import Factor, Program, blocks, decode_graph

_in_body: ContextVar[bool] = ContextVar("in_body", default=False)


def in_body() -> bool:
    """Whether what is compiled now is a chunk."""
    return _in_body.get()


class Compiled:
    """The span for one chunk, compiled at its first call."""

    def __init__(self, text: str):
        self.program = Program.decode(text)
        self._compiled: dict[bool, Callable[..., Any]] = {}

    def __call__(
        self, product: Tensor | None, tensors: list[Tensor], ints: Sequence[int], dynamic: bool
    ) -> list[Tensor]:
        """The values of one chunk. `product`: the first argument, where the body takes one."""
        run = self._compiled.get(dynamic)
        if run is None:
            device = tensors[0].device.type
            run = self._compiled[dynamic] = _first_that_compiles(self.program, dynamic, device)
        if dynamic:
            for tensor, cut in zip(tensors, self.program.inputs, strict=True):
                if cut is not None:
                    torch._dynamo.maybe_mark_dynamic(tensor, cut.hi - 1)
            if product is not None:
                torch._dynamo.maybe_mark_dynamic(product, 0)
        mark = _in_body.set(True)
        try:
            first = () if product is None else (product,)
            with inductor.mended():
                return list(run(*first, *tensors, *ints))
        finally:
            _in_body.reset(mark)


def _first_that_compiles(program: Program, dynamic: bool, device: str) -> Callable[..., Any]:
    """A chunk compiled; without the overwriting of its product where the compiler fails on that.

    Inductor of torch 2.13 does on some variances. Where it fails again, the chunk runs op by op. In
    torch 2.10 and 2.11 it overwrites the product before it reads the last of it, where sizes are
    symbols.
    """
    if inductor.miscompiled(body := decode_graph(program.body), device):
        return body

    def compiled(graph: fx.GraphModule) -> Callable[..., Any]:
        return torch.compile(graph, dynamic=None if dynamic else False)

    ways = []
    if program.over is None or torch.__version__ >= "2.12":
        ways.append(compiled(body))
    if program.over is not None:
        ways.append(_overwriting(compiled(_without_copy(program)), program.over))
    ways.append(decode_graph(program.body))

    def run(*args: Any) -> Any:
        while True:
            try:
                return ways[0](*args)
            except torch._dynamo.exc.TorchDynamoException as error:
                if len(ways) == 1:
                    raise
                del ways[0]
                if len(ways) == 1:
                    warnings.warn(
                        f"storage_ops.autochunk: chunks run uncompiled, which failed: {error}",
                        stacklevel=2,
                    )

    return run


def _without_copy(program: Program) -> fx.GraphModule:
    gm = decode_graph(program.body)
    (copy,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.copy_.default)
    copy.replace_all_uses_with(copy.args[1])
    gm.graph.erase_node(copy)
    gm.recompile()
    return gm


def _overwriting(body: Callable[..., Any], over: int) -> Callable[..., Any]:
    def run(product: Tensor, *args: Any) -> list[Tensor]:
        values = list(body(product, *args))
        values[over] = product.copy_(values[over])
        return values

    return run


@functools.lru_cache(maxsize=64)
def body_of(text: str) -> Compiled:
    """The body of a program, one per text."""
    return Compiled(text)


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
    device = next(t.device for t in inputs)
    if groups == 0:  # as where a mask keeps no token: sums of nothing
        return [torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
                for spec, shape in zip(p.outputs, shapes_of(p, sizes), strict=True)]  # fmt: skip
    # Compiled chunks are guarded by the dispatch keys in force, which differ between a forward, a
    # backward and a plain call: without these guards each would compile anew. torch's own compiled
    # functions run in the same way, under the same two names in 2.10, 2.13 and 2.15; there is no
    # public one. torch.inference_mode would do too, but its tensors cannot be saved for a backward.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    below = torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(keys)
    with below[0], below[1], torch.no_grad(), torch.autocast(device.type, enabled=False):
        cuts = [Input(t, c, 1 if c is None else _number(c.per, ints))
                for t, c in zip(inputs, p.inputs, strict=True)]  # fmt: skip
        ends, given = p.bounds(groups), [(t.shape, t.element_size()) for t in inputs]
        results: list[Result | Waiting] = []
        for spec, shape in zip(p.outputs, shapes_of(p, sizes), strict=True):
            if len(ends) > 2 and p.waits(spec, shape, given):
                assert spec.factors is not None
                cut = cuts[spec.factors[1].place]
                results.append(Waiting(spec, shape, cut.per, cut.tensor, len(ends) - 1))
                continue
            per = 1 if spec.rows is None else _number(spec.rows.per, ints)
            results.append(Result(spec, shape, per, device))
        _Run(body, cuts, ints, results)(ends)
        for result in results:
            if isinstance(result, Waiting):
                result.settle()
        return [result.finish() for result in results]


class _Run:
    """All chunks, one after another."""

    def __init__(
        self, body: Compiled, cuts: list[Input], ints: Sequence[int],
        results: list[Result | Waiting],
    ) -> None:  # fmt: skip
        self.body, self.cuts, self.ints, self.results = body, cuts, ints, results
        p = body.program
        self.dynamic = p.dynamic
        self.waiting = self._holder()
        late = [] if self.waiting is None else [other for other, _ in self.waiting.others]
        self.products = [r for r in results if r.spec.factors is not None and r not in late]

    def _holder(self) -> Waiting | None:
        """The sum that the large product waits in, told of what has the same factors."""
        p = self.body.program
        for result in self.results:
            if isinstance(result, Waiting) and p.holds_product(result.spec):
                for other in self.results:
                    if isinstance(other, Result) and p.shares_factor(other.spec):
                        assert other.spec.factors is not None
                        right = self.cuts[other.spec.factors[1].place].tensor
                        result.others.append((other, right))
                return result
        return None

    def __call__(self, ends: list[int]) -> None:
        """Work through the groups between these places."""
        p = self.body.program
        product = Product(p, self.waiting)
        if self.waiting is not None and p.formed is not None:
            *bias, left, right = (self.cuts[i].tensor for i in p.formed)
            self.waiting.form(left, right, bias)
        chunks = list(itertools.pairwise(ends))
        width = product.group_bytes([cut(*chunks[0]) for cut in self.cuts], *chunks[0])
        device = self.cuts[0].tensor.device
        places = [
            blocks(end - begin, width, device) if p.in_blocks else [0, end - begin]
            for begin, end in chunks
        ]
        sizes = {j - i for each in places for i, j in itertools.pairwise(each)}
        self.dynamic = self.dynamic or len(sizes) > 1
        largest = max(end - begin for begin, end in chunks)
        for (begin, end), each in zip(chunks, places, strict=True):
            tensors = [cut(begin, end) for cut in self.cuts]
            formed = product(tensors, begin, end, largest)
            values = self._values(formed, begin, each)
            self._multiply(values, tensors, begin, end)
            del values, formed  # before the next chunk makes its own

    def _values(self, product: Tensor | None, begin: int, places: list[int]) -> list[Tensor]:
        """Run the body, in blocks where nothing but the product leaves it as a whole."""
        values: list[Tensor] = []
        for i, j in itertools.pairwise(places):
            part = product
            if product is not None:
                rows = len(product) // places[-1]
                part = product[i * rows : j * rows]
            values = self._block(part, begin + i, begin + j)
        if self.body.program.over is not None:
            assert product is not None
            values[self.body.program.over] = product
        return values

    def _block(self, product: Tensor | None, begin: int, end: int) -> list[Tensor]:
        tensors = [cut(begin, end) for cut in self.cuts]
        values = self.body(product, tensors, self.ints, self.dynamic)
        for result in self.results:
            if isinstance(result, Result) and result.spec.factors is None:
                assert result.spec.value is not None
                result.put(values[result.spec.value], begin, end)
        return values

    def _multiply(self, values: list[Tensor], tensors: list[Tensor], begin: int, end: int) -> None:
        def factor(f: Factor) -> Tensor:
            found = (values if f.source == "value" else tensors)[f.place]
            return found.t() if f.transposed else found

        for result in self.products:
            assert result.spec.factors is not None
            left, right = result.spec.factors
            result.multiply(factor(left), factor(right), begin, end)


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
