"""Gradients of compiled steps use the forward's dropout masks under every budget."""

import pytest
import torch
from torch._functorch import config
from torch.nn import functional as F

N, D, V = 16, 8, 300


def loss(x, v, w, t):
    hidden = F.dropout(torch.tanh(x @ v), 0.5)
    return F.cross_entropy(F.dropout(torch.tanh(hidden @ v), 0.3) @ w, t)


@pytest.mark.in_turn
@pytest.mark.parametrize("budget, random", [(0.4, False), (0, False), (0, True)])
def test_dropout_below_a_budget_of_activations(budget, random):
    x, t = torch.randn(N, D).double(), torch.randint(V, (N,))
    v, w = torch.randn(D, D).double(), torch.randn(D, V).double()
    options = {"num_chunks": 4, "fallback_random": random}
    compiled = torch.compile(loss, backend="storage_ops", options=options)

    def at(step):
        torch.manual_seed(1)
        return compiled(x, (v + step * direction).requires_grad_(), w, t)

    direction = torch.zeros_like(v)
    with config.patch(activation_memory_budget=budget):
        torch.manual_seed(1)
        leaf = v.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(compiled(x, leaf, w, t), leaf)
        direction, step = torch.randn_like(v), 1e-5
        slope = (at(step) - at(-step)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope.detach(), rtol=1e-5, atol=1e-6)
