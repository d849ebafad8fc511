"""FullyShardedDataParallel: an error says what it frees under a region. All else works."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import storage_ops as so

from ..ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
WIDTH = 8
FULL, AFTER_BACKWARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP


class Mlp(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.way = way

    def act(self, x):
        return torch.tanh(self.up(x))

    def forward(self, x):
        if self.way == "own":
            return x + so.output_discard(self.act, self.down)(x)
        if self.way != "hook":
            return x + self.down(self.act(x))
        ckpt = so.OutputDiscardCheckpoint()
        h = ckpt.checkpoint(self.act, x)
        y = x + self.down(h)
        ckpt.discard_output_and_register_recompute(y)
        return y


class Norm(nn.Module):
    """A layer so small that its output is freed in a row of layers too."""

    def __init__(self, way):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x)


def sharded(module, **options):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def trained(way, rank, kind=Mlp, **options):
    torch.manual_seed(0)
    net = nn.Sequential(*(kind(way) for _ in range(4))).double()
    config = {"layer_names": ["0", "1"], "mode": "output_discard"}
    if way == "before":
        so.apply_activation_checkpoint(net, config)
    for i, block in enumerate(net):
        net[i] = sharded(block, **options)
    whole = sharded(net, **options)
    if way == "after":
        so.apply_activation_checkpoint(net, config)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        whole(x).square().mean().backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(whole):
        return torch.cat([p.detach().flatten() for p in whole.parameters()]).clone()


def every_way(rank):
    for strategy in (FULL, AFTER_BACKWARD):
        for original in (True, False):
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            right = trained("plain", rank, **options)
            for way in ("before", "after", "own", "hook"):
                if strategy is FULL and way == "hook":  # the layers of "before" keep their outputs
                    with pytest.raises(RuntimeError, match=r"FSDP1.*Use fully_shard"):
                        trained(way, rank, **options)
                else:
                    assert torch.equal(trained(way, rank, **options), right), (way, options)
    with pytest.raises(RuntimeError, match=r"FSDP1.*Use fully_shard"):
        trained("before", rank, Norm)
    assert torch.equal(trained("after", rank, Norm), trained("plain", rank, Norm))


@pytest.mark.in_turn
def test_discarding_under_fsdp1_is_correct_or_refused():
    run_on_ranks(every_way, 2)
