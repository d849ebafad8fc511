"""Splits reductions over all tokens into one over the classes and one over the tokens.

A metric such as the largest of all logits mixes tokens. The largest logit of each token is computed
in a chunk, and the reduction of these few numbers is outside.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.analysis.rules import RULES, dims_of
from storage_ops.autochunk.fx_graph.edit import Calls, SizeNodes
from storage_ops.autochunk.fx_graph.nodes import argument, name_of, shape
from storage_ops.autochunk.reasons import Conflict

_ATEN = torch.ops.aten
_EXTREME = {
    "aten.max.default": _ATEN.amax.default, "aten.min.default": _ATEN.amin.default,
    "aten.amax.default": _ATEN.amax.default, "aten.amin.default": _ATEN.amin.default,
}  # fmt: skip
_TRUTH = {
    "aten.any.default": _ATEN.any, "aten.any.dims": _ATEN.any,
    "aten.all.default": _ATEN.all, "aten.all.dims": _ATEN.all,
}  # fmt: skip
_PLACES = {
    "aten.argmax.default": (_ATEN.amax.default, _ATEN.argmax.default),
    "aten.argmin.default": (_ATEN.amin.default, _ATEN.argmin.default),
}  # fmt: skip
_VARIANCE = {"aten.var.correction", "aten.var_mean.correction"}


def by_classes(graph: fx.Graph, node: fx.Node, sizes: list[fx.Node]) -> bool:
    """Rewrite a reduction over classes and tokens as two. Return False if `node` is another op.

    `sizes`: nodes that provide sizes.
    """
    name = name_of(node)
    if name in _PLACES:
        return _place(graph, node, sizes)
    if name not in {*_EXTREME, *_TRUTH, *_VARIANCE}:
        return False
    x: Any = node.args[0]
    dims_arg = argument(node, 1, "dim", None)
    dims, keep = dims_of(dims_arg, len(shape(x))), bool(argument(node, 2, "keepdim", False))
    if name in _VARIANCE:
        keep = bool(node.kwargs.get("keepdim", False))
    rank = 0
    if len(dims) == len(shape(x)) and (not keep or name in _EXTREME):
        keep, rank = False, len(dims) if keep else 0
        x = _below_views(x)  # the order of the elements does not matter
        dims = list(range(len(shape(x))))
    last = len(shape(x)) - 1
    if len(dims) < 2 or last not in dims:
        return False
    call = Calls(graph, x)
    if name in _EXTREME:
        op: Any = _EXTREME[name]
        result = call(op, call(op, x, [last], True), dims, keep)
        if rank:
            result = call(_ATEN.reshape.default, result, [1] * rank)
    elif name in _TRUTH:
        op = _TRUTH[name]
        per_token = call(op.dim, x, last, True)
        result = call(op.default, per_token) if name.endswith("default") else call(
            op.dims, per_token, dims, keep
        )  # fmt: skip
    else:
        try:
            size = SizeNodes(call, sizes)
            result = _variance(call, size, x, node, dims, keep)
        except Conflict:
            return False
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
        return True
    for user in list(node.users):
        user.replace_all_uses_with(result[user.args[1]])
    return True


def _place(graph: fx.Graph, node: fx.Node, sizes: list[fx.Node]) -> bool:
    """Rewrite the position of the largest element as its token and its class.

    Return False if the op has another form.
    """
    if argument(node, 1, "dim", None) is not None or argument(node, 2, "keepdim", False):
        return False
    x: Any = node.args[0]
    while (rule := RULES.get(name_of(x))) is not None and rule.kind == "view":
        x = x.args[0]
    if len(shape(x)) < 2:
        return False
    call, (value, place) = Calls(graph, x), _PLACES[name_of(node)]
    try:
        classes = SizeNodes(call, sizes)(shape(x)[-1])
    except Conflict:
        return False
    values = call(_ATEN.reshape.default, call(value, x, [-1]), [-1])
    chosen = call(_ATEN.reshape.default, call(place, x, -1), [-1])
    token = call(place, values, 0, True)
    chosen = call(_ATEN.squeeze.dim, call(_ATEN.gather.default, chosen, 0, token), 0)
    token = call(_ATEN.squeeze.dim, token, 0)
    position = call(_ATEN.add.Tensor, call(_ATEN.mul.Tensor, token, classes), chosen)
    node.replace_all_uses_with(position)
    return True


def _variance(
    call: Calls, size: SizeNodes, x: fx.Node, node: fx.Node, dims: list[int], keep: bool
) -> Any:
    """Return the variance over dimensions, from means and variances over the last one.

    Sums of squared differences add up with those of the means (Chan, Golub and LeVeque).
    """
    dtype = x.meta["val"].dtype
    if not dtype.is_floating_point:
        raise Conflict("is the variance of complex numbers")
    if dtype.itemsize == 2:
        x = call(torch.ops.prims.convert_element_type.default, x, torch.float32)
    classes, count = shape(x)[-1], math.prod(shape(x)[d] for d in dims)
    mean = call(_ATEN.mean.dim, x, [-1], True)
    variances = call(_ATEN.var.correction, x, [-1], correction=0, keepdim=True)
    center = call(_ATEN.mean.dim, mean, dims, True)
    apart = call(_ATEN.pow.Tensor_Scalar, call(_ATEN.sub.Tensor, mean, center), 2)
    total = call(_ATEN.sum.dim_IntList, call(_ATEN.add.Tensor, variances, apart), dims, keep)
    total = call(_ATEN.mul.Tensor, total, size(classes))
    correction: Any = node.kwargs.get("correction")
    correction = 1 if correction is None else correction
    if not isinstance(count, int):
        raise Conflict("divides by a symbolic number of elements")
    # A count that is not positive divides by zero, as in the op itself.
    variance = call(_ATEN.div.Tensor, total, max(count - correction, 0))
    variance = call(torch.ops.prims.convert_element_type.default, variance, dtype)
    if "var_mean" not in name_of(node):
        return variance
    if not keep:
        center = call(_ATEN.reshape.default, center, [size(s) for s in shape(variance)])
    return variance, call(torch.ops.prims.convert_element_type.default, center, dtype)


def _below_views(node: fx.Node) -> fx.Node:
    """Return the value below a view or permutation with the same elements."""
    while node.op == "call_function" and name_of(node) in RULES:
        if RULES[name_of(node)].kind not in ("view", "permute"):
            break
        node = node.args[0]  # type: ignore[assignment]
    return node
