"""`gradient_tolerance` with slices of the vocabulary on ranks: the bound is that of the sum."""

import torch
import torch.distributed as dist

import storage_ops

from ..loss.test_gradient_tolerance import peaked, relative
from ..ranks import run_on_ranks

CLASSES, TOLERANCE = 6000, 0.1


def compare(rank):
    world = dist.get_world_size()
    x, w, target = peaked(300, 256, CLASSES)
    mine = slice(rank * CLASSES // world, (rank + 1) * CLASSES // world)
    part = w.detach()[mine].clone().requires_grad_()
    loss, dropped = storage_ops.linear_cross_entropy(
        x, part, target, gradient_tolerance=TOLERANCE, returns=("loss", "dropped"),
        process_group=dist.group.WORLD,
    )  # fmt: skip
    ours = torch.autograd.grad(loss, (x, part))
    exact = storage_ops.linear_cross_entropy(x, w, target)
    expected = torch.autograd.grad(exact, (x, w))
    torch.testing.assert_close(loss, exact)
    assert 0 < dropped.max() <= TOLERANCE
    assert 0 < relative(ours[0], expected[0]) < TOLERANCE
    assert relative(ours[1], expected[1][mine]) < TOLERANCE
    seen = [torch.empty_like(dropped) for _ in range(world)]
    dist.all_gather(seen, dropped)
    assert all(other.equal(dropped) for other in seen)


def test_slices_of_the_vocabulary():
    run_on_ranks(compare, 2)


def compare_divergences(rank):
    world = dist.get_world_size()
    x, w, _ = peaked(300, 256, CLASSES)
    teacher, head = (t.detach() + 0.1 * torch.randn_like(t) for t in (x, w))
    mine = slice(rank * CLASSES // world, (rank + 1) * CLASSES // world)
    part = w.detach()[mine].clone().requires_grad_()
    loss = storage_ops.linear_kl_div(
        x, part, teacher, head[mine], gradient_tolerance=TOLERANCE, reduction="sum",
        process_group=dist.group.WORLD,
    )  # fmt: skip
    ours = torch.autograd.grad(loss, (x, part))
    exact = storage_ops.linear_kl_div(x, w, teacher, head, reduction="sum")
    expected = torch.autograd.grad(exact, (x, w))
    torch.testing.assert_close(loss, exact)
    far = (ours[0] - expected[0]).norm(dim=1)
    assert 0 < far.max() <= TOLERANCE * w.detach().norm(dim=1).max()
    assert 0 < relative(ours[1], expected[1][mine]) < 0.5


def test_divergences_of_slices():
    run_on_ranks(compare_divergences, 2)
