"""Recomputed regions with random numbers and in-place ops."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import storage_ops
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


def test_native_dropout_of_probability_zero_draws_at_most_once():
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


def test_the_result_of_an_op_with_its_own_generator_is_saved():
    generator = torch.Generator()

    def step(x):
        def region(x):
            return x * torch.rand(x.shape, generator=generator, dtype=x.dtype).exp()

        return torch.autograd.grad(checkpoint(region, x, use_reentrant=False).sum(), x)

    (x,) = leaves((3,))
    try:
        traced = graph.trace_step(step, x)
    except Exception as error:  # some versions of torch do not trace a generator
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

    def layout(x, w):
        h = (x @ w).unsqueeze_(0).transpose_(1, 2)
        h.mul_(2)
        return h.squeeze_(0).t_().sin() @ w

    def bits(x, w):
        h = x @ w
        old = h.detach().view(torch.int64)
        h.detach().t().view(torch.int64).bitwise_and_(-(1 << 40))
        return h.exp() @ w * old.view(torch.double)

    return [relu, chain, view, old_view, masked, fill, layout, bits]


@pytest.mark.parametrize("region", inplace_regions(), ids=lambda r: r.__name__)
def test_in_place_ops_on_tensors_that_a_region_created(region):
    def step(x, w):
        y = checkpoint(region, x, w, use_reentrant=False)
        y.mul_(3)
        return torch.autograd.grad(y.sum(), (x, w))

    both(step, *leaves((4, 4), (4, 4)))


@pytest.mark.parametrize("view", [lambda z: z.real, lambda z: z.conj()], ids=["real", "conj"])
def test_in_place_ops_on_a_view_with_other_elements_are_refused(view):
    def region(x):
        z = torch.complex(x.sin(), x.cos())
        view(z).mul_(2)
        return z.abs()

    (x,) = leaves((4,))
    with pytest.raises(RuntimeError, match=r"complex.* in place, is a view with other elements"):
        graph.trace_step(lambda x: torch.autograd.grad(checkpointed(region, x).sum(), x), x)


def test_a_recurrent_layer_in_a_region():
    """Its code exchanges dimensions in place."""
    layer = torch.nn.GRU(4, 4, batch_first=True, dtype=torch.double)
    both(lambda x: torch.autograd.grad(checkpointed(layer, x)[0].sum(), x), *leaves((2, 3, 4)))


def checkpointed(fn, x):
    return checkpoint(fn, x, use_reentrant=False)


def once(fn, x):
    return fn(x)


def test_in_place_ops_on_tensors_from_outside_run_once():
    buffer, (w,) = torch.zeros(4, dtype=torch.double), leaves((4, 4))

    def on_closure(x, call):
        y = (x @ w + buffer).sin()
        buffer.add_(x.detach().sum(0))
        return y * 2 + buffer

    def on_input(x, call):
        return (x.add_(1) @ w).sin()

    def on_view_of_input(x, call):
        view = x.view(-1)
        y = (view.exp() - view).sum()
        view[0] = 0.0
        return (x @ w).sin() + y

    def on_outputs(x, call):
        first, second = x + 1, x * 2
        y = (first @ w).exp()
        return call(lambda a: (a.mul_(3) + y @ w).sin(), second)

    x = torch.randn(4, 4, dtype=torch.double)
    for region in (on_closure, on_input, on_view_of_input, on_outputs):

        def step(x, call=checkpointed, region=region):
            y = call(lambda x: region(x, call), x * 1)
            return torch.autograd.grad(call(lambda x: region(x, call), x + y).sum(), w)

        traced = graph.trace_step(step, x)
        assert torch.equal(buffer, torch.zeros_like(buffer))
        graph.remat(traced.gm, verify=True)
        got = traced(x), buffer.clone()
        buffer.zero_()
        right = step(x, once), buffer.clone()
        torch.testing.assert_close(got, right, rtol=0, atol=0)
        buffer.zero_()


def test_in_place_ops_on_a_discarded_output_are_refused():
    (w,) = leaves((4, 4))

    def step(x):
        with storage_ops.OutputDiscardChain() as chain:
            h = chain.checkpoint(lambda x: (x @ w).sin(), x)
            y = chain.checkpoint(lambda h: h.add_(1).cos(), h)
            return torch.autograd.grad((y * 2).sum(), w)

    with pytest.raises(RuntimeError, match="the output of another region, which discards"):
        graph.trace_step(step, torch.randn(4, 4, dtype=torch.double))


def test_tensors_that_a_region_reads_may_be_modified_before_its_backward():
    (w,) = leaves((4, 4))
    scale = torch.ones(4, dtype=torch.double)

    def step(x, call=checkpointed):
        y = call(lambda x: (x @ w).add(scale).sin(), x)
        scale.add_(1)
        return torch.autograd.grad(y.sum(), w)

    x = torch.randn(4, 4, dtype=torch.double)
    traced = graph.trace_step(step, x)
    got = traced(x)
    scale.fill_(1)
    assert torch.equal(got[0], step(x, once)[0])
    assert torch.equal(scale, torch.full_like(scale, 2))


def test_as_strided_of_a_part_of_a_modified_storage_is_refused():
    (w,) = leaves((4,))
    table = torch.ones(4, 4, dtype=torch.double)

    def step(x, part):
        y = checkpoint(
            lambda x: (x * w + part().as_strided((4,), (1,), 2)).sin(), x, use_reentrant=False
        )
        table.add_(1)
        return torch.autograd.grad(y.sum(), w)

    x = torch.randn(4, dtype=torch.double)
    traced = graph.trace_step(lambda x: step(x, lambda: table), x)
    got = traced(x)
    assert torch.equal(got[0], x * (x * w + 1).cos())
    rows = table[1:]
    with pytest.raises(RuntimeError, match=r"as_strided.* modifies in place before"):
        graph.trace_step(lambda x: step(x, lambda: rows), x)
