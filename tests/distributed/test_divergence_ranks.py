"""The divergence of two heads with slices of the vocabulary on two gloo ranks equals the whole."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import storage_ops as so
from storage_ops.divergence import reference

from ..ranks import run_on_ranks

WORLD, VOCAB = 2, 37
SLICES = (slice(0, 20), slice(20, VOCAB))  # of different sizes
OPTIONS = [
    {},
    {"reduction": "none", "temperature": 1.7, "shift": True},
    {"memory_budget": 10_500, "token_weight": True, "reduction": "sum"},
    {"softcap": 2.0, "teacher_softcap": 3.0, "scale_by_temperature": True},
]


def heads(dtype):
    sizes = ((2, 9, 8), (VOCAB, 8), (VOCAB,), (2, 9, 6), (VOCAB, 6), (VOCAB,))
    return [torch.randn(size).to(dtype) for size in sizes]


def compare(rank):
    kinds = [("forward", 0.5), ("reverse", 0.5), ("jsd", 0.3), ("tvd", 0.5), ("cosine", 0.5)]
    dtypes = (torch.float64, torch.bfloat16)
    for dtype, (kind, beta), change in itertools.product(dtypes, kinds, OPTIONS):
        tensors, options = heads(dtype), {**change, "divergence": kind, "beta": beta}
        if kind == "cosine":
            if dtype == torch.bfloat16:  # same code for the sums
                continue
            options["temperature"] = 1.0
        weight = torch.rand(2, 9).masked_fill(torch.rand(2, 9) < 0.3, 0)
        options["token_weight"] = weight if options.pop("token_weight", False) else None
        mine, results = SLICES[rank], []
        for function, part in ((so.linear_kl_div, mine), (reference.linear_kl_div, slice(None))):
            ours = part is mine
            x, t = tensors[0].clone(), tensors[3]
            w, b, tw, tb = (tensors[k][part].clone() for k in (1, 2, 4, 5))
            if not ours:
                x, t, w, b, tw, tb = (v.double() for v in (x, t, w, b, tw, tb))
            leaves = [v.requires_grad_() for v in (x, w, b)]
            more = {"process_group": dist.group.WORLD} if ours else {}
            loss = function(x, w, t, tw, linear_bias=b, teacher_bias=tb, **options, **more)
            (loss * torch.arange(1.0, loss.numel() + 1).view(loss.shape)).sum().backward()
            whole = [slice(None), *([slice(None)] * 2 if ours else [mine] * 2)]
            grads = [v.grad[p].double() for v, p in zip(leaves, whole, strict=True)]
            results.append((loss.detach().double(), *grads))
        if kind == "tvd" and dtype == torch.bfloat16:  # signs differ where logits are equal
            results = [r[:1] for r in results]
        if dtype == torch.float64:
            torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
            continue
        for got, right in zip(*results, strict=True):  # an element may have the error of a logit
            assert (got - right).norm() <= 5e-2 * right.norm() + 1e-2


def transforms(rank):
    """compile, func.grad, no_grad, and a mesh instead of a group."""
    x, w, _, t, tw, _ = heads(torch.float64)
    w, tw = w[SLICES[rank]].clone(), tw[SLICES[rank]].clone()
    mesh = init_device_mesh("cpu", (WORLD,))

    def loss(x, w):
        return so.linear_kl_div(x, w, t, tw, process_group=dist.group.WORLD, divergence="jsd")

    leaves = [v.clone().requires_grad_() for v in (x, w)]
    right = loss(*leaves)
    grads = torch.autograd.grad(right, leaves)
    with torch.no_grad():
        torch.testing.assert_close(
            so.linear_kl_div(x, w, t, tw, process_group=mesh, divergence="jsd"), right.detach()
        )
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(x, w), grads)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    of_compiled = compiled(*leaves)
    torch.testing.assert_close(of_compiled, right)
    torch.testing.assert_close(torch.autograd.grad(of_compiled, leaves), grads)


def refused(rank):
    x, w, _, t, tw, _ = heads(torch.float32)
    w, tw = w[SLICES[rank]], tw[SLICES[rank]]
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="`valid_classes` is 3"):
        so.linear_kl_div(x, w, t, tw, process_group=group, valid_classes=3)
    stored = torch.randn(2, 9, 4).log_softmax(-1), torch.arange(4).expand(2, 9, 4)
    with pytest.raises(ValueError, match="`process_group` is given together with a stored teacher"):
        so.linear_kl_div(x, w, teacher_topk=stored, process_group=group)
    with pytest.raises(TypeError, match="`process_group` is 3"):
        so.linear_kl_div(x, w, t, tw, process_group=3)
    with pytest.raises(ValueError, match=r"^Dtypes and options.* differ"):  # on every rank
        so.linear_kl_div(x, w, t, tw, process_group=group, divergence=("jsd", "tvd")[rank])
    alone = ("Expected", {"token_weight": torch.rand(3)}), ("^Rank 0 .* has refused", {})
    with pytest.raises(ValueError, match=alone[rank > 0][0]):
        so.linear_kl_div(x, w, t, tw, process_group=group, **alone[rank > 0][1])
    sharded = distribute_tensor(torch.randn(VOCAB, 8), init_device_mesh("cpu", (WORLD,)))
    with pytest.raises(TypeError, match="`linear_weight` is a DTensor"):
        so.linear_kl_div(x, sharded, t, tw)


def everything(rank):
    for work in (compare, transforms, refused):
        work(rank)


@pytest.mark.in_turn
def test_divergence_over_ranks():
    run_on_ranks(everything, WORLD)
