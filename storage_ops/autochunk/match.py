"""Recognizes a span that is linear cross-entropy, which has an op of its own.

What the span reads is told by its structure. Whether it computes the loss is told by its values:
body is evaluated in float64 on a few random tokens and compared with the loss and its
gradients.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from storage_ops.autochunk.passes import Passes
from storage_ops.autochunk.program import Factor, Output
from storage_ops.autochunk.propagate import Span, hint
from storage_ops.autochunk.rules import is_zero, name_of, rule_of, shape
from storage_ops.autochunk.state import Conflict, Layout, Partial, Rows, same
from storage_ops.ops import planner
from storage_ops.ops.products import has_fast_products

_TOKENS, _HIDDEN = 3, 2  # of the comparison


@dataclass
class Match:
    """A span that is linear cross-entropy.

    Attributes:
        input, weight, bias, target: nodes; weight is (V, D) if not transposed, else (D, V).
        scale: the number that all gradients are multiplied by, as a node.
        results: for every output what it is: "nll", "logp" (its negative), "input", "weight",
            "weight.t" or "bias".
    """

    input: fx.Node
    weight: fx.Node
    transposed: bool
    bias: fx.Node | None
    target: fx.Node
    ignore_index: int
    scale: fx.Node
    softcap: float
    logit_scale: float
    results: list[str]


def match(span: Span, passes: Passes, one: Any, specs: list[Output]) -> Match | None:
    """The cross-entropy that the only pass of a span computes, or None if it is something else."""
    if len(passes.outputs) != 1 or len(span.amplifiers) != 1 or not same(span.step, 1):
        return None
    amplifier = next(iter(span.amplifiers))
    *bias, left, right = amplifier.args
    dtype = amplifier.meta["val"].dtype
    if "bmm" in name_of(amplifier) or dtype == torch.float16 or passes.tangent is None:
        return None
    if bias and len(shape(bias[0])) != 1:  # type: ignore[arg-type]
        return None
    base, flipped = _base(right)
    targets: dict[tuple[fx.Node, int], None] = {}
    scales: dict[fx.Node, None] = {}
    roles: list[str] = []
    for arg, *_ in one.inputs:
        role = _role(arg, left, base, flipped, bias, targets, scales)
        if role is None:
            return None
        roles.append(role)
    if len(targets) != 1 or len(scales) != 1 or one.ints:
        return None
    ((target, ignore_index),) = targets
    softcap, logit_scale = _transform(amplifier)
    found = Match(
        left, base, flipped, bias[0] if bias else None, target, ignore_index,  # type: ignore[arg-type]
        next(iter(scales)), softcap, logit_scale, [],
    )  # fmt: skip
    for node in passes.outputs[0]:
        layout = span.layouts[node]
        if isinstance(layout, Rows) and not _masked(node, target, ignore_index) and (
            shape(node)[-1:] != shape(left)[-1:] or "mm" not in name_of(node)  # type: ignore[arg-type]
        ):  # fmt: skip
            return None
    results = _compare(found, span, passes.outputs[0], one, specs, roles)
    if results is None:
        return None
    found.results = results
    return found


def _base(node: Any) -> tuple[fx.Node, bool]:
    """A matrix without its transpositions: as (V, D) when False is returned with it."""
    flipped = True  # the product reads (D, V)
    while isinstance(node, fx.Node) and node.op == "call_function" and (
        rule_kind(node) == "permute" and len(shape(node)) == 2
    ):  # fmt: skip
        node, flipped = node.args[0], not flipped
    return node, flipped


def rule_kind(node: fx.Node) -> str:
    """The kind of a node's rule, empty if it has none."""
    try:
        return rule_of(node).kind
    except Conflict:
        return ""


def _role(
    arg: fx.Node, left: Any, base: fx.Node, transposed: bool, bias: Any,
    targets: dict[tuple[fx.Node, int], None], scales: dict[fx.Node, None],
) -> str | None:  # fmt: skip
    """What an input of the span is to the loss."""
    if arg is left:
        return "input"
    if bias and arg is bias[0]:
        return "bias"
    bare, flipped = _base(arg)
    if bare is base:
        return "weight.t" if flipped == transposed else "weight"
    if not arg.meta["val"].is_floating_point():
        target = _target(arg)
        if target is not None:
            targets[target] = None
            return "target"
        return None
    chosen = _choice(arg)
    if chosen is not None and is_zero(chosen[3]) and _one(_bare(chosen[2])):
        targets[chosen[:2]] = None
        scales[_bare(chosen[2])] = None
        return "upstream"
    return None


def _one(node: Any) -> bool:
    return isinstance(node, fx.Node) and all(same(s, 1) for s in shape(node))


def _bare(node: Any) -> Any:
    """A node without views of it."""
    while isinstance(node, fx.Node) and node.op == "call_function" and (
        rule_kind(node) in ("view", "expand") or name_of(node) == "aten.alias.default"
    ):  # fmt: skip
        node = node.args[0]
    return node


def _choice(node: Any) -> tuple[fx.Node, int, Any, Any] | None:
    """(t, c, a, b) of a node that is a where t != c, else b."""
    node = _bare(node)
    if not isinstance(node, fx.Node) or name_of(node) != "aten.where.self":
        return None
    condition, yes, no = node.args
    condition = _bare(condition)
    name = name_of(condition)
    if name == "aten.eq.Scalar":
        yes, no = no, yes
    elif name != "aten.ne.Scalar":
        return None
    return _bare(condition.args[0]), condition.args[1], yes, no


def _target(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The class indices and the ignored one, of an index that is 0 where it is ignored."""
    chosen = _choice(node)
    if chosen is None or _bare(chosen[2]) is not chosen[0] or not is_zero(chosen[3]):
        return None
    return chosen[:2]


def _masked(node: fx.Node, target: fx.Node, ignore_index: int) -> bool:
    """Whether all that reads a value per token drops it where the token is ignored."""
    stack = [node]
    while stack:
        current = stack.pop()
        for user in current.users:
            name = name_of(user)
            if name == "aten.where.self":
                chosen = _choice(user)
                if chosen is None or chosen[:2] != (target, ignore_index):
                    return False
                if chosen[2] is not current or not is_zero(chosen[3]):
                    return False
            elif user.op == "call_function" and (
                rule_kind(user) == "view"
                or name in ("aten.neg.default", "aten.alias.default",
                            "prims.convert_element_type.default")
            ):  # fmt: skip
                stack.append(user)
            else:
                return False
    return True


def _transform(amplifier: fx.Node) -> tuple[float, float]:
    """Soft-cap (0: none) and scale of the logits, as far as the chain after the product tells."""
    node, scale, cap = amplifier, 1.0, 0.0
    while True:
        steps = [u for u in node.users if u.op == "call_function"]
        after = next((u for u in steps if _number(u, node) is not None), None)
        if after is None:
            return cap, scale
        number = _number(after, node)
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


def _number(user: fx.Node, node: fx.Node) -> float | None:
    """What a link of the chain multiplies by; None if it is no link."""
    name = name_of(user)
    if rule_kind(user) == "view" or name in (
        "aten.alias.default", "prims.convert_element_type.default", "aten.tanh.default"
    ):  # fmt: skip
        return 1.0
    if name.startswith(("aten.mul.", "aten.div.")) and user.args[0] is node:
        other = user.args[1]
        if isinstance(other, (int, float)) and other:
            return float(other) if "mul" in name else 1.0 / other
    return None


def _compare(
    found: Match, span: Span, outputs: list[fx.Node], one: Any, specs: list[Output],
    roles: list[str],
) -> list[str] | None:  # fmt: skip
    """What every output is, by its values on random tokens; None if one is something else."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    amplifier = next(iter(span.amplifiers))
    vocabulary = shape(amplifier)[-1]
    if not isinstance(vocabulary, int):
        return None
    with unset_fake_temporarily(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options: Any = {"dtype": torch.float64, "requires_grad": True}
        x, w = torch.randn(_TOKENS, _HIDDEN, **options), torch.randn(vocabulary, _HIDDEN, **options)
        b = torch.randn(vocabulary, **options)
        t, u = torch.randint(vocabulary, (_TOKENS,)), torch.rand(_TOKENS, dtype=torch.float64)
        z = F.linear(x, w, None if found.bias is None else b) * found.logit_scale
        if found.softcap:
            z = torch.tanh(z / found.softcap) * found.softcap
        nll = F.cross_entropy(z, t, reduction="none")
        wanted = [x, w] if found.bias is None else [x, w, b]
        grads = torch.autograd.grad((nll * u).sum(), wanted)
        known = {"input": grads[0], "weight": grads[1], "weight.t": grads[1].t(),
                 "bias": grads[-1], "nll": nll.detach(), "logp": -nll.detach()}  # fmt: skip
        given = {"input": x, "weight": w, "weight.t": w.t(), "bias": b, "target": t, "upstream": u}
        tensors = [
            _shaped(given[role].detach(), arg, layout, role)
            for (arg, layout, _), role in zip(one.inputs, roles, strict=True)
        ]
        try:
            with torch.no_grad():
                values = list(fx.Interpreter(_in_double(one.body)).run(*tensors))
        except (RuntimeError, IndexError, TypeError):
            return None
        results = []
        for node, spec in zip(outputs, specs, strict=True):
            value = _value(spec, values, tensors)
            kind = _kind(value, known, isinstance(span.layouts[node], Partial))
            if kind is None:
                return None
            results.append(kind)
    return results if len(set(results) & {"nll", "logp"}) == 1 else None


def _shaped(value: Tensor, arg: fx.Node, layout: Layout, role: str) -> Tensor:
    """A value in the shape that an input has for a chunk."""
    if role in ("target", "upstream"):
        assert isinstance(layout, Rows)
        return value.reshape([_TOKENS if d == layout.hi - 1 else 1 for d in range(len(shape(arg)))])
    return value


def _value(spec: Output, values: list[Tensor], tensors: list[Tensor]) -> Tensor:
    def factor(f: Factor) -> Tensor:
        found = (values if f.source == "value" else tensors)[f.index]
        return found.t() if f.transposed else found

    if spec.factors is None:
        assert spec.value is not None
        return values[spec.value]
    return factor(spec.factors[0]) @ factor(spec.factors[1])


def _kind(value: Tensor, known: dict[str, Tensor], summed: bool) -> str | None:
    for name in ("weight", "weight.t", "bias") if summed else ("input", "nll", "logp"):
        like = known[name]
        if value.numel() == like.numel() and [s for s in value.shape if s != 1] == [
            s for s in like.shape if s != 1
        ] and torch.allclose(value.reshape(like.shape), like, rtol=1e-9, atol=1e-12):  # fmt: skip
            return name
    return None


def _in_double(body: fx.Graph) -> fx.GraphModule:
    """The body with all its floating-point numbers in float64."""
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in body.nodes:
        env[node] = copy.node_copy(node, env.__getitem__)
        new = env[node]
        new.args = tuple(torch.float64 if a in narrow else a for a in new.args) if any(
            isinstance(a, torch.dtype) for a in new.args
        ) else new.args  # fmt: skip
        if new.kwargs.get("dtype") in narrow:
            new.kwargs = {**new.kwargs, "dtype": torch.float64}
        if "device" in new.kwargs:
            new.kwargs = {**new.kwargs, "device": torch.device("cpu")}
    return fx.GraphModule(torch.nn.Module(), copy)


def _problem(x: Tensor, vocabulary: int, grads: list[bool]) -> planner.Problem:
    """What the op's plan depends on."""
    return planner.Problem(
        hint(x.shape[0]), hint(x.shape[1]), vocabulary, x.element_size(),
        (grads[0], grads[1], grads[2]),
        upcast=not has_fast_products(x.dtype, x.device.type),
        cuda=x.device.type == "cuda",
        gather=True,
        threads=torch.get_num_threads(),
    )  # fmt: skip


def grads_of(found: Match) -> list[bool]:
    """Whether input, weight and bias have gradients."""
    weight = any(r.startswith("weight") for r in found.results)
    return ["input" in found.results, weight, "bias" in found.results]


def budget_of(span: Span, found: Match, num_chunks: int | None, budget: int | None) -> int | None:
    """The op's memory_budget: given, that of so many chunks, or its own default."""
    if num_chunks is None and budget is None:
        return None
    vocabulary = hint(shape(next(iter(span.amplifiers)))[-1])
    p = _problem(found.input.meta["val"], vocabulary, grads_of(found))
    wanted = budget
    if num_chunks is not None:
        # What a chunk of tokens takes, with the few numbers per token that come on top.
        share = -(-p.tokens // num_chunks) * planner.padded(vocabulary) * p.itemsize
        wanted = share + share // 50 + planner.token_bytes(p)
    return max(wanted or 0, planner.smallest_budget(p))


def scratch(node: fx.Node) -> int:
    """What a call of the op holds besides its arguments and results, as planned."""
    x, weight, budget, grads = (node.args[i] for i in (0, 1, 16, 20))
    p = _problem(x.meta["val"], hint(shape(weight)[0]), grads)  # type: ignore
    return planner.choose(p, budget).peak_bytes  # type: ignore[arg-type]


def emit(
    builder: Any, found: Match, outputs: list[fx.Node], budget: int | None
) -> list[tuple[fx.Node, fx.Node]]:
    """The op in place of the span: every output and what replaces it."""
    aten, call = torch.ops.aten, builder.call
    tokens = [builder.size(shape(found.input)[0])]
    weight = found.weight
    if found.transposed:
        weight = call(aten.permute.default, weight, [1, 0])
    target = call(aten.reshape.default, found.target, tokens)
    mask = grads_of(found)
    op = call(
        torch.ops.storage_ops.linear_cross_entropy.default, found.input, weight, target, found.bias,
        None, None, None, "sum", found.ignore_index, 0.0, 0.0, found.softcap, found.logit_scale,
        False, None, None, budget, "", "", True, mask, [True, False, False, False],
    )  # fmt: skip
    # Where every token is ignored a mean's scale is not finite, but the gradients are zeros.
    scale = call(aten.reshape.default, found.scale, [])
    valid = call(aten.any.default, call(aten.ne.Scalar, target, found.ignore_index))
    scale = call(aten.where.self, valid, scale, call(
        aten.full.default, [], 0, dtype=scale.meta["val"].dtype, device=scale.meta["val"].device
    ))  # fmt: skip
    places = {"nll": 1, "logp": 1, "input": 6, "weight": 7, "weight.t": 7, "bias": 8}
    replaced = []
    for node, result in zip(outputs, found.results, strict=True):
        value = node.meta["val"]
        new = call(operator.getitem, op, places[result])
        if result == "logp":
            new = call(aten.neg.default, new)
        if places[result] > 1:
            new = call(aten.mul.Tensor, new, scale)
        if result == "weight.t":
            new = call(aten.permute.default, new, [1, 0])
        if new.meta["val"].dtype != value.dtype:
            new = call(torch.ops.prims.convert_element_type.default, new, value.dtype)
        if len(shape(new)) != len(shape(node)):
            sizes = [builder.size(s) for s in shape(node)]
            new = call(aten.reshape.default, new, sizes)
        replaced.append((node, new))
    return replaced
