"""Test each rule of the table by itself, with slices, sums and factors of its arguments."""

import itertools
import operator

import pytest
import torch
import torch._inductor.inductor_prims  # defines some prims
from torch import fx

from storage_ops.autochunk.analysis.layouts import Rows, reshape
from storage_ops.autochunk.analysis.rules import RULES, rule_of
from storage_ops.autochunk.reasons import Conflict

ROWS, COLUMNS, OTHER = 4, 6, 5
SIZES = {"aten.full.default": 0, "aten.zeros.default": 0, "aten.ones.default": 0}


def positive(*sizes):
    return torch.rand(*sizes) + 0.2


def index():
    return torch.randint(COLUMNS, (ROWS, 3))


def places():
    """Return indices for two dimensions that broadcast to 3 x 2."""
    return torch.tensor([[3], [0], [1]]), torch.tensor([2, 2])


# Arguments that the schema does not determine. All other ops get 0.5 for every number and a (4, 6)
# tensor for every tensor argument, which is broadcast every other time.
SAMPLES = {
    "prims.convert_element_type.default": lambda: (positive(ROWS, COLUMNS), torch.float64),
    "aten.where.self": lambda: (positive(ROWS, 1) > 0.7, *positive(2, ROWS, COLUMNS)),
    "aten.masked_fill.Scalar": lambda: (positive(ROWS, COLUMNS), positive(ROWS, 1) > 0.7, 0.0),
    "aten.masked_fill.Tensor": lambda: (
        positive(ROWS, COLUMNS), positive(ROWS, 1) > 0.7, torch.tensor(0.0)),
    "aten.bitwise_not.default": lambda: (positive(ROWS, COLUMNS) > 0.7,),
    **{f"aten.bitwise_{name}.Tensor": lambda: (
        positive(ROWS, COLUMNS) > 0.7, positive(COLUMNS) > 0.7) for name in ("and", "or", "xor")},
    "aten.expand.default": lambda: (positive(ROWS, 1), [ROWS, COLUMNS]),
    "aten.permute.default": lambda: (positive(ROWS, COLUMNS, OTHER), [2, 0, 1]),
    "aten.transpose.int": lambda: (positive(ROWS, COLUMNS, OTHER), 0, 2),
    "aten.sum.dim_IntList": lambda: (positive(ROWS, COLUMNS, OTHER), [0, -1], True),
    "aten.mean.dim": lambda: (positive(ROWS, COLUMNS, OTHER), [1]),
    **{f"aten.{name}.default": lambda: (positive(ROWS, COLUMNS), [1], True)
       for name in ("amax", "amin", "logsumexp")},
    **{f"aten.{name}": lambda: (positive(ROWS, COLUMNS), 1)
       for name in ("any.dim", "max.dim", "min.dim", "argmax.default", "argmin.default")},
    "aten._softmax.default": lambda: (positive(ROWS, COLUMNS), 1, False),
    "aten._log_softmax.default": lambda: (positive(ROWS, COLUMNS), 1, False),
    **{f"aten._{name}_backward_data.default": lambda: (
        *positive(2, ROWS, COLUMNS), 1, torch.float32) for name in ("softmax", "log_softmax")},
    "aten.gelu_backward.default": lambda: tuple(positive(2, ROWS, COLUMNS)),
    "prims.fma.default": lambda: tuple(positive(3, ROWS, COLUMNS)),
    "aten.cumsum.default": lambda: (positive(ROWS, COLUMNS), 1),
    "aten.flip.default": lambda: (positive(ROWS, COLUMNS), [1]),
    "aten.slice.Tensor": lambda: (positive(ROWS, COLUMNS), 1, 1, 4),
    "aten.slice_scatter.default": lambda: (
        positive(ROWS, COLUMNS), positive(ROWS, 3), 1, 1, 4),
    "aten.select_scatter.default": lambda: (positive(ROWS, COLUMNS), positive(ROWS), 1, 2),
    "aten.cat.default": lambda: ([positive(ROWS, COLUMNS), positive(ROWS, OTHER)], 1),
    "aten.constant_pad_nd.default": lambda: (positive(ROWS, COLUMNS), [1, 2, 0, 0]),
    "prims.rev.default": lambda: (positive(ROWS, COLUMNS), [1]),
    **{f"aten.{name}.default": lambda: (positive(ROWS, COLUMNS), 1)
       for name in ("cumprod", "cummax", "cummin", "logcumsumexp")},
    "aten.median.dim": lambda: (positive(ROWS, COLUMNS), 1),
    "aten.nanmedian.dim": lambda: (positive(ROWS, COLUMNS), 1),
    "aten.kthvalue.default": lambda: (positive(ROWS, COLUMNS), 2, 1),
    "aten.prod.dim_int": lambda: (positive(ROWS, COLUMNS), 1),
    "aten.all.dim": lambda: (positive(ROWS, COLUMNS) > 0.5, 1),
    "aten.var.correction": lambda: (positive(ROWS, COLUMNS), [1]),
    "aten.var_mean.correction": lambda: (positive(ROWS, COLUMNS), [1]),
    "aten.split.Tensor": lambda: (positive(ROWS, COLUMNS), 3, 1),
    "aten.split_with_sizes.default": lambda: (positive(ROWS, COLUMNS), [2, 4], 1),
    "aten.repeat.default": lambda: (positive(ROWS, COLUMNS), [2, 1, 3]),
    "aten.index.Tensor": lambda: (
        positive(ROWS, COLUMNS, OTHER), [None, torch.tensor([3, 0, 1])]),
    "aten._unsafe_index.Tensor": lambda: (positive(ROWS, COLUMNS, OTHER), [None, *places()]),
    **{f"aten.{name}.default": lambda: (
        positive(ROWS, COLUMNS, OTHER), [None, *places()], positive(ROWS, 3, 2), True)
       for name in ("index_put", "_unsafe_index_put")},
    "aten.sort.default": lambda: (positive(ROWS, COLUMNS), 1),
    "aten.topk.default": lambda: (positive(ROWS, COLUMNS), 3),
    "aten.select.int": lambda: (positive(ROWS, COLUMNS, OTHER), 1, 2),
    "aten.gather.default": lambda: (positive(ROWS, COLUMNS), 1, index()),
    "aten.scatter.value": lambda: (positive(ROWS, COLUMNS), 1, index(), 0.0),
    "aten.scatter.src": lambda: (
        positive(ROWS, COLUMNS), 1, index().sort(1)[0], positive(ROWS, 1).expand(ROWS, 3)),
    "aten.scatter_add.default": lambda: (
        positive(ROWS, COLUMNS), 1, index(), positive(ROWS, 3)),
    "aten.mm.default": lambda: (positive(ROWS, COLUMNS), positive(COLUMNS, OTHER)),
    "aten.addmm.default": lambda: (
        positive(OTHER), positive(ROWS, COLUMNS), positive(COLUMNS, OTHER)),
    "aten.bmm.default": lambda: (positive(2, ROWS, COLUMNS), positive(2, COLUMNS, OTHER)),
    "aten.full.default": lambda: ([ROWS, COLUMNS], 0.5),
    "aten.zeros.default": lambda: ([ROWS, COLUMNS],),
    "aten.ones.default": lambda: ([ROWS, COLUMNS],),
    "aten.scalar_tensor.default": lambda: (0.5,),
    "getitem": lambda: (torch.max(positive(ROWS, COLUMNS), 1), 0),
}  # fmt: skip


def exists(name):
    """Return True if this torch has the op."""
    return name == "getitem" or hasattr(getattr(torch.ops, name.split(".")[0]), name.split(".")[1])


LABELLED = sorted(n for n, rule in RULES.items() if rule.labels is not None and exists(n))


def op_of(name):
    if name == "getitem":
        return operator.getitem
    namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


def sample(name):
    if name in SAMPLES:
        return list(SAMPLES[name]())
    args, shapes = [], [(ROWS, COLUMNS), (COLUMNS,), (ROWS, 1)]
    for argument in op_of(name)._schema.arguments:
        if str(argument.type) == "Tensor":
            args.append(positive(*shapes[sum(isinstance(a, torch.Tensor) for a in args)]))
        elif str(argument.type) in ("number", "Optional[number]") and not argument.kwarg_only:
            args.append(0.5)
        elif not argument.kwarg_only and not argument.has_default_value():
            raise AssertionError(f"{name} needs a sample: {argument}")
    return args


def node_of(name, args):
    """Return a call as a node, and its argument nodes with their values."""
    graph = fx.Graph()
    places = {}

    def place(value):
        node = graph.placeholder(f"x{len(places)}")
        node.meta["val"] = value
        places[node] = value
        return node

    def wrap(item):
        if isinstance(item, torch.Tensor):
            return place(item)
        if isinstance(item, list):
            return [wrap(inner) for inner in item]
        return place(item) if isinstance(item, tuple) else item

    node = graph.call_function(op_of(name), tuple(wrap(a) for a in args))
    node.meta["val"] = op_of(name)(*args)
    return node, places


def evaluate(node, values, out_sizes=None):
    args = fx.map_arg(node.args, values.__getitem__)
    rule = rule_of(node)
    if rule.sizes is not None and out_sizes is not None:
        args = list(args)
        args[rule.sizes] = out_sizes
    result = node.target(*args)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def cut(value, labels, label, begin, end):
    if isinstance(value, tuple):
        return tuple(cut(v, labels, label, begin, end) for v in value)
    return value.narrow(labels.index(label), begin, end - begin) if label in labels else value


def length(places, labelled, node, label):
    if label in labelled.out:
        return node_shape(node)[labelled.out.index(label)]
    return next(v.shape[labels.index(label)] for a, v in places.items()
                for labels in labelled.args[a] if label in labels)  # fmt: skip


def node_shape(node):
    value = node.meta["val"]
    return (value[0] if isinstance(value, (tuple, list)) else value).shape


@pytest.mark.parametrize("name", LABELLED)
def test_slices(name):
    node, places = node_of(name, sample(name))
    labelled = rule_of(node).labels(node)
    whole = evaluate(node, places)
    labels = {x for x in labelled.out if x is not None} | set(labelled.sums)
    for label in labels:
        size = length(places, labelled, node, label)
        ends = [0, 1, size // 2 + 1, size]
        parts = []
        for begin, end in itertools.pairwise(ends):
            values = {a: cut(v, labelled.args[a][0], label, begin, end) for a, v in places.items()}
            sizes = [end - begin if x == label else s
                     for x, s in zip(labelled.out, node_shape(node), strict=True)]  # fmt: skip
            parts.append((end - begin, evaluate(node, values, sizes)))
        for i, want in enumerate(whole):
            if label in labelled.out:
                got = torch.cat([p[i] for _, p in parts], labelled.out.index(label))
            elif labelled.mean:
                got = sum(p[i] * n for n, p in parts) / size
            else:
                got = sum(p[i] for _, p in parts)
            torch.testing.assert_close(got, want, equal_nan=True, msg=f"{name} along {label}")
    assert labels or not any(v.dim() for v in places.values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("name", LABELLED)
def test_degrees(name):
    node, places = node_of(name, sample(name))
    floats = [a for a, v in places.items()
              if isinstance(v, tuple) or v.is_floating_point()]  # fmt: skip
    whole = evaluate(node, places)
    for scaled in [*([a] for a in floats), floats]:
        try:
            degree = RULES[name].degree(node, lambda item, s=scaled: int(item in s))
        except Conflict:
            continue
        if degree is None:
            continue
        values = {a: times(v, 2.0) if a in scaled else v for a, v in places.items()}
        for got, want in zip(evaluate(node, values), whole, strict=True):
            want = want * 2**degree if degree else want
            torch.testing.assert_close(got, want, equal_nan=True)


def times(value, factor):
    if isinstance(value, tuple):
        return tuple(v * factor if v.is_floating_point() else v for v in value)
    return value * factor


def test_views():
    x = torch.arange(4 * 6 * 5)
    for old, rows, new in [
        ((4, 6, 5), Rows(0, 1, 1), (24, 5)),
        ((24, 5), Rows(0, 1, 1), (4, 6, 5)),
        ((24, 5), Rows(0, 1, 6), (4, 6, 5)),
        ((4, 6, 5), Rows(1, 2, 1), (4, 6, 5, 1)),
        ((4, 6, 5), Rows(0, 2, 1), (1, 24, 5)),
        ((4, 1, 6, 5), Rows(0, 1, 1), (4, 30)),
    ]:
        reshaped = reshape(rows, old, new)
        left = x.view(old).flatten(rows.lo, rows.hi - 1)
        right = x.view(new).flatten(reshaped.lo, reshaped.hi - 1)
        groups = left.shape[rows.lo] // rows.per
        assert groups == right.shape[reshaped.lo] // reshaped.per
        for g in range(groups):
            a = left.narrow(rows.lo, g * rows.per, rows.per)
            b = right.narrow(reshaped.lo, g * reshaped.per, reshaped.per)
            assert torch.equal(a.flatten(), b.flatten())


def test_a_view_with_the_tokens_several_times():
    assert reshape(Rows(1, 2), (4, 6), (24,)) == Rows(0, 1, outer=4)
