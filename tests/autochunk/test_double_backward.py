"""Second derivatives of losses that the backend compiles are errors, as for other graphs."""

import pytest
import torch
from torch.autograd import grad
from torch.nn import functional as F

from storage_ops.autochunk import chunk

N, D, V = 64, 8, 500


def cross_entropy(x, w, t):
    return 2 * F.cross_entropy(x.exp() @ w.t(), t)


def sigmoids(x, w, t):
    return torch.sigmoid(x.exp() @ w.t()).square().mean()


def chunked_by_a_pass(f):
    def run(graph):
        chunk(graph, num_chunks=4, strict=True)

    return torch.compile(f, options={"joint_custom_pre_pass": run})


def chunked(f):
    options = {"num_chunks": 4, "strict": True}
    return torch.compile(f, backend="storage_ops", options=options)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "f, compiled",
    [(cross_entropy, chunked), (sigmoids, chunked), (sigmoids, chunked_by_a_pass)],
)
def test_second_derivatives_raise(f, compiled):
    """They are errors for every tensor, also for one that no product reads."""
    x, w = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    t, g = torch.randint(V, (N,)), compiled(f)
    for asked in ([x], [w], [x, w]):
        loss = g(x, w, t)
        (first,) = grad(loss, x, create_graph=True)
        torch.testing.assert_close(first, grad(f(x, w, t), x)[0])
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            grad(loss + first.square().sum(), asked)


@pytest.mark.in_turn
def test_transforms_inside():
    """torch.func differentiates before the graph is compiled, so second derivatives are right."""
    x = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    w = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    t = torch.randint(V, (N,))

    def penalised(x, w):
        return torch.func.grad(cross_entropy)(x, w, t).square().sum()

    compiled = torch.compile(penalised, backend="storage_ops", options={"num_chunks": 4})
    torch.testing.assert_close(grad(compiled(x, w), (x, w)), grad(penalised(x, w), (x, w)))
