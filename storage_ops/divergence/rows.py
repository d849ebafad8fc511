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

import torch
from torch import Tensor

# Stands for the logarithm of 0, so that 0 log 0 is 0, and what a divergence is infinite from.
LOG_ZERO, INFINITE = -1e37, 1e9
# Copies of a piece of rows that are alive at a time, in the arithmetic dtype, at most.
COPIES = 6


def piece_elements(cuda: bool) -> int:
    """Elements of a tile that are worked on at a time, or one row: copies stay in a CPU's cache."""
    return 1 << 23 if cuda else 1 << 17


def normalise(z: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of whole rows, and their log-sum-exp (rows, 1); `z` becomes the logarithms."""
    largest = z.amax(1, keepdim=True)
    p = z.sub_(largest).exp()
    total = p.sum(1, keepdim=True)
    p.div_(total)
    log_total = total.log_()
    z.sub_(log_total).clamp_(min=LOG_ZERO)
    return p, largest.add_(log_total)


def normalised(z: Tensor, lse: Tensor) -> Tensor:
    """Softmax of parts of rows whose log-sum-exp is known; `z` becomes the logarithms."""
    return z.sub_(lse).clamp_(min=LOG_ZERO).exp()


def values(
    divergence: str, beta: float, a: Tensor, b: Tensor, p: Tensor, q: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Value and center (rows,) of whole rows, and what `gradients` wants; all may be overwritten.

    Log-probabilities a, b and probabilities p, q: (rows, classes).
    """
    if divergence == "forward":
        value = b.sub_(a).mul_(q).sum(1)
        center, each = torch.zeros_like(value), q
    elif divergence == "reverse":
        each = a.sub_(b)
        value = center = torch.mul(p, each, out=b).sum(1)
    elif divergence == "jsd":
        log_m = _log_mixture(beta, p, q)
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
    divergence: str, beta: float, a: Tensor, b: Tensor, p: Tensor, q: Tensor
) -> Tensor:
    """What `gradients` wants, of parts of rows; all but p may be overwritten."""
    if divergence == "forward":
        return q
    if divergence == "reverse":
        return a.sub_(b)
    if divergence == "jsd":
        return a.sub_(_log_mixture(beta, p, q))
    return torch.sub(p, q, out=b).sign_().mul_(0.5)


def gradients(divergence: str, beta: float, p: Tensor, each: Tensor, center: Tensor) -> Tensor:
    """The gradient with respect to the logits; overwrites p or `each`."""
    if divergence == "forward":
        return p.sub_(each)
    each.sub_(center.unsqueeze(1)).mul_(p)
    return each.mul_(1 - beta) if divergence == "jsd" else each


def _log_mixture(beta: float, p: Tensor, q: Tensor) -> Tensor:
    mixture = p.mul(1 - beta).add_(q, alpha=beta)
    return mixture.clamp_(min=torch.finfo(p.dtype).tiny).log_()
