"""Regions that communicate where autograd saves different tensors on each rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import storage_ops as so

from ..ranks import run_on_ranks

if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WIDTH, TOKENS = 4, 6
MODES = (
    {"mode": "full"},
    {"mode": "full", "determinism_check": "checksum"},
    {"policy": "matmuls"},
    {"policy": "communication"},
    {"use_reentrant": True},
    {"mode": "output_discard"},
)


class Reduce(torch.autograd.Function):
    """Sums over ranks in forward, as a row-parallel layer does."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Copy(torch.autograd.Function):
    """Sums over ranks in backward, as a column-parallel layer does."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return Reduce.apply(gradient)


class Send(torch.autograd.Function):
    """Sends rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.counts = sent, received
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.counts
        return Send.apply(gradient, received, sent), None, None


class Exchange(torch.autograd.Function):
    """Exchanges a tensor with the other rank by messages instead of a collective."""

    @staticmethod
    def forward(ctx, x):
        other, out = 1 - dist.get_rank(), torch.empty_like(x)
        messages = [
            dist.P2POp(dist.isend, x.contiguous(), other),
            dist.P2POp(dist.irecv, out, other),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Parallel(Layer):
    def forward(self, x):
        h = Reduce.apply(Copy.apply(self.linear(x).sin()))
        return h.exp() if dist.get_rank() == 1 else 2 * h


class Uneven(Layer):
    """Saves tensors on rank 1 alone, where a row of such layers would take more memory."""

    def forward(self, x):
        h = Reduce.apply(Copy.apply(self.linear(x)))
        return h.sin().sin() if dist.get_rank() == 1 else 2 * h


class Ring(Layer):
    def forward(self, x):
        h = Exchange.apply(self.linear(x).sin())
        return Exchange.apply(h.exp() if dist.get_rank() == 1 else 2 * h)


class Gathered(Layer):
    def forward(self, x):
        h = all_gather_tensor_autograd(self.linear(x).sin(), 0, dist.group.WORLD)
        return x + (h.exp() if dist.get_rank() == 1 else 2 * h).chunk(2)[0]


class Experts(Layer):
    """Every token goes to the expert of rank 0. Rank 1 skips its own."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        rows, mine = len(x), dist.get_rank() == 0
        sent, received = [rows, 0], [rows, rows] if mine else [0, 0]
        h = Send.apply(x * self.linear(x).sigmoid(), sent, received)
        unused = sum(p.sum() for p in self.expert.parameters())
        h = self.expert(h) if len(h) else h + 0 * unused
        return x + Send.apply(h, received, sent)


class Nested(nn.Sequential):
    """A region in a region. The inner one is the module "1"."""

    def __init__(self):
        super().__init__(Experts(), Parallel())


class Sharded(Layer):
    """Experts that FSDP gathers inside the region."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.expert(self.linear(x).sin())
        return h.exp() if dist.get_rank() == 1 else 2 * h


def gradients(kind, config):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), kind()).double()
    if config is not None:
        names = ["1", "2", "*.1"] if kind is Nested else ["1", "2"]
        so.apply_activation_checkpoint(net, {"layer_names": names, **config})
    if kind is Sharded:
        for layer in net[1:]:
            fully_shard(layer.expert)
            fully_shard(layer)
        fully_shard(net)
    torch.manual_seed(1 + dist.get_rank())
    x, results = torch.randn(TOKENS, WIDTH, dtype=torch.float64), []
    for _ in range(2):
        net.zero_grad()
        net(x).square().mean().backward()
        results += [p.grad for p in net.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in results]


def every_kind(rank):
    for kind in (Parallel, Uneven, Ring, Gathered, Experts, Nested, Sharded):
        right = gradients(kind, None)
        for config in MODES:
            ours = gradients(kind, config)
            for a, b in zip(ours, right, strict=True):
                assert torch.equal(a, b), (kind, config, (a - b).abs().max())


@pytest.mark.in_turn
@pytest.mark.filterwarnings("ignore:the policy of the selective")
def test_two_ranks():
    run_on_ranks(every_kind, 2)
