"""Cross-entropy of an output layer that is more than a weight and a bias.

LoRA's layer forms `x W^T + s (x A^T) B^T`, DoRA's scales each class of that by a trained number and
a norm. One product with the weights side by side, or with W + s B A, would need a copy of W and a
gradient of its size, for a weight that is frozen. So the layer's own forward runs, on a *piece* of
the tokens at a time, and again in the backward: two products of tokens x D x V forward and again,
one for the gradient of the hidden states, and products of the rank for A and B. W is neither copied
nor rounded, and what the layer does to a token is exactly what it did before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from storage_ops.loss.planner import bounded

_COPIES = 6  # of a piece's logits in float32, in its backward: base, low rank, sum, softmax, ...


def piece_rows(tokens: int, classes: int, itemsize: int, budget: int | None) -> int:
    """Tokens of a piece whose backward keeps to a budget; None: to the default one of the op."""
    if budget is None:
        budget = bounded(tokens * classes * itemsize // 4)
    return max(1, min(tokens, budget // (classes * max(itemsize, 4) * _COPIES)))


def head_cross_entropy(
    form: Callable[[Tensor], Tensor],
    classes: int,
    hidden: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    token_weight: Tensor | None,
    returns: tuple[str, ...],
    memory_budget: int | None,
) -> tuple[Tensor, ...]:
    """What `linear_cross_entropy` returns, of logits that are a function of the hidden states.

    Args:
        form: hidden states of some tokens, (n, D), to their logits, (n, classes); each token's
            must depend on its own hidden state alone.
        classes: V.
        hidden: (N, D).
        target: (N,) classes, or (N, V) distributions.
        weight, reduction, ignore_index, label_smoothing, token_weight, returns: as there; returns
            from "loss", "nll", "lse", "entropy", "argmax" and "correct".
        memory_budget: scratch memory of a piece in bytes; one token takes what it takes.

    Returns:
        The results in the order of `returns`.
    """
    dense = target.is_floating_point()
    keywords: dict[str, Any] = {"reduction": "none", "ignore_index": ignore_index}

    def piece(hidden: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        z = form(hidden)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        valid = None if dense else target != ignore_index
        found = []
        for name in returns:
            if name == "loss":
                smoothed: dict[str, Any] = {
                    "weight": weight,
                    "label_smoothing": label_smoothing,
                    **keywords,
                }
                found.append(F.cross_entropy(z, target, **smoothed))
            elif name == "nll":
                found.append(F.cross_entropy(z, target, **keywords))
            elif name == "lse":
                found.append(_where(valid, z.logsumexp(-1), 0))
            elif name == "entropy":
                logp = z.log_softmax(-1)
                found.append(_where(valid, -(logp.exp() * logp.clamp_min(-1e30)).sum(-1), 0))
            elif name == "argmax":
                found.append(_where(valid, z.argmax(-1), -1))
            else:
                right = target.argmax(-1) if dense else target
                found.append(_where(valid, z.argmax(-1) == right, False))
        return tuple(found)

    rows = piece_rows(hidden.shape[0], classes, hidden.element_size(), memory_budget)
    parts = zip(hidden.split(rows), target.split(rows), strict=True)
    pieces = [checkpoint(piece, h, t, use_reentrant=False) for h, t in parts]
    results = dict(zip(returns, (torch.cat(values) for values in zip(*pieces, strict=True)),
                       strict=True))  # fmt: skip
    results["loss"] = _reduced(
        results["loss"], target, weight, reduction, ignore_index, token_weight
    )
    return tuple(results[name] for name in returns)


def _where(valid: Tensor | None, value: Tensor, other: Any) -> Tensor:
    """The value of tokens that are not ignored, of the others a constant."""
    return value if valid is None else torch.where(valid, value, other)


def _reduced(
    each: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    token_weight: Tensor | None,
) -> Tensor:
    if token_weight is not None:
        each = each * token_weight
    if reduction == "none":
        return each
    if reduction == "sum":
        return each.sum()
    share = torch.ones_like(each) if token_weight is None else token_weight.to(each.dtype)
    if not target.is_floating_point():
        valid = target != ignore_index
        if weight is not None:
            share = share * weight[torch.where(valid, target, 0)]
        share = torch.where(valid, share, 0)
    return each.sum() / share.sum()
