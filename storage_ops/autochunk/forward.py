"""A product of Dynamo's graph and what depends on it, as ATen ops, and back again.

Before autograd the loss stands as the user wrote it. Dynamo's graph says so in functions of torch,
of which there are many; the rules know ATen's ops. So the slice of the graph from a product to the
loss is traced, and what is found out there is written back as ATen ops, which autograd takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from storage_ops.autochunk.lattice import Conflict
from storage_ops.autochunk.prepare import decompose
from storage_ops.autochunk.values import is_hinted, leading_to, numel, reached

_PRODUCTS = {"linear", "matmul", "mm", "addmm", "einsum"}
_SCOPES = {"_enter_autocast", "_exit_autocast"}  # autocast begins and ends in the graph
MOST = 256  # nodes of a slice: what comes after the logits of a model are some tens


@dataclass
class Forward:
    """A slice of Dynamo's graph.

    Attributes:
        gm: the module of that graph.
        product: the node that forms the logits.
        loss: the number that all of its users lead to, if there is one; the last node then.
        graph: the slice as ATen ops; its output are the values that are read elsewhere.
        inputs: for its placeholders, the nodes of Dynamo.
        values: for the nodes of Dynamo in the slice, those of `graph`.
    """

    gm: fx.GraphModule
    product: fx.Node
    loss: fx.Node | None
    graph: fx.Graph
    inputs: dict[fx.Node, fx.Node]
    values: dict[fx.Node, fx.Node]

    @property
    def output(self) -> fx.Node:
        """The end of the ATen graph."""
        end: fx.Node = next(n for n in self.graph.nodes if n.op == "output")
        return end

    def learns(self, node: fx.Node) -> bool:
        """Whether a value of the ATen graph depends on an input that has a gradient."""
        return any(
            _value(self.inputs[n]).requires_grad
            for n in leading_to([node]) if n in self.inputs and _is_tensor(self.inputs[n])
        )  # fmt: skip


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(_value(node), Tensor)


def _is_integral(node: fx.Node) -> bool:
    value = _value(node)
    return isinstance(value, torch.SymInt) or (_is_tensor(node) and not value.is_floating_point())


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _is_product(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and _name(node) in _PRODUCTS


def products(graph: fx.Graph) -> list[fx.Node]:
    """Products that are larger than their factor, the largest first."""
    found = {}
    for node in graph.nodes:
        factors = [a for a in node.all_input_nodes if _is_tensor(a)]
        left = factors[1 if _name(node) == "addmm" else 0] if factors else node
        if _is_product(node) and _is_tensor(node) and numel(node) > numel(left):
            found[node] = numel(node)
    return sorted(found, key=found.__getitem__, reverse=True)


def forget_bounds(graph: fx.Graph) -> None:
    """Drop Dynamo's checks that a mask keeps no more than there is: they read the logits' size."""
    for kept in [n for n in graph.nodes if _name(n) == "getitem" and _is_mask(n.args[1])]:
        bounds = ("_check_is_size",), ("ge", 0), ("le", numel(kept.args[1]))
        for size in [u for u in kept.users if str(u.target) == "aten.sym_size.int"]:
            for check in [u for u in size.users if (_name(u), *u.args[1:]) in bounds]:
                if all(str(u.target) == "aten._assert_scalar.default" for u in check.users):
                    for node in [*check.users, check]:
                        graph.erase_node(node)
            if not size.users:
                graph.erase_node(size)


def _is_mask(item: Any) -> bool:
    return isinstance(item, fx.Node) and _is_tensor(item) and _value(item).dtype == torch.bool


def _end(nodes: list[fx.Node]) -> int:
    """How many nodes there are until a number is all that the others read; 0 if that never is."""
    place = {node: i for i, node in enumerate(nodes)}
    latest = 0
    for i, node in enumerate(nodes):
        if latest <= i and i and _is_tensor(node) and not _value(node).shape:
            return i + 1 if _value(node).requires_grad else 0
        latest = max([latest, *(place.get(user, len(nodes)) for user in node.users)])
    return 0


def slice_of(gm: fx.GraphModule, product: fx.Node) -> Forward:
    """The slice from a product to the loss, or to the end.

    Raises:
        Conflict: the slice is not one of plain functions.
    """
    after = reached([product]) | {product}
    nodes = [n for n in gm.graph.nodes if n in after and n.op != "output"]
    end = _end(nodes)
    nodes = nodes[:end] if end else nodes
    if len(nodes) > MOST or any(_is_product(n) for n in nodes[1:]):
        raise Conflict("leads to more than a loss", product)
    loss = nodes[-1] if end else None
    run = set(nodes)
    if all(is_hinted(s) for n in nodes if _is_tensor(n) for s in _value(n).shape):
        run |= _of_integers(nodes)  # a mask that is formed again keeps another number of tokens
    order = list(gm.graph.nodes)
    inside = order[order.index(nodes[0]) : order.index(nodes[-1])]
    for node in [*run, *inside]:
        if _name(node) == "_set_grad_enabled" or (node in run and _is_opaque(node)):
            raise Conflict("is no plain function", node)
    scopes = [n for n in order if n.op == "call_function" and _name(n) in _SCOPES]
    run |= {n for n in scopes if order.index(n) < order.index(nodes[-1])}
    return _trace(gm, product, loss, [n for n in order if n in run], nodes)


def _of_integers(nodes: list[fx.Node]) -> set[fx.Node]:
    """What nodes read that is made of integers, such as targets and masks, or of nothing."""
    found: set[fx.Node] = set()
    stack = [a for n in nodes for a in n.all_input_nodes]
    while stack:
        node = stack.pop()
        value = _value(node)
        if node in found or node.op not in ("call_function", "call_method"):
            continue
        if isinstance(value, Tensor) and all(map(_is_integral, node.all_input_nodes)):
            found.add(node)
            stack += node.all_input_nodes
    return found


def _is_opaque(node: fx.Node) -> bool:
    """Whether a node has a backward, or a body, of its own."""
    return node.op not in ("call_function", "call_method") or isinstance(
        node.target, torch._ops.HigherOrderOperator
    )


def _call(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _by_rows(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """A sum of everything: over the last dimension first, for a value per token to be seen."""
    if x.dim() < 2:
        return NotImplemented
    return x.sum(-1, dtype=dtype).sum(dtype=dtype)


def _mean_by_rows(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    if x.dim() < 2:
        return NotImplemented
    return x.mean(-1, dtype=dtype).mean(dtype=dtype)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's, but for what autograd has to see, and with sums of everything by rows."""
    from torch._inductor.decomposition import select_decomp_table

    aten, table = torch.ops.aten, dict(select_decomp_table())
    for op in (aten._to_copy, aten.detach, aten.logsumexp):
        table.pop(op.default, None)
    return {**table, aten.sum.default: _by_rows, aten.mean.default: _mean_by_rows}


def _trace(
    gm: fx.GraphModule, product: fx.Node, loss: fx.Node | None, run: list[fx.Node],
    nodes: list[fx.Node],
) -> Forward:  # fmt: skip
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    known = set(run)
    read = dict.fromkeys(a for n in run for a in n.all_input_nodes if a not in known)
    if any(_value(n) is None for n in [*read, *nodes]):
        raise Conflict("has no value", product)
    changed = [n for n in read if _is_tensor(n) and _value(n)._version]
    if changed:
        raise Conflict("is changed in place by the function", changed[0])
    results: list[fx.Node] = []

    def slice(*given: Any) -> list[Tensor]:
        env: dict[fx.Node, Any] = dict(zip(read, given, strict=True))
        opened: list[Any] = []
        try:
            for node in run:
                env[node] = _call(node, env)
                if _name(node) == "_enter_autocast":
                    opened.append(env[node])
                elif _name(node) == "_exit_autocast":
                    opened.remove(env[node.args[0]])  # type: ignore[index]
        finally:
            for scope in reversed(opened):
                torch.amp.autocast_mode._exit_autocast(scope)
        results[:] = [n for n in nodes if isinstance(env[n], Tensor)]
        return [env[n] for n in results]

    # In torch 2.10 ops that C++ takes apart read sizes as numbers, unless Python's dispatcher does.
    old = torch.__version__.startswith("2.10.")
    dispatcher = enable_python_dispatcher() if old else contextlib.nullcontext()
    with dispatcher, _value(product).fake_mode, torch.no_grad():
        graph = make_fx(dispatch_functionalize(slice), decomposition_table=decompositions())(
            *map(_value, read)
        ).graph
    if any(n.op not in ("placeholder", "call_function", "output") for n in graph.nodes):
        raise Conflict("reads a tensor that is no input", product)
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        if node.op == "call_function" and (
            node.is_impure() or torch.Tag.nondeterministic_seeded in tags
        ):
            raise Conflict("changes something in place, or is random", product)
    decompose(graph, graph.nodes)
    inputs = dict(zip((n for n in graph.nodes if n.op == "placeholder"), read, strict=True))
    end = next(n for n in graph.nodes if n.op == "output")
    values = dict(zip(results, end.args[0], strict=True))
    last = [loss] if loss is not None else [
        n for n in values if any(user not in values for user in n.users)
    ]  # fmt: skip
    end.args = ([values[n] for n in last],)
    graph.eliminate_dead_code()
    return Forward(gm, product, loss, graph, inputs, values)


class Splice:
    """Copies nodes of ATen graphs to Dynamo's, before one of its nodes."""

    def __init__(self, forward: Forward, before: fx.Node):
        self.forward, self.before = forward, before
        self.env: dict[fx.Node, fx.Node] = dict(forward.inputs)
        self.made: list[fx.Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call, with its value."""
        graph = self.forward.gm.graph
        with graph.inserting_before(self.before):
            node = graph.call_function(target, args, kwargs)
        self.made.append(node)
        values = fx.map_arg((args, kwargs), _value)
        with _value(self.forward.product).fake_mode, torch.no_grad():
            node.meta["example_value"] = target(*values[0], **values[1])
        node.meta["stack_trace"] = self.forward.product.meta.get("stack_trace")
        return node

    def copy(self, wanted: fx.Node) -> fx.Node:
        """A node of an ATen graph, after what it is made of."""
        needed: set[fx.Node] = set()
        stack = [wanted]
        while stack:
            node = stack.pop()
            if node not in needed and node not in self.env:
                needed.add(node)
                stack += node.all_input_nodes
        for node in wanted.graph.nodes:
            if node in needed:
                args, kwargs = fx.map_arg((node.args, node.kwargs), self.env.__getitem__)
                self.env[node] = self.call(node.target, *args, **kwargs)
        return self.env[wanted]


def sweep(forward: Forward) -> None:
    """Drop what nobody reads any more of the slice."""
    graph = forward.gm.graph
    for node in reversed([n for n in graph.nodes if n in forward.values]):
        if not node.users:
            graph.erase_node(node)
