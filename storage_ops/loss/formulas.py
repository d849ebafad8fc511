"""The formulas of linear cross-entropy for each token, before and after its tiles of logits.

A token has the logits z, lse = log sum exp z, the target t and the weight a. The V classes have the
weights w, and e is the label smoothing:

    loss = a * ((1 - e) w_t (lse - z_t) + e/V sum_j w_j (lse - z_j) + z_loss * lse^2)

and with a distribution q as target, q' = (1 - e) q + e/V:

    loss = a * (sum_j w_j q'_j (lse - z_j) + z_loss * lse^2)

The mean divides the sum over the tokens that are not ignored by the sum of a * w_t, or of a for
distributions. This is torch's definition for class weights, extended to token weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from storage_ops.loss.call import Call, arithmetic
from storage_ops.loss.engine.tokens import Tokens


def denominator(tokens: Tokens, call: Call) -> Tensor:
    """Return the number that divides the sum; 0-dimensional, on the device."""
    dtype = arithmetic(tokens.x.dtype)
    if call.divisor is not None:
        return call.divisor.to(dtype)
    if tokens.probabilities:
        if tokens.token_weight is not None:
            return tokens.token_weight.sum()
        return torch.full((), tokens.count, dtype=dtype, device=tokens.x.device)
    valid = tokens.target != call.ignore_index
    weights = valid.to(dtype) if tokens.target_weight is None else tokens.target_weight
    if tokens.token_weight is not None:
        weights = weights * tokens.token_weight
    return torch.where(valid, weights, 0).sum()


def total_weight(
    target: Tensor, class_dim: int, class_weight: Tensor | None, token_weight: Tensor | None,
    ignore_index: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the divisor of a mean, for targets in any shape.

    Distributions have a dimension of classes. Calls that consist of several smaller ones use this
    function, because each smaller call knows only some of the tokens.
    """
    if target.is_floating_point():
        weights = torch.ones_like(target.select(class_dim, 0), dtype=dtype)
    else:
        valid = target != ignore_index
        weights = valid.to(dtype)
        if class_weight is not None:
            classes = torch.where(valid, target, 0).long().clamp(0, class_weight.shape[0] - 1)
            weights = weights * class_weight.to(dtype)[classes]
    return (weights if token_weight is None else weights * token_weight.to(dtype)).sum()


def scale_of(tokens: Tokens, call: Call) -> Tensor:
    """Return the gradient of a reduced loss with respect to each token's loss; 0 where ignored."""
    if not call.divides:
        return torch.ones((), dtype=arithmetic(tokens.x.dtype), device=tokens.x.device)
    total = denominator(tokens, call)
    return torch.where(total == 0, 0, total.reciprocal())


def upstream_of(
    tokens: Tokens,
    call: Call,
    loss: Tensor | None,
    nll: Tensor | None = None,
    lse: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Tensor:
    """Return the upstream gradients of the row kernel: target, spread, lse, entropy, square.

    The arguments are gradients with respect to each token's reduced loss, nll, lse and entropy,
    0-dimensional or (n,).
    """
    zero = torch.zeros((), dtype=arithmetic(tokens.x.dtype), device=tokens.x.device)
    loss = zero if loss is None else loss
    if tokens.token_weight is not None:
        loss = loss * tokens.token_weight
    target: Tensor | None = None
    spread: Tensor | None = None
    if tokens.probabilities:
        spread = loss if nll is None else loss + nll
    else:
        target = loss if tokens.target_weight is None else loss * tokens.target_weight
        if call.label_smoothing:
            target, spread = target * (1 - call.label_smoothing), loss
        target = target if nll is None else target + nll
    square = 2 * call.z_loss * loss if call.z_loss else None
    rows = [target, spread, lse, entropy, square]
    while len(rows) > 1 and rows[-1] is None:  # the kernel takes missing rows as zeros
        rows.pop()
    filled = [zero if row is None else row for row in rows]
    wide = next((len(row) for row in filled if row.dim()), 1)
    return torch.stack([row.expand(wide) for row in filled])


@dataclass
class Outputs:
    """Per-token results (n,), from the finished state of the rows.

    Attributes:
        nll: the cross-entropy.
        loss: the loss, multiplied by the token's weight and not reduced.
    """

    nll: Tensor
    loss: Tensor

    @staticmethod
    def of(tokens: Tokens, call: Call, state: Tensor) -> Outputs:
        """Compute loss and nll. The state of ignored rows makes both 0."""
        shift, total, _, dot, mass, logit = state.unbind(0)
        log_sum = total.log()
        if tokens.probabilities:
            loss = nll = mass * log_sum - dot
        else:
            loss = nll = log_sum + (shift - logit)
            if tokens.target_weight is not None:
                loss = loss * tokens.target_weight
            if call.label_smoothing:
                loss = loss * (1 - call.label_smoothing) + (mass * log_sum - dot)
        if call.z_loss:
            loss = loss + call.z_loss * Outputs.lse_of(state).square()
        if tokens.token_weight is not None:
            loss = torch.where(tokens.token_weight == 0, 0, loss * tokens.token_weight)
        if tokens.broken is not None:
            loss = torch.where(tokens.broken, float("nan"), loss)
        return Outputs(nll, loss)

    @staticmethod
    def lse_of(state: Tensor) -> Tensor:
        """Return the log-sum-exp of each row; 0 for ignored rows."""
        shift, total, *_ = state.unbind(0)
        # A row with an infinite logit has a nan sum, but its log-sum-exp is infinite.
        return torch.where(shift == float("inf"), shift, shift + total.log())

    @staticmethod
    def entropy_of(state: Tensor) -> Tensor:
        """Return the entropy of each row's softmax, in nats."""
        _, total, slope, *_ = state.unbind(0)
        return total.log() - slope / total


def reduce(loss: Tensor, tokens: Tokens, call: Call) -> Tensor:
    """Return the loss for the caller, with the call's reduction."""
    if call.reduction == "none":
        return tokens.spread(loss)
    return loss.sum() / denominator(tokens, call) if call.divides else loss.sum()
