"""Linear cross-entropy with slices of the vocabulary on three gloo ranks equals the whole."""

import pytest
import torch
import torch.distributed as dist

import storage_ops as so
from storage_ops.ops import loss_reference as reference
from storage_ops.ops import planner

from ..ranks import run_on_ranks

WORLD, VOCAB, HIDDEN = 3, 66, 8
OPTIONS = [
    {},
    {"weight": True, "label_smoothing": 0.1},
    {"softcap": 3.0, "z_loss": 0.1, "logit_scale": 2.0},
    {"shift": True, "token_weight": True, "reduction": "sum"},
    {"returns": ("nll", "lse", "entropy", "argmax")},
    {"reduction": "none", "weight": True},
    {"memory_budget": 9_000},
    {"plan": planner.make(planner.Problem(18, HIDDEN, VOCAB // WORLD, 4), "token-chunked", 7, 10)},
]


def total(result):
    parts = result[:3] if isinstance(result, tuple) else (result,)
    return sum((i + 1.5) * part.double().sum() for i, part in enumerate(parts))


def compare(rank, dtype, options, bias):
    mine = slice(rank * VOCAB // WORLD, (rank + 1) * VOCAB // WORLD)
    x, w = torch.randn(2, 9, HIDDEN).to(dtype), torch.randn(VOCAB, HIDDEN).to(dtype)
    b, target = torch.randn(VOCAB).to(dtype), torch.randint(VOCAB, (2, 9))
    target[0, 3] = -100
    options = dict(options)
    if "token_weight" in options:
        options["token_weight"] = torch.rand(2, 9)
    classes = torch.rand(VOCAB) if options.pop("weight", False) else None
    here, whole = ([x.clone(), w[s].clone(), b[s].clone()] for s in (mine, slice(None)))
    for t in (*here, *whole):
        t.requires_grad_()
    ours = so.linear_cross_entropy(
        here[0], here[1], target, linear_bias=here[2] if bias else None,
        weight=None if classes is None else classes[mine], process_group=dist.group.WORLD,
        **options,
    )  # fmt: skip
    right = reference.linear_cross_entropy(
        whole[0],
        whole[1],
        target,
        linear_bias=whole[2] if bias else None,
        weight=classes,
        **options,
    )
    for o, r in zip(*((v if isinstance(v, tuple) else (v,)) for v in (ours, right)), strict=True):
        torch.testing.assert_close(o, r, check_dtype=False)
    total(ours).backward()
    total(right).backward()
    for a, e, part in zip(here[: 2 + bias], whole, (slice(None), mine, mine), strict=False):
        torch.testing.assert_close(a.grad, e.grad[part], rtol=1e-4, atol=1e-5)


def work(rank):
    for dtype in (torch.float64, torch.float32):
        for options in OPTIONS:
            for bias in (False, True):
                compare(rank, dtype, options, bias)


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_every_rank_has_the_loss_and_its_part_of_the_gradients():
    run_on_ranks(work, WORLD)
