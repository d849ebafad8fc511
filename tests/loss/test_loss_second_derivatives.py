"""Differentiating gradients of linear cross-entropy again is an error, by every API."""

import pytest
import torch
from torch.autograd import functional, grad

import storage_ops as so

ONCE = pytest.raises(RuntimeError, match="double backward is not supported")


def early(x, w, target):
    """Return a mean, whose gradients are computed in the forward."""
    return so.linear_cross_entropy(x, w, target)


def late(x, w, target):
    """Return losses per token, whose gradients are computed in the backward."""
    return so.linear_cross_entropy(x, w, target, reduction="none").sum()


def several(x, w, target):
    loss, lse = so.linear_cross_entropy(x, w, target, returns=("loss", "lse"))
    return loss + lse.sum()


@pytest.fixture(params=[early, late, several])
def problem(request):
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    return request.param, x, w, torch.randint(9, (6,))


@pytest.mark.parametrize("of", ["input", "linear_weight"])
def test_a_penalty_on_a_gradient(problem, of):
    loss, x, w, target = problem

    def penalised():
        result = loss(x * 2, w.sin(), target)  # neither is a leaf
        (first,) = grad(result, x if of == "input" else w, create_graph=True)
        return result + first.square().sum()

    for asked in ([x], [w], [x, w]):
        with ONCE:
            grad(penalised(), asked)
        with ONCE:
            penalised().backward(inputs=asked)
    with ONCE:
        penalised().backward()


COMPILED = pytest.raises(RuntimeError, match="does not currently support double backward")


def divergence(x, w, target):
    return so.linear_kl_div(x, w, torch.ones(6, 3), torch.linspace(-1, 1, 27).view(9, 3))


def of_views(loss, x, w, target):
    """Return a number that is not an output of the op."""
    return 3 * loss(x.view(6, 4), w, target)


def of_others(loss, x, w, target):
    """Call the op with an argument that is not an input of the graph."""
    return loss(x.exp(), w, target)


@pytest.mark.parametrize(
    "loss, f",
    [(early, of_views), (early, of_others), (several, of_views), (divergence, of_views)],
)
def test_compiled(loss, f):
    """A compiled gradient has no second derivative by any tensor."""
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    target = torch.randint(9, (6,))
    torch.compiler.reset()
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for of in (x, w):
        for asked in ([x], [w], [x, w]):
            result = compiled(loss, x, w, target)
            (first,) = grad(result, of, create_graph=True)
            torch.testing.assert_close(first, grad(f(loss, x, w, target), of)[0])
            with COMPILED:
                grad(result + first.square().sum(), asked)


def test_torch_autograd_functional(problem):
    loss, x, w, target = problem
    x, w = x.detach(), w.detach()
    of_input = lambda x: loss(x, w, target)  # noqa: E731
    with ONCE:
        functional.hessian(of_input, x)
    for product in (functional.hvp, functional.vhp, functional.jvp):
        with ONCE:
            product(of_input, x, torch.ones_like(x))


def test_derivatives_by_a_factor_of_the_loss(problem):
    loss, x, w, target = problem
    scale = torch.tensor(2.0, requires_grad=True)
    (first,) = grad(loss(x, w, target) * scale, x, create_graph=True)
    with ONCE:
        grad(first.square().sum(), scale)


def test_a_gradient_may_be_used(problem):
    loss, x, w, target = problem
    result, factor = loss(x, w, target), torch.tensor(3.0, requires_grad=True)
    (first,) = grad(result, x, create_graph=True)
    torch.testing.assert_close(first, grad(loss(x, w, target), x)[0])
    torch.testing.assert_close(grad((first * factor).sum(), factor)[0], first.sum().detach())


def test_gradients_of_probabilities():
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    target = torch.softmax(torch.randn(6, 9), 1).requires_grad_()
    (first,) = grad(so.linear_cross_entropy(x, w, target), target, create_graph=True)
    for asked in (x, target):
        with ONCE:
            grad(first.square().sum(), asked, retain_graph=True)

    def of_target(x, target):
        return so.linear_cross_entropy(x, w, target)

    def penalty(x):
        return torch.func.grad(of_target, 1)(x, target.detach()).square().sum()

    with ONCE:
        torch.func.grad(penalty)(x.detach())


def test_with_accumulate_into():
    x, w = torch.randn(6, 4), torch.randn(9, 4, requires_grad=True)
    target, into = torch.randint(9, (6,)), torch.zeros(9, 4)

    def loss(x):
        return so.linear_cross_entropy(x, w, target, accumulate_into=into)

    with ONCE:
        torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x)
    x.requires_grad_()
    (first,) = grad(loss(x), x, create_graph=True)
    with ONCE:
        grad(first.sum(), x)


def test_the_graph_does_not_keep_the_input():
    """Until the backward, a placeholder without memory replaces the input."""
    leaf, w = torch.randn(64, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    hidden = leaf * 1.0
    storage = hidden.untyped_storage()
    loss = so.linear_cross_entropy(hidden, w, torch.randint(9, (64,)))
    users = torch._C._storage_Use_Count(storage._cdata)
    del hidden
    assert torch._C._storage_Use_Count(storage._cdata) == users - 1 == 1
    loss.backward()
