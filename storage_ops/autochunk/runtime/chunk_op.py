"""The op that processes the tokens chunk by chunk."""

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
from storage_ops.autochunk.runtime import inductor
from storage_ops.autochunk.runtime.assemble import Input, Product, Result, Waiting
from storage_ops.autochunk.runtime.program import (
    Factor,
    Output,
    Program,
    Slice,
    blocks,
    decode,
    decode_graph,
    encode,
    results_of,
)

_in_body: ContextVar[bool] = ContextVar("in_body", default=False)


def in_body() -> bool:
    """Return True while a chunk is compiled or runs."""
    return _in_body.get()


class Compiled:
    """The body for one chunk, compiled at its first call."""

    def __init__(self, text: str):
        (self.program,) = decode(text)
        self._compiled: dict[bool, Callable[..., Any]] = {}

    def __call__(
        self, products: list[Tensor], tensors: list[Tensor], ints: Sequence[int], dynamic: bool
    ) -> list[Tensor]:
        """Return the values of one chunk, from its large products and the slices of its inputs."""
        run = self._compiled.get(dynamic)
        if run is None:
            device = tensors[0].device.type
            run = self._compiled[dynamic] = _first_that_compiles(self.program, dynamic, device)
        if dynamic:
            for tensor, cut in zip(tensors, self.program.inputs, strict=True):
                if cut is not None:
                    torch._dynamo.maybe_mark_dynamic(tensor, cut.hi - 1)
            for product in products:
                torch._dynamo.maybe_mark_dynamic(product, 0)
        mark = _in_body.set(True)
        try:
            with inductor.mended():
                return list(run(*products, *tensors, *ints))
        finally:
            _in_body.reset(mark)


def _first_that_compiles(program: Program, dynamic: bool, device: str) -> Callable[..., Any]:
    """Return a compiled chunk. If the compiler fails, do not overwrite the product.

    Inductor of torch 2.13 fails on some variances. If it fails again, the chunk runs op by op. With
    symbolic sizes, Inductor of torch 2.10 and 2.11 overwrites the product before it has read all of
    it.
    """
    if inductor.miscompiled(body := decode_graph(program.body), device):
        return body

    def compiled(graph: fx.GraphModule) -> Callable[..., Any]:
        return torch.compile(graph, dynamic=None if dynamic else False)

    versions, over = [], [(i, value) for i, value in enumerate(program.over) if value is not None]
    if not over or torch.__version__ >= "2.12":
        versions.append(compiled(body))
    if over:
        versions.append(_overwriting(compiled(_without_copy(program)), over))
    versions.append(decode_graph(program.body))

    def run(*args: Any) -> Any:
        while True:
            try:
                return versions[0](*args)
            except torch._dynamo.exc.TorchDynamoException as error:
                if len(versions) == 1:
                    raise
                del versions[0]
                if len(versions) == 1:
                    warnings.warn(
                        "storage_ops.autochunk: compiling a chunk failed, so chunks run "
                        f"uncompiled: {error}",
                        stacklevel=2,
                    )

    return run


def _without_copy(program: Program) -> fx.GraphModule:
    gm = decode_graph(program.body)
    for copy in [n for n in gm.graph.nodes if n.target is torch.ops.aten.copy_.default]:
        copy.replace_all_uses_with(copy.args[1])
        gm.graph.erase_node(copy)
    gm.recompile()
    return gm


def _overwriting(body: Callable[..., Any], over: list[tuple[int, int]]) -> Callable[..., Any]:
    def run(*args: Any) -> list[Tensor]:
        values = list(body(*args))
        for product, value in over:
            values[value] = args[product].copy_(values[value])
        return values

    return run


@functools.lru_cache(maxsize=64)
def body_of(text: str) -> Compiled:
    """Return the body of a program. It is created once per text."""
    return Compiled(text)


@functools.lru_cache(maxsize=64)
def bodies_of(text: str) -> list[tuple[Program, Compiled]]:
    """Return programs and their bodies. Programs share a body if only results or cuts differ."""
    bare: dict[str, Any] = {
        "outputs": (), "num_chunks": None, "chunk_bytes": 0, "group_bytes": 0, "block_bytes": 0,
    }  # fmt: skip
    programs = decode(text)
    cuts = [tuple(c and Slice(c.hi - 1, c.hi, 1) for c in p.inputs) for p in programs]
    bodies = [encode([p._replace(inputs=c, **bare)])
              for p, c in zip(programs, cuts, strict=True)]  # fmt: skip
    return list(zip(programs, map(body_of, bodies), strict=True))


def _number(reference: int, ints: Sequence[int]) -> int:
    return reference if reference >= 0 else ints[-1 - reference]


def shapes_of(programs: Sequence[Program], sizes: Sequence[Any]) -> list[list[Any]]:
    """Return the shape of every result from the flat list of sizes."""
    shapes, place = [], 0
    for spec, *_ in results_of(programs):
        shapes.append(list(sizes[place : place + spec.rank]))
        place += spec.rank
    return shapes


def chunked_span(
    inputs: list[Tensor], ints: Sequence[int], sizes: Sequence[int], groups: Sequence[int],
    program: str,
) -> list[Tensor]:  # fmt: skip
    """Evaluate programs in order, each on all chunks of its tokens.

    Inputs and integers are concatenated over the programs.
    """
    bodies = bodies_of(program)
    programs = [p for p, _ in bodies]
    of_result = results_of(programs)
    shapes, results = shapes_of(programs, sizes), dict[int, Result | Waiting]()
    device = next(t.device for t in inputs)
    # Guards of compiled chunks include the current dispatch keys, which differ between a forward, a
    # backward and a plain call. Excluding these keys avoids compiling again for each. torch's own
    # compiled functions do the same, by two private names that exist in 2.10, 2.13 and 2.15.
    # torch.inference_mode would work too, but its tensors cannot be saved for a backward.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    below = torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(keys)
    with below[0], below[1], torch.no_grad(), torch.autocast(device.type, enabled=False):
        for (p, body), count in zip(bodies, groups, strict=True):
            own, inputs = inputs[: len(p.inputs)], inputs[len(p.inputs) :]
            numbers, ints = ints[: p.num_ints], ints[p.num_ints :]
            cuts = [Input(t, c, 1 if c is None else _number(c.per, numbers))
                    for t, c in zip(own, p.inputs, strict=True)]  # fmt: skip
            ends, own_sizes = p.bounds(count), [(t.shape, t.element_size()) for t in own]
            for spec in p.outputs:
                shape, alone = shapes[spec.place], len(of_result[spec.place]) == 1
                if alone and len(ends) > 2 and p.waits(spec, shape, own_sizes):
                    assert spec.factors is not None
                    cut = cuts[spec.factors[1].place]
                    waiting = Waiting(spec, shape, cut.per, cut.tensor, len(ends) - 1)
                    results[spec.place] = waiting
                elif spec.place not in results:
                    per = 1 if spec.rows is None else _number(spec.rows.per, numbers)
                    results[spec.place] = Result(spec, shape, per, device)
            mine = [(spec, results[spec.place]) for spec in p.outputs]
            if count:  # a mask may select no token
                _Run(p, body, cuts, numbers, mine)(ends)
            for _, result in mine:
                if isinstance(result, Waiting):
                    result.settle()
        return [results[place].finish() for place in range(len(results))]


class _Run:
    """Runs all chunks in order."""

    def __init__(
        self, program: Program, body: Compiled, cuts: list[Input], ints: Sequence[int],
        results: list[tuple[Output, Result | Waiting]],
    ) -> None:  # fmt: skip
        self.body, self.cuts, self.ints, self.results = body, cuts, ints, results
        self.program = p = program
        self.dynamic = p.dynamic
        self.waiting = self._holders()
        late = [other for held in self.waiting.values() for other, _ in held.others]
        self.products = [(s, r) for s, r in results if s.factors is not None and r not in late]

    def _holders(self) -> dict[int, Waiting]:
        """Return the sums in which large products wait, by product.

        Each such sum also gets the other results with the same factors.
        """
        p, waiting = self.program, dict[int, Waiting]()
        for held, result in self.results:
            product = p.holds_product(held)
            if isinstance(result, Waiting) and product is not None and product not in waiting:
                waiting[product] = result
                for spec, other in self.results:
                    if isinstance(other, Result) and p.shares_factor(spec) == product:
                        assert spec.factors is not None
                        right = self.cuts[spec.factors[1].place].tensor
                        result.others.append((other, right))
        return waiting

    def __call__(self, ends: list[int]) -> None:
        """Process the groups between these places."""
        p = self.program
        products = [Product(places, self.waiting.get(i)) for i, places in enumerate(p.formed)]
        for i, held in self.waiting.items():
            *bias, left, right = (self.cuts[place].tensor for place in p.formed[i])
            held.form(left, right, bias)
        chunks = list(itertools.pairwise(ends))
        first = [cut(*chunks[0]) for cut in self.cuts]
        width = sum(product.group_bytes(first, *chunks[0]) for product in products)
        del first
        device = self.cuts[0].tensor.device
        places = [
            blocks(end - begin, width, device) if p.in_blocks else [0, end - begin]
            for begin, end in chunks
        ]
        sizes = {
            j - i for places_of_chunk in places for i, j in itertools.pairwise(places_of_chunk)
        }
        self.dynamic = self.dynamic or len(sizes) > 1
        largest = max(end - begin for begin, end in chunks)
        for (begin, end), places_of_chunk in zip(chunks, places, strict=True):
            tensors = [cut(begin, end) for cut in self.cuts]
            formed = [product(tensors, begin, end, largest) for product in products]
            values = self._values(formed, begin, places_of_chunk)
            self._multiply(values, tensors, begin, end)
            del values, formed, tensors  # freed before the next chunk allocates its own

    def _values(self, products: list[Tensor], begin: int, places: list[int]) -> list[Tensor]:
        """Run the body, in blocks if no other value of the body must be whole."""
        values: list[Tensor] = []
        rows = [len(product) // places[-1] for product in products]
        for i, j in itertools.pairwise(places):
            parts = [p[i * n : j * n] for p, n in zip(products, rows, strict=True)]
            values.clear()  # a view among them keeps its base alive
            values += self._block(parts, begin + i, begin + j)
        for product, place in zip(products, self.program.over, strict=True):
            if place is not None:
                values[place] = product
        return values

    def _block(self, products: list[Tensor], begin: int, end: int) -> list[Tensor]:
        tensors = [cut(begin, end) for cut in self.cuts]
        values = self.body(products, tensors, self.ints, self.dynamic)
        for spec, result in self.results:
            if isinstance(result, Result) and spec.factors is None:
                assert spec.value is not None
                result.put(values[spec.value], begin, end)
        return values

    def _multiply(self, values: list[Tensor], tensors: list[Tensor], begin: int, end: int) -> None:
        def factor(f: Factor) -> Tensor:
            operand = (values if f.source == "value" else tensors)[f.place]
            return operand.t() if f.transposed else operand

        for spec, result in self.products:
            assert spec.factors is not None
            left, right = spec.factors
            result.multiply(factor(left), factor(right), begin, end)


_schemas.library.impl("_chunked_span", chunked_span, "CompositeExplicitAutograd")


@register_fake("storage_ops::_chunked_span", lib=_schemas.library)
def _(
    inputs: list[Tensor], ints: Sequence[int], sizes: Sequence[Any], groups: Any, program: str
) -> list[Tensor]:
    programs = decode(program)
    return [
        inputs[0].new_empty(shape, dtype=getattr(torch, spec.dtype))
        for (spec, *_), shape in zip(results_of(programs), shapes_of(programs, sizes), strict=True)
    ]
