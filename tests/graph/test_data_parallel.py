"""Traced steps of data-parallel modules, on two gloo ranks."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from storage_ops import graph

from ..ranks import run_on_ranks
from .models import GPT, batch, count

if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)
WORLD = 2
REDUCE = torch.ops._c10d_functional.all_reduce.default


def gpt(mode, sync):
    """Return a step of two micro-batches. The first one may skip averaging its gradients."""
    model = DistributedDataParallel(GPT(layers=1, mode=mode).double())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens, targets):
        opt.zero_grad()
        with contextlib.nullcontext() if sync else model.no_sync():
            model(tokens, targets).backward()
        loss = model(tokens, targets)
        loss.backward()
        opt.step()
        return loss.detach()

    return model, step


def norm():
    """Return a step with batch norms, whose statistics are the first rank's."""
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 4))
    model = DistributedDataParallel(model.double())

    def step(tokens, targets):
        loss = model(tokens.double()).square().sum()
        loss.backward()
        return loss.detach()

    return model, step


def compare(rank, reductions, make, *args):
    """Compare state and gradients after traced and eager steps, which alternate on one module."""
    results = []
    seed = int(torch.randint(1 << 30, ()))
    for traced in (False, True):
        torch.manual_seed(seed)
        model, eager = make(*args)
        torch.manual_seed(seed + rank)
        data = batch()
        before = copy.deepcopy(model.state_dict())
        step = graph.trace_step(eager, *data) if traced else eager
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        if traced:
            assert count(step.gm, REDUCE) == reductions * len(list(model.parameters()))
        torch.manual_seed(seed + rank + 1)
        losses = [run(*data) for run in (step, step, eager)]
        grads = [p.grad for p in model.parameters()]
        results.append((losses, grads, model.state_dict(), torch.get_rng_state()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-14)


def work(rank):
    compare(rank, 2, gpt, "full", True)
    compare(rank, 1, gpt, "selective", False)
    compare(rank, 1, norm)
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, lambda state, bucket: bucket)
    with pytest.raises(ValueError, match=r"model is a Dist.* with a communication hook"):
        graph.trace_step(lambda x: model(x).sum().backward(), torch.ones(1, 2))


@pytest.mark.in_turn
def test_distributed_data_parallel():
    run_on_ranks(work, WORLD)
