"""DDP and FSDP2 on two gloo ranks: discarding does not change the gradients of a model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import storage_ops as so

from ..ranks import run_on_ranks

WORLD, WIDTH = 2, 16


class Block(nn.Module):
    def __init__(self, discards):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.discards = discards

    def forward(self, x):
        def act(x):
            return nn.functional.gelu(self.up(x))

        if self.discards:
            return x + so.output_discard(act, self.down)(x)
        return x + self.down(act(x))


def model(discards, module=False):
    torch.manual_seed(0)
    if module:
        middle = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU()), nn.Linear(64, WIDTH)
        both = so.OutputDiscard(*middle) if discards else nn.Sequential(*middle)
        return nn.Sequential(Block(discards), both)
    return nn.Sequential(Block(discards), Block(discards))


def gradients(net, x):
    losses = []
    for _ in range(2):  # two steps: a second forward after a backward
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    grads = [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in net.parameters()
    ]
    return [*losses, *grads]


def compare(rank, how):
    torch.manual_seed(rank)
    x = torch.randn(6, WIDTH)
    results = []
    for discards in (False, True):
        net = model(discards, module="module" in how)
        if "ddp" in how:
            net = nn.parallel.DistributedDataParallel(net)
        else:
            for block in net:
                fully_shard(block)
            fully_shard(net)
        results.append(gradients(net, x))
    for plain, ours in zip(*results, strict=True):
        assert torch.allclose(plain, ours, rtol=1e-5, atol=1e-7)


def work(rank):
    for how in ("ddp", "fsdp2", "ddp module", "fsdp2 module"):
        compare(rank, how)


@pytest.mark.in_turn
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_gradients_under_ddp_and_fsdp2():
    run_on_ranks(work, WORLD)
