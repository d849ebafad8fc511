"""Traced steps of FSDP2 modules, on two gloo ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from storage_ops import graph

from ..ranks import run_on_ranks
from .models import GPT, batch, count

if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)
WORLD = 2
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default


def shard(model, **options):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


# DTensors of torch 2.11 do not accept a symbol as a number, such as the step size of AdamW.
OPTIMIZER = torch.optim.SGD if torch.__version__.startswith("2.11") else torch.optim.AdamW


class Checkpointed(nn.Module):
    """Calls a block in a checkpoint. The block gathers its parameters inside of the checkpoint."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def local(t):
    return t.to_local().detach().clone()


def compare(rank, mode, layers=1, is_checkpointed=False, close=(1e-10, 1e-12), **options):
    """Compare losses, gradients and parameters after steps. One of the steps runs eagerly."""
    results = []
    seed = int(torch.randint(1 << 30, ()))
    for traced in (False, True):
        torch.manual_seed(seed)
        model = shard(GPT(layers=layers, mode=mode).double(), **options)
        opt = OPTIMIZER(model.parameters(), lr=0.01)
        if is_checkpointed:
            model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))

        def step(tokens, targets, model=model, opt=opt):
            opt.zero_grad()
            loss = model(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            return loss.detach()

        torch.manual_seed(seed + rank)
        data = batch()
        run = graph.trace_step(step, *data) if traced else step
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        torch.manual_seed(seed + rank + 1)
        losses = [run(*data), step(*data)]
        with torch.no_grad():
            losses.append(model(*data))  # leaves the root's parameters gathered
        losses.append(run(*data))
        state = [(local(p), local(p.grad)) for p in model.parameters()]
        results.append((losses, state, torch.get_rng_state()))
    rtol, atol = close
    torch.testing.assert_close(results[1], results[0], rtol=rtol, atol=atol)
    return run.gm, len(state)


def work(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    for mode, is_checkpointed in (("selective", False), ("none", True)):
        gm, parameters = compare(rank, mode, layers=2, is_checkpointed=is_checkpointed)
        assert count(gm, SCATTER) == parameters
        # Parameters are gathered again where the backward reads them, with or without a checkpoint.
        assert parameters + 8 < count(gm, GATHER) <= 2 * parameters
    compare(rank, "full", mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    compare(rank, "full", close=(0.1, 0.05), mp_policy=low)
    model = shard(GPT(layers=1), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(ValueError, match="is an FSDPModule with parameters on the CPU"):
        graph.trace_step(lambda *data: model(*data).backward(), *batch())


@pytest.mark.in_turn
def test_fully_shard():
    run_on_ranks(work, WORLD)
