"""The part of a loss from the hidden states to a few numbers per token, its *rows*.

This part is evaluated in float64 on random tokens. Every row, and its gradient, must be a linear
combination of the terms of linear cross-entropy. A row without a gradient is allowed, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from storage_ops.autochunk.analysis.layouts import Layout, Rows, Whole, same
from storage_ops.autochunk.analysis.rules import is_transposition
from storage_ops.autochunk.analysis.spans import Span
from storage_ops.autochunk.cross_entropy.dynamo_slice import ForwardSlice
from storage_ops.autochunk.fx_graph.edit import Builder
from storage_ops.autochunk.fx_graph.nodes import (
    Size,
    hint,
    name_of,
    numel,
    reached,
    shape,
    short_name,
)
from storage_ops.autochunk.reasons import Conflict
from storage_ops.autochunk.rewrite.body import Body

_TOKENS, _HIDDEN = 16, 2  # tokens and hidden size for the comparison
_MOST = 4  # the most classes per token whose log-probabilities are read
# Functions that may be applied to logits. Analytic functions agree everywhere if they agree on
# random tokens. The largest logit of a row is also allowed. Others, such as clamp, may differ
# between tokens.
_ANALYTIC = {
    "_log_softmax", "_softmax", "_to_copy", "_unsafe_view", "add", "addcdiv", "addcmul", "addmm",
    "alias", "amax", "cat", "clone", "detach", "div", "exp", "exp2", "expand", "expm1", "gather",
    "getitem", "index", "log", "log1p", "log2", "logaddexp", "logsumexp", "mean", "mm", "mul",
    "neg", "permute", "pow", "reciprocal", "reshape", "rsqrt", "rsub", "select", "sigmoid", "slice",
    "split", "split_with_sizes", "sqrt", "square", "squeeze", "sub", "sum", "t", "tanh",
    "transpose", "unsqueeze", "view",
}  # fmt: skip
VIEWS = ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "alias")


@dataclass(frozen=True)
class Terms:
    """The coefficients of the terms of a row.

    row = sum_k nll_k C_t (lse - z_t) + spread sum_j C_j (lse - z_j) + lse lse + entropy entropy,
    with t the k-th target. `detached` means that the row has no gradient.
    """

    nll: list[float]
    spread: float
    lse: float
    entropy: float
    detached: bool

    @property
    def is_lse(self) -> bool:
        """Return True if the row is only lse."""
        return not any(self.nll) and not self.spread and abs(self.lse - 1) < 1e-9


class PerToken:
    """A product and its rows, with the arguments of the op that replaces them.

    Attributes:
        span: the span from the product to the rows.
        input, weight, bias: operands of the product; weight is (D, V) if transposed, else (V, D).
        targets: one or more tensors of class indices of the tokens, or one of probabilities.
        classes: weights of the classes, or None.
        softcap (0: none), logit_scale: soft-cap and scale of the logits.
        rows: values per token.
        terms: the terms of the rows.
    """

    def __init__(self, forward: ForwardSlice, span: Span):
        if len(span.amplifiers) != 1 or not same(span.step, 1):
            raise Conflict("mixes tokens")
        (amplifier,) = span.amplifiers
        self.forward, self.span, self.amplifier = forward, span, amplifier
        self.vocabulary = shape(amplifier)[-1]
        factors: list[Any] = list(amplifier.args)
        *bias, self.input, right = factors
        self.weight, self.transposed = _untransposed(right)
        self.bias: fx.Node | None = next(iter(bias or _added(amplifier, self.vocabulary)), None)
        self.targets: list[fx.Node] = []
        self.classes: fx.Node | None = None
        self.softcap, self.logit_scale = _transform(amplifier, self.bias)
        self.rows = self._rows()
        self.terms: list[Terms] = []
        self.body = Body(span, Builder(forward.graph, span.amplifiers, span.layouts))
        self.body.run([n for n in forward.graph.nodes if n in span.layouts], self.rows)
        if self.body.ints or not isinstance(self.vocabulary, int):
            raise Conflict("has a symbolic number of classes")
        _check_analytic(self.body.graph)
        self.roles = [self._role(arg, layout) for arg, layout, _ in self.body.inputs]

    @property
    def dense(self) -> bool:
        """Return True if the targets are probabilities."""
        return any(t.meta["val"].is_floating_point() for t in self.targets)

    @property
    def learns(self) -> list[bool]:
        """Return whether input, weight and bias each have gradients."""
        return [bool(n and self.forward.learns(n)) for n in (self.input, self.weight, self.bias)]

    def _rows(self) -> list[fx.Node]:
        layouts, after, rows = self.span.layouts, reached([self.amplifier]), []
        for node in layouts:
            if node in after and any(user not in layouts for user in node.users):
                per_token = numel(node) * hint(self.vocabulary) == numel(self.amplifier)
                if not isinstance(layouts[node], Rows) or not per_token:
                    raise Conflict(f"{node} does not have one value per token")
                rows.append(node)
        return rows

    def _role(self, arg: fx.Node, layout: Layout) -> str:
        """Return the role of an input of the body, such as "weight" or "target 0"."""
        value, sizes = arg.meta["val"], shape(arg)
        if arg is self.input:
            return "input"
        if arg is self.bias and len(sizes) == 1 and value.dtype == self.input.meta["val"].dtype:
            return "bias"
        base, transposed = _untransposed(arg)
        if base is self.weight:
            return "weight" if transposed != self.transposed else "weight.t"
        rows = isinstance(layout, Rows) and same(layout.per, 1)
        wide = bool(sizes) and same(sizes[-1], self.vocabulary) and value.is_floating_point()
        vector = isinstance(layout, Whole) and wide and all(same(s, 1) for s in sizes[:-1])
        if self.forward.learns(arg) or value.dtype == torch.bool:
            raise Conflict(f"{arg} needs a gradient, or is a mask")
        if rows and not value.is_floating_point() and not self.dense:
            known = [k for k, t in enumerate(self.targets) if _alike(bare(t), bare(arg))]
            if known or len(self.targets) < _MOST:
                self.targets += [] if known else [arg]
                return f"target {known[0] if known else len(self.targets) - 1}"
        if rows and wide and len(sizes) == 2 and not self.targets:
            # Chunks compute only their part of this argument, but the op needs all of it.
            if not self.forward.is_given(arg):
                raise Conflict(f"{arg} is computed by the function itself", arg)
            self.targets.append(arg)
            return "probabilities"
        if vector and self.classes in (None, bare(arg)):
            self.classes = bare(arg)
            return "classes"
        raise Conflict(f"{arg} is not an input that linear_cross_entropy has")

    def fit(self) -> None:
        """Find the terms of the rows. Raise Conflict if a row has others."""
        tokens, tensors = _Tokens(self), []
        for (arg, layout, _), role in zip(self.body.inputs, self.roles, strict=True):
            value, rank = tokens.values_of_role[role], len(shape(arg))
            if "target" in role:
                assert isinstance(layout, Rows)
                value = value.reshape([_TOKENS if d == layout.hi - 1 else 1 for d in range(rank)])
            elif role in ("classes", "bias"):
                value = value.reshape([1] * (rank - 1) + [-1])
            tensors.append(value)
        with torch.enable_grad():
            values = fx.Interpreter(in_double(self.body.graph)).run(*tensors)
        for row in self.rows:
            got = values[self.body.values.index(row)].flatten()
            numbers = fit(got.detach(), [term.detach() for term in tokens.terms])
            # Check gradients, too: a row may be detached, or its gradient may not match its value.
            residual = got - sum(c * term for c, term in zip(numbers, tokens.terms, strict=True))
            factors = torch.rand_like(got)
            slope, whole, size = (tokens.gradient((v * factors).sum())
                                  for v in (residual, got, tokens.terms[-2]))  # fmt: skip
            detached = not whole.any()
            if not detached and not slope.norm() <= 1e-9 * size.norm():
                raise Conflict("has another gradient")
            *nll, spread, lse, entropy = numbers
            # A sum of logits is inexact next to V * lse. With class weights the factor is not V.
            if lse and (spread or (any(nll) and (self.dense or self.classes is not None))):
                raise Conflict("is a sum of logits", row)
            self.terms.append(Terms(nll, spread, lse, entropy, detached))


class _Tokens:
    """Random tokens with the values of the terms."""

    def __init__(self, per_token: PerToken):
        double: Any = {"dtype": torch.float64}
        vocabulary = per_token.vocabulary
        x = torch.randn(_TOKENS, _HIDDEN, **double, requires_grad=True)
        w = torch.randn(vocabulary, _HIDDEN, **double, requires_grad=True)
        b, c = torch.randn(vocabulary, **double), torch.ones(vocabulary, **double)
        if per_token.classes is not None:
            c = torch.rand(vocabulary, **double) + 0.5
        q = torch.rand(vocabulary, _TOKENS, **double).t()  # need not add up to 1
        targets = [torch.randint(vocabulary, (_TOKENS,)) for _ in per_token.targets]
        with torch.enable_grad():
            z = F.linear(x, w, None if per_token.bias is None else b) * per_token.logit_scale
            z = torch.tanh(z / per_token.softcap) * per_token.softcap if per_token.softcap else z
            lse = torch.logsumexp(z, 1)
            below = (lse[:, None] - z) * c
            entropy = lse - (torch.softmax(z, 1) * z).sum(1)
            nll = [(below * q).sum(1) if per_token.dense else below.gather(1, t[:, None])[:, 0]
                   for t in targets]  # fmt: skip
            self.terms = (*nll, below.sum(1), lse, entropy)
        self.learning = x, w
        self.values_of_role = {
            "input": x, "weight": w, "weight.t": w.t(), "bias": b, "classes": c, "probabilities": q,
            **{f"target {k}": t for k, t in enumerate(targets)},
        }  # fmt: skip

    def gradient(self, value: Tensor) -> Tensor:
        """Return the gradient of a number with respect to input and weight, flattened."""
        if not value.requires_grad:
            return torch.zeros(1)
        gradients = torch.autograd.grad(value, self.learning, retain_graph=True, allow_unused=True)
        return torch.cat([g.flatten() for g in gradients if g is not None])


def _untransposed(node: Any) -> tuple[fx.Node, bool]:
    """Return a matrix below its transpositions, and whether it is (D, V) as products read it."""
    transposed = True
    while is_transposition(node):
        node, transposed = node.args[0], not transposed
    return node, transposed


def bare(node: Any) -> fx.Node:
    """Return the node below all its views."""
    while short_name(node) in VIEWS:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _alike(one: object, other: object) -> bool:
    """Return True if two nodes, or arguments, are the same ops on the same nodes."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_alike, one, other))
    if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)):
        return bool(type(one) is type(other) and one == other)
    if one is other or one.op != "call_function" or one.target is not other.target:
        return one is other
    named = (sorted(node.kwargs.items()) for node in (one, other))
    return _alike(one.args, other.args) and _alike(*named)


def _added(amplifier: fx.Node, vocabulary: Size) -> list[Any]:
    """Return the vector over the classes that is added to the product, in a list, or []."""
    stack = [amplifier]
    while stack:
        node = stack.pop()
        for user in node.users:
            if short_name(user) in VIEWS:
                stack.append(user)
            elif name_of(user) == "aten.add.Tensor":
                other = user.args[0 if user.args[1] is node else 1]
                sizes = shape(other) if isinstance(other, fx.Node) else []
                if len(sizes) == 1 and same(sizes[0], vocabulary):
                    return [other]
    return []


def _check_analytic(body: fx.Graph) -> None:
    """Raise Conflict if random tokens cannot distinguish the function of the logits from others."""
    after_product: set[fx.Node] = set()
    for node in body.nodes:
        name = short_name(node)
        if after_product.intersection(node.all_input_nodes) or name in ("mm", "addmm"):
            after_product.add(node)
            if node.op == "call_function" and name not in _ANALYTIC:
                raise Conflict(f"applies {name} to the logits")


def _transform(amplifier: fx.Node, bias: fx.Node | None) -> tuple[float, float]:
    """Return the soft-cap (0: none) and scale of the logits, from the ops after the product."""
    node, scale, cap = amplifier, 1.0, 0.0
    while True:
        links = [(u, number) for u in node.users if (number := _link(u, node, bias)) is not None]
        if not links:
            return cap, scale
        after, number = links[0]
        if short_name(after) == "tanh":
            if cap:
                return cap, scale
            cap = 1.0
        elif cap:
            return number, scale * number
        else:
            scale *= number
        node = after


def _link(user: fx.Node, node: fx.Node, bias: fx.Node | None) -> float | None:
    """Return the factor of an op in the chain after the product, or None at the chain's end."""
    name = short_name(user)
    if name in (*VIEWS, "_to_copy", "clone", "tanh") or (name == "add" and bias in user.args):
        return 1.0
    if name in ("mul", "div") and user.args[0] is node:
        other = user.args[1]
        if isinstance(other, (int, float)) and other:
            return float(other) if name == "mul" else 1.0 / other
    return None


def fit(got: Tensor, terms: Sequence[Tensor]) -> list[float]:
    """Return the numbers c with got = sum_i c_i terms_i. Raise Conflict if there are none."""
    basis = torch.stack(list(terms), 1)
    size = basis.norm(dim=0).clamp(min=1e-300)
    coefficients = torch.linalg.lstsq(basis / size, got[:, None]).solution[:, 0] / size
    error = (basis @ coefficients - got).norm()
    if not error <= 1e-9 * (got.norm() + 1e-30):
        raise Conflict("is not the gradient of any known function of the logits")
    return [float(c) if abs(c) > 1e-9 else 0.0 for c in coefficients]


def in_double(graph: fx.Graph) -> fx.GraphModule:
    """Return a graph with all its floating-point numbers in float64, on the CPU."""
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
