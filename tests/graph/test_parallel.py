"""Traced steps of models over a mesh: tensor, sequence and context parallel, with FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from storage_ops import graph

from ..ranks import run_on_ranks
from .models import count

if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)
WIDTH, HEADS = 16, 2
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH + 4)
        self.drop, self.down = nn.Dropout(0.2), nn.Linear(2 * WIDTH + 4, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.drop(self.norm(x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def tensor_parallel(model, mesh, sequence=False):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            down = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
            plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
            plan |= {"down": down}
            part, whole = {"input_layouts": Replicate()}, {"output_layouts": Shard(1)}
            parallelize_module(layer, mesh, PrepareModuleInput(
                **part, desired_input_layouts=Shard(1), use_local_output=False
            ))  # fmt: skip
            parallelize_module(layer, mesh, PrepareModuleOutput(
                **whole, desired_output_layouts=Replicate()
            ))  # fmt: skip
        parallelize_module(layer, mesh, plan)
    return model


def shard(model, mesh, **options):
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(t):
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def compare(build, ranks_of_data=1, rank_of_data=0, close=(1e-11, 1e-12), drop=0.2):
    """Compare a traced step with an eager one, and without dropout with one process on all data."""
    seed = int(torch.randint(1 << 30, ()))
    results, gm = [], None
    for how in ("alone", "eager", "traced"):
        torch.manual_seed(seed)
        model = Model().double()
        for layer in model.layers:
            layer.drop.p = drop
        data = torch.randn(2 * ranks_of_data, 4, WIDTH, dtype=torch.float64)
        if how != "alone":
            model = build(model)
            data = data.chunk(ranks_of_data)[rank_of_data]
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x, model=model, opt=opt):
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        step(data)
        torch.manual_seed(seed)
        run = graph.trace_step(step, data) if how == "traced" else step
        losses = [run(data), run(data)]
        for loss in losses:
            if how != "alone" and ranks_of_data > 1:
                dist.all_reduce(loss)
                loss /= dist.get_world_size()
        results.append((losses, [whole(p) for p in model.parameters()]))
        gm = run.gm if how == "traced" else gm
    rtol, atol = close
    torch.testing.assert_close(results[2], results[1], rtol=rtol, atol=atol)
    if not drop:
        torch.testing.assert_close(results[2], results[0], rtol=rtol, atol=atol)
    return gm


def over_two(rank):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    for drop in (0.2, 0.0):
        compare(lambda model: tensor_parallel(model, mesh), drop=drop)
    compare(lambda model: tensor_parallel(model, mesh, sequence=True), drop=0.0)


def over_four(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def both(model, sequence=False, **options):
        return shard(tensor_parallel(model, mesh["tp"], sequence), mesh["dp"], **options)

    data = (2, mesh["dp"].get_local_rank())
    for drop in (0.2, 0.0):
        gm = compare(both, *data, drop=drop)
        assert count(gm, GATHER) > 8
    compare(lambda model: both(model, sequence=True), *data, drop=0.0)
    low = MixedPrecisionPolicy(torch.float32, torch.float64)
    compare(lambda model: both(model, mp_policy=low), *data, close=(1e-5, 1e-6))
    copies = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("copies", "shards", "tp"))
    compare(
        lambda model: shard(
            tensor_parallel(model, copies["tp"]), copies["copies", "shards"]
        ), *data, drop=0.0,
    )  # fmt: skip


class Attention(nn.Module):
    """Attends with queries of a part of the sequence to the keys and values of the whole."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, rank=0, group=None):
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        if group is not None:
            from torch.distributed._functional_collectives import all_gather_tensor_autograd

            k, v = (all_gather_tensor_autograd(t.contiguous(), 2, group) for t in (k, v))
        place = torch.arange(q.shape[2]) + rank * q.shape[2]
        mask = place[:, None] >= torch.arange(k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def over_a_sequence(rank):
    """Context parallelism by gathered keys and values is traced. Torch's ring is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    net, x = Attention().double(), torch.randn(2, 8, WIDTH, dtype=torch.float64)
    right = net(x)
    right.square().sum().backward()
    grad, net.qkv.weight.grad = net.qkv.weight.grad, None
    part = x.chunk(2, 1)[rank].contiguous()

    def step(part):
        out = checkpoint(net, part, rank, dist.group.WORLD, use_reentrant=False)
        out.square().sum().backward()
        return out.detach()

    traced = graph.trace_step(step, part)
    torch.testing.assert_close(traced(part), right.chunk(2, 2)[rank])
    dist.all_reduce(net.qkv.weight.grad)
    torch.testing.assert_close(net.qkv.weight.grad, grad)

    mesh, buffer = init_device_mesh("cpu", (2,)), x.clone()

    def ring(x):
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
            return net(buffer).sum()

    with pytest.raises(ValueError, match="`fn` uses torch's context_parallel"):
        graph.trace_step(ring, x)
    assert torch.equal(buffer, x)
    with (
        context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]),
        pytest.raises(ValueError, match="`fn` uses torch's context_parallel"),
    ):
        graph.trace_step(lambda x: net(x).sum(), x)


def asynchronous(rank):
    import torch._inductor.config as config
    from torch.distributed.device_mesh import init_device_mesh

    model = tensor_parallel(Model(), init_device_mesh("cpu", (2,)))
    x = torch.randn(2, 4, WIDTH)
    with (
        config.patch(_micro_pipeline_tp=True),
        pytest.raises(ValueError, match=r"up.weight is a DTensor.*_micro_pipeline_tp.*torch.comp"),
    ):
        graph.trace_step(lambda x: model(x).sum(), x)
    with config.patch(_micro_pipeline_tp=True):  # does not affect a model without DTensors
        plain = nn.Linear(WIDTH, 2)
        graph.trace_step(lambda x: plain(x).sum(), x)


@pytest.mark.in_turn
@pytest.mark.parametrize("work", [over_two, over_a_sequence, asynchronous])
def test_two_ranks(work):
    run_on_ranks(work, 2)


@pytest.mark.slow
def test_fully_shard_over_tensor_parallelism():
    run_on_ranks(over_four, 4)
