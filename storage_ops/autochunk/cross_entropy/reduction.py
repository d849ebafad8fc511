"""The part of a loss from its rows to one number: masks, weights, counts and sums.

It must be linear in the rows, except for the square of lse. Its gradient with respect to the rows
is traced. This gradient is the weight of every token, with all masks, means and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from storage_ops.autochunk.analysis.spans import is_product
from storage_ops.autochunk.cross_entropy.dynamo_slice import NodeReplay, learns, loss_of, traced
from storage_ops.autochunk.cross_entropy.per_token import VIEWS, PerToken, fit, in_double
from storage_ops.autochunk.fx_graph.nodes import (
    hint,
    leading_to,
    numel,
    shape,
    short_name,
    values_of,
)
from storage_ops.autochunk.reasons import Conflict
from storage_ops.loss.call import arithmetic

# And the distance at which a comparison still matters.
_COMPARISONS = {"eq": 0, "ne": 0, "lt": 1, "le": 1, "gt": 1, "ge": 1}
_CHOOSING = {*_COMPARISONS, "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "relu"}
_MOST = 1 << 24  # most elements of a value that is drawn at random


class Reduction:
    """The part of a loss after its rows.

    Attributes:
        loss: the node of the loss in Dynamo's graph.
        leaves: other nodes of Dynamo's graph that the part reads.
        graph: the traced part. It takes `inputs`, the leaves and the rows. It returns `weight`, the
            tokens' weights, `total`, the loss, and the loss's gradient with respect to every row.
        label_smoothing, z_loss: options of the loss.
    """

    def __init__(self, per_token: PerToken):
        self.per_token, self.label_smoothing, self.z_loss = per_token, 0.0, 0.0
        loss_and_nodes = loss_of(per_token.forward)
        if loss_and_nodes is None:
            raise Conflict("does not lead to a loss")
        if len(per_token.targets) != 1 or any(t.entropy or t.detached for t in per_token.terms):
            raise Conflict("is not a sum of cross-entropy and squares of lse")
        self.loss, nodes = loss_and_nodes
        self.ends = NodeReplay(per_token.forward.gm.graph, nodes, per_token.forward.ends)
        self.between = self._between()
        inputs = per_token.forward.inputs
        own = [inputs[n] for n in self.between if n.op == "placeholder"]
        self.leaves = list(dict.fromkeys([*own, *self.ends.inputs]))
        for leaf in self.leaves:
            if learns(leaf):
                raise Conflict("needs a gradient", leaf)
        self.graph = self._trace()
        for node in self.graph.nodes:
            if is_product(node) or numel(node) > _MOST:
                raise Conflict("is too large to be computed from a value per token", node)
        self.inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        end: Any = next(n for n in self.graph.nodes if n.op == "output").args[0]
        self.weight: fx.Node = end[0]
        self.total: fx.Node = end[1]
        # Their sizes may be those of rows.
        sizes = [n for n in self.graph.nodes if short_name(n) == "sym_size"]
        read = leading_to([self.weight], dict.fromkeys(sizes, self.weight))
        if read & set(self.inputs[len(self.leaves) :]):
            raise Conflict("is not linear in the rows")

    def _between(self) -> list[fx.Node]:
        """Return the ATen nodes between rows and ends, and the nodes that they read, in order."""
        between: set[fx.Node] = set()
        stack = list(self.per_token.forward.values)
        while stack:
            node = stack.pop()
            if node not in between and node not in self.per_token.rows:
                between.add(node)
                stack += node.all_input_nodes
        if any(map(is_product, between)):
            raise Conflict("reads the size of the logits")
        return [n for n in self.per_token.forward.graph.nodes if n in between]

    def _trace(self) -> fx.Graph:
        per_token, forward = self.per_token, self.per_token.forward
        shares = [sum(t.nll) + per_token.vocabulary * t.spread for t in per_token.terms]

        def run(*values: Tensor) -> list[Tensor]:
            outer: dict[fx.Node, Any] = dict(zip(self.leaves, values, strict=False))
            rows = [row.detach().requires_grad_() for row in values[len(self.leaves) :]]
            inner: dict[fx.Node, Any] = dict(zip(per_token.rows, rows, strict=True))
            with torch.enable_grad():
                for node in self.between:
                    if node.op == "placeholder":
                        inner[node] = outer[forward.inputs[node]]
                    else:
                        args, kwargs = fx.map_arg((node.args, node.kwargs), inner.__getitem__)
                        inner[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                outer.update((e, inner[v]) for e, v in zip(forward.ends, forward.values,
                                                           strict=True))  # fmt: skip
                self.ends(outer)
                loss = outer[self.loss]
                pulled = torch.autograd.grad(loss, rows)
            flat = [p.reshape(-1) for p in pulled]
            parts = [p if share == 1 else p * share
                     for p, share in zip(flat, shares, strict=True) if share]  # fmt: skip
            weight = sum(parts[1:], start=parts[0])
            return [weight, loss.detach(), *flat]

        rows = [n.meta["val"].to(arithmetic(n.meta["val"].dtype)) for n in per_token.rows]
        return traced(run, [*(leaf.meta["example_value"] for leaf in self.leaves), *rows])

    @property
    def uniform(self) -> bool:
        """Return True if all tokens have the same weight."""
        node = self.weight
        while numel(node) > 1 and node.op == "call_function":
            per_token_inputs = [a for a in node.all_input_nodes if numel(a) > 1]
            if not per_token_inputs:
                return short_name(node) in ("expand", "full")
            if len(per_token_inputs) > 1 or short_name(node) not in (*VIEWS, "mul", "div", "neg"):
                return False
            node = per_token_inputs[0]
        return numel(node) == 1

    def fit(self) -> None:
        """Find smoothing and z-loss. Raise Conflict if the loss has another term."""
        run = fx.Interpreter(in_double(self.graph)).run
        # Enough draws for all kinds of tokens that the loss may distinguish.
        draws = 2 + 64 // max(numel(self.per_token.rows[0]), 1)
        fitted = [options for _ in range(draws) if (options := self._draw(run)) is not None]
        if not fitted:
            raise Conflict("has no weights")
        smoothing, z_loss = fitted[0]
        for other, square in fitted:
            if abs(smoothing - other) > 1e-6 * smoothing or abs(z_loss - square) > 1e-6 * z_loss:
                raise Conflict("has options that are not numbers")
        if not 0 <= smoothing <= 1 or z_loss < 0:
            raise Conflict("is not a loss")
        if (smoothing or z_loss) and self._chooses():
            raise Conflict("selects some of its tokens")
        self.label_smoothing, self.z_loss = smoothing, z_loss

    def _draw(self, run: Callable[..., Any]) -> tuple[float, float] | None:
        """Return smoothing and z-loss for random leaves and rows, or None if no token counts."""
        numbers = _literals(self.graph.nodes)
        leaves = [_drawn(leaf, numbers) for leaf in self.leaves]
        rows = [
            torch.rand([hint(s) for s in shape(row)]).double() + 0.5 for row in self.per_token.rows
        ]
        weight, loss, *pulled = run(*leaves, *rows)
        _, at_zero, *_ = run(*leaves, *(torch.zeros_like(row) for row in rows))
        if not weight.any() and not any(p.nan_to_num().any() for p in pulled):
            return None
        if not weight.any() or not weight.isfinite().all():
            raise Conflict("has weights of another kind")
        flat, terms = [row.flatten() for row in rows], self.per_token.terms
        spread, lse = (
            torch.stack([p * by for p, by in zip(pulled, each, strict=True)]).sum(0)
            for each in ([t.spread for t in terms], [t.lse for t in terms])
        )
        (smoothing,) = fit(spread * self.per_token.vocabulary, [weight])
        squared = [i for i, t in enumerate(terms) if t.is_lse]
        total = torch.zeros_like(loss)
        z_loss = 0.0
        if lse.norm() > 1e-9 * weight.norm():
            if len(squared) != 1:
                raise Conflict("has an lse that is not squared")
            values = flat[squared[0]]
            (z_loss,) = fit(lse, [2 * weight * values])
            pulled[squared[0]] = pulled[squared[0]] - z_loss * 2 * weight * values
            total = z_loss * (weight * values.square()).sum()
        total = total + torch.cat(pulled) @ torch.cat(flat)
        if not abs(loss - at_zero - total) <= 1e-6 * (abs(loss) + abs(total)):
            raise Conflict("returns another loss than the one that is differentiated")
        return smoothing, z_loss

    def _chooses(self) -> bool:
        """Return True if the loss selects tokens by floating-point numbers.

        All of a few random numbers might lie on the same side of a threshold.
        """
        tokens = numel(self.per_token.rows[0])
        return any(
            short_name(n) in _CHOOSING
            and numel(n) >= tokens
            and any(v.is_floating_point() for a in n.all_input_nodes for v in values_of(a))
            for n in self.graph.nodes
        )


def _literals(nodes: Iterable[fx.Node]) -> list[int]:
    """Return integers on both sides of the numbers that values are compared with."""
    literals = {0, 1}
    for node in nodes:
        margin = _COMPARISONS.get(short_name(node))
        if margin is not None and isinstance(node.args[1], int):
            literals |= set(range(node.args[1] - margin, node.args[1] + margin + 1))
    return sorted(literals)


def _drawn(node: fx.Node, numbers: list[int]) -> Any:
    """Return a random value for a leaf."""
    value = node.meta["example_value"]
    if not isinstance(value, Tensor):
        return hint(value)
    sizes = [hint(s) for s in value.shape]
    if value.dtype.is_floating_point:
        return torch.randn(sizes).double()
    if value.dtype == torch.bool:
        return torch.rand(sizes) < 0.5
    return torch.tensor(numbers)[torch.randint(len(numbers), sizes)].to(value.dtype)
