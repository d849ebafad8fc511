"""Divergences of rows of log-probabilities, and their gradients, in plain torch and in place.

With p the student's distribution, q the teacher's, a = log p, b = log q and m = beta q +
(1 - beta) p, the value of a row, its gradient with respect to the student's logits, and the center:

    forward  sum q (b - a);  p - q;  0
    reverse  sum p (a - b);  p (a - b - center);  the value
    jsd      beta sum q (b - log m) + (1 - beta) sum p (a - log m);
             (1 - beta) p (a - log m - center);  sum p (a - log m)
    tvd      1/2 sum |p - q|;  p (s - center);  sum p s

where s = sign(p - q) / 2. A class of probability 0 contributes 0 to a sum that it weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from storage_ops.loss.cost import STATE_ROWS
from storage_ops.loss.schedule import UPDATE

_OPS = torch.ops.storage_ops

# Stands for the logarithm of 0, so that 0 log 0 is 0, and what a divergence is infinite from.
LOG_ZERO, INFINITE = -1e37, 1e9
LOG2_E = 1 / math.log(2)
# Copies of a piece of rows that are alive at a time, in the arithmetic dtype: what is in 16 bits
# of both heads, both distributions, and one more; of a stored teacher one, and what torch takes.
COPIES = 5


def piece_elements(cuda: bool) -> int:
    """Elements of a tile that are worked on at a time, or one row: copies stay in a CPU's cache."""
    return 1 << 23 if cuda else 1 << 17


def log_sum_exp(z: Tensor) -> Tensor:
    """(rows,), by the row kernel of cross-entropy, which reads `z` once."""
    state = z.new_zeros(STATE_ROWS, len(z))
    target = torch.zeros(len(z), dtype=torch.int64, device=z.device)  # any class
    _OPS._cross_entropy_rows(
        z, target, None, None, None, state, None, 0, z.shape[1], -1, 0.0, 1.0, 0.0, UPDATE
    )
    return state[0] + state[1].log()


def normalise(z: Tensor, lse: Tensor, out: Tensor) -> Tensor:
    """Softmax of rows or parts of them, given their log-sum-exp; `z` becomes the logarithms."""
    z.sub_(lse).clamp_(min=LOG_ZERO)
    if z.dtype == torch.float32 and z.device.type == "cpu":
        # Four times as fast on a processor whose maker is not Intel; the error is that of rounding
        # the logarithm once more, as on a GPU.
        return torch.mul(z, LOG2_E, out=out).exp2_()
    return torch.exp(z, out=out)


def values(
    divergence: str, beta: float, a: Tensor, b: Tensor, p: Tensor, q: Tensor, spare: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Value and center (rows,) of whole rows, and what `gradients` wants; overwrites all but p.

    Log-probabilities a, b, probabilities p, q and spare memory: (rows, classes).
    """
    if divergence == "forward":
        value = b.sub_(a).mul_(q).sum(1)
        center, each = torch.zeros_like(value), q
    elif divergence == "reverse":
        each = a.sub_(b)
        value = center = torch.mul(p, each, out=b).sum(1)
    elif divergence == "jsd":
        log_m = _log_mixture(beta, p, q, spare)
        of_teacher = b.sub_(log_m).mul_(q).sum(1)
        each = a.sub_(log_m)
        center = torch.mul(p, each, out=log_m).sum(1)
        value = beta * of_teacher + (1 - beta) * center
    else:
        difference = torch.sub(p, q, out=b)
        value = torch.abs(difference, out=q).sum(1).mul_(0.5)
        each = difference.sign_().mul_(0.5)
        center = torch.mul(p, each, out=q).sum(1)
    return value.masked_fill(value > INFINITE, torch.inf), center, each


def contributions(
    divergence: str, beta: float, a: Tensor, b: Tensor, p: Tensor, q: Tensor, spare: Tensor
) -> Tensor:
    """What `gradients` wants, of parts of rows; overwrites all but p."""
    if divergence == "forward":
        return q
    if divergence == "reverse":
        return a.sub_(b)
    if divergence == "jsd":
        return a.sub_(_log_mixture(beta, p, q, spare))
    return torch.sub(p, q, out=b).sign_().mul_(0.5)


def gradients(divergence: str, beta: float, p: Tensor, each: Tensor, center: Tensor) -> Tensor:
    """The gradient with respect to the logits; overwrites p or `each`."""
    if divergence == "forward":
        return p.sub_(each)
    each.sub_(center.unsqueeze(1)).mul_(p)
    return each.mul_(1 - beta) if divergence == "jsd" else each


def _log_mixture(beta: float, p: Tensor, q: Tensor, out: Tensor) -> Tensor:
    mixture = torch.mul(p, 1 - beta, out=out).add_(q, alpha=beta)
    return mixture.clamp_(min=torch.finfo(p.dtype).tiny).log_()
