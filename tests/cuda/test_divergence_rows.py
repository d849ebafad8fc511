"""The row kernel of divergences on a GPU agrees with plain torch in float64 on a CPU."""

import pytest
import torch

import storage_ops as so

from ..divergence.test_divergence_rows import (
    DIVERGENCES,
    GRADIENT,
    UPDATE,
    compare_rows,
    part_ties,
    tiles,
)
from .devices import DTYPES, each_device, moved

OPS = torch.ops.storage_ops
# Larger than on a CPU, because sums have another order and exp2 is less exact.
BOUNDS = {2: (5e-5, 5e-3, 5e-6), 4: (5e-5, 5e-5, 5e-6), 8: (1e-11, 1e-11, 1e-11)}


@pytest.mark.cuda
def test_the_cuda_kernel_is_registered():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has("storage_ops::_divergence_rows", "CUDA")


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [2, 5, 1025, 50257, 128256])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_against_plain_torch_in_float64(dtype, divergence, columns):
    arguments = tiles(dtype, columns, bias=columns % 2 > 0)
    part_ties(arguments, 0.7)
    # `by` scales the gradients above the smallest number of float16.
    compare_rows(OPS._divergence_rows, arguments, divergence, BOUNDS, "cuda", by=64)


@pytest.mark.cuda
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_two_runs_give_the_same_bits(divergence):
    arguments, results = moved(tiles(torch.bfloat16, 50257), "cuda"), []
    upstream = torch.ones(1, device="cuda")
    for _ in range(2):
        own = [None if t is None else t.clone() for t in arguments]
        OPS._divergence_rows(*own, upstream, divergence, 0.3, 1.0, UPDATE | GRADIENT, False)
        results.append((own[0], own[4], own[5]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def part_tied_tokens(x, w, t, head):
    """Change the teacher's tokens until no class is nearly as likely under both heads.

    The gradient of total variation jumps there in plain torch, and is a ramp in this package.
    """
    student = (x.double() @ w.double().T).log_softmax(-1)
    while True:
        teacher = (t.double() @ head.double().T).log_softmax(-1)
        tied = ((student - teacher).abs() < 2e-4).any(-1)
        if not tied.any():
            return
        t[tied] = torch.randn_like(t[tied])


@each_device
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("budget", [None, "400 KiB"])
@pytest.mark.parametrize("targets", [False, True])
def test_the_divergence_of_two_heads(device, divergence, budget, targets):
    tensors = [torch.randn(*shape) for shape in ((40, 16), (1003, 16), (40, 24), (1003, 24))]
    part_tied_tokens(*tensors)
    results = []
    for where, dtype in ((device, torch.float32), ("cpu", torch.float64)):
        x, w, t, head = (m.to(where, dtype) for m in tensors)
        leaves = [x.requires_grad_(), w.requires_grad_()]
        options = {"divergence": divergence, "beta": 0.3}
        if targets:
            target = torch.arange(40) * 25
            target[::5] = -100
            options |= {"target": target.to(where), "target_weight": 0.5}
        if dtype == torch.float32:
            options["memory_budget"] = budget
        loss = so.linear_kl_div(*leaves, t, head, **options)
        grads = torch.autograd.grad(loss, leaves)
        results.append([r.detach().cpu().double() for r in (loss, *grads)])
    for ours, right in zip(*results, strict=True):
        assert (ours - right).norm() <= 2e-4 * right.norm()
