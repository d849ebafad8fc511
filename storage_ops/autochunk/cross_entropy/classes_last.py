"""Rewrites cross-entropy with the classes in dimension 1, so that they come last.

Convolutions that compute logits become matrix products.

In logits of shape (N, C, H, W) the tokens are not contiguous, so a chunk would be whole images.
Logits of shape (N * H * W, C) can be cut anywhere. The loss is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from storage_ops.autochunk.fx_graph.edit import Calls
from storage_ops.autochunk.fx_graph.nodes import leading_to, nbytes, numel, reached

_LOSSES = {
    F.cross_entropy: ("input", "target", "weight", "size_average", "ignore_index", "reduce",
                      "reduction", "label_smoothing"),
    F.nll_loss: ("input", "target", "weight", "size_average", "ignore_index", "reduce",
                 "reduction"),
}  # fmt: skip
_VIEWS = {"flatten", "reshape", "view"}
_TURNS = {"permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims"}
_ELEMENTWISE = {
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "tanh",
    "mul",
    "div",
    "truediv",
    "contiguous",
}
_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}
_STRIDES = 1, 0, 1  # stride, padding and dilation of a convolution that is a matrix product


def classes_last(gm: fx.GraphModule, least: int) -> None:
    """Rewrite losses of a graph of Dynamo whose logits have more bytes than `least`."""
    for node in list(gm.graph.nodes):
        names = _LOSSES.get(node.target) if node.op == "call_function" else None
        if names is not None:
            options = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            if _is_wanted(options, least):
                _rewrite(node, options)
    for node in list(gm.graph.nodes):
        if node.target in _CONVOLUTIONS and _is_head(node, least):
            _replace_convolution(node)


def _is_head(node: fx.Node, least: int) -> bool:
    """Return True if a convolution's result is larger than its input, and no layer reads it.

    If the result is interpolated, the largest interpolation counts, if it has more than `least`
    bytes.
    """
    layers = {*_CONVOLUTIONS, F.linear, torch.matmul, torch.bmm}
    x: Any = node.args[0] if node.args else node.kwargs["input"]
    after = reached([node])
    largest = max([node, *(n for n in after if n.target is F.interpolate)], key=numel)
    larger = numel(largest) > numel(x) and nbytes(largest) > least
    return larger and not any(n.target in layers for n in after)


def _replace_convolution(node: fx.Node) -> None:
    """Replace a convolution by a matrix product if possible."""
    call = Calls(node.graph, node, before=node, key="example_value")
    with torch.set_grad_enabled(node.meta["example_value"].requires_grad):
        product = _as_product(call, node)
        if product is not None:
            node.replace_all_uses_with(call(torch.movedim, product, -1, 1))
            node.graph.erase_node(node)


def _is_wanted(arguments: dict[str, Any], least: int) -> bool:
    logits, target = arguments.get("input"), arguments.get("target")
    if not isinstance(logits, fx.Node) or not isinstance(target, fx.Node):
        return False
    plain = arguments.get("size_average") is None and arguments.get("reduce") is None
    value = target.meta["example_value"]
    classes = not value.is_floating_point() and value.dim() > 1
    return plain and classes and nbytes(logits) > least


def _rewrite(node: fx.Node, arguments: dict[str, Any]) -> None:
    graph: fx.Graph = node.graph
    call = Calls(graph, arguments["input"], before=node, key="example_value")
    with torch.set_grad_enabled(node.meta["example_value"].requires_grad):
        old = arguments.pop("input")
        logits = _turned(call, old)
        if logits is None:
            return
        turned = leading_to([old])
        target = arguments.pop("target")
        logits = call(torch.flatten, logits, 0, -2)
        loss: Any = node.target
        result = call(loss, logits, call(torch.flatten, target), **arguments)
        if arguments.get("reduction") == "none":
            result = call(torch.ops.aten.view_as.default, result, target)
    node.replace_all_uses_with(result)
    unused = [node]
    while unused:  # other dead nodes stay, because they may have side effects
        dead = unused.pop()
        read = [a for a in dead.all_input_nodes if a.op != "placeholder"]
        graph.erase_node(dead)
        unused += [a for a in read if not a.users and a in turned]


def _turned(call: Calls, node: object) -> fx.Node | None:
    """Return logits with dimension 1 moved to the end, or None if that needs a copy."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return None
    # Insert before the node, because its arguments may be changed in place after it.
    call = Calls(node.graph, node, before=node, key="example_value")
    name = str(getattr(node.target, "__name__", node.target))
    value, (base, *arguments) = node.meta["example_value"], node.args or (None,)
    if not isinstance(base, (fx.Node, str)):
        return None
    if name in _TURNS and isinstance(base, fx.Node):
        order = _order(node, len(value.shape))
        return base if order == [0, len(order) - 1, *range(1, len(order) - 1)] else None
    if len(node.users) > 1:
        return None
    if name == "einsum" and isinstance(base, str):
        return _as_linear(call, base.replace(" ", ""), arguments)
    if node.target in _CONVOLUTIONS:
        return _as_product(call, node)
    if name in _VIEWS:
        turned = _turned(call, base) if value.shape[:2] == _shape(base)[:2] else None
        sizes = [value.shape[0], *value.shape[2:], value.shape[1]]
        if turned is None or not all(isinstance(size, int) for size in sizes):
            return None
        return call(torch.reshape, turned, sizes)
    if name == "log_softmax" and {*arguments[:1], *node.kwargs.values()} & {1, 1 - value.dim()}:
        turned = _turned(call, base)
        dtype = node.kwargs.get("dtype")
        return turned and call(torch.log_softmax, turned, -1, dtype=dtype)
    if name in _ELEMENTWISE and not any(
        isinstance(a, fx.Node) for a in (*arguments, *node.kwargs.values())
    ):
        turned = _turned(call, base)
        if turned is None or name == "contiguous":
            return turned
        target: Any = node.target if callable(node.target) else getattr(torch.Tensor, name)
        return call(target, turned, *arguments, **node.kwargs)
    return None


def _as_linear(call: Calls, equation: str, factors: list[Any]) -> fx.Node | None:
    """Return an einsum of hidden states and a matrix as a product, with the classes last."""
    terms, _, out = equation.partition("->")
    for hidden, matrix in ((0, 1), (1, 0)):
        parts = terms.split(",")
        if len(parts) != 2 or len(parts[matrix]) != 2 or "." in terms or len(out) < 2:
            continue
        tokens, channel, classes = parts[hidden][:-1], parts[hidden][-1], out[1]
        if tokens != out[:1] + out[2:] or set(parts[matrix]) != {channel, classes}:
            continue
        weight = factors[matrix]
        if parts[matrix][0] == channel:
            weight = call(torch.transpose, weight, 0, 1)
        return call(F.linear, factors[hidden], weight)
    return None


def _shape(node: Any) -> Any:
    return node.meta["example_value"].shape


def _order(node: fx.Node, rank: int) -> list[int]:
    """Return the argument's dimension for each dimension of a permutation's result."""
    small = torch.empty(*range(1, rank + 1), device="meta")
    _, *arguments = node.args
    target: Any = node.target
    target = target if callable(target) else getattr(torch.Tensor, target)
    moved = target(small, *arguments, **node.kwargs)
    return [size - 1 for size in moved.shape]


def _as_product(call: Calls, node: fx.Node) -> fx.Node | None:
    """Return a convolution whose kernel is one element as a product, with the channels last."""
    names = "input", "weight", "bias", "stride", "padding", "dilation", "groups"
    options = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    x, weight = options["input"], options["weight"]
    for name, wanted in zip(("stride", "padding", "dilation"), _STRIDES, strict=True):
        value = options.get(name, wanted)
        if any(v != wanted for v in (value if isinstance(value, (tuple, list)) else [value])):
            return None
    if any(size != 1 for size in _shape(weight)[2:]) or options.get("groups", 1) != 1:
        return None
    if len(_shape(x)) != len(_shape(weight)):
        return None
    hidden = _turned(call, x)
    if hidden is None:
        hidden = call(torch.movedim, x, 1, -1)
    return call(F.linear, hidden, call(torch.flatten, weight, 1), options.get("bias"))
