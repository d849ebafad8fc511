"""Traces a part of Dynamo's graph, from a product to numbers per token, to ATen ops.

Before autograd the loss is as the user wrote it. Dynamo's graph has many functions of torch, but
there are rules only for ATen ops. So the slice of the graph from a product to a few numbers per
token is traced to ATen ops. The replacement is written back as ATen ops, which autograd accepts.
The code after these numbers stays unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from storage_ops.autochunk.analysis.spans import is_product
from storage_ops.autochunk.fx_graph.edit import Calls
from storage_ops.autochunk.fx_graph.nodes import (
    hint,
    is_hinted,
    leading_to,
    numel,
    owner,
    reached,
    returned,
)
from storage_ops.autochunk.prepare.decompose import decompose
from storage_ops.autochunk.reasons import Conflict
from storage_ops.foundation.ops import Product, product_of

_SCOPES = {"_enter_autocast", "_exit_autocast"}  # begin and end of autocast in the graph
_GRADS = "_set_grad_enabled"
# These ops may choose tokens, so that others need not be computed.
_CHOOSING = {"getitem", "narrow", "select"}
_INDEXING = ("gather", "getitem", "index_put", "scatter", "setitem")
MOST = 256  # most nodes of a slice; a model has some tens of nodes after the logits


@dataclass
class ForwardSlice:
    """A slice of Dynamo's graph.

    Attributes:
        gm: the module of Dynamo's graph.
        product: the node that computes the logits.
        nodes: the nodes of Dynamo, from the product to the few numbers per token.
        ends: the nodes of the slice that are read outside of it.
        graph: the slice as ATen ops, which returns the values of `ends`.
        inputs: the nodes of Dynamo for the placeholders of `graph`.
    """

    gm: fx.GraphModule
    product: fx.Node
    nodes: list[fx.Node]
    ends: list[fx.Node]
    graph: fx.Graph
    inputs: dict[fx.Node, fx.Node]

    @property
    def values(self) -> list[fx.Node]:
        """Return the ATen nodes that compute `ends`."""
        return returned(self.graph)

    def learns(self, node: fx.Node) -> bool:
        """Return True if a value of the ATen graph depends on an input that requires a gradient."""
        return any(learns(self.inputs[n]) for n in leading_to([node]) if n in self.inputs)

    def is_given(self, node: fx.Node) -> bool:
        """Return True if a value of the ATen graph is an input of the function, or a view of one.

        Such a tensor is in memory before and after the call. A chunk saves nothing on it.
        """
        source = self.inputs.get(owner(node))
        inputs = [n for n in self.gm.graph.nodes if n.op in ("placeholder", "get_attr")]
        return source is not None and any(_shares_storage(source, n) for n in inputs)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def learns(node: fx.Node) -> bool:
    """Return True if a value of Dynamo's graph requires a gradient."""
    return _is_tensor(node) and bool(_value(node).requires_grad)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(_value(node), Tensor)


def _shares_storage(one: fx.Node, other: fx.Node) -> bool:
    """Return True if the values of two nodes of Dynamo are views of the same storage."""
    if not (_is_tensor(one) and _is_tensor(other)):
        return False
    storages = (_value(node).untyped_storage() for node in (one, other))
    return len({storage._cdata for storage in storages}) == 1


def _is_integral(node: fx.Node) -> bool:
    value = _value(node)
    return isinstance(value, torch.SymInt) or (_is_tensor(node) and not value.is_floating_point())


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _product(node: fx.Node) -> Product | None:
    """Return the positions of a call's factors, if it multiplies matrices."""
    return product_of(_name(node)) if node.op in ("call_function", "call_method") else None


def products(graph: fx.Graph) -> list[fx.Node]:
    """Return the products that are larger than their factor, the largest first."""
    by_product = {}
    for node in graph.nodes:
        product = _product(node)
        if product is None or not _is_tensor(node):
            continue
        tensors = [a for a in node.all_input_nodes if _is_tensor(a)]
        if tensors and numel(node) > numel(tensors[: product.left + 1][-1]):
            by_product[node] = numel(node)
    return sorted(by_product, key=by_product.__getitem__, reverse=True)


def forget_bounds(graph: fx.Graph) -> None:
    """Drop Dynamo's checks that a mask selects no more than all elements.

    The checks read the size of the logits.
    """
    for kept in [n for n in graph.nodes if _name(n) == "getitem" and _is_mask(n.args[1])]:
        bounds = ("_check_is_size",), ("ge", 0), ("le", numel(kept.args[1]))
        for size in [u for u in kept.users if str(u.target) == "aten.sym_size.int"]:
            for check in [u for u in size.users if (_name(u), *u.args[1:]) in bounds]:
                if all(str(u.target) == "aten._assert_scalar.default" for u in check.users):
                    for node in [*check.users, check]:
                        graph.erase_node(node)
            if not size.users:
                graph.erase_node(size)


def join_sizes(graph: fx.Graph) -> None:
    """Guard that logits and the indices into them have the same sizes, if their examples have.

    If sizes become dynamic automatically, each input has symbols of its own. Most ops compare the
    sizes of their arguments. Indexing does not, because it may read fewer tokens than there are.
    """
    for node in graph.nodes:
        if _name(node).startswith(_INDEXING):
            values = [_value(n) for n in node.all_input_nodes if _is_tensor(n)]
            for index in values[1:]:
                for a, b in zip(values[0].shape, index.shape, strict=False):
                    if is_hinted(a) and is_hinted(b) and hint(a) == hint(b):
                        bool(a == b)  # adds the guard, and makes one symbol of two


def _is_mask(item: object) -> bool:
    return isinstance(item, fx.Node) and _is_tensor(item) and _value(item).dtype == torch.bool


def loss_of(forward: ForwardSlice) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the one number that all users of a product lead to, and the nodes between.

    The nodes of the slice are left out. Returns None if there is no such number.
    """
    after = reached([forward.product]) | {forward.product}
    nodes = [n for n in forward.gm.graph.nodes if n in after and n.op != "output"]
    place = {node: i for i, node in enumerate(nodes)}
    latest = 0
    for i, node in enumerate(nodes):
        if latest <= i and i and _is_tensor(node) and not _value(node).shape:
            known = set(forward.nodes)
            between = [n for n in nodes[: i + 1] if n not in known]
            return (node, between) if learns(node) and len(between) <= MOST else None
        latest = max([latest, *(place.get(user, len(nodes)) for user in node.users)])
    return None


def _up_to_rows(graph: fx.Graph, product: fx.Node) -> list[fx.Node]:
    """Return a product and its users, up to those with a few numbers per token, in order.

    A node is included if its value is large, if it reads or leads to a large value, or if it
    chooses tokens of a large value.
    """
    tokens = numel(product) // max(hint(_value(product).shape[-1]), 1)
    after = reached([product])
    order = [n for n in graph.nodes if n in after]
    large, inside, stack = {product}, {product}, list[fx.Node]()
    for node in order:
        if node.op != "output" and numel(node) > tokens:
            large.add(node)
        chooses = _name(node) in _CHOOSING and not inside.isdisjoint(node.all_input_nodes)
        if chooses or node in large or not large.isdisjoint(node.all_input_nodes):
            if node.op == "output":
                raise Conflict("is returned, or kept for a backward", product)
            stack.append(node)
        while stack:
            new = stack.pop()
            if new not in inside:
                inside.add(new)
                stack += [a for a in new.all_input_nodes if a in after]
    return [product, *(n for n in order if n in inside)]


def slice_of(gm: fx.GraphModule, product: fx.Node) -> ForwardSlice:
    """Return the slice from a product to a few numbers per token.

    Raises:
        Conflict: the slice has nodes that are not plain functions.
    """
    nodes = _up_to_rows(gm.graph, product)
    if len(nodes) > MOST or any(map(_product, nodes[1:])):
        raise Conflict("computes more than a loss", product)
    known = set(nodes)
    ends = [n for n in nodes[1:] if any(user not in known for user in n.users)]
    run = NodeReplay(gm.graph, nodes)
    if not all(isinstance(_value(n), (Tensor, torch.SymInt)) for n in ends):
        raise Conflict("computes values that are not tensors", product)
    _check_unchanged(ends)
    graph = run.trace(ends)
    inputs = dict(zip((n for n in graph.nodes if n.op == "placeholder"), run.inputs, strict=True))
    return ForwardSlice(gm, product, nodes, ends, graph, inputs)


class NodeReplay:
    """Runs nodes of Dynamo's graph again.

    Attributes:
        order: the nodes, with their arguments that depend on integers, and scopes of autocast.
        inputs: their other arguments.
    """

    def __init__(self, graph: fx.Graph, nodes: list[fx.Node], computed: Iterable[fx.Node] = ()):
        """Find the nodes to run again. `computed` are nodes whose values already exist."""
        inside, self.computed, order = set(nodes), set(computed), list(graph.nodes)
        run = set(inside)
        if all(is_hinted(s) for n in nodes if _is_tensor(n) for s in _value(n).shape):
            # A repeated mask would keep a different number of tokens.
            run |= _of_integers(nodes, self.computed)
        for node in run:
            if _is_opaque(node):
                raise Conflict("is not a plain function", node)
        last = max(map(order.index, nodes), default=0)
        run |= {n for n in order[:last] if n.op == "call_function" and _name(n) in _SCOPES}
        self.order = [n for n in order if n in run]
        self.still = without_gradients(order)
        known = run | self.computed
        self.inputs = list(dict.fromkeys(
            a for n in self.order for a in n.all_input_nodes if a not in known
        ))  # fmt: skip
        if any(_value(n) is None for n in [*self.inputs, *nodes]):
            raise Conflict("has no value", nodes[0] if nodes else None)
        # A node that changes it is not run again. It comes before the one reader or after the
        # other.
        _check_unchanged(n for n in [*self.inputs, *self.order] if n not in inside)

    def __call__(self, env: dict[fx.Node, Any]) -> None:
        """Run the nodes. `env` has the values of inputs and given nodes, and receives results."""
        opened: list[Any] = []
        try:
            for node in self.order:
                env[node] = _call(node, env)
                if node in self.still and isinstance(env[node], Tensor):
                    env[node] = env[node].detach()
                if _name(node) == "_enter_autocast":
                    opened.append(env[node])
                elif _name(node) == "_exit_autocast":
                    opened.remove(env[node.args[0]])
        finally:
            for scope in reversed(opened):
                torch.amp.autocast_mode._exit_autocast(scope)

    def trace(self, ends: list[fx.Node]) -> fx.Graph:
        """Return the nodes as ATen ops that return the values of `ends`."""

        def run(*values: object) -> list[Any]:
            env: dict[fx.Node, Any] = dict(zip(self.inputs, values, strict=True))
            self(env)
            return [env[n] for n in ends]

        graph = traced(run, list(map(_value, self.inputs)), grads=False)
        if any(n.op not in ("placeholder", "call_function", "output") for n in graph.nodes):
            raise Conflict("reads a tensor that is not an input", ends[0] if ends else None)
        decompose(graph, graph.nodes)
        graph.eliminate_dead_code()
        return graph


def traced(run: Callable[..., Any], values: list[Any], grads: bool = True) -> fx.Graph:
    """Return the ATen ops of a function of fake tensors.

    Raises:
        Conflict: an op changes a tensor in place, or is random.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    # In torch 2.10, ops that C++ decomposes read sizes as numbers, unless Python's dispatcher runs.
    old = torch.__version__.startswith("2.10.")
    dispatcher = enable_python_dispatcher() if old else contextlib.nullcontext()
    mode = next(v for v in values if isinstance(v, Tensor)).fake_mode  # type: ignore[attr-defined]
    with dispatcher, mode, torch.set_grad_enabled(grads):
        graph = make_fx(dispatch_functionalize(run), decomposition_table=decompositions())(
            *values
        ).graph
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        if node.op == "call_function" and (
            node.is_impure() or torch.Tag.nondeterministic_seeded in tags
        ):
            raise Conflict("changes a tensor in place, or is random")
    return graph


def without_gradients(order: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes that run under torch.no_grad."""
    nodes, enabled = set[fx.Node](), True
    for node in order:
        if node.op == "call_function" and _name(node) == _GRADS:
            enabled = bool(node.args[0])
        elif not enabled:
            nodes.add(node)
    return nodes


def _of_integers(nodes: list[fx.Node], known: set[fx.Node]) -> set[fx.Node]:
    """Return arguments that depend only on integers, such as targets and masks, or on no input."""
    integers: set[fx.Node] = set()
    stack = [a for n in nodes for a in n.all_input_nodes]
    while stack:
        node = stack.pop()
        value = _value(node)
        if node in integers | known or node.op not in ("call_function", "call_method"):
            continue
        if isinstance(value, Tensor) and all(map(_is_integral, node.all_input_nodes)):
            integers.add(node)
            stack += node.all_input_nodes
    return integers


def _check_unchanged(nodes: Iterable[fx.Node]) -> None:
    """Raise Conflict if a value is changed in place after it was computed."""
    for node in nodes:
        if _is_tensor(node) and _value(node)._version:
            raise Conflict("is changed in place by the function", node)


def _is_opaque(node: fx.Node) -> bool:
    """Return True if a node has a backward, or a body, of its own."""
    return node.op not in ("call_function", "call_method") or isinstance(
        node.target, torch._ops.HigherOrderOperator
    )


def _call(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _by_rows(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """Sum over the last dimension first, so that the graph has a value per token."""
    if x.dim() < 2:
        return NotImplemented
    return x.sum(-1, dtype=dtype).sum(dtype=dtype)


def _mean_by_rows(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    if x.dim() < 2:
        return NotImplemented
    return x.mean(-1, dtype=dtype).mean(dtype=dtype)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions, without those of ops that autograd must see.

    Sums over all elements go by rows.
    """
    from torch._inductor.decomposition import select_decomp_table

    aten, table = torch.ops.aten, dict(select_decomp_table())
    for op in (aten._to_copy, aten.detach, aten.logsumexp):
        table.pop(op.default, None)
    return {**table, aten.sum.default: _by_rows, aten.mean.default: _mean_by_rows}


class Splice:
    """Copies nodes of ATen graphs to Dynamo's, before one of its nodes.

    Attributes:
        call: adds a call there.
        env: maps nodes of the ATen graph to nodes of Dynamo's.
    """

    def __init__(self, forward: ForwardSlice, before: fx.Node):
        self.call = Calls(forward.gm.graph, forward.product, before, "example_value")
        self.env: dict[fx.Node, fx.Node] = dict(forward.inputs)

    def copy(self, wanted: fx.Node) -> fx.Node:
        """Copy a node of an ATen graph, after the nodes that it depends on."""
        needed: set[fx.Node] = set()
        stack = [wanted]
        while stack:
            node = stack.pop()
            if node not in needed and node not in self.env:
                needed.add(node)
                stack += node.all_input_nodes
        for node in wanted.graph.nodes:
            if node in needed:
                if is_product(node):
                    raise Conflict("would be computed for all tokens at once", node)
                args, kwargs = fx.map_arg((node.args, node.kwargs), self.env.__getitem__)
                self.env[node] = self.call(node.target, *args, **kwargs)
        return self.env[wanted]


def sweep(forward: ForwardSlice) -> None:
    """Remove nodes of the slice that no node reads any more."""
    for node in reversed(forward.nodes):
        if not node.users:
            forward.gm.graph.erase_node(node)
