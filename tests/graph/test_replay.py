"""Regions that draw random numbers or work in place, and are recomputed all the same."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from storage_ops import graph

from .models import both, leaves


@pytest.mark.parametrize(
    "op",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.0),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.rrelu(x, training=False),
        lambda x: torch.native_dropout(x, 0.5, False)[0],
    ],
)
def test_random_ops_that_draw_nothing_are_pure(op):
    def step(x):
        y = checkpoint(lambda x: op(x.sin()).cos(), x, use_reentrant=False)
        return torch.autograd.grad(y.sum(), x)

    (x,) = leaves((2, 2, 4, 4))
    assert replays(both(step, x)) == 0


def test_native_dropout_of_probability_zero_draws_no_more_than_once():
    def step(x):
        y = checkpoint(
            lambda x: torch.native_dropout(x.sin(), 0.0, True)[0].cos(), x, use_reentrant=False
        )
        return torch.autograd.grad(y.sum(), x)

    assert replays(both(step, *leaves((3,)))) == 0


def replays(step):
    return sum("rng_state" in str(n.target) for n in step.gm.graph.nodes)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x + torch.rand_like(x),
        lambda x: x * torch.randn(4, dtype=x.dtype) + torch.rand(4, dtype=x.dtype),
        lambda x: x * torch.bernoulli(x.sigmoid()),
        lambda x: F.dropout(x, 0.5, inplace=True),
        lambda x: F.alpha_dropout(x, 0.5) * F.feature_alpha_dropout(x.view(4, 1), 0.2).view(4),
        lambda x: x * torch.empty_like(x).uniform_(1, 2).exponential_(),
        lambda x: x[torch.randperm(4)] + x.new_empty(4).normal_(),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
        lambda x: F.rrelu(x, training=True),
        lambda x: F.dropout(x.view(2, 2).t(), 0.5).flatten(),
        lambda x: x * torch.empty_strided((2, 2), (1, 2)).uniform_(1, 2).exponential_().flatten(),
        lambda x: torch.cat([x, x]).view(2, 4).clone()[:, :2].geometric_(0.5).t().flatten() * x,
        lambda x: F.multi_head_attention_forward(
            x.view(4, 1, 1), x.view(4, 1, 1), x.view(4, 1, 1), 1, 1,
            torch.ones(3, 1).double(), None, None, None, False, 0.5,
            torch.ones(1, 1).double(), None,
        )[0].flatten(),
    ],
)  # fmt: skip
def test_random_ops_are_replayed(op):
    def step(x):
        def region(x):
            y = op(x.sin())
            return F.dropout(y.exp(), 0.5).cos()

        y = checkpoint(region, F.dropout(x, 0.1), use_reentrant=False)
        y = F.dropout(y, 0.1)
        return torch.autograd.grad(y.sum(), x)

    assert replays(both(step, *leaves((4,)))) > 0


def test_an_op_with_a_generator_of_its_own_is_kept():
    generator = torch.Generator()

    def step(x):
        def region(x):
            return x * torch.rand(x.shape, generator=generator, dtype=x.dtype).exp()

        return torch.autograd.grad(checkpoint(region, x, use_reentrant=False).sum(), x)

    (x,) = leaves((3,))
    try:
        traced = graph.trace_step(step, x)
    except Exception as error:  # a trace may not take a generator
        pytest.skip(f"torch does not trace generators: {error}")
    generator.manual_seed(0)
    expected = torch.rand(3, generator=generator, dtype=torch.double).exp()
    generator.manual_seed(0)
    assert torch.equal(traced(x)[0], expected)


def inplace_regions():
    def relu(x, w):
        return (x @ w).relu_() @ w

    def chain(x, w):
        h = x @ w
        h.mul_(2).add_(1)
        return h.sin() @ w

    def view(x, w):
        h = (x @ w).mul(w)
        h[:, 0] = 0.5
        h[1:].mul_(x[1:])
        return h.t().sin() @ h

    def old_view(x, w):
        h = x @ w
        v = h.view(-1)
        h.clamp_(min=0)
        return v.exp().view_as(h) @ w

    def masked(x, w):
        h = x @ w
        return h.masked_fill_(h < 0, -1.0).sin() @ w

    def fill(x, w):
        out = torch.empty_like(x)
        out.copy_(x @ w)
        out.index_put_((torch.tensor([0]),), torch.zeros(4, dtype=x.dtype))
        return out.sin().mul_(2).cos()

    return [relu, chain, view, old_view, masked, fill]


@pytest.mark.parametrize("region", inplace_regions(), ids=lambda r: r.__name__)
def test_in_place_ops_on_what_a_region_made(region):
    def step(x, w):
        y = checkpoint(region, x, w, use_reentrant=False)
        y.mul_(3)
        return torch.autograd.grad(y.sum(), (x, w))

    both(step, *leaves((4, 4), (4, 4)))


def test_in_place_ops_on_what_comes_from_outside_are_refused():
    buffer, (w,) = torch.zeros(4, dtype=torch.double), leaves((4, 4))

    def on_closure(x):
        buffer.add_(x.sum(0))
        return (x @ w) * buffer

    def on_input(x):
        return (x.add_(1) @ w).sin()

    def on_view_of_input(x):
        x.view(-1)[0] = 0.0
        return (x @ w).sin()

    x = torch.randn(4, 4, dtype=torch.double)
    for region in (on_closure, on_input, on_view_of_input):

        def step(x, region=region):
            y = checkpoint(region, x * 1, use_reentrant=False)
            return torch.autograd.grad(y.sum(), w)

        with pytest.raises(RuntimeError, match="made outside the region"):
            graph.trace_step(step, x)
    assert torch.equal(buffer, torch.zeros_like(buffer))


def test_an_input_of_a_region_that_is_modified_before_its_backward_is_refused():
    (w,) = leaves((4, 4))
    scale = torch.ones(4, dtype=torch.double)

    def step(x):
        y = checkpoint(lambda x: (x @ w).add(scale).sin(), x, use_reentrant=False)
        scale.add_(1)
        return torch.autograd.grad(y.sum(), w)

    with pytest.raises(RuntimeError, match=r"lifted_\d, which aten\.add_.* has modified"):
        graph.trace_step(step, torch.randn(4, 4, dtype=torch.double))
    assert torch.equal(scale, torch.ones_like(scale))
