"""A rank whose slice of the vocabulary fits into one tile, while the others need several."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import storage_ops as so

from ..ranks import run_on_ranks

pytestmark = [
    pytest.mark.in_turn,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed"),
]
N, D, V = 24, 8, 200
SLICES = (slice(0, 10), slice(10, V))


def smallest_budget(call):
    with pytest.raises(ValueError, match="`memory_budget` is 1 bytes") as raised:
        call(memory_budget=1)
    return int(re.search(r"at least (\d+)", str(raised.value)).group(1))


def compare(rank):
    """Ranks add up 16-bit gradients of the input in one dtype."""
    mine, group = SLICES[rank], dist.group.WORLD
    target = torch.randint(V, (N,))
    tensors = [torch.randn(n, D).bfloat16() for n in (N, V, N, V)]
    x, w, t, tw = (tensor.double().requires_grad_() for tensor in tensors)
    z, log_p = F.linear(x, w), F.linear(t, tw).log_softmax(-1)
    right = {
        "loss": F.cross_entropy(z, target),
        "divergence": F.kl_div(z.log_softmax(-1), log_p, reduction="batchmean", log_target=True),
    }
    for name, expected in right.items():
        leaves = [v.clone().requires_grad_() for v in (tensors[0], tensors[1][mine])]

        def call(name=name, leaves=leaves, **options):
            if name == "loss":
                return so.linear_cross_entropy(*leaves, target, process_group=group, **options)
            frozen = tensors[2], tensors[3][mine]
            return so.linear_kl_div(*leaves, *frozen, process_group=group, **options)

        of_input, of_weight = torch.autograd.grad(expected, (x, w), retain_graph=True)
        budget = smallest_budget(call)
        for memory_budget in (budget, 2 * budget, None):
            got = torch.autograd.grad(call(memory_budget=memory_budget), leaves)
            for ours, wanted in zip(got, (of_input, of_weight[mine]), strict=True):
                assert (ours.double() - wanted).norm() <= 2e-2 * of_weight.norm(), name


def test_ranks_add_up_gradients_of_one_dtype():
    run_on_ranks(compare, len(SLICES))
