"""More than one GPU: skipped by name where there is one."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import storage_ops as so

from ..loss.test_linear_cross_entropy import error, exact, problem

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
BOTH = [torch.device("cuda", i) for i in range(2)]


def test_bytes_of_another_device_are_refused():
    dst, src = (torch.ones(64, device=device) for device in BOTH)
    with pytest.raises(RuntimeError, match="device"):
        so.share_storage(dst, src)
    so.discard_storage(src)
    assert so.is_discarded(src) and dst.sum() == 64


@pytest.mark.parametrize("device", BOTH, ids=str)
def test_the_loss_on_a_device_that_is_not_the_current_one(device):
    x, w, target, b = problem()
    right, right_grads = exact(x, w, target, b)
    leaves = [t.to(device).requires_grad_() for t in (x, w, b)]
    loss = so.linear_cross_entropy(*leaves[:2], target.to(device), linear_bias=leaves[2])
    grads = torch.autograd.grad(loss, leaves)
    assert loss.device == device and error(loss.cpu(), right) < 1e-5
    assert all(error(g.cpu(), e) < 1e-5 for g, e in zip(grads, right_grads, strict=True))


def test_a_region_across_devices_repeats_the_random_numbers_of_both(path):
    up, down = nn.Linear(64, 256).to(BOTH[0]), nn.Linear(256, 64).to(BOTH[1])
    x = torch.randn(32, 64, device=BOTH[0], requires_grad=True)

    def producer(x):
        return F.dropout(F.dropout(F.gelu(up(x)), 0.3).to(BOTH[1]), 0.3)

    results = []
    for way in (lambda x: down(producer(x)), so.output_discard(producer, down)):
        torch.manual_seed(1)
        loss = way(x).square().sum()
        results.append(torch.autograd.grad(loss, (x, up.weight, down.weight)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _vocab_parallel(rank, x, w, target, address):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", address, rank=rank, world_size=2)
    x, part = x.cuda().requires_grad_(), w.chunk(2)[rank].cuda().requires_grad_()
    loss = so.linear_cross_entropy(x, part, target.cuda(), process_group=dist.group.WORLD)
    loss.backward()
    right, (dx, dw) = exact(x.detach().cpu(), w, target, None)
    assert error(loss.detach().cpu(), right) < 1e-5 and error(x.grad.cpu(), dx) < 1e-5
    assert error(part.grad.cpu(), dw.chunk(2)[rank]) < 1e-5
    dist.destroy_process_group()


def test_a_vocabulary_over_two_gpus(tmp_path):
    x, w, target, _ = problem(vocab=100, bias=False)
    mp.spawn(_vocab_parallel, (x, w, target, f"file://{tmp_path}/ranks"), nprocs=2)
