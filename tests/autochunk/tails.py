"""Pieces of which random functions of logits are built.

A tail has some pieces of LARGE, one of SMALL, some of AFTER and one of LAST. Every piece accepts
all shapes that the pieces before it return.
"""

import torch
from torch.nn import functional as F


def even(z):
    return z[..., : z.shape[-1] // 2 * 2]


def ramp(z, end=1.0):
    return torch.linspace(0, end, z.shape[-1]).to(z.dtype)


def classes(z):
    """Return a class for every row."""
    return torch.arange(z[..., 0].numel()) % z.shape[-1]


def rows(z):
    return z.reshape(-1, z.shape[-1])


def overwritten(z):
    z = z * 1
    z[..., 0] = 0
    return z


def picked(z):
    """Return the logit of each row's class, by two indices."""
    z = torch.log_softmax(rows(z), -1)
    return z[torch.arange(len(z)), classes(z)]


LARGE = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "clamp": lambda z: z.clamp(-1, 1),
    "softmax": lambda z: torch.softmax(z, -1),
    "log_softmax": lambda z: torch.log_softmax(z, -1),
    "scale": lambda z: z * 0.3 + 0.1,
    "center": lambda z: z - z.mean(-1, keepdim=True),
    "center across": lambda z: z - z.mean(-2, keepdim=True),
    "batch": lambda z: z + z.flip(0),
    "bias": lambda z: z + ramp(z),
    "mask": lambda z: z.masked_fill(torch.arange(z.shape[-1]) % 3 == 0, -2.0),
    "flat": rows,
    "sort": lambda z: z.sort(-1)[0],
    "pad": lambda z: F.pad(z, (1, 1)),
    "half": lambda z: z[..., : z.shape[-1] // 2],
    "stride": lambda z: z[..., ::2],
    "transpose": lambda z: z.transpose(0, 1),
    "cumsum": lambda z: z.cumsum(-1) * 0.05,
    "cumsum across": lambda z: z.cumsum(0),
    "cast": lambda z: z.to(torch.bfloat16).float(),
    "double": lambda z: z.double(),
    "split": lambda z: sum(even(z).split(z.shape[-1] // 2, -1)),
    "chunk and cat": lambda z: torch.cat(z.chunk(2, -1)[::-1], -1),
    "cat across": lambda z: torch.cat([z, z * 0.5], 0),
    "layer norm": lambda z: F.layer_norm(z, z.shape[-1:]),
    "var": lambda z: z / (z.var(-1, keepdim=True) + 1).sqrt(),
    "where": lambda z: torch.where(z > 0, z, z * 0.1),
    "roll": lambda z: z.roll(1, -1),
    "rows": lambda z: z[:-1],
    "einsum": lambda z: torch.einsum("...v,...v->...v", z, z),
    "columns": lambda z: z[..., torch.arange(0, z.shape[-1], 3)],
    "glu": lambda z: F.glu(even(z), -1),
    "cummax": lambda z: z.cummax(-1)[0],
    "overwrite": overwritten,
    "repeat": lambda z: z.repeat(*([1] * (z.dim() - 1)), 2),
    "product": lambda z: z @ torch.stack([ramp(z, 0.1)] * 24, 1),
    "with itself": lambda z: z @ z.transpose(-1, -2) * 0.05,
    "no gradient": lambda z: z * z.detach(),
}
SMALL = {
    "lse": lambda z: torch.logsumexp(z, -1),
    "sum": lambda z: z.square().sum(-1),
    "first": lambda z: z[..., 0],
    "max": lambda z: z.max(-1)[0],
    "median": lambda z: z.median(-1)[0],
    "norm": lambda z: z.norm(dim=-1),
    "top": lambda z: z.topk(min(3, z.shape[-1]), -1)[0].sum(-1),
    "gather": lambda z: z.gather(-1, z.argmax(-1, keepdim=True))[..., 0],
    "picked": picked,
    "entropy": lambda z: -(torch.softmax(z, -1) * torch.log_softmax(z, -1)).sum(-1),
    "cross entropy": lambda z: F.cross_entropy(
        rows(z), classes(z), reduction="none", label_smoothing=0.1
    ),
    "binary": lambda z: F.binary_cross_entropy_with_logits(
        z, torch.zeros_like(z), reduction="none"
    ).mean(-1),
    "columns": lambda z: rows(z).square().mean(0),
    "product": lambda z: rows(z) @ ramp(z),
}
AFTER = {
    "square": torch.square,
    "sigmoid": torch.sigmoid,
    "sum": lambda v: v.sum(-1, keepdim=True),
    "shift": lambda v: v[1:] - v[:-1] if len(v) > 1 else v,
    "log": lambda v: torch.log1p(v.abs()),
    "cumsum": lambda v: v.cumsum(0),
    "sort": lambda v: v.sort(0)[0],
    "softmax": lambda v: torch.softmax(v, 0),
    "chunk": lambda v: v.chunk(2, 0)[0],
    "weight": lambda v: v * torch.linspace(0, 1, v.numel()).view(v.shape),
    "center": lambda v: v - v.mean(),
    "no gradient": lambda v: v * v.detach(),
}
LAST = {
    "mean": torch.mean,
    "sum": torch.sum,
    "root": lambda v: (v.square().mean() + 1e-3).sqrt(),
    "ratio": lambda v: v.sum() / (1 + v.detach().abs().sum()),
    "masked": lambda v: (v * (v.detach() > 0)).sum() / (v.detach() > 0).sum().clamp(min=1),
    "all": lambda v: v,
    "with another": lambda v: (v.sum(), v.detach() * 2),
    "two": lambda v: (v.sum(), v.square().mean()),
}
HEADS = {
    "linear": F.linear,
    "bias": lambda x, w: F.linear(x, w, w[:, 0]),
    "einsum": lambda x, w: torch.einsum("btd,vd->btv", x, w),
    "heads": lambda x, w: torch.bmm(
        x.reshape(2, -1, x.shape[-1]), w.view(2, -1, w.shape[-1]).transpose(1, 2)
    ),
    "two": lambda x, w: F.linear(x, w) + F.linear(x * x, w * 0.5),
    "tied": lambda x, w: F.linear(x + w[: x.shape[1]], w),
    "turned": lambda x, w: (w @ x.flatten(0, 1).t()).t(),
    "halves": lambda x, w: torch.cat([F.linear(x, h) for h in w.chunk(2)], -1),
}
