"""Losses of `storage_ops.losses` with slices of the vocabulary and with DTensors on two ranks."""

import pytest
import torch
import torch.distributed as dist

from storage_ops import losses

from ..losses.test_losses_everywhere import batch, call, leaves
from ..ranks import assert_same, run_on_ranks

if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

WORLD = 2
PLACES = [  # of hidden states, heads and targets
    (Replicate(), Shard(0), None),
    (Shard(1), Shard(0), Shard(1)),
    (Shard(0), Replicate(), None),
    (Shard(0), Shard(1), Shard(0)),
]


def local(loss):
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def placed(tensors, mesh, of_input, of_weight):
    """Return the batch with DTensors as hidden states and heads."""
    places = {"x": of_input, "ref": of_input, "w": of_weight, "ref_w": of_weight}
    result = dict(tensors)
    for name, place in places.items():
        t = distribute_tensor(tensors[name].detach(), mesh, [place])
        result[name] = t.requires_grad_(tensors[name].requires_grad)
    return result


def compare(rank):
    mesh = init_device_mesh("cpu", (WORLD,))
    for name in losses.__all__:
        if name == "kd":  # divergences take no DTensors
            continue
        tensors, target = batch()
        right = call(name, *leaves(tensors), tensors, target)
        wanted = torch.autograd.grad(right, leaves(tensors))
        for of_input, of_weight, of_target in PLACES:
            ours = placed(tensors, mesh, of_input, of_weight)
            targets = distribute_tensor(target, mesh, [of_target]) if of_target else target
            loss = call(name, *leaves(ours), ours, targets)
            assert_same(local(loss), right)
            for got, expected in zip(torch.autograd.grad(loss, leaves(ours)), wanted, strict=True):
                assert_same(got.full_tensor(), expected)


def metrics(rank):
    mesh = init_device_mesh("cpu", (WORLD,))
    tensors, target = batch()
    prompts = torch.randint(len(tensors["w"]), target.shape)
    bounds = torch.tensor([0, 3, target.numel()])
    for part in (Shard(0), Shard(1)):
        ours = placed(tensors, mesh, part, Shard(0))
        targets = distribute_tensor(target, mesh, [part])
        of_prompts = distribute_tensor(prompts, mesh, [part])
        pairs = [
            (losses.sft(*leaves(v), t, return_metrics=True),
             losses.orpo(*leaves(v), t, nll_target=p, return_metrics=True))
            for v, t, p in ((ours, targets, of_prompts), (tensors, target, prompts))
        ]  # fmt: skip
        torch.testing.assert_close(*pairs, rtol=1e-12, atol=1e-12)
    x = tensors["x"].detach().flatten(0, 1)
    right = losses.simpo(x, tensors["w"], target.flatten(), cu_seqlens=bounds)
    packed, targets = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, target.flatten()))
    assert_same(losses.simpo(packed, tensors["w"], targets, cu_seqlens=bounds), right)


@pytest.mark.in_turn
def test_dtensors():
    run_on_ranks(compare, WORLD)


def test_metrics_of_dtensors():
    run_on_ranks(metrics, WORLD)
