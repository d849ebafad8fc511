"""Replaces a product of Dynamo's graph by the op of linear cross-entropy.

If a loss is linear in the numbers per token, the op computes the loss, and its gradients in the
forward. For any other loss the op returns the numbers per token, which the user's code reads. Then
the backward computes the logits again. `docs/design/chunker.md` compares this with the general
rewrite in chunks, which is an alternative for such losses.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.analysis.layouts import same
from storage_ops.autochunk.analysis.op_plan import EVERY, plan_of
from storage_ops.autochunk.analysis.spans import LARGE
from storage_ops.autochunk.cross_entropy.dynamo_slice import (
    ForwardSlice,
    Splice,
    products,
    without_gradients,
)
from storage_ops.autochunk.cross_entropy.per_token import PerToken, bare
from storage_ops.autochunk.cross_entropy.reduction import Reduction
from storage_ops.autochunk.fx_graph.edit import Builder
from storage_ops.autochunk.fx_graph.nodes import Size, name_of, numel, shape
from storage_ops.autochunk.reasons import Conflict, log
from storage_ops.loss.call import Call, arithmetic

_ATEN = torch.ops.aten
_TURNED = {"t", "transpose", "permute", "T", "mT"}


@dataclass(frozen=True)
class Emitted:
    """The number of tiles of an emitted op, and how often it computes the logits."""

    num_chunks: int
    num_passes: int


class Emitter:
    """Writes calls of the op in place of a product.

    Attributes:
        ranges: the op's arguments for the product, or for ranges of its tokens.
        learns: whether input, weight or bias has a gradient.
    """

    def __init__(
        self,
        forward: ForwardSlice,
        ranges: list[PerToken],
        num_chunks: int | None,
        budget: int | None,
    ):
        self.forward, self.ranges = forward, ranges
        self.num_chunks, self.budget = num_chunks, budget
        spans = [per_token.span for per_token in ranges]
        amplifiers = [per_token.amplifier for per_token in ranges]
        inside = {node for span in spans for node in span.layouts}
        self.size = Builder(forward.graph, amplifiers, inside).size
        self.emitted = Emitted(0, 0)
        self.learns = any(map(any, (per_token.learns for per_token in ranges)))

    def loss(self, reduction: Reduction) -> Emitted:
        """Write a loss, plus the value of the reduction for zeros."""
        (per_token,) = self.ranges
        splice = self.splice = Splice(self.forward, reduction.loss)
        call, copy = splice.call, splice.copy
        # The weights of the tokens do not depend on the rows, so zeros replace them.
        leaves, marks = list(reduction.leaves), None if reduction.uniform else self.marks(per_token)
        for row in per_token.rows:
            dtype, sizes = arithmetic(row.meta["val"].dtype), self.numbers(shape(row))
            if marks is None:
                device = row.meta["val"].device
                zeros = call(_ATEN.full.default, sizes, 0.0, dtype=dtype, device=device)
            else:
                zeros = call(_ATEN._to_copy.default, marks, dtype=dtype)
                zeros = call(_ATEN.reshape.default, zeros, sizes)
            leaves.append(zeros)
        splice.env.update(zip(reduction.inputs, leaves, strict=True))
        token_weights, at_zero = copy(reduction.weight), copy(reduction.total)
        if marks is not None:  # otherwise the op would leave out tokens that make the loss nan
            lost = call(_ATEN.where.ScalarOther, call(_ATEN.isnan.default, at_zero), marks, 0.0)
            token_weights = call(_ATEN.add.Tensor, token_weights, lost)
        results = self.op(
            [per_token],
            copy(per_token.targets[0]) if per_token.dense else self.flat(per_token.targets[0]),
            class_weight=self.classes(per_token),
            # Without this, the op would check each token.
            token_weight=None if reduction.uniform else token_weights,
            reduction="sum", label_smoothing=reduction.label_smoothing, z_loss=reduction.z_loss,
        )  # fmt: skip
        new = call(operator.getitem, results, 0)
        if reduction.uniform:
            new = call(_ATEN.mul.Tensor, new, call(_ATEN.select.int, token_weights, 0, 0))
        new = call(_ATEN.add.Tensor, new, at_zero)
        reduction.loss.replace_all_uses_with(self.like(new, reduction.loss.meta["example_value"]))
        return self.emitted

    def marks(self, per_token: PerToken) -> fx.Node:
        """Return 0 per token, and nan where the hidden state is not finite.

        A token that the loss multiplies by 0 has weight 0, like an ignored token. The reduction of
        these numbers distinguishes both, because 0 * nan is nan.
        """
        call = self.splice.call
        hidden = call(_ATEN.detach.default, self.splice.copy(per_token.input))
        return call(_ATEN.sum.dim_IntList, call(_ATEN.mul.Tensor, hidden, 0.0), [-1])

    def rows(self) -> Emitted:
        """Write the rows for the nodes that read them."""
        splice = self.splice = Splice(self.forward, self.place())
        alike = all(_of_one_call(self.ranges[0], per_token) for per_token in self.ranges)
        for ranges in [self.ranges] if alike else [[per_token] for per_token in self.ranges]:
            self.rows_of(ranges)
        for end, value in zip(self.forward.ends, self.forward.values, strict=True):
            end.replace_all_uses_with(splice.copy(value))
        return self.emitted

    def place(self) -> fx.Node:
        """Return the node of Dynamo's graph before which the rows must exist."""
        forward, order = self.forward, list(self.forward.gm.graph.nodes)
        if self.learns and self.is_shared():
            raise Conflict("shares its weight with another product", forward.product)
        inside, position = set(forward.nodes), {node: i for i, node in enumerate(order)}
        first = min(position[u] for e in forward.ends for u in e.users if u not in inside)
        still = without_gradients(order) if self.learns else set()
        while order[first] in still:
            first -= 1
        if any(position[node] >= first for node in forward.inputs.values()):
            raise Conflict("reads a tensor that is computed only after its first result is needed")
        place: fx.Node = order[first]
        return place

    def is_shared(self) -> bool:
        """Return True if another product of about this size has the same weight.

        Chunks add both gradients of the weight in the same memory, but two ops do not.
        """
        weights = {
            _root(self.forward.inputs.get(per_token.weight)) for per_token in self.ranges
        } - {None}
        return any(
            numel(other) * LARGE > numel(self.forward.product)
            and not weights.isdisjoint(map(_root, other.all_input_nodes))
            for other in products(self.forward.gm.graph) if other is not self.forward.product
        )  # fmt: skip

    def rows_of(self, ranges: list[PerToken]) -> None:
        """Write one call that computes the rows of ranges of the tokens."""
        call, per_token = self.splice.call, ranges[0]
        terms = [t for part in ranges for t in part.terms]
        spread = any(t.spread for t in terms)
        most = max(len(part.targets) for part in ranges)
        if per_token.dense:
            if spread:
                raise Conflict("has probabilities as targets, and a sum over all classes")
            targets = [self.splice.copy(per_token.targets[0])]
        else:
            targets = [self.targets(ranges, k) for k in range(max(most, 1))]
        selected = call(_ATEN.stack.default, targets[1:], -1) if len(targets) > 1 else None
        classes = self.classes(per_token)
        results = self.op(
            ranges, targets[0], ignore_index=EVERY, in_forward=False, selected_ids=selected,
            class_weight=classes if spread or per_token.dense else None,
            reduction="none" if spread else "sum", label_smoothing=float(spread),
            wants=[any(t.nll[:1] != [0.0] and t.nll for t in terms),
                   any(t.lse for t in terms), any(t.entropy for t in terms), False],
        )  # fmt: skip

        @functools.cache
        def result(name: str, k: int = 0) -> fx.Node:
            if name == "nll" and k:
                picked = call(_ATEN.select.int, call(operator.getitem, results, 4), -1, k - 1)
                value = call(_ATEN.neg.default, picked)
            else:
                place = ("spread", "nll", "lse", "entropy").index(name)
                value = call(operator.getitem, results, place)
            if name == "nll" and classes is not None and not per_token.dense:
                weights = call(_ATEN.index_select.default, classes, 0, targets[k])
                value = call(_ATEN.mul.Tensor, value, weights)
            return value

        end: Size = 0
        for part in ranges:
            begin, end = end, end + part.span.tokens
            for row, t in zip(part.rows, part.terms, strict=True):
                factors: dict[tuple[Any, ...], float] = {
                    **{("nll", k): c for k, c in enumerate(t.nll)},
                    ("spread",): t.spread * per_token.vocabulary,  # the op returns their mean
                    ("lse",): t.lse, ("entropy",): t.entropy,
                }  # fmt: skip
                parts = [self.times(result(*of), c) for of, c in factors.items() if c]
                if not parts:
                    raise Conflict("is zero", row)
                value = functools.reduce(functools.partial(call, _ATEN.add.Tensor), parts)
                if len(ranges) > 1:
                    value = call(_ATEN.slice.Tensor, value, 0, *self.numbers([begin, end]))
                value = call(_ATEN.reshape.default, value, self.numbers(shape(row)))
                value = self.like(value, row.meta["val"])
                value = call(_ATEN.detach.default, value) if t.detached else value
                self.splice.env[row] = value

    def times(self, value: fx.Node, factor: float) -> fx.Node:
        """Return a value times a number."""
        if factor in (1, -1):
            return value if factor > 0 else self.splice.call(_ATEN.neg.default, value)
        return self.splice.call(_ATEN.mul.Tensor, value, factor)

    def op(self, ranges: list[PerToken], target: fx.Node, **options: object) -> fx.Node:
        """Return a call of the op for ranges of the tokens."""
        per_token, copy = ranges[0], self.splice.copy
        weight = copy(per_token.weight)
        if per_token.transposed:
            weight = self.splice.call(_ATEN.permute.default, weight, [1, 0])
        learns = (
            per_token.learns
            if any(not t.detached for h in ranges for t in h.terms)
            else [False] * 3
        )
        options = {
            "softcap": per_token.softcap, "logit_scale": per_token.logit_scale, "grad_mask": learns,
            "wants": [False] * 4, **options,
        }  # fmt: skip
        arguments: Any = self.input(ranges), weight, target, per_token.bias and copy(per_token.bias)
        call_args = Call(*arguments, **options)  # type: ignore[arg-type]
        arguments = fx.map_arg(tuple(call_args), lambda n: n.meta["example_value"])
        values = Call(*arguments)
        budget, plan = plan_of(values, self.num_chunks, self.budget)
        passes = 1 + (not values.in_forward and any(learns))
        count = max(self.emitted.num_chunks, plan.num_chunks * plan.num_slices)
        self.emitted = Emitted(count, max(self.emitted.num_passes, passes))
        log.debug("%s: it is linear cross-entropy, %s", self.forward.product, options)
        op = torch.ops.storage_ops.linear_cross_entropy.default
        return self.splice.call(op, *call_args._replace(memory_budget=budget))

    def input(self, ranges: list[PerToken]) -> fx.Node:
        """Return the input of all ranges: the product's own, if the ranges cover it in order."""
        parts = [per_token.input for per_token in ranges]
        if len(parts) == 1:
            return self.splice.copy(parts[0])
        cuts: Any = [n.args for n in parts if name_of(n) == "aten.slice.Tensor" and not n.kwargs]
        bases = {args[0] for args in cuts}
        if len(cuts) == len(parts) and len(bases) == 1 and all(args[1] == 0 for args in cuts):
            (base,) = bases
            ends = [0, *(args[3] for args in cuts)]
            begins = [*(args[2] for args in cuts), shape(base)[0]]
            if all(same(_number(a), _number(b)) for a, b in zip(ends, begins, strict=True)):
                return self.splice.copy(base)
        return self.splice.call(_ATEN.cat.default, list(map(self.splice.copy, parts)))

    def targets(self, ranges: list[PerToken], k: int) -> fx.Node:
        """Return the k-th target of all tokens. Tokens without a target get class 0."""
        parts = []
        for per_token in ranges:
            if per_token.targets:
                parts.append(self.flat(per_token.targets[min(k, len(per_token.targets) - 1)]))
            else:
                device = per_token.amplifier.meta["val"].device
                sizes = self.numbers([per_token.span.tokens])
                parts.append(self.splice.call(_ATEN.full.default, sizes, 0, dtype=torch.int64,
                                              device=device))  # fmt: skip
        return parts[0] if len(parts) == 1 else self.splice.call(_ATEN.cat.default, parts)

    def flat(self, node: fx.Node) -> fx.Node:
        """Return a value per token, or per class, in one dimension."""
        return self.splice.call(_ATEN.reshape.default, self.splice.copy(node), [-1])

    def classes(self, per_token: PerToken) -> fx.Node | None:
        """Return the weights of the classes, or None if there are none."""
        return per_token.classes and self.flat(per_token.classes)

    def like(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        """Return a node in the dtype of a value."""
        if node.meta["example_value"].dtype == value.dtype:
            return node
        return self.splice.call(_ATEN._to_copy.default, node, dtype=value.dtype)

    def numbers(self, sizes: list[Size]) -> list[int | fx.Node]:
        """Return sizes as arguments of a call."""
        size_nodes = map(self.size, sizes)
        return [n if isinstance(n, int) else self.splice.copy(n) for n in size_nodes]


def _number(item: object) -> Any:
    return item.meta["val"] if isinstance(item, fx.Node) else item


def _root(node: object) -> Any:
    """Return the node of Dynamo's graph below all transpositions of it."""
    while isinstance(node, fx.Node) and str(getattr(node.target, "__name__", node.target)) in (
        _TURNED
    ):
        node = node.args[0]
    return node


def _of_one_call(one: PerToken, other: PerToken) -> bool:
    """Return True if two PerTokens differ only in their range of tokens."""
    if one is other:
        return True
    heads = [(h.weight, h.transposed, h.bias and bare(h.bias), h.classes, h.softcap, h.logit_scale)
             for h in (one, other)]  # fmt: skip
    return heads[0] == heads[1] and not one.dense and not other.dense
