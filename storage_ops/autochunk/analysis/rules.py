"""The table of rules: op -> which dimensions of its arguments and result belong together.

A rule labels dimensions. A label in an argument and in the result marks a dimension along which the
op computes each element separately. A slice of the argument gives the same slice of the result. A
label in `sums` marks a dimension that the op sums over: slices give terms of the sum. A dimension
without a label (None) must stay whole.

A rule also says how a factor of the arguments becomes a factor of the result. Gradients are linear
in the upstream gradient, which is assumed to be 1 until the end. A law is a sum of products of
arguments. An addition has the law ((0,), (1,)): both terms must have the factor. A multiplication
has ((0, 1),). An argument that is in no term must not have the factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

from storage_ops.autochunk.analysis.layouts import same
from storage_ops.autochunk.fx_graph.nodes import (
    argument,
    is_tensor,
    name_of,
    shape,
    tensors,
    values_of,
)
from storage_ops.autochunk.reasons import Conflict

Labels: TypeAlias = list[Any]
Degree: TypeAlias = int | None  # degree of homogeneity; None for zero, which has every degree
Law: TypeAlias = tuple[tuple[int, ...], ...] | None  # terms, as positions of arguments

LINEAR: Law = None  # linear in all tensors together: each is a term
NONLINEAR: Law = ()
FIRST: Law = ((0,),)  # linear in the first argument
ADDITIVE: Law = ((0,), (1,))
BILINEAR: Law = ((0, 1),)


@dataclass
class Labelled:
    """The labels of one call."""

    out: Labels
    args: Mapping[fx.Node, list[Labels]]  # an argument may be passed more than once
    sums: tuple[Any, ...] = ()
    mean: bool = False


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Attributes:
        labels: returns the labels of a call; None for a view, whose rows `layouts.reshape`
            computes.
        law: how factors of the arguments become factors of the result.
        sizes: index of the argument with the result's sizes.
        kind: the kind of op, for tests and messages.
    """

    kind: str
    labels: Callable[[fx.Node], Labelled] | None
    law: Law
    sizes: int | None = None

    def degree(self, node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
        """Return the degree of a call's result in the upstream gradient.

        Raises:
            Conflict: the result has no degree.
        """
        law = self.law if _is_real(node) else NONLINEAR
        if law is None:
            return _common(degree(a) for a in tensors(node))
        places = {i for term in law for i in term}
        constant: list[fx.Node] = []
        others = tuple(a for i, a in enumerate(node.args) if i not in places)
        fx.map_arg(others, constant.append)
        if any(degree(a) for a in constant):
            raise Conflict("is not linear in the upstream gradient")
        if not law:
            return 0
        # Only the value of a padding may be missing, or be passed by name.
        return _common(_times(degree(argument(node, i, "value", 0)) for i in term) for term in law)


def _is_real(node: fx.Node) -> bool:
    """Return True if a value is floating-point. Integers are proportional to nothing."""
    return all(v.is_floating_point() for v in values_of(node))


def _common(degrees: Iterable[Degree]) -> Degree:
    """Return the degree of a sum, which all terms must share."""
    known = {d for d in degrees if d is not None}
    if len(known) > 1:
        raise Conflict("adds terms that grow differently with the upstream gradient")
    return known.pop() if known else None


def _times(degrees: Iterable[Degree]) -> Degree:
    """Return the degree of a product."""
    total = 0
    for degree in list(degrees):
        if degree is None:
            return None
        total += degree
    if total > 1:
        raise Conflict("is quadratic in the upstream gradient")
    return total


def dims_of(dims: Any, rank: int) -> list[int]:
    """Return the dimensions of a reduction as non-negative numbers. An empty list means all."""
    if dims is None or dims == []:
        return list(range(rank))
    dim_list = [dims] if isinstance(dims, int) else dims
    return [int(d) % rank for d in dim_list] if rank else []


def _all_but(rank: int, whole: Iterable[int] = ()) -> Labels:
    """Return a label for each dimension, except for dimensions that stay whole."""
    return [None if d in whole else d for d in range(rank)]


def _spread(node: fx.Node, out: Labels, sizes: list[Any]) -> Labels:
    """Return the labels of an argument that is broadcast to these sizes, aligned at the last."""
    own = shape(node)
    places = range(len(sizes) - len(own), len(sizes))
    return [out[i] if same(s, sizes[i]) else None for i, s in zip(places, own, strict=True)]


def _indexed(node: fx.Node) -> tuple[range, list[fx.Node], int]:
    """Return the adjacent indexed dimensions, the indices, and the number of their dimensions."""
    index_args: Any = node.args[1]
    dims = [d for d, index in enumerate(index_args) if index is not None]
    if not all(index_args[d].meta["val"].dtype.is_signed for d in dims):
        raise Conflict(
            "is indexed by a mask. Apply the mask to the hidden states: hidden[mask] @ weight"
        )
    if not dims or dims[-1] - dims[0] + 1 != len(dims):
        raise Conflict("indexes dimensions that are not adjacent")
    indices = [index_args[d] for d in dims]
    return range(dims[0], dims[-1] + 1), indices, max(len(shape(i)) for i in indices)


def aligned(node: fx.Node) -> Labelled:
    """Label an elementwise op, with broadcasting."""
    sizes = shape(node)
    out = _all_but(len(sizes))
    return Labelled(out, {a: [_spread(a, out, sizes)] for a in tensors(node)})


def _reduced(node: fx.Node) -> tuple[Any, list[int], Labels]:
    """Return the argument of a reduction, the reduced dimensions, and the labels of the result."""
    x: Any = node.args[0]
    dims = dims_of(argument(node, 1, "dim", None), len(shape(x)))
    out = _all_but(len(shape(x)), dims)
    keep = argument(node, 2, "keepdim", False)
    return x, dims, out if keep else [d for d in out if d is not None]


def summing(node: fx.Node) -> Labelled:
    """Label a sum over some dimensions. A mean is the sum over the count."""
    x, dims, out = _reduced(node)
    return Labelled(out, {x: [_all_but(len(shape(x)))]}, tuple(dims), "mean" in str(node.target))


def ranking(node: fx.Node) -> Labelled:
    """Label the k-th smallest element along one dimension, by default the last."""
    x: Any = node.args[0]
    (dim,) = dims_of(argument(node, 2, "dim", -1), len(shape(x)))
    row = _all_but(len(shape(x)), [dim])
    kept = argument(node, 3, "keepdim", False)
    return Labelled(row if kept else [d for d in row if d is not None], {x: [row]})


def reducing(node: fx.Node) -> Labelled:
    """Label another reduction. The reduced dimensions stay whole."""
    x, dims, out = _reduced(node)
    return Labelled(out, {x: [_all_but(len(shape(x)), dims)]})


def along(place: int, name: str = "dim", default: object = None) -> Callable[[fx.Node], Labelled]:
    """Label an op along one dimension, which stays whole.

    The op is elementwise along other dimensions.
    """

    def labels(node: fx.Node) -> Labelled:
        rank = len(shape(node))
        row = _all_but(rank, dims_of(argument(node, place, name, default), rank))
        return Labelled(row, {a: [row] for a in tensors(node)})

    return labels


def ranging(place: int) -> Callable[[fx.Node], Labelled]:
    """Label an op on a range of a dimension, which stays whole unless the range is all of it."""

    def labels(node: fx.Node) -> Labelled:
        x: Any = node.args[0]
        part: Any = node if place == 1 else node.args[1]
        rank = len(shape(x))
        dims = dims_of(argument(node, place, "dim", 0), rank)
        row = _all_but(rank, [d for d in dims if not same(shape(part)[d], shape(x)[d])])
        return Labelled(row, {a: [row] for a in tensors(node)})

    return labels


def padding(node: fx.Node) -> Labelled:
    """Label an op that pads some of the last dimensions, which stay whole."""
    x: Any = node.args[0]
    pads: Any = node.args[1]
    last = len(shape(x)) - 1
    row = _all_but(last + 1, [d for d in range(last + 1) if any(pads[2 * (last - d) :][:2])])
    return Labelled(row, {x: [row]})


def gathering(node: fx.Node) -> Labelled:
    """Label out[i][j] = x[i][index[i][j]] along dim. Other dimensions of equal size correspond."""
    operands: Any = node.args[:3]
    x, dim, index = operands
    sizes, index_sizes = shape(x), shape(index)
    dims = dims_of(dim, len(sizes))
    out = _all_but(len(index_sizes))
    row = [None if d in dims or not same(sizes[d], index_sizes[d]) else d for d in out]
    args: dict[fx.Node, list[Labels]] = {x: [row]}
    args.setdefault(index, []).append(out)
    return Labelled(out, args)


def scattered(node: fx.Node) -> Labelled:
    """Label out[i][index[i][j]] = src[i][j] along dim.

    Other dimensions of equal size correspond.
    """
    sizes = shape(node)
    out = _all_but(len(sizes), dims_of(node.args[1], len(sizes)))
    for a in tensors(node)[1:]:
        if shape(a):
            out = [d if d is not None and same(s, sizes[d]) else None
                   for d, s in zip(out, shape(a), strict=True)]  # fmt: skip
    return Labelled(out, {a: [out if shape(a) else []] for a in tensors(node)})


def permuting(node: fx.Node) -> Labelled:
    """Label a permutation: the result's dimension i is the argument's dimension dims[i]."""
    x: Any = node.args[0]
    order: Any = _all_but(len(shape(x)))
    if "transpose" in str(node.target):
        i, j = dims_of(node.args[1:3], len(order))
        order[i], order[j] = j, i
    elif str(node.target) == "aten.t.default":
        order.reverse()
    else:
        order = dims_of(node.args[1], len(order))
    return Labelled(order, {x: [_all_but(len(order))]})


def repeating(node: fx.Node) -> Labelled:
    """Label copies next to each other along some dimensions, which stay whole."""
    x: Any = node.args[0]
    sizes = shape(node)
    row = _spread(x, _all_but(len(sizes)), sizes)
    return Labelled([None] * (len(sizes) - len(row)) + row, {x: [row]})


def indexed(node: fx.Node) -> Labelled:
    """Label indexing of adjacent dimensions, which stay whole. One index gives one part."""
    x: Any = node.args[0]
    dims, indices, num_dims = _indexed(node)
    row, places = _all_but(len(shape(x)), dims), [("index", i) for i in range(num_dims)]
    out = [*row[: dims.start], *places, *row[dims.stop :]]
    sizes = shape(node)[dims.start : dims.start + num_dims]
    args: dict[fx.Node, list[Labels]] = {x: [row]}
    for index in indices:
        args.setdefault(index, []).append(_spread(index, places, sizes))
    return Labelled(out, args)


def index_put(node: fx.Node) -> Labelled:
    """Label an op that writes or adds to indices of adjacent dimensions, which stay whole."""
    x, _, values = list[Any](node.args)[:3]
    dims, indices, num_dims = _indexed(node)
    sizes = shape(node)
    row = _all_but(len(sizes), dims)
    value_labels = [*row[: dims.start], *[None] * num_dims, *row[dims.stop :]]
    room = [*sizes[: dims.start], *[0] * num_dims, *sizes[dims.stop :]]
    args: dict[fx.Node, list[Labels]] = {x: [row]}
    for index, labels in [*((i, [None] * len(shape(i))) for i in indices),
                          (values, _spread(values, value_labels, room))]:  # fmt: skip
        args.setdefault(index, []).append(labels)
    return Labelled(row, args)


def selected(node: fx.Node) -> Labelled:
    """Label one index of a dimension, which the result does not have."""
    x: Any = node.args[0]
    row = _all_but(len(shape(x)), dims_of(node.args[1], len(shape(x))))
    return Labelled([d for d in row if d is not None], {x: [row]})


def select_scattered(node: fx.Node) -> Labelled:
    """Label an op that writes one index of a dimension."""
    args: Any = node.args[:3]
    x, source, dim = args
    row = _all_but(len(shape(x)), dims_of(dim, len(shape(x))))
    return Labelled(row, {x: [row], source: [[d for d in row if d is not None]]})


def product(node: fx.Node) -> Labelled:
    """Label matrix products: (n, k) x (k, m), with a batch dimension for bmm. They sum over k."""
    name = str(node.target)
    operands: Any = node.args[: 3 if "addmm" in name else 2]
    *bias, a, b = operands
    batch: Labels = ["b"] if "bmm" in name else []
    out: Labels = [*batch, "n", "m"]
    args: dict[Any, list[Labels]] = {a: [[*batch, "n", "k"]]}
    args.setdefault(b, []).append([*batch, "k", "m"])
    for t in bias:
        args.setdefault(t, []).append(_spread(t, out, shape(node)))
    return Labelled(out, args, () if bias else ("k",))  # every chunk would add the bias


def created(node: fx.Node) -> Labelled:
    """Label a tensor of equal numbers."""
    return Labelled(_all_but(len(shape(node))), {})


def item_of(node: fx.Node) -> Labelled:
    """Label one of several results, which have the same dimensions."""
    row = _all_but(len(shape(node)))
    return Labelled(row, {node.args[0]: [row]})  # type: ignore[dict-item]


def _table() -> dict[str, Rule]:
    table: dict[str, Rule] = {}

    def add(
        kind: str,
        names: str,
        labels: Callable[[fx.Node], Labelled] | None,
        law: Law,
        sizes: int | None = None,
    ) -> None:
        for name in names.split():
            table[name] = Rule(kind, labels, law, sizes)

    add("elementwise", """
        aten.neg.default aten.alias.default aten.detach.default aten.clone.default
        prims.convert_element_type.default aten._to_copy.default aten.positive.default
        aten.mul.Scalar aten.div.Scalar aten.lift_fresh_copy.default
        """, aligned, LINEAR)  # fmt: skip
    add("elementwise", "aten.add.Tensor aten.sub.Tensor aten.rsub.Scalar", aligned, ADDITIVE)
    add("elementwise", "aten.mul.Tensor", aligned, BILINEAR)
    add("elementwise", "aten.div.Tensor", aligned, FIRST)
    add("elementwise", "prims.fma.default", aligned, ((0, 1), (2,)))
    add("elementwise", "aten.where.self", aligned, ((1,), (2,)))
    add("elementwise", "aten.masked_fill.Scalar aten.masked_fill.Tensor", aligned, ((0,), (2,)))
    add("elementwise", """
        aten.tanh_backward.default aten.sigmoid_backward.default aten.threshold_backward.default
        aten.gelu_backward.default aten.silu_backward.default
        """, aligned, FIRST)  # fmt: skip
    add("elementwise", """
        aten.exp.default aten.exp2.default aten.expm1.default aten.log.default aten.log1p.default
        aten.log2.default aten.log10.default aten.tanh.default aten.sigmoid.default
        aten.relu.default aten.gelu.default aten.silu.default aten.softplus.default
        aten.erf.default aten.abs.default aten.sign.default aten.sqrt.default aten.rsqrt.default
        aten.reciprocal.default aten.square.default aten.sin.default aten.cos.default
        aten.floor.default aten.ceil.default aten.round.default aten.trunc.default
        aten.isnan.default aten.isinf.default aten.logical_not.default aten.signbit.default
        aten.tan.default aten.asin.default aten.acos.default aten.atan.default aten.sinh.default
        aten.cosh.default aten.asinh.default aten.acosh.default aten.atanh.default aten.sgn.default
        aten.erfc.default aten.erfinv.default aten.lgamma.default aten.digamma.default
        aten.atan2.default aten.hypot.default aten.copysign.Tensor aten.addcmul.default
        aten.addcdiv.default aten.elu.default aten.leaky_relu.default aten.fmod.Tensor
        aten.remainder.Tensor
        aten.bitwise_not.default aten.clamp.default aten.clamp_min.default aten.clamp_max.default
        aten.pow.Tensor_Scalar aten.pow.Scalar aten.pow.Tensor_Tensor
        aten.add.Scalar aten.sub.Scalar aten.eq.Scalar aten.ne.Scalar aten.lt.Scalar
        aten.le.Scalar aten.gt.Scalar aten.ge.Scalar aten.eq.Tensor aten.ne.Tensor
        aten.lt.Tensor aten.le.Tensor aten.gt.Tensor aten.ge.Tensor
        aten.maximum.default aten.minimum.default aten.logical_and.default
        aten.logical_or.default aten.logical_xor.default aten.bitwise_and.Tensor
        aten.bitwise_or.Tensor aten.bitwise_xor.Tensor aten.logaddexp.default
        aten.xlogy.Tensor aten.fmod.Scalar aten.remainder.Scalar
        aten.zeros_like.default aten.ones_like.default aten.full_like.default
        """, aligned, NONLINEAR)  # fmt: skip
    add("expand", "aten.expand.default", aligned, LINEAR, sizes=1)
    add("view", """
        aten.view.default aten.reshape.default aten._unsafe_view.default aten.unsqueeze.default
        aten.squeeze.dim aten.squeeze.dims aten.squeeze.default
        """, None, LINEAR)  # fmt: skip
    add("permute", "aten.permute.default aten.t.default aten.transpose.int", permuting, LINEAR)
    add("sum", "aten.sum.default aten.sum.dim_IntList aten.mean.default aten.mean.dim",
        summing, LINEAR)  # fmt: skip
    add("reduce", "aten.amax.default aten.amin.default aten.logsumexp.default aten.any.dim",
        reducing, NONLINEAR)  # fmt: skip
    add("reduce", """
        aten.argmax.default aten.argmin.default aten.max.dim aten.min.dim aten.median.dim
        aten.nanmedian.dim
        aten.var.correction aten.var_mean.correction aten.prod.dim_int aten.all.dim
        """, reducing, NONLINEAR)  # fmt: skip
    add("reduce", "aten.kthvalue.default", ranking, NONLINEAR)
    add("softmax", "aten._softmax.default aten._log_softmax.default", along(1), NONLINEAR)
    add("softmax", "aten._softmax_backward_data.default aten._log_softmax_backward_data.default",
        along(2), FIRST)  # fmt: skip
    add("along", "aten.cumsum.default aten.flip.default prims.rev.default", along(1), LINEAR)
    add("along", """
        aten.cumprod.default aten.cummax.default aten.cummin.default aten.logcumsumexp.default
        """, along(1), NONLINEAR)  # fmt: skip
    add("along", "aten.split.Tensor aten.split_with_sizes.default", along(2, default=0), LINEAR)
    add("repeat", "aten.repeat.default", repeating, LINEAR)
    add("index", "aten.index.Tensor aten._unsafe_index.Tensor", indexed, FIRST)
    add("index", "aten.index_put.default aten._unsafe_index_put.default", index_put, ((0,), (2,)))
    add("along", "aten.slice.Tensor", ranging(1), LINEAR)
    add("along", "aten.cat.default", along(1, default=0), LINEAR)
    add("pad", "aten.constant_pad_nd.default", padding, ((0,), (2,)))
    add("along", "aten.slice_scatter.default", ranging(2), ADDITIVE)
    add("along", "aten.sort.default", along(1, default=-1), NONLINEAR)
    add("along", "aten.topk.default", along(2, default=-1), NONLINEAR)
    add("select", "aten.select.int", selected, LINEAR)
    add("select", "aten.select_scatter.default", select_scattered, ADDITIVE)
    add("gather", "aten.gather.default", gathering, FIRST)
    add("scatter", "aten.scatter.value aten.scatter.src aten.scatter_add.default",
        scattered, ((0,), (3,)))  # fmt: skip
    add("product", "aten.mm.default aten.bmm.default", product, BILINEAR)
    add("product", "aten.addmm.default", product, ((0,), (1, 2)))
    add("create", "aten.full.default aten.zeros.default aten.ones.default", created, NONLINEAR,
        sizes=0)  # fmt: skip
    add("create", "aten.scalar_tensor.default", created, NONLINEAR)
    add("getitem", "getitem", item_of, LINEAR)
    return table


RULES = _table()
PRODUCTS = frozenset(name for name, rule in RULES.items() if rule.kind == "product")


def rule_of(node: fx.Node) -> Rule:
    """Return the rule of a node. A Conflict names an op without a rule."""
    rule = RULES.get(name_of(node)) if node.op == "call_function" else None
    if rule is None:
        raise Conflict(f"no rule for {name_of(node)}", node)
    if any(is_tensor(a) for a in node.kwargs.values()):
        raise Conflict(f"no rule for {name_of(node)} with a tensor as keyword", node)
    return rule


def is_transposition(node: object) -> bool:
    """Return True if a node is a matrix with its dimensions exchanged."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or len(shape(node)) != 2:
        return False
    rule = RULES.get(name_of(node))
    if rule is None or rule.kind != "permute" or rule.labels is None:
        return False
    return rule.labels(node).out == [1, 0]
