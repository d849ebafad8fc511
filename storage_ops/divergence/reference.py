"""The divergence of two heads in plain torch: the definition, with all logits in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _weighted(weight: Tensor, z: Tensor) -> Tensor:
    """Return weight * z, but 0 for a weight of 0 even when z is infinite."""
    return torch.where(weight == 0, 0, weight * torch.where(weight == 0, 0, z))


def _coarse(log_q: Tensor, log_p: Tensor, ids: Tensor, tail: str) -> tuple[Tensor, Tensor]:
    """Return both heads over the classes of a stored teacher, and one class for the rest."""
    known = log_q.gather(-1, ids)
    if tail == "renormalize":
        return known.log_softmax(-1), log_p.log_softmax(-1)
    others = torch.ones_like(log_q).scatter(-1, ids, 0).bool()
    rest = torch.where(others, log_q, -torch.inf).logsumexp(-1, keepdim=True)
    left = (1 - log_p.exp().sum(-1, keepdim=True)).clamp_min(0).log()
    return torch.cat([known, rest], -1), torch.cat([log_p, left], -1)


def linear_kl_div(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    divergence: str = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    scale_by_temperature: bool = False,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    shift: bool = False,
    teacher_topk: tuple[Tensor, Tensor] | None = None,
    teacher_tail: str = "bucket",
    valid_classes: int | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    target: Tensor | None = None,
    target_weight: float = 1.0,
    **memory: Any,
) -> Tensor:
    """See `storage_ops.linear_kl_div`. Options that only affect memory are accepted and ignored."""

    def logits(x: Tensor, w: Tensor, b: Tensor | None, cap: float | None) -> Tensor:
        z = F.linear(x, w, b)[..., :valid_classes]
        return z if cap is None else cap * torch.tanh(z / cap)

    z = t = logits(input, linear_weight, linear_bias, softcap)
    a = F.log_softmax(z / temperature, -1)
    if teacher_topk is not None:
        a, b = _coarse(a, teacher_topk[0].to(a), teacher_topk[1].long(), teacher_tail)
    else:
        assert teacher_input is not None and teacher_weight is not None
        b = t = logits(teacher_input, teacher_weight, teacher_bias, teacher_softcap)
        b = F.log_softmax(b / temperature, -1).to(a)
    b = b.detach()
    q, p = a.exp(), b.exp()
    if divergence == "jsd" and beta in (0, 1):
        divergence = "reverse" if beta else "forward"
    if divergence == "forward":
        values = _weighted(p, b - a)
    elif divergence == "reverse":
        values = _weighted(q, a - b)
    elif divergence == "jsd":
        m = (beta * p + (1 - beta) * q).log()
        values = beta * _weighted(p, b - m) + (1 - beta) * _weighted(q, a - m)
    elif divergence == "tvd":
        values = (p - q).abs() / 2
    else:
        values = (1 - F.cosine_similarity(z, t.to(z).detach(), dim=-1)).unsqueeze(-1)
    loss = values.sum(-1)
    weight = torch.ones_like(loss) if token_weight is None else token_weight.to(loss)
    if target is not None:
        target = target.long()
        weight = torch.where(target == -100, 0, weight)
        before = z.roll(1, -2) if shift else z  # the logits of the token that predicts each target
        nll = -F.log_softmax(before, -1).gather(-1, target.clamp_min(0)[..., None])[..., 0]
        nll = nll.roll(-1, -1) if shift else nll
        loss = loss + target_weight / (temperature**2 if scale_by_temperature else 1) * nll
    if shift:
        loss, weight = loss[..., :-1], weight[..., 1:]
    loss = torch.where(weight == 0, 0, loss * weight)
    if reduction != "none":
        loss = loss.sum() / (weight.sum() if reduction == "mean" else 1)
    return loss * temperature**2 if scale_by_temperature else loss
