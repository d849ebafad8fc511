"""The loss gathers and scatters a sequence that is sharded over the ranks of a vocabulary."""

import pytest
import torch
import torch.distributed as dist

import storage_ops as so
from storage_ops.loss import reference

from ..ranks import assert_same, run_on_ranks

WORLD, VOCAB, HIDDEN = 3, 50, 8  # slices of 17, 17 and 16 classes
SHAPES = [((12,), 0), ((2, 6), 1), ((6, 2), 0), ((2, 3, 2), 1)]
OPTIONS = [
    {},
    {"reduction": "none", "shift": True},
    {"shift": True, "token_weight": True, "reduction": "sum", "softcap": 3.0},
    {"returns": ("nll", "lse", "entropy", "argmax")},
    {"memory_budget": 4_000, "label_smoothing": 0.1},
]


def total(result):
    parts = result[:3] if isinstance(result, tuple) else (result,)
    return sum(((i + 1.5) * part.double()).sum() for i, part in enumerate(parts))


def compare(rank, shape, dim, dtype, options, ignore, call=so.linear_cross_entropy):
    x, w = torch.randn(*shape, HIDDEN).to(dtype), torch.randn(VOCAB, HIDDEN).to(dtype)
    target, options = torch.randint(VOCAB, shape), dict(options)
    if ignore:
        target[torch.rand(shape) < 0.4] = -100
        target.view(-1)[:2] = 1
    if "token_weight" in options:
        options["token_weight"] = torch.rand(shape)
    mine = x.chunk(WORLD, dim)[rank].clone().requires_grad_()
    part = w.tensor_split(WORLD)[rank].clone().requires_grad_()
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    ours = call(
        mine, part, target, process_group=dist.group.WORLD, input_grad="reduce_scatter", **options
    )
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    right = reference.linear_cross_entropy(x, w, target, **wide)
    for o, r in zip(*((v if isinstance(v, tuple) else (v,)) for v in (ours, right)), strict=True):
        assert_same(o, r, dtype if o.is_floating_point() else None)
    total(ours).backward()
    total(right).backward()
    assert_same(mine.grad, x.grad.chunk(WORLD, dim)[rank], dtype)
    assert_same(part.grad, w.grad.tensor_split(WORLD)[rank], dtype)
    assert mine.grad.untyped_storage().nbytes() == mine.nbytes  # no memory of other ranks' tokens


def work(rank):
    for shape, dim in SHAPES:
        for ignore in (False, True):
            for options in OPTIONS:
                compare(rank, shape, dim, torch.float64, options, ignore)
            compare(rank, shape, dim, torch.bfloat16, {}, ignore)


def compiled(rank):
    for options in ({}, {"reduction": "none"}):
        for dynamic in (False, True):
            torch._dynamo.reset()
            # This call shows the ranks that one of them has fewer classes.
            compare(rank, (2, 6), 1, torch.float32, options, True)
            call = torch.compile(so.linear_cross_entropy, fullgraph=True, dynamic=dynamic)
            compare(rank, (2, 6), 1, torch.float32, options, True, call)


def errors(rank):
    w, group = torch.randn(20, HIDDEN), dist.group.WORLD
    options = {"process_group": group, "input_grad": "reduce_scatter"}
    for shape in ((2, 4), (4, 12), (2, 12, 1)):
        x, target = torch.randn(2, 4, HIDDEN), torch.zeros(shape, dtype=torch.long)
        with pytest.raises(ValueError, match="linear_cross_entropy: `target` has shape"):
            so.linear_cross_entropy(x, w, target, **options)
    with pytest.raises(TypeError, match="class indices with input_grad"):
        so.linear_cross_entropy(x, w, torch.rand(2, 12, 20), **options)


needs_distributed = pytest.mark.skipif(not dist.is_available(), reason="torch has no distributed")


@pytest.mark.in_turn
@needs_distributed
def test_every_rank_gets_the_gradient_of_its_tokens():
    run_on_ranks(work, WORLD)


@pytest.mark.slow
@needs_distributed
def test_the_compiled_loss_is_equal():
    run_on_ranks(compiled, WORLD)


@needs_distributed
def test_errors_name_sizes_that_do_not_match():
    run_on_ranks(errors, WORLD)
