"""Puts linear cross-entropy's op in the place of a span that computes it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from storage_ops import matmul
from storage_ops.autochunk.match import Match
from storage_ops.autochunk.nodes import shape
from storage_ops.autochunk.propagate import Span, hint
from storage_ops.loss import cost, planner
from storage_ops.loss.call import arithmetic
from storage_ops.loss.devices import has_row_kernel, rates_of
from storage_ops.loss.problem import Problem, padded, parts
from storage_ops.loss.tokens import copy_elements

_ATEN = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_INPUT, _WEIGHT, _BUDGET, _MASK = 0, 1, 16, 20  # arguments of the op
_TENSORS = 6  # of them, the first ones
_LOSS, _NLL, _LSE, _STATE = 0, 1, 2, 5  # its results
_GRADIENTS = {"input": 6, "weight": 7, "weight.t": 7, "bias": 8}


def _problem(
    x: torch.Tensor,
    vocabulary: int,
    grads: list[bool],
    target: torch.Tensor | None,
    bias: torch.Tensor | None,
    classes: torch.Tensor | None,
    weighted: bool,
) -> Problem:
    """What the op's plan depends on; `weighted`: the tokens are."""
    wide = arithmetic(x.dtype)
    dense = target is not None and target.is_floating_point()
    copies = copy_elements(bias, x.dtype) * x.element_size()
    copies += copy_elements(classes, wide) * wide.itemsize
    return Problem(
        hint(x.shape[0]),
        hint(x.shape[1]),
        vocabulary,
        matmul.of(x.dtype, x.device.type, torch.get_num_threads()),
        grads=(grads[0], grads[1], grads[2]),
        gathers=not dense,
        rescales=not dense,
        masks=dense and weighted,
        plain=not has_row_kernel(x.device.type),
        cast_bytes=wide.itemsize if dense and target.dtype != wide else 0,  # type: ignore
        fixed_bytes=hint(copies),
    )


def _grads_of(found: Match) -> list[bool]:
    """Whether input, weight and bias have gradients."""
    given = [r for r in found.results if isinstance(r, str)]
    weight = any(r.startswith("weight") for r in given)
    return ["input" in given, weight, "bias" in given]


def plan_of(
    span: Span, found: Match, num_chunks: int | None, budget: int | None
) -> tuple[int | None, planner.Plan]:
    """The op's memory_budget (given, that of so many chunks, or its own default), and its plan."""
    vocabulary = hint(shape(next(iter(span.amplifiers)))[-1])
    x = found.roles.input.meta["val"]
    given = (found.roles.target, found.roles.bias, found.roles.classes)
    target, bias, classes = (None if n is None else n.meta["val"] for n in given)
    weighted = bool(found.factor.weights)
    p = _problem(x, vocabulary, _grads_of(found), target, bias, classes, weighted)
    least, rates = planner.smallest_budget(p), rates_of(x.device)
    if num_chunks is not None:
        # A chunk of tokens, padding and products included; the few numbers per token on top.
        share = parts(p.tokens, num_chunks) * padded(vocabulary)
        budget = share * p.itemsize * 51 // 50 + cost.token_bytes(p)
    budget = budget if budget is None else max(budget, least)
    return budget, planner.choose(p, budget, rates)


def scratch(node: fx.Node) -> int:
    """What a call of the op holds besides its arguments and results, as planned."""
    weight, budget, grads = (node.args[i] for i in (_WEIGHT, _BUDGET, _MASK))
    given = [None if n is None else n.meta["val"] for n in node.args[:_TENSORS]]  # type: ignore
    x, _, target, bias, classes, tokens = given
    p = _problem(x, hint(shape(weight)[0]), grads, target, bias, classes, tokens is not None)  # type: ignore
    least = planner.smallest_budget(p)
    return planner.choose(p, None if budget is None else max(budget, least)).peak_bytes  # type: ignore


def emit(
    builder: Any, found: Match, outputs: list[fx.Node], budget: int | None
) -> list[tuple[fx.Node, fx.Node]]:
    """The op in place of the span: every output and what replaces it."""
    return _Emission(builder, found, outputs).run(outputs, budget)


class _Emission:
    def __init__(self, builder: Any, found: Match, outputs: list[fx.Node]):
        self.call: Callable[..., fx.Node] = builder.call
        self.size, self.found = builder.size, found
        roles = self.roles = found.roles
        self.tokens = [self.size(shape(roles.input)[0])]
        self.target = roles.target
        if not roles.dense:
            self.target = self.call(_ATEN.reshape.default, roles.target, self.tokens)
        self.weights = roles.classes
        if roles.classes is not None:
            self.weights = self.call(_ATEN.reshape.default, roles.classes, [-1])

    def run(self, outputs: list[fx.Node], budget: int | None) -> list[tuple[fx.Node, fx.Node]]:
        call, found, roles = self.call, self.found, self.roles
        weight = roles.weight
        if roles.transposed:
            weight = call(_ATEN.permute.default, weight, [1, 0])
        needs = [set(r) for r in found.results if not isinstance(r, str)]
        wants = set().union(*needs)
        lse = not roles.dense and bool(wants & {"lse", "square"})
        self.op = call(
            torch.ops.storage_ops.linear_cross_entropy.default, roles.input, weight, self.target,
            roles.bias, self.weights, self._token_weight(), None, "sum",
            -100 if roles.ignore_index is None else roles.ignore_index, found.label_smoothing,
            found.z_loss, found.softcap, found.logit_scale, False, None, None, budget, "", "", True,
            _grads_of(found), [bool(wants), lse, False, False],
        )  # fmt: skip
        scale = self._scale()
        replaced = []
        for node, result in zip(outputs, found.results, strict=True):
            if isinstance(result, str):
                new = call(operator.getitem, self.op, _GRADIENTS[result])
                new = call(_ATEN.mul.Tensor, new, scale)
                if result == "weight.t":
                    new = call(_ATEN.permute.default, new, [1, 0])
            else:
                new = self._loss(result)
            if new.meta["val"].dtype != node.meta["val"].dtype:
                new = call(_CONVERT, new, node.meta["val"].dtype)
            if len(shape(new)) != len(shape(node)):
                new = call(_ATEN.reshape.default, new, [self.size(s) for s in shape(node)])
            replaced.append((node, new))
        return replaced

    def _token_weight(self) -> fx.Node | None:
        weight: fx.Node | None = None
        for each in self.found.factor.weights:
            flat = self.call(_ATEN.reshape.default, each, self.tokens)
            weight = flat if weight is None else self.call(_ATEN.mul.Tensor, weight, flat)
        return weight

    def _scale(self) -> fx.Node:
        """What the gradients of the sum are multiplied by."""
        call, factor = self.call, self.found.factor
        scale = call(_ATEN.reshape.default, factor.scales[0], [])
        if scale.meta["val"].element_size() < 4:
            scale = call(_CONVERT, scale, torch.float32)
        for node in factor.scales[1:]:
            scale = call(_ATEN.mul.Tensor, scale, call(_ATEN.reshape.default, node, []))
        for node in factor.inverse:
            scale = call(_ATEN.div.Tensor, scale, call(_ATEN.reshape.default, node, []))
        number = self.found.number
        if abs(number - 1) > 1e-9:
            scale = call(_ATEN.mul.Tensor, scale, number)
        if self.roles.ignore_index is None:
            return scale
        # Where every token is ignored a mean's scale is not finite, but the gradients are zeros.
        kept = call(_ATEN.ne.Scalar, self.target, self.roles.ignore_index)
        value = scale.meta["val"]
        zero = call(_ATEN.full.default, [], 0, dtype=value.dtype, device=value.device)
        return call(_ATEN.where.self, call(_ATEN.any.default, kept), scale, zero)

    def _loss(self, numbers: dict[str, float]) -> fx.Node:
        """A sum of terms, per token or of all tokens."""
        call, total = self.call, None
        for name, number in numbers.items():
            part = self._term(name)
            if abs(number - 1) > 1e-9:
                part = call(_ATEN.mul.Tensor, part, number)
            total = part if total is None else call(_ATEN.add.Tensor, total, part)
        assert total is not None
        return total

    def _term(self, name: str) -> fx.Node:
        call = self.call
        if name == "sum":
            return call(operator.getitem, self.op, _LOSS)
        if name in ("lse", "square"):
            lse = call(operator.getitem, self.op, _LSE)
            return lse if name == "lse" else call(_ATEN.mul.Tensor, lse, lse)
        nll = call(operator.getitem, self.op, _NLL)
        if name == "spread":
            return self._spread()
        if name == "nll" or self.weights is None or self.roles.dense:
            return nll
        index = call(_ATEN.clamp.default, self.target, 0)
        return call(_ATEN.mul.Tensor, nll, call(_ATEN.index_select.default, self.weights, 0, index))

    def _spread(self) -> fx.Node:
        """sum_j C_j (lse - z_j), from the state of the rows, where it is times e / V."""
        call = self.call
        state = call(operator.getitem, self.op, _STATE)
        total, dot, mass = (call(_ATEN.select.int, state, 0, i) for i in (1, 3, 4))
        log = call(_ATEN.log.default, call(_ATEN.clamp_min.default, total, 1e-30))
        spread = call(_ATEN.sub.Tensor, call(_ATEN.mul.Tensor, mass, log), dot)
        vocabulary = shape(self.roles.weight)[1 if self.roles.transposed else 0]
        return call(_ATEN.mul.Tensor, spread, vocabulary / self.found.label_smoothing)
