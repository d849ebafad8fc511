"""Tests for several GPUs. They are skipped with fewer than two, and have not run yet."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
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


def _on_nccl(rank, work, address):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", address, rank=rank, world_size=2)
    torch.manual_seed(0)
    work(rank)
    dist.destroy_process_group()


def _sequence_shards(rank):
    x, w, target, _ = problem(vocab=100, bias=False)
    x, target = x[:36], target[:36]
    mine, part = (
        t.chunk(2)[rank].clone().cuda().requires_grad_() for t in (x.detach(), w.detach())
    )
    so.linear_cross_entropy(
        mine, part, target.cuda(), process_group=dist.group.WORLD, input_grad="reduce_scatter"
    ).backward()
    _, (dx, dw) = exact(x.detach(), w.detach(), target, None)
    assert error(mine.grad.cpu(), dx.chunk(2)[rank]) < 1e-5
    assert error(part.grad.cpu(), dw.chunk(2)[rank]) < 1e-5


def _blocks(mode, wrap):
    torch.manual_seed(1)
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    ).cuda()
    if mode is not None:
        so.apply_activation_checkpoint(net, {"layer_names": ["0", "1"], "mode": mode})
    return wrap(net)


def _fsdp(net):
    for block in net:
        fully_shard(block)
    return fully_shard(net)


def _discarding(rank):
    x = torch.randn(32, 64, device="cuda")
    for wrap in (_fsdp, nn.parallel.DistributedDataParallel):
        results = []
        for mode in (None, "output_discard"):
            net = _blocks(mode, wrap)
            for _ in range(2):
                net.zero_grad()
                net(x).square().mean().backward()
            grads = [p.grad for p in net.parameters()]
            results.append([g.full_tensor() if wrap is _fsdp else g for g in grads])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), wrap


def _estimated(rank):
    x = torch.randn(1 << 14, 64, device="cuda")

    def loss(y):
        return y.square().mean()

    for wrap in (_fsdp, nn.parallel.DistributedDataParallel):
        net = _blocks(None, wrap)
        step = so.memory.simulate_step(net, x, loss=loss)
        for _ in range(3):
            net.zero_grad()
            with so.memory.measure(device="cuda") as m:
                loss(net(x)).backward()
        estimated = step.peak_bytes - step.timeline[0].nbytes
        assert abs(estimated - m.peak_bytes) <= 0.01 * m.peak_bytes, (wrap, estimated, m.peak_bytes)


@pytest.mark.parametrize("work", [_sequence_shards, _discarding, _estimated])
def test_ranks_that_communicate_by_nccl(work, tmp_path):
    mp.spawn(_on_nccl, (work, f"file://{tmp_path}/ranks"), nprocs=2)
