"""Recognises a forward that is linear cross-entropy, which has an op of its own.

A loss falls into the part from the hidden states to a few numbers per token, its *rows*, and the
*tail* that makes one number of the rows, with masks, weights and counts.

The part before is evaluated in float64 on a few random tokens: every row has to be a sum of the
terms that the loss has, each times a number. The tail has to be linear in the rows, but for the
square of lse. Then its gradient with respect to the rows, which is traced, is the weight of each
token, whatever masks and means it comes from, and the loss is that of the op with these weights,
plus what the tail makes of zeros.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from storage_ops.autochunk import op_plan
from storage_ops.autochunk.forward import Forward, Splice, decompositions
from storage_ops.autochunk.log import log
from storage_ops.autochunk.nodes import leading_to, name_of, shape
from storage_ops.autochunk.propagate import Span, is_product, numel, propagate, reached
from storage_ops.autochunk.rewrite import Body, Builder
from storage_ops.autochunk.rules import is_transposition
from storage_ops.autochunk.state import Conflict, Layout, Rows, Whole, same
from storage_ops.loss.call import Call

_ATEN = torch.ops.aten
_TOKENS, _HIDDEN = 24, 2  # of the comparison
TERMS = ("target", "spread", "lse")  # of rows: C_t (lse - z_t), sum_j C_j (lse - z_j), lse
# What may happen to logits: analytic functions, which agree everywhere if they do on random tokens,
# and the largest logit of a row. Others, such as clamp, may differ where no random token is.
_ANALYTIC = {
    "_log_softmax", "_softmax", "_to_copy", "_unsafe_view", "add", "addcdiv", "addcmul", "addmm",
    "alias", "amax", "cat", "clone", "convert_element_type", "detach", "div", "exp", "exp2",
    "expand", "expm1", "gather", "getitem", "index", "log", "log1p", "log2", "logaddexp",
    "logsumexp", "mean", "mm", "mul", "neg", "permute", "pow", "reciprocal", "reshape", "rsqrt",
    "rsub", "select", "sigmoid", "slice", "split", "split_with_sizes", "sqrt", "square", "squeeze",
    "sub", "sum", "t", "tanh", "transpose", "unsqueeze", "view",
}  # fmt: skip
_VIEWS = ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "alias")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class Unlike(Exception):
    """The forward is no linear cross-entropy."""


@dataclass
class Head:
    """What a product and its rows are to the op.

    Attributes:
        input, weight, bias: of the product; weight is (D, V) if transposed, else (V, D).
        target: class indices of the tokens, or probabilities.
        classes: weights of the classes, or None.
        softcap (0: none), logit_scale: of the logits.
        rows: values per token; their `terms` are the numbers by which TERMS are multiplied.
    """

    input: fx.Node
    weight: fx.Node
    transposed: bool
    bias: fx.Node | None
    target: fx.Node | None = None
    classes: fx.Node | None = None
    softcap: float = 0.0
    logit_scale: float = 1.0
    rows: list[fx.Node] = field(default_factory=list)
    terms: list[dict[str, float]] = field(default_factory=list)

    @property
    def dense(self) -> bool:
        """Whether the targets are probabilities."""
        return bool(self.target is not None and self.target.meta["val"].is_floating_point())


@dataclass
class Tail:
    """What becomes of the rows.

    Attributes:
        graph: takes leaves and rows, and gives the tokens' weights, the loss, and the gradient of
            the loss with respect to every row.
        leaves: what it reads besides the rows.
        label_smoothing, z_loss: options of the loss.
    """

    graph: fx.Graph
    leaves: list[fx.Node]
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def recognise(forward: Forward, amplifier: fx.Node) -> tuple[Head, Tail]:
    """The cross-entropy that a forward computes.

    Raises:
        Unlike: it is something else, or that is not certain.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if forward.loss is None or not forward.learns(amplifier):
        raise Unlike("has no loss")
    dtype, vocabulary = amplifier.meta["val"].dtype, shape(amplifier)[-1]
    # In float16 the op forms the logits twice, for gradients without their factor might overflow.
    # The general rewrite picks a factor, and needs three products where the op needs four.
    if name_of(amplifier) == "aten.bmm.default" or dtype == torch.float16:
        raise Unlike("is a product of another kind")
    if not isinstance(vocabulary, int):
        raise Unlike("has classes without a number")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            span = propagate(forward.graph, amplifier, 1)
            head, body, roles = _head(forward, span, amplifier)
            tail = _tail(forward, head)
            with unset_fake_temporarily(), torch.no_grad():
                _fit_rows(head, body, roles, vocabulary)
            tail.graph = _pull(forward, head, tail.leaves)
            with unset_fake_temporarily(), torch.no_grad():
                _fit_tail(forward, head, tail, vocabulary)
        except (Conflict, RuntimeError, IndexError, TypeError, KeyError) as error:
            raise Unlike(str(error)) from error
    return head, tail


# The head: from the hidden states to the rows


def _head(forward: Forward, span: Span, amplifier: fx.Node) -> tuple[Head, Body, list[str]]:
    """The parts of the product, the body that gives the rows, and what each of its inputs is."""
    if len(span.amplifiers) != 1 or not same(span.step, 1):
        raise Unlike("mixes tokens")
    args: list[Any] = list(amplifier.args)
    *bias, left, right = args
    bias = bias or _added(amplifier)
    if bias and (len(shape(bias[0])) != 1 or bias[0].meta["val"].dtype != left.meta["val"].dtype):
        raise Unlike("a bias of another kind")
    weight, flipped = _untransposed(right)
    head = Head(left, weight, not flipped, bias[0] if bias else None)
    after = reached([amplifier])
    for node in span.layouts:
        if node in after and any(user not in span.layouts for user in node.users):
            if not isinstance(span.layouts[node], Rows) or numel(node) != numel(left) // _width(left):
                raise Unlike(f"{node} is no value per token")
            head.rows.append(node)
    body = Body(span, Builder(forward.graph, span), lambda node: node)
    body.run([n for n in forward.graph.nodes if n in span.layouts], head.rows)
    if body.ints:
        raise Unlike("has classes without a number")
    _check_analytic(body.graph)
    roles = [_role(forward, head, arg, layout, amplifier) for arg, layout, _ in body.inputs]
    if head.target is None:
        raise Unlike("has no target")
    head.softcap, head.logit_scale = _transform(amplifier, head.bias)
    return head, body, roles


def _width(node: fx.Node) -> int:
    return max(int(shape(node)[-1]), 1)


def _untransposed(node: Any) -> tuple[fx.Node, bool]:
    """A factor without its transpositions, and whether it is (V, D)."""
    flipped = False  # the product reads (D, V)
    while is_transposition(node):
        node, flipped = node.args[0], not flipped
    return node, flipped


def _bare(node: Any) -> fx.Node:
    """A node without views of it."""
    while _short(node) in _VIEWS:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _added(amplifier: fx.Node) -> list[Any]:
    """A vector over the classes that is added to the product."""
    stack = [amplifier]
    while stack:
        node = stack.pop()
        for user in node.users:
            if _short(user) in _VIEWS:
                stack.append(user)
            elif name_of(user) == "aten.add.Tensor":
                other = user.args[0 if user.args[1] is node else 1]
                if isinstance(other, fx.Node) and len(shape(other)) == 1:
                    return [other]
    return []


def _role(
    forward: Forward, head: Head, arg: fx.Node, layout: Layout, amplifier: fx.Node
) -> str:
    """What an input of the body is."""
    if arg is head.input:
        return "input"
    if arg is head.bias:
        return "bias"
    base, flipped = _untransposed(arg)
    if base is head.weight:
        return "weight" if flipped == head.transposed else "weight.t"
    sizes, value = shape(arg), arg.meta["val"]
    wide = bool(sizes) and same(sizes[-1], shape(amplifier)[-1])
    rows = isinstance(layout, Rows) and same(layout.per, 1)
    if forward.learns(arg) or value.dtype == torch.bool:
        raise Unlike(f"{arg} has a gradient, or is a mask")
    if rows and not value.is_floating_point() and head.target in (None, arg):
        head.target = arg
        return "target"
    if rows and wide and len(sizes) == 2 and value.is_floating_point() and head.target is None:
        head.target = arg
        return "probabilities"
    vector = wide and isinstance(layout, Whole) and all(same(s, 1) for s in sizes[:-1])
    if vector and value.is_floating_point() and head.classes in (None, _bare(arg)):
        head.classes = _bare(arg)
        return "classes"
    raise Unlike(f"{arg} is none of its inputs")


def _short(node: Any) -> str:
    """The name of an op without library and overload."""
    parts = name_of(node).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _check_analytic(body: fx.Graph) -> None:
    """Raise Unlike if logits go through what random tokens do not tell from another function."""
    found: set[fx.Node] = set()
    for node in body.nodes:
        name = _short(node)
        read = found.intersection(node.all_input_nodes)
        if not read and name not in ("mm", "addmm"):
            continue
        found.add(node)
        infinite = _is_infinite(node) or (name == "abs" and all(map(_is_infinite, node.users)))
        chosen = name == "where" and _is_infinite(node.args[0])
        if node.op == "call_function" and not (name in _ANALYTIC or chosen or infinite):
            raise Unlike(f"{name} of logits")


def _is_infinite(node: Any) -> bool:
    """Whether a node is |m| == inf, by which logsumexp finds rows without a finite logit."""
    if _short(node) != "eq" or node.args[1] != math.inf:
        return False
    return _short(node.args[0]) == "abs"


def _transform(amplifier: fx.Node, bias: fx.Node | None) -> tuple[float, float]:
    """Soft-cap (0: none) and scale of the logits, as far as the chain after the product tells."""
    node, scale, cap = amplifier, 1.0, 0.0
    while True:
        links = [u for u in node.users if _link(u, node, bias) is not None]
        if not links:
            return cap, scale
        after, number = links[0], _link(links[0], node, bias)
        assert number is not None
        if _short(after) == "tanh":
            if cap:
                return cap, scale
            cap = 1.0
        elif cap:
            return number, scale * number
        else:
            scale *= number
        node = after


def _link(user: fx.Node, node: fx.Node, bias: fx.Node | None) -> float | None:
    """What a link of the chain multiplies by; None if it is no link."""
    name = _short(user)
    if name in (*_VIEWS, "_to_copy", "clone", "tanh"):
        return 1.0
    if name == "add" and bias in user.args:
        return 1.0
    if name in ("mul", "div") and user.args[0] is node:
        other = user.args[1]
        if isinstance(other, (int, float)) and other:
            return float(other) if name == "mul" else 1.0 / other
    return None


class _Tokens:
    """Random tokens, and what the terms are for them."""

    def __init__(self, head: Head, vocabulary: int):
        double: Any = {"dtype": torch.float64}
        x, w = (torch.randn(n, _HIDDEN, **double) for n in (_TOKENS, vocabulary))
        b, t = torch.randn(vocabulary, **double), torch.randint(vocabulary, (_TOKENS,))
        c = torch.ones(vocabulary, **double)
        if head.classes is not None:
            c = torch.rand(vocabulary, **double) + 0.5
        q = torch.softmax(torch.randn(vocabulary, _TOKENS, **double), 0).t()
        z = F.linear(x, w, None if head.bias is None else b) * head.logit_scale
        z = torch.tanh(z / head.softcap) * head.softcap if head.softcap else z
        lse = torch.logsumexp(z, 1)
        below = (lse[:, None] - z) * c
        nll = (below * q).sum(1) if head.dense else below.gather(1, t[:, None])[:, 0]
        self.terms = (nll, below.sum(1), lse)
        self.given = {
            "input": x, "weight": w, "weight.t": w.t(), "bias": b, "target": t, "classes": c,
            "probabilities": q,
        }  # fmt: skip


def _fit_rows(head: Head, body: Body, roles: list[str], vocabulary: int) -> None:
    """Find the numbers by which the terms are multiplied in each row."""
    tokens, tensors = _Tokens(head, vocabulary), []
    for (arg, layout, _), role in zip(body.inputs, roles, strict=True):
        value, rank = tokens.given[role], len(shape(arg))
        if role == "target":
            assert isinstance(layout, Rows)
            value = value.reshape([_TOKENS if d == layout.hi - 1 else 1 for d in range(rank)])
        elif role in ("classes", "bias"):
            value = value.reshape([1] * (rank - 1) + [-1])
        tensors.append(value)
    values = fx.Interpreter(in_double(body.graph)).run(*tensors)
    for row in head.rows:
        got = values[body.values.index(row)].flatten()
        head.terms.append(dict(zip(TERMS, fit(got, tokens.terms), strict=True)))


def fit(got: Tensor, terms: Sequence[Tensor]) -> list[float]:
    """The numbers c with got = sum_i c_i terms_i; raises Unlike if there are none."""
    basis = torch.stack(list(terms), 1)
    size = basis.norm(dim=0).clamp(min=1e-300)
    found = torch.linalg.lstsq(basis / size, got[:, None]).solution[:, 0] / size
    error = (basis @ found - got).norm()
    if not error <= 1e-9 * (got.norm() + 1e-30):
        raise Unlike("has other values")
    return [float(c) if abs(c) > 1e-9 else 0.0 for c in found]


def in_double(graph: fx.Graph) -> fx.GraphModule:
    """A graph with all its floating-point numbers in float64, on the CPU."""
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = env[node] = copy.node_copy(node, env.__getitem__)
        new.args = tuple(torch.float64 if a in narrow else a for a in new.args) if any(
            isinstance(a, torch.dtype) for a in new.args
        ) else new.args  # fmt: skip
        if new.kwargs.get("dtype") in narrow:
            new.kwargs = {**new.kwargs, "dtype": torch.float64}
        if "device" in new.kwargs:
            new.kwargs = {**new.kwargs, "device": torch.device("cpu")}
    return fx.GraphModule(torch.nn.Module(), copy)


# The tail: from the rows to the loss


def _needed(forward: Forward, head: Head) -> list[fx.Node]:
    """Nodes of the tail and what else they read, in their order."""
    found: set[fx.Node] = set()
    stack: list[fx.Node] = list(forward.output.all_input_nodes)
    while stack:
        node = stack.pop()
        if node not in found and node not in head.rows:
            found.add(node)
            stack += node.all_input_nodes
    return [n for n in forward.graph.nodes if n in found]


def _tail(forward: Forward, head: Head) -> Tail:
    nodes = _needed(forward, head)
    if any(is_product(n) for n in nodes):
        raise Unlike("reads another product")
    leaves = [n for n in nodes if n.op == "placeholder"]
    for leaf in leaves:
        if forward.learns(leaf):
            raise Unlike(f"{leaf} has a gradient")
    return Tail(fx.Graph(), leaves)


def _pull(forward: Forward, head: Head, leaves: list[fx.Node]) -> fx.Graph:
    """The gradient of the loss with respect to the rows, traced."""
    from torch.fx.experimental.proxy_tensor import make_fx

    nodes = [n for n in _needed(forward, head) if n.op == "call_function"]
    (loss,) = forward.output.args[0]  # type: ignore[misc]
    classes = shape(head.weight)[1 if head.transposed else 0]
    shares = [terms["target"] + classes * terms["spread"] for terms in head.terms]

    def run(*given: Any) -> list[Tensor]:
        env: dict[fx.Node, Any] = dict(zip([*leaves, *head.rows], given, strict=True))
        rows = [env[row].detach().requires_grad_() for row in head.rows]
        env.update(zip(head.rows, rows, strict=True))
        with torch.enable_grad():
            for node in nodes:
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            pulled = torch.autograd.grad(env[loss], rows)  # type: ignore[index]
        flat = [p.reshape(-1) for p in pulled]
        weight = sum(p * share for p, share in zip(flat, shares, strict=True) if share)
        return [weight, env[loss].detach(), *flat]  # type: ignore[list-item,index]

    wide = [n.meta["val"].to(_wide(n.meta["val"].dtype)) for n in head.rows]
    with head.input.meta["val"].fake_mode, torch.no_grad():
        values = [*(n.meta["val"] for n in leaves), *wide]
        graph = make_fx(run, decomposition_table=decompositions())(*values).graph
    end = next(n for n in graph.nodes if n.op == "output")
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    if leading_to([end.args[0][0]]) & set(inputs[len(leaves) :]):
        raise Unlike("is not linear in the rows")
    return graph


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _fit_tail(forward: Forward, head: Head, tail: Tail, vocabulary: int) -> None:
    """Find smoothing and z-loss, and check that nothing else is in the loss."""
    numbers = _literals([*tail.graph.nodes, *_needed(forward, head)])
    module, found = in_double(tail.graph), []
    terms = {name: [t[name] for t in head.terms] for name in TERMS}
    squared = [i for i, (t, s, lse) in enumerate(zip(*terms.values(), strict=True))
               if t == s == 0 and abs(lse - 1) < 1e-9]  # fmt: skip
    for _ in range(2):
        leaves = [_drawn(leaf, numbers) for leaf in tail.leaves]
        rows = [torch.rand(_sizes(row)).double() + 0.5 for row in head.rows]
        run = fx.Interpreter(module).run
        weight, loss, *pulled = run(*leaves, *rows)
        _, at_zero, *_ = run(*leaves, *(torch.zeros_like(row) for row in rows))
        spread = sum(p * c for p, c in zip(pulled, terms["spread"], strict=True)) * vocabulary
        lse = sum(p * c for p, c in zip(pulled, terms["lse"], strict=True))
        flat = [row.flatten() for row in rows]
        square = [2 * flat[i] * weight for i in squared]
        if lse.norm() > 1e-9 * weight.norm() and len(square) != 1:  # type: ignore[union-attr]
            raise Unlike("has an lse that is not squared")
        smoothing = fit(spread, [weight])[0]  # type: ignore[arg-type]
        z_loss = fit(lse, square)[0] if square else 0.0  # type: ignore[arg-type]
        for i in squared:
            pulled[i] = pulled[i] - z_loss * square[0]
        total = sum((p * r).sum() for p, r in zip(pulled, flat, strict=True))
        total += sum((weight * flat[i].square()).sum() for i in squared) * z_loss
        if not abs(loss - at_zero - total) <= 1e-6 * (abs(loss) + abs(total)):
            raise Unlike("shows another loss than the one whose gradient follows")
        if not weight.any() or not weight.isfinite().all():
            raise Unlike("has no weights")
        found.append((smoothing, z_loss))
    (smoothing, z_loss), other = found
    if any(abs(a - b) > 1e-6 * abs(a) for a, b in zip(found[0], other, strict=True)):
        raise Unlike("has options that are no numbers")
    if not 0 <= smoothing <= 1 or z_loss < 0:
        raise Unlike("is no loss")
    if (smoothing or z_loss) and _compares_floats(tail.graph):
        raise Unlike("chooses among its tokens")
    tail.label_smoothing, tail.z_loss = smoothing, z_loss


def _compares_floats(graph: fx.Graph) -> bool:
    """Whether a graph has comparisons that random numbers may never see come out both ways."""
    return any(
        _short(n) in _COMPARISONS and n.args[0].meta["val"].is_floating_point()
        for n in graph.nodes if n.op == "call_function"
    )  # fmt: skip


def _literals(nodes: Sequence[fx.Node]) -> list[int]:
    """Integers that something is compared with, and their neighbours."""
    found = {0, 1}
    for node in nodes:
        if node.op == "call_function" and _short(node) in _COMPARISONS:
            number = node.args[1]
            if isinstance(number, int):
                found |= {number} if "q" in _short(node) or _short(node) == "ne" else {number - 1, number, number + 1}
    return sorted(found)


def _sizes(node: fx.Node) -> list[int]:
    return [s if isinstance(s, int) else int(s.node.hint) for s in shape(node)]


def _drawn(node: fx.Node, numbers: list[int]) -> Any:
    """A random value for a leaf of the tail."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return value if isinstance(value, int) else int(value.node.hint)
    if numel(node) > 1 << 24:
        raise Unlike(f"{node} is too large")
    sizes = _sizes(node)
    if value.dtype.is_floating_point:
        return torch.rand(sizes).double() + 0.5
    if value.dtype == torch.bool:
        return torch.rand(sizes) < 0.5
    return torch.tensor(numbers)[torch.randint(len(numbers), sizes)].to(value.dtype)


# The op in the place of both


def _is_uniform(node: fx.Node) -> bool:
    """Whether a value is made of one number."""
    while numel(node) > 1 and node.op == "call_function":
        given = [a for a in node.all_input_nodes if numel(a) > 1]
        if len(given) > 1 or _short(node) not in (*_VIEWS, "expand", "full", "mul", "div", "neg"):
            return False
        if not given:
            return True
        node = given[0]
    return numel(node) == 1


def emit(
    forward: Forward, amplifier: fx.Node, head: Head, tail: Tail, num_chunks: int | None,
    memory_budget: int | None,
) -> tuple[fx.Node, int]:
    """Write the op and what the tail is at zero before the loss; the new loss and its tiles."""
    loss = forward.loss
    assert loss is not None and head.target is not None
    splice = Splice(forward, loss)
    call = splice.call
    given = [head.input, head.weight, head.target, head.bias, head.classes]
    done = splice.copy([n for n in given if n is not None])
    env = dict(zip([n for n in given if n is not None], done, strict=True))
    x, weight, target = env[head.input], env[head.weight], env[head.target]
    bias = None if head.bias is None else env[head.bias]
    classes = None if head.classes is None else call(_ATEN.reshape.default, env[head.classes], [-1])
    if head.transposed:
        weight = call(_ATEN.permute.default, weight, [1, 0])
    if not head.dense:
        target = call(_ATEN.reshape.default, target, [-1])
    # The weights of the tokens do not depend on the rows, of which only zeros are to be had here.
    inputs = [n for n in tail.graph.nodes if n.op == "placeholder"]
    leaves = splice.copy(tail.leaves) if tail.leaves else []
    zeros, builder = [], Builder(forward.graph, Span({amplifier: Rows(0, 1)}, 0, 1))
    for row in head.rows:
        value = row.meta["val"]
        sizes = [size if isinstance(size, int) else splice.copy([size])[0]
                 for size in map(builder.size, value.shape)]  # fmt: skip
        options = {"dtype": _wide(value.dtype), "device": value.device}
        zeros.append(call(_ATEN.full.default, sizes, 0.0, **options))
    splice.env.update(zip(inputs, [*leaves, *zeros], strict=True))
    end = next(n for n in tail.graph.nodes if n.op == "output")
    token_weight, at_zero = splice.copy(end.args[0][:2])
    factor = None
    if _is_uniform(end.args[0][0]):  # then the op need not look at tokens one by one
        factor, token_weight = call(_ATEN.select.int, token_weight, 0, 0), None
    learns = [n is not None and forward.learns(n) for n in (head.input, head.weight, head.bias)]
    arguments: list[Any] = [x, weight, target, bias, classes, token_weight]
    options: dict[str, Any] = {
        "reduction": "sum", "label_smoothing": tail.label_smoothing, "z_loss": tail.z_loss,
        "softcap": head.softcap, "logit_scale": head.logit_scale, "grad_mask": learns,
        "wants": [False] * 4,
    }  # fmt: skip
    values = [a if a is None else a.meta["example_value"] for a in arguments]
    budget, plan = op_plan.plan_of(Call(*values, **options), num_chunks, memory_budget)
    made = call(
        torch.ops.storage_ops.linear_cross_entropy.default,
        *Call(*arguments, **options, memory_budget=budget),
    )
    new = call(operator.getitem, made, 0)
    if factor is not None:
        new = call(_ATEN.mul.Tensor, new, factor)
    new = call(_ATEN.add.Tensor, new, at_zero)
    dtype = loss.meta["example_value"].dtype
    if new.meta["example_value"].dtype != dtype:
        new = call(_ATEN._to_copy.default, new, dtype=dtype)
    log.debug("it is linear cross-entropy: %s, %s", head, tail)
    return new, plan.num_chunks * plan.num_slices
