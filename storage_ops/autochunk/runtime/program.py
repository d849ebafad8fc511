"""The work on every chunk of tokens as text. It is an op's argument, which compile caches store."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import fx

_FUNCTIONS = {"getitem": operator.getitem, "floordiv": operator.floordiv, "mul": operator.mul}
_TYPES = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


# The least and most bytes of a product that the body processes at a time. On a CPU they fit into
# the cache. On a GPU the products take longer than a launch.
BLOCK = {"cpu": (32 << 10, 2 << 20), "cuda": (64 << 20, 64 << 20)}


class Slice(NamedTuple):
    """How to cut an input, or where an output goes: dimensions lo to hi - 1 are rows."""

    lo: int
    hi: int
    per: int  # elements of a group; -1 - i means the op's integer i


class Factor(NamedTuple):
    """A factor of a product: a value of the body or an input, perhaps transposed."""

    source: str  # "value" or "input"
    place: int
    transposed: bool


class Output(NamedTuple):
    """One result of the chunks.

    Attributes:
        rows: the place of the chunk's rows, or None for terms of a sum.
        rank: the number of dimensions of the result.
        dtype: the name of the result's dtype.
        value: the index among the body's values, or None.
        factors: the factors of a product that is computed outside the body, in the result itself.
        place: the index among the op's results. Several outputs may be terms of one result.
    """

    rows: Slice | None
    rank: int
    dtype: str
    value: int | None
    factors: tuple[Factor, Factor] | None = None
    place: int = 0


class Program(NamedTuple):
    """A span of the graph, for one chunk.

    Attributes:
        inputs: how to cut each tensor. None: every chunk reads all of it.
        outputs: how the body's values become results.
        num_chunks: the number of chunks. None: as many as `chunk_bytes` needs.
        chunk_bytes: the most bytes of a chunk.
        group_bytes: the bytes of a group in a chunk.
        block_bytes: the bytes of a group in a block, if the body works on blocks.
        dynamic: whether sizes differ from call to call.
        body: the nodes of the body's graph.
        formed: inputs (bias,) left and right of products that are the body's first arguments.
        over: for each of these products, the body's value that overwrites it, or None.
    """

    inputs: tuple[Slice | None, ...]
    outputs: tuple[Output, ...]
    num_chunks: int | None
    chunk_bytes: int
    group_bytes: int
    block_bytes: int
    dynamic: bool
    body: list[Any]
    formed: tuple[tuple[int, ...], ...] = ()
    over: tuple[int | None, ...] = ()

    def count(self, groups: int) -> int:
        """Return the number of chunks for this number of groups."""
        number = self.num_chunks
        if number is None:
            number = math.ceil(groups * self.group_bytes / max(self.chunk_bytes, 1))
        return max(1, min(number, groups))

    def bounds(self, groups: int) -> list[int]:
        """Return the begins of chunks, and the last end. Sizes differ by at most one group."""
        count = self.count(groups)
        return [i * groups // count for i in range(count + 1)]

    @property
    def in_blocks(self) -> bool:
        """Return True if products outside the body read only inputs and overwritten products."""
        used = [f for spec in self.outputs for f in spec.factors or ()]
        return bool(self.formed) and all(f.source == "input" or f.place in self.over for f in used)

    def waits(
        self, output: Output, sizes: Sequence[int], inputs: Sequence[tuple[Sequence[int], int]]
    ) -> bool:
        """Return True if the left factors of a sum of products fit into the sum's memory.

        Args:
            output: the result, with its sizes in `sizes`.
            inputs: sizes of all inputs, and bytes per element.
        """
        if output.rows is not None or output.factors is None:
            return False
        left, right = output.factors
        if left.source != "value" or not left.transposed or right.source != "input":
            return False
        cut, (sizes_of_input, itemsize) = self.inputs[right.place], inputs[right.place]
        if cut is None or cut.lo != 0 or len(sizes_of_input) != cut.hi + 1:
            return False
        wide = int(getattr(torch, output.dtype).itemsize)
        return math.prod(sizes_of_input[: cut.hi]) * itemsize <= sizes[1] * wide

    def holds_product(self, output: Output) -> int | None:
        """Return the product that is overwritten by the left factor of this sum of products."""
        return self._multiplies_overwritten(output, transposed=True)

    def shares_factor(self, output: Output) -> int | None:
        """Return the product that is overwritten by a factor of these rows, or None."""
        if output.rows is None or output.factors is None:
            return None
        right = output.factors[1]
        whole = right.source == "input" and self.inputs[right.place] is None
        return self._multiplies_overwritten(output, transposed=False) if whole else None

    def _multiplies_overwritten(self, output: Output, transposed: bool) -> int | None:
        left = None if output.factors is None else output.factors[0]
        for product, place in enumerate(self.over):
            if place is not None and left == Factor("value", place, transposed):
                return product
        return None

    @property
    def num_ints(self) -> int:
        """Return the number of integers that the body takes."""
        inputs = [kind for kind, *_ in self.body if kind == "input"]
        return len(inputs) - len(self.inputs) - len(self.formed)


def blocks(size: int, group_bytes: int, device: torch.device) -> list[int]:
    """Return the begins of blocks of a chunk of `size` groups, and the end of the last.

    Temporary values of the body are at most as large as a block. Blocks are equal if that takes at
    most twice as many of them.
    """
    total = size * group_bytes
    smallest, largest = BLOCK.get(device.type, BLOCK["cuda"])
    most = min(largest, max(total // 16, smallest))
    least = max(1, min(size, -(-total // most)))
    count = next((n for n in range(least, 2 * least + 1) if size % n == 0), least)
    return [i * size // count for i in range(count + 1)]


def encode(programs: Sequence[Program]) -> str:
    """Return programs as text."""
    return json.dumps(programs, separators=(",", ":"))


def decode(text: str) -> list[Program]:
    """Return programs from text."""
    return [_program(*fields) for fields in json.loads(text)]


def _program(inputs: Any, outputs: Any, *fields: Any) -> Program:
    cuts, results = tuple(cut and Slice(*cut) for cut in inputs), tuple(starmap(_output, outputs))
    program = Program(cuts, results, *fields)
    return program._replace(formed=tuple(map(tuple, program.formed)), over=tuple(program.over))


def _output(rows: Any, rank: int, dtype: str, value: Any, factors: Any, place: int) -> Output:
    pair = factors and (Factor(*factors[0]), Factor(*factors[1]))
    return Output(rows and Slice(*rows), rank, dtype, value, pair, place)


def results_of(programs: Sequence[Program]) -> list[list[Output]]:
    """Return the outputs of each result."""
    outputs: dict[int, list[Output]] = {}
    for output in (o for p in programs for o in p.outputs):
        outputs.setdefault(output.place, []).append(output)
    return [outputs[place] for place in range(len(outputs))]


def encode_graph(graph: fx.Graph) -> list[Any]:
    """Return the nodes of a graph of ATen and prims ops, getitem and //, as lists."""
    numbers: dict[fx.Node, int] = {}
    nodes: list[Any] = []
    for node in graph.nodes:
        numbers[node] = len(nodes)
        if node.op == "placeholder":
            nodes.append(["input"])
            continue
        args = _encode(list(node.args), numbers)
        if node.op == "output":
            nodes.append(["output", args])
        elif node.op == "call_method":
            nodes.append([f"method {node.target}", args, _encode(dict(node.kwargs), numbers)])
        else:
            nodes.append([_name(node.target), args, _encode(dict(node.kwargs), numbers)])
    return nodes


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(target.__name__)


def _encode(item: object, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(item, fx.Node):
        return {"node": numbers[item]}
    if isinstance(item, (list, tuple)):
        return [_encode(entry, numbers) for entry in item]
    if isinstance(item, dict):
        return {"dict": {key: _encode(entry, numbers) for key, entry in item.items()}}
    if isinstance(item, torch.device):
        return {"device": str(item)}
    for name, kind in _TYPES.items():
        if isinstance(item, kind):
            return {name: str(item).removeprefix("torch.")}
    if isinstance(item, float):
        return {"float": item.hex()}  # exact, also for inf and nan
    if item is None or isinstance(item, (bool, int, str)):
        return item
    raise TypeError(
        f"A chunk has an argument of type {type(item).__name__}. Expected a node, a number, text, "
        "None, a device, a dtype, or a container of them."
    )


def _decode(item: object, nodes: list[fx.Node]) -> Any:
    if isinstance(item, list):
        return [_decode(entry, nodes) for entry in item]
    if not isinstance(item, dict):
        return item
    ((kind, value),) = item.items()
    if kind == "node":
        return nodes[value]
    if kind == "dict":
        return {key: _decode(entry, nodes) for key, entry in value.items()}
    if kind == "device":
        return torch.device(value)
    if kind == "float":
        return float.fromhex(value)
    return getattr(torch, value)


def decode_graph(body: list[Any]) -> fx.GraphModule:
    """Return the graph that `encode_graph` encoded."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for kind, *fields in body:
        if kind == "input":
            nodes.append(graph.placeholder(f"x{len(nodes)}"))
            continue
        args = tuple(_decode(fields[0], nodes))
        if kind == "output":
            nodes.append(graph.output(*args))
        elif kind.startswith("method "):
            nodes.append(graph.call_method(kind.removeprefix("method "), args))
        else:
            nodes.append(graph.call_function(_target(kind), args, _decode(fields[1], nodes)))
    return fx.GraphModule(torch.nn.Module(), graph)


def _target(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)
