"""Checkpointed layers under DDP, FSDP2 and tensor parallelism, on two gloo ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import storage_ops as so

from ..ranks import run_on_ranks
from .blocks import Block, Model, Ops

Config = so.ActivationCheckpointConfig
WORLD = 2
OPTIONS = [
    {},
    {"policy": ["matmuls", "communication"]},
    {"layer_classes": ["GELU"], "mode": "output_discard"},
]


def train(module, rank, steps=1):
    """Return losses and parameters after steps of SGD. Each rank has its own inputs."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    torch.manual_seed(100 + rank)
    for _ in range(steps):
        x = torch.randn(2, 6, 16, dtype=torch.float64)
        loss = module(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    full = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in module.parameters()]
    return losses, full


def shard(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def both_orders(model, cfg, wrap):
    """Return the model checkpointed before it is wrapped, and after."""
    yield wrap(so.apply_activation_checkpoint(copy.deepcopy(model), cfg))
    yield so.apply_activation_checkpoint(wrap(copy.deepcopy(model)), cfg)


def compare(rank, wrap):
    model = Model(layers=2).double()
    with Ops() as plain:
        losses, right = train(wrap(copy.deepcopy(model)), rank)
    for options in OPTIONS:
        cfg = Config(**{"layer_classes": ["Block"], **options})
        for module in both_orders(model, cfg, wrap):
            with Ops() as ops:
                got_losses, got = train(module, rank)
            assert got_losses == losses, options
            for a, b in zip(got, right, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
            assert ops.count["gelu"] == 2 * plain.count["gelu"], options
            so.apply_activation_checkpoint(module, cfg)
        so.remove_activation_checkpoint(module)
        with Ops() as ops:
            train(module, rank)
        assert ops.count["gelu"] == plain.count["gelu"], options


class Gathering(nn.Module):
    def forward(self, x):
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        everyone = all_gather_tensor_autograd(x.exp(), 0, dist.group.WORLD)
        return everyone.sin().sin()


def compare_communication():
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    grads, gathered = {}, {}
    for policy in (None, "matmuls", "communication"):
        layer = Gathering() if policy is None else so.CheckpointWrapper(Gathering(), policy=policy)
        y = layer(x).square().sum()
        with Ops() as ops:
            grads[policy] = torch.autograd.grad(y, x)[0]
        gathered[policy] = ops.count["all_gather_into_tensor"]
    assert gathered == {None: 0, "matmuls": 1, "communication": 0}
    assert all(torch.equal(grad, grads[None]) for grad in grads.values())


class InPlace(torch.autograd.Function):
    """Calls collectives that write into their arguments, as in Functions for tensor parallelism."""

    @staticmethod
    def forward(ctx, x, kind, total):
        if kind == "reduce":
            dist.all_reduce(x)
            return x
        if kind == "reduce later":
            x = x.clone()
            dist.all_reduce(x, async_op=True).wait()
        elif kind == "reduce twice":
            x = x.clone()
            dist.all_reduce(x)
            dist.all_reduce(x)
        elif kind == "total":  # the collective is on a buffer to which the next call adds
            total.fill_(x.sum().item())
            dist.all_reduce(total)
            x = x * total
        elif kind == "to all":
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x.contiguous())
            return out
        elif kind == "gather into one":
            out = x.new_empty(WORLD * len(x), x.shape[1])
            dist.all_gather_into_tensor(out, x)
            return out
        elif kind == "scatter sums":
            out = x.new_empty(len(x) // WORLD, x.shape[1])
            dist.reduce_scatter_tensor(out, x)
            return out
        else:
            everyone = [torch.empty_like(x) for _ in range(WORLD)]
            dist.all_gather(everyone, x)
            return torch.cat(everyone)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient.repeat(WORLD, 1)[:2], None, None


KINDS = (
    "reduce", "reduce later", "reduce twice", "total", "to all", "gather", "gather into one",
    "scatter sums",
)  # fmt: skip


class Parallel(nn.Module):
    def __init__(self, kind, is_last):
        super().__init__()
        self.kind, self.is_last = kind, is_last
        self.layer = nn.Linear(4, 4, bias=False).double()
        self.register_buffer("total", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        y = InPlace.apply(self.layer(x), self.kind, self.total)
        return y if self.is_last else y.exp().sin()


def compare_in_place_collectives(rank):
    for kind in KINDS:
        for policy in (None, "matmuls", "communication", lambda ctx, op, *args, **kwargs: True):
            for is_last in (False, True):
                torch.manual_seed(0)
                plain = Parallel(kind, is_last)
                layer = so.CheckpointWrapper(
                    copy.deepcopy(plain), **({} if policy is None else {"policy": policy})
                )
                torch.manual_seed(rank)
                x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
                loss = [(m(x).square() + m(x + 1)).sum() for m in (plain, layer)]
                right = torch.autograd.grad(loss[0], (x, plain.layer.weight))
                with Ops() as ops:
                    got = torch.autograd.grad(loss[1], (x, layer.layer.weight))
                assert all(map(torch.equal, got, right)), (kind, policy, is_last)
                assert torch.equal(layer.total, plain.total)
                # gloo copies scattered sums in wait(). That is a write, so they are sent again.
                names = ("allreduce_", "alltoall_base_", "allgather_", "_allgather_base_")
                sent = sum(ops.count[name] for name in names)
                # The second of two collectives on the same bytes overwrites the first result.
                expected = 2 if kind == "reduce twice" else 0
                assert sent == expected or policy in (None, "matmuls"), (
                    kind,
                    policy,
                    is_last,
                    sent,
                )


def compare_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (WORLD,))
    block = Block(dropout=0.0).double()
    for p in block.parameters():
        dist.broadcast(p.data, 0)
    plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    parallelize_module(block, mesh, plan)
    torch.manual_seed(3)
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    right = torch.autograd.grad(block(x).sum(), (x, *block.parameters()))
    for options in ({}, {"policy": ["matmuls", "communication"]}, {"ops_to_save": ["aten.gelu"]}):
        so.CheckpointWrapper(block, **options)
        got = torch.autograd.grad(block(x).sum(), (x, *block.parameters()))
        for a, b in zip(got, right, strict=True):
            a, b = (getattr(t, "full_tensor", lambda t=t: t)() for t in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
        so.remove_activation_checkpoint(block)


def work(rank):
    compare(rank, DistributedDataParallel)
    compare(rank, shard)
    compare_communication()
    compare_in_place_collectives(rank)
    compare_tensor_parallel()
    model = shard(so.apply_activation_checkpoint(Model(layers=1), Config(["Block"])))
    assert isinstance(model.layers[0], Block) and list(model.state_dict()) == list(
        Model(layers=1).state_dict()
    )


@pytest.mark.in_turn
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_parallel_training_gives_the_results_without_checkpoints():
    run_on_ranks(work, WORLD)
