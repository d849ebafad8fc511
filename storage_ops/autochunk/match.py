"""Recognizes a span that is linear cross-entropy, which has an op of its own.

What the span reads is told by its structure. Whether it computes the loss is told by its values:
the body is evaluated in float64 on a few random tokens, an ignored one among them, and every result
has to be a sum of the terms that the loss has, each times a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from storage_ops.autochunk import program
from storage_ops.autochunk.nodes import name_of, shape
from storage_ops.autochunk.passes import Passes
from storage_ops.autochunk.propagate import Span, numel
from storage_ops.autochunk.roles import (
    Factor,
    Roles,
    Unlike,
    is_dropped,
    kind_of,
    roles_of,
    same_value,
)
from storage_ops.autochunk.state import Partial, Rows, same

_TOKENS, _HIDDEN = 8, 2  # of the comparison
# What may happen to logits: analytic functions, which agree everywhere if they do on random tokens,
# and the largest logit of a row. Others, such as clamp, may differ where no random token is.
_ANALYTIC = {
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "_to_copy",
    "_unsafe_view", "add", "addcdiv", "addcmul", "addmm", "alias", "amax", "bmm", "cat", "clone",
    "convert_element_type", "detach", "div", "exp", "exp2", "expand", "expm1", "gather", "getitem",
    "index", "log", "log1p", "log2", "logaddexp", "logsumexp", "mean", "mm", "mul", "neg",
    "permute", "pow", "reciprocal", "reshape", "rsqrt", "rsub", "scatter", "scatter_add", "select",
    "select_scatter", "sigmoid", "sigmoid_backward", "slice", "slice_scatter", "split",
    "split_with_sizes", "sqrt", "square", "squeeze", "sub", "sum", "t", "tanh", "tanh_backward",
    "transpose", "unsqueeze", "view",
}  # fmt: skip
_SLICE = 64  # nodes that lead to upstream gradients, at most
TERMS = ("target", "spread", "square")  # of the loss: C_t (lse - z_t), sum_j C_j (lse - z_j), lse^2
VALUES = (*TERMS, "lse", "nll")  # of tokens


@dataclass
class Match:
    """A span that is linear cross-entropy.

    Attributes:
        roles: its inputs.
        factor: the upstream gradient that all gradients are multiplied by.
        number: another factor of theirs.
        label_smoothing, z_loss, softcap (0: none), logit_scale: options of the loss.
        results: for every output "input", "weight", "weight.t", "bias", or, for a loss, the numbers
            by which the terms are multiplied.
    """

    roles: Roles
    factor: Factor
    number: float
    label_smoothing: float
    z_loss: float
    softcap: float
    logit_scale: float
    results: list[str | dict[str, float]]


def match(span: Span, passes: Passes, one: Any, specs: list[program.Output]) -> Match | None:
    """The cross-entropy that the only pass of a span computes, or None if it is something else."""
    if len(passes.outputs) != 1 or len(span.amplifiers) != 1 or not same(span.step, 1):
        return None
    amplifier = next(iter(span.amplifiers))
    dtype, vocabulary = amplifier.meta["val"].dtype, shape(amplifier)[-1]
    # In float16 the op forms the logits twice, for gradients without their factor might overflow.
    # The general rewrite picks a factor, and needs three products where the op needs four.
    if "bmm" in name_of(amplifier) or dtype == torch.float16 or passes.tangent is None:
        return None
    if one.ints or not isinstance(vocabulary, int):
        return None
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    try:
        with unset_fake_temporarily(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _check_analytic(one.body)
            roles = roles_of(amplifier, one.inputs, passes.dependent.__contains__)
            return _Comparison(span, passes.outputs[0], one, specs, roles, vocabulary).match()
    except Unlike:
        return None


def _check_analytic(body: fx.Graph) -> None:
    """Raise Unlike if logits go through what random tokens do not tell from another function."""
    found: set[fx.Node] = set()
    for node in body.nodes:
        name = _short(node)
        read = found.intersection(node.all_input_nodes)
        if not read and name not in ("mm", "addmm"):
            continue
        found.add(node)
        chosen = name == "where" and (node.args[0] not in read or _is_infinite(node.args[0]))
        chosen = chosen or (name == "masked_fill" and node.args[1] not in read)
        infinite = _is_infinite(node) or (name == "abs" and all(map(_is_infinite, node.users)))
        if node.op == "call_function" and not (name in _ANALYTIC or chosen or infinite):
            raise Unlike(f"{name} of logits")


def _is_infinite(node: fx.Node) -> bool:
    """Whether a node is |m| == inf, by which logsumexp finds rows without a finite logit."""
    if _short(node) != "eq" or node.args[1] != math.inf:
        return False
    return _short(node.args[0]) == "abs"


def _short(node: Any) -> str:
    """The name of an op without library and overload."""
    parts = name_of(node).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


class _Tokens:
    """Random tokens, and what the terms of the loss and their gradients are for them."""

    def __init__(self, roles: Roles, vocabulary: int, count: int, softcap: float, scale: float):
        options: Any = {"dtype": torch.float64, "requires_grad": True}
        x = torch.randn(count, _HIDDEN, **options)
        w = torch.randn(vocabulary, _HIDDEN, **options)
        b = torch.randn(vocabulary, **options)
        t, a = torch.randint(vocabulary, (count,)), torch.ones(count).double()
        if any(factor.weights for factor in roles.upstream.values()):
            a += torch.rand(count)
        self.kept = torch.ones(count, dtype=torch.bool)
        if roles.ignore_index is not None and count > 1:
            self.kept[1], t[1], a[1] = False, 0, 0
        c = torch.ones(vocabulary).double()
        if roles.classes is not None:
            c = torch.rand(vocabulary).double() + 0.5
        q = torch.softmax(torch.randn(vocabulary, count).double(), 0).t()
        z = F.linear(x, w, None if roles.bias is None else b) * scale
        z = torch.tanh(z / softcap) * softcap if softcap else z
        lse = torch.logsumexp(z, 1)
        below = lse[:, None] - z
        nll = below.gather(1, t[:, None])[:, 0]
        target = (below * c * q).sum(1) if roles.dense else nll * c[t]
        terms = (target, (below * c).sum(1), lse.square())
        self.values = {n: v.detach() for n, v in zip(VALUES, (*terms, lse, nll), strict=True)}
        wanted = [x, w] if roles.bias is None else [x, w, b]
        self.gradients = [
            torch.autograd.grad((term * a).sum(), wanted, retain_graph=True) for term in terms
        ]
        self.given = {
            "input": x, "weight": w, "weight.t": w.t(), "bias": b, "target": t, "classes": c,
            "probabilities": q, "kept": self.kept, "ignored": ~self.kept, "upstream": a,
            "class upstream": c,
        }  # fmt: skip


class _Comparison:
    """A span beside the loss."""

    def __init__(
        self, span: Span, outputs: list[fx.Node], one: Any, specs: list[program.Output],
        roles: Roles, vocabulary: int,
    ):  # fmt: skip
        self.span, self.outputs, self.one, self.specs = span, outputs, one, specs
        self.roles, self.vocabulary = roles, vocabulary
        self.amplifier = next(iter(span.amplifiers))
        self.softcap, self.scale = _transform(self.amplifier, roles.bias)
        self.body = in_double(one.body)
        self.draws: list[_Tokens] = []

    def match(self) -> Match:
        """What it is; raises Unlike if it is something else."""
        first, *others = self.roles.upstream.values()
        for factor in others:
            if len(factor.weights) != len(first.weights) or not all(
                any(same_value(w, v) for v in factor.weights) for w in first.weights
            ):
                raise Unlike("tokens have several weights")
        kinds = [self.kind(node) for node in self.outputs]
        terms = self.coefficients(kinds)
        smoothed = terms["target"] + terms["spread"] * self.vocabulary
        if abs(terms["target"]) < 1e-12 or smoothed == 0:
            raise Unlike("has no target")
        smoothing = _tidy(terms["spread"] * self.vocabulary / smoothed)
        z_loss = _tidy(terms["square"] / smoothed)
        if not 0 <= smoothing <= 1 or z_loss < 0:
            raise Unlike("is no loss")
        results: list[str | dict[str, float]] = []
        for i, kind in enumerate(kinds):
            if kind:
                results.append(kind)
                continue
            rows = isinstance(self.span.layouts[self.outputs[i]], Rows)
            read = [u for u in self.outputs[i].users if u not in self.span.layouts]
            if rows and not is_dropped(self.outputs[i], read, self.roles, first.weights):
                raise Unlike(f"{self.outputs[i]} is read where tokens are ignored")
            results.append(self.as_results(self.values(i), smoothing, z_loss, rows))
        return Match(
            self.roles, first, smoothed, smoothing, z_loss, self.softcap, self.scale, results
        )

    def as_results(
        self, numbers: dict[str, float], smoothing: float, z_loss: float, rows: bool
    ) -> dict[str, float]:
        """Terms of a loss as the op has them: "sum" is all of the loss, over the tokens."""
        if rows and not self.roles.dense:
            if "spread" in numbers and not smoothing > 0:
                raise Unlike("the op has no such sum")
            return numbers
        terms = {n: numbers.pop(n, 0.0) for n in TERMS}
        total = terms["target"] + terms["spread"] * self.vocabulary
        want = {"target": 1 - smoothing, "spread": smoothing / self.vocabulary, "square": z_loss}
        if numbers or not total or any(
            abs(terms[n] / total - want[n]) > 1e-6 * max(abs(want[n]), 1e-6) for n in TERMS
        ) or (rows and z_loss):  # fmt: skip
            raise Unlike("is not the loss whose gradient follows")
        return {"target" if rows else "sum": total}

    def kind(self, node: fx.Node) -> str:
        """Which gradient an output is by its shape; empty for a loss."""
        sizes, summed = shape(node), isinstance(self.span.layouts[node], Partial)
        like = {"weight": shape(self.roles.weight), "bias": [self.vocabulary]}
        if self.roles.transposed:
            like["weight"] = like["weight"][::-1]
        like["weight.t"] = like["weight"][::-1]
        if summed:
            bare = [s for s in sizes if not same(s, 1)]
            found = [name for name, size in like.items()
                     if len(bare if name == "bias" else sizes) == len(size)
                     and all(map(same, bare if name == "bias" else sizes, size))]  # fmt: skip
            return found[0] if found else ""
        product = kind_of(node) == "product"
        return "input" if product and same(sizes[-1], like["weight"][1]) else ""

    def coefficients(self, kinds: list[str]) -> dict[str, float]:
        """The numbers by which the gradients of the terms are multiplied."""
        places = list(self.roles.upstream)
        ratios = _ratios(list(self.roles.upstream.values()))
        total = dict.fromkeys(TERMS, 0.0)
        tokens = self.draw(0, _TOKENS)
        names = ["input", "weight", "bias"]
        wanted = [i for i, kind in enumerate(kinds) if kind]
        for place, ratio in zip(places, ratios, strict=True):
            values = self.evaluate(tokens, place)
            got, terms = [], [[] for _ in TERMS]  # type: ignore[var-annotated]
            for i in wanted:
                like = names.index(kinds[i].removesuffix(".t"))
                value = values[i].t() if kinds[i] == "weight.t" else values[i]
                got.append(value.flatten())
                for term, gradients in zip(terms, tokens.gradients, strict=True):
                    term.append(gradients[like].flatten())
            found = fit(torch.cat(got), [torch.cat(term) for term in terms])
            for name, number in zip(TERMS, found, strict=True):
                total[name] += number * ratio
        return total

    def values(self, index: int) -> dict[str, float]:
        """The numbers by which the terms are multiplied in a loss."""
        summed = isinstance(self.span.layouts[self.outputs[index]], Partial)
        names = [n for n in VALUES if n != "nll" or self.roles.classes is not None]
        if self.roles.dense:
            names.remove("nll") if "nll" in names else None
        got, terms = [], [[] for _ in names]  # type: ignore[var-annotated]
        for draw in range(2 * len(names) if summed else 1):
            tokens = self.draw(draw, _TOKENS)
            value = self.evaluate(tokens, None)[index].flatten()
            kept = tokens.kept
            got.append(value if summed else value[kept])
            for term, name in zip(terms, names, strict=True):
                each = tokens.values[name][kept]
                term.append(each.sum()[None] if summed else each)
        found = fit(torch.cat(got), [torch.cat(term) for term in terms])
        return {n: c for n, c in zip(names, found, strict=True) if abs(c) > 1e-9}

    def draw(self, index: int, count: int) -> _Tokens:
        """Random tokens; the same for the same index."""
        while len(self.draws) <= index:
            self.draws.append(_Tokens(self.roles, self.vocabulary, count, self.softcap, self.scale))
        return self.draws[index]

    def evaluate(self, tokens: _Tokens, upstream: int | None) -> list[Tensor]:
        """The outputs for some tokens, with one upstream gradient and zeros for the others."""
        tensors = []
        for place, ((arg, layout, _), role) in enumerate(
            zip(self.one.inputs, self.roles.names, strict=True)
        ):
            if place in self.roles.constants:
                tensors.append(self.roles.constants[place])
                continue
            value = tokens.given[role].detach()
            if role in ("input", "weight", "weight.t"):
                tensors.append(value)
                continue
            if place in self.roles.upstream and place != upstream:
                value = torch.zeros_like(value)
            rank = len(shape(arg))
            if role in ("classes", "class upstream", "bias"):
                value = value.reshape([1] * (rank - 1) + [-1])
            elif role == "probabilities":
                pass
            elif isinstance(layout, Rows):
                at = layout.hi - 1
                value = value.reshape([len(value) if d == at else 1 for d in range(rank)])
            else:  # one number for all tokens
                value = value[:1].reshape([1] * rank) * 0 + (place == upstream)
            tensors.append(value)
        try:
            with torch.no_grad():
                values = list(fx.Interpreter(self.body).run(*tensors))
        except (RuntimeError, IndexError, TypeError) as error:
            raise Unlike(str(error)) from None
        return [_value(spec, values, tensors) for spec in self.specs]


def _tidy(number: float) -> float:
    """A number without the rounding errors of a fit."""
    return 0.0 if abs(number) < 1e-9 else number


def fit(got: Tensor, terms: Sequence[Tensor]) -> list[float]:
    """The numbers c with got = sum_i c_i terms_i; raises Unlike if there are none."""
    basis = torch.stack(list(terms), 1)
    size = basis.norm(dim=0).clamp(min=1e-300)
    found = torch.linalg.lstsq(basis / size, got[:, None]).solution[:, 0] / size
    error = (basis @ found - got).norm()
    if not error <= 1e-9 * (got.norm() + 1e-30):
        raise Unlike("has other values")
    return [float(c) for c in found]


def _ratios(factors: list[Factor]) -> list[float]:
    """Every upstream gradient over the first, which has to be a number."""
    first = factors[0]
    result = []
    for factor in factors:
        ratio = factor.number
        if factor.scales != first.scales or factor.inverse != first.inverse:
            ratio *= _constant(factor, first)
        result.append(ratio)
    return result


def _constant(factor: Factor, first: Factor) -> float:
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        known: dict[fx.Node, Any] = {}
        values = [
            math.prod(float(_number(n, known)) for n in f.scales)
            / math.prod(float(_number(n, known)) for n in f.inverse)
            for f in (factor, first)
        ]
        found.append(values[0] / values[1] if values[1] else math.nan)
    if not abs(found[0] - found[1]) <= 1e-6 * abs(found[1]):
        raise Unlike("the ratio of two upstream gradients is not constant")
    return found[0]


def _number(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The value of a node, for random inputs of the graph."""
    stack = [node]
    while stack:
        top = stack[-1]
        missing = [a for a in top.all_input_nodes if a not in known]
        if top in known or not missing:
            stack.pop()
            known.setdefault(top, _evaluate(top, known) if top not in known else None)
        else:
            stack.extend(missing)
        if len(known) + len(stack) > _SLICE:
            raise Unlike("upstream gradients come from far")
    return known[node]


def _evaluate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    value = node.meta.get("val")
    if node.op == "call_function" and kind_of(node) != "product":
        args, given = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        kwargs = dict(given)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.op != "placeholder" or not isinstance(value, Tensor) or numel(node) > 1 << 24:
        raise Unlike("upstream gradients come from far")
    sizes = [int(s) if isinstance(s, int) else int(s.node.hint) for s in value.shape]
    if value.dtype.is_floating_point:
        return torch.rand(sizes).to(value.dtype) + 0.5
    drawn = torch.randint(2, sizes)
    return drawn.bool() if value.dtype == torch.bool else torch.where(drawn == 0, -100, drawn)


def _transform(amplifier: fx.Node, bias: fx.Node | None) -> tuple[float, float]:
    """Soft-cap (0: none) and scale of the logits, as far as the chain after the product tells."""
    node, scale, cap = amplifier, 1.0, 0.0
    while True:
        steps = [u for u in node.users if u.op == "call_function"]
        links = [u for u in steps if _link(u, node, bias) is not None]
        if not links:
            return cap, scale
        # What the backward reads of tanh is an alias of its result, and no link.
        after = min(links, key=lambda u: "alias" in name_of(u))
        number = _link(after, node, bias)
        assert number is not None
        if name_of(after) == "aten.tanh.default":
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
    name = name_of(user)
    if kind_of(user) == "view" or name in (
        "aten.alias.default", "prims.convert_element_type.default", "aten.tanh.default"
    ):  # fmt: skip
        return 1.0
    if name == "aten.add.Tensor" and bias in user.args:
        return 1.0
    if name.startswith(("aten.mul.", "aten.div.")) and user.args[0] is node:
        other = user.args[1]
        if isinstance(other, (int, float)) and other:
            return float(other) if "mul" in name else 1.0 / other
    return None


def _value(spec: program.Output, values: list[Tensor], tensors: list[Tensor]) -> Tensor:
    def factor(f: program.Factor) -> Tensor:
        found = (values if f.source == "value" else tensors)[f.index]
        return found.t() if f.transposed else found

    if spec.factors is None:
        assert spec.value is not None
        return values[spec.value]
    return factor(spec.factors[0]) @ factor(spec.factors[1])


def in_double(body: fx.Graph) -> fx.GraphModule:
    """The body with all its floating-point numbers in float64, on the CPU."""
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in body.nodes:
        new = env[node] = copy.node_copy(node, env.__getitem__)
        new.args = tuple(torch.float64 if a in narrow else a for a in new.args) if any(
            isinstance(a, torch.dtype) for a in new.args
        ) else new.args  # fmt: skip
        if new.kwargs.get("dtype") in narrow:
            new.kwargs = {**new.kwargs, "dtype": torch.float64}
        if "device" in new.kwargs:
            new.kwargs = {**new.kwargs, "device": torch.device("cpu")}
    return fx.GraphModule(torch.nn.Module(), copy)
