"""Cross-entropy of an output layer that is more than a weight and a bias.

LoRA's layer computes `x W^T + s (x A^T) B^T`. DoRA's also scales each class by a trained number and
a norm. A single product, with W + s B A or with all weights side by side, would need a copy of W.
It would also need a gradient of that size for the frozen weight. So the layer's own forward runs on
a *piece* of the tokens at a time, and again in the backward. That takes a product of tokens x D x V
in the forward, the same product again in the backward, and one for the gradient of the hidden
states. Products for A and B have the size of the rank.

W is neither copied nor rounded, and the layer computes the same for a token as before. The loss
uses the adapters and modes of the model's forward, even if they have changed since.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from storage_ops.loss.planning.budgets import bounded, most
from storage_ops.loss.planning.devices import rates_of
from storage_ops.loss.reference import reduced, results_of

_COPIES = 6  # float32 copies of a piece's logits in its backward: base, low rank, sum, softmax, ...


def _most(device: torch.device) -> int:
    """Return the largest default budget on a device."""
    return most(rates_of(device))


# Dynamo cannot trace the look-up. `torch.compiler.assume_constant_result` sets this attribute, but
# imports Dynamo, which takes a second.
_most._dynamo_marked_constant = True  # type: ignore[attr-defined]


def piece_rows(hidden: Tensor, classes: int, itemsize: int, budget: int | None) -> int:
    """Return the tokens of a piece of `hidden` whose backward fits a budget.

    None is a quarter of the logits, in the bounds of the op's default budget.
    """
    tokens = hidden.shape[0]
    if budget is None:
        budget = bounded(tokens * classes * itemsize // 4, _most(hidden.device))
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
    """Return the results of `linear_cross_entropy` for logits that are a function of hidden states.

    Args:
        form: maps hidden states of some tokens, (n, D), to their logits, (n, classes). Each token's
            logits must depend on its own hidden state alone. All other values that `form` reads
            must be as in the forward when it is called again.
        classes: V.
        hidden: (N, D).
        target: (N,) classes, or (N, V) distributions.
        weight, reduction, ignore_index, label_smoothing, token_weight, returns: as in
            `linear_cross_entropy`. returns may have "loss", "nll", "lse", "entropy", "argmax" and
            "correct".
        memory_budget: scratch memory of a piece in bytes. A piece has at least one token.

    Returns:
        The results in the order of `returns`.
    """

    def piece(
        weight: Tensor | None, hidden: Tensor, target: Tensor, token_weight: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        z = form(hidden)
        results, share = results_of(
            z.to(torch.promote_types(z.dtype, torch.float32)), target, returns, weight=weight,
            ignore_index=ignore_index, label_smoothing=label_smoothing, token_weight=token_weight,
        )  # fmt: skip
        return share, *(results[name] for name in returns)

    rows = piece_rows(hidden, classes, hidden.element_size(), memory_budget)
    rowwise = [hidden, target] if token_weight is None else [hidden, target, token_weight]
    parts = zip(*(t.split(rows) for t in rowwise), strict=True)
    # Arguments are saved tensors, so autograd detects modifications of them.
    pieces = [checkpoint(piece, weight, *part, use_reentrant=False) for part in parts]
    share, *values = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    results = dict(zip(returns, values, strict=True))
    if "loss" in results:
        results["loss"] = reduced(results["loss"], share, reduction)
    return tuple(results[name] for name in returns)
