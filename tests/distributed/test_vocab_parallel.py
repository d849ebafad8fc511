"""Linear cross-entropy with slices of the vocabulary on three gloo ranks equals the whole."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

import storage_ops as so
from storage_ops.loss import reference
from storage_ops.loss.planning import planner
from storage_ops.loss.planning.problem import Problem
from storage_ops.matmul.aten import Aten

from ..ranks import assert_same, run_on_ranks

WORLD, VOCAB, HIDDEN = 3, 66, 8
PART = Problem(18, HIDDEN, VOCAB // WORLD, Aten(4))
OPTIONS = [
    {},
    {"weight": True, "label_smoothing": 0.1},
    {"softcap": 3.0, "z_loss": 0.1, "logit_scale": 2.0},
    {"shift": True, "token_weight": True, "reduction": "sum"},
    {"returns": ("nll", "lse", "entropy", "argmax")},
    {"reduction": "none", "weight": True},
    {"memory_budget": 9_000},
    {"plan": planner.make(planner.schedule(PART, "token-chunked", 7, 10))},
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
    slices, whole = ([x.clone(), w[s].clone(), b[s].clone()] for s in (mine, slice(None)))
    for t in (*slices, *whole):
        t.requires_grad_()
    ours = so.linear_cross_entropy(
        slices[0], slices[1], target, linear_bias=slices[2] if bias else None,
        weight=None if classes is None else classes[mine], process_group=dist.group.WORLD,
        **options,
    )  # fmt: skip
    whole = [t.detach().double().requires_grad_() for t in whole]
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    right = reference.linear_cross_entropy(
        whole[0],
        whole[1],
        target,
        linear_bias=whole[2] if bias else None,
        weight=None if classes is None else classes.double(),
        **wide,
    )
    for o, r in zip(*((v if isinstance(v, tuple) else (v,)) for v in (ours, right)), strict=True):
        assert_same(o, r)
    total(ours).backward()
    total(right).backward()
    for a, e, part in zip(slices[: 2 + bias], whole, (slice(None), mine, mine), strict=False):
        assert_same(a.grad, e.grad[part])


def infinite_and_nan(rank):
    """The logits of one class are infinite. Those of another class, on a later rank, are nan."""
    x, target = torch.randn(4, HIDDEN), torch.tensor([0, 30, -100, 60])
    w, b, part = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB), VOCAB // WORLD
    for large, nan in ((5, 50), (50, 5), (30, 31), (31, 30)):
        b[:] = 0
        b[large], b[nan] = torch.inf, torch.nan
        for only in (large, None):
            bias = b if only is None else b.nan_to_num(0.0, torch.inf)
            mine = slice(rank * part, (rank + 1) * part)
            options = {"returns": ("lse", "argmax"), "reduction": "none"}
            lse, argmax = so.linear_cross_entropy(
                x,
                w[mine],
                target,
                linear_bias=bias[mine],
                process_group=dist.group.WORLD,
                **options,
            )
            logits = x @ w.T + bias
            right, kept = logits.argmax(1), target != -100
            assert torch.equal(argmax[kept], right[kept])
            assert lse[kept].isnan().all() if only is None else (lse[kept] == torch.inf).all()


def work(rank):
    for dtype in (torch.float64, torch.float32):
        for options in OPTIONS:
            for bias in (False, True):
                compare(rank, dtype, options, bias)


@pytest.mark.in_turn
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_a_nan_is_above_an_infinite_logit_on_any_ranks():
    run_on_ranks(infinite_and_nan, WORLD)


@pytest.mark.in_turn
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_every_rank_returns_the_loss_and_its_part_of_the_gradients():
    run_on_ranks(work, WORLD)


def copies(rank):
    """Copy and pickle a module with a group."""
    whole = so.LinearCrossEntropyLoss(HIDDEN, VOCAB, label_smoothing=0.1)
    alone, _ = dist.new_subgroups(1)
    x, target = torch.randn(5, HIDDEN), torch.randint(VOCAB, (5,))
    for group in (dist.group.WORLD, alone):
        size = group.size()
        mine = torch.arange(VOCAB).chunk(size)[rank % size]
        head = so.LinearCrossEntropyLoss(
            HIDDEN, VOCAB // size, label_smoothing=0.1, process_group=group
        )
        head.load_state_dict({"linear.weight": whole.linear.weight[mine]})
        for copied in (head, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
            copied.zero_grad()
            copied(x, target).backward()
            whole.zero_grad()
            whole(x, target).backward()
            torch.testing.assert_close(copied(x, target), whole(x, target))
            torch.testing.assert_close(copied.linear.weight.grad, whole.linear.weight.grad[mine])
        assert group.group_name in repr(head)


@pytest.mark.in_turn
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_a_module_with_a_group_can_be_copied():
    run_on_ranks(copies, WORLD)
