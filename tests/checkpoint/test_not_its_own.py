"""A region frees only tensors that it created and that no other code refers to."""

import pytest
import torch
import transformers
from torch import nn

import storage_ops as so


def by_hook(layer, head):
    def run(x):
        ckpt = so.OutputDiscardCheckpoint()
        y = head(ckpt.checkpoint(layer, x))
        ckpt.discard_output_and_register_recompute(y)
        return y

    return run


def chained(layer, head):
    def run(x):
        with so.OutputDiscardChain() as chain:
            return head(chain.checkpoint(layer, x))

    return run


def by_mode(layer, head):
    config = {"layer_names": ["0"], "mode": "output_discard"}
    return so.apply_activation_checkpoint(nn.Sequential(layer, head), config)


WAYS = (so.output_discard, by_hook, chained, by_mode)


class Holding(nn.Module):
    """A layer that refers to three tables in different ways, and returns parts of them."""

    def __init__(self, get):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.register_buffer("buffer", torch.randn(5, 6))
        self.attribute, self.cache, self.last = torch.randn(200, 64, 6), None, None
        self.up, self.get = nn.Linear(6, 6), get

    def forward(self, x):
        return self.get(self, x)


def cached(m, x):
    if m.cache is None:
        m.cache = torch.arange(30.0).reshape(5, 6).cos()
    return m.cache


def remembered(m, x):
    m.last = m.up(x).sin()
    return m.last


def remembered_view(m, x):
    m.last = m.up(x)
    return m.last.view(6, 5).view(5, 6)


def listed(m, x):
    m.last = [m.up(x).sin()]
    return m.last[0]


HELD = {
    "parameter": lambda m, x: m.table,
    "view of a parameter": lambda m, x: m.table.view(6, 5).view(5, 6),
    "alias of a parameter": lambda m, x: m.table.detach(),
    "buffer": lambda m, x: m.buffer,
    "large attribute": lambda m, x: m.attribute,
    "part of an attribute": lambda m, x: m.attribute[3, :5],
    "cache": cached,
    "with a gradient": remembered,
    "view of a tensor with a gradient": remembered_view,
    "in a list": listed,
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("way", WAYS)
def test_an_output_with_other_references_is_kept(way, name):
    """In each of two steps, two forwards run before the backward."""
    layer, head, xs = Holding(HELD[name]), nn.Linear(6, 3), torch.randn(3, 5, 6)
    results = []
    for run in (lambda x: head(layer(x)), way(layer, head)):
        x = xs.clone().requires_grad_()
        layer.cache, before = None, layer.attribute.clone()
        for step in (x[:2], x[2:]):
            loss = sum(run(tokens).square().sum() for tokens in step)
            last = layer.last if isinstance(layer.last, list) else [layer.last]
            referenced = [*layer.state_dict().values(), layer.attribute, layer.cache, *last]
            assert not any(t is not None and so.is_discarded(t) for t in referenced)
            loss.backward()
        assert torch.equal(layer.attribute, before)
        results.append([x.grad, *(p.grad for p in (*layer.parameters(), *head.parameters()))])
        layer.zero_grad()
        head.zero_grad()
    for got, right in zip(*results, strict=True):
        assert (got is None and right is None) or torch.equal(got, right)


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_the_caller_that_the_region_fills(way, alias):
    up, head, x = nn.Linear(6, 6), nn.Linear(6, 3), torch.randn(5, 6, requires_grad=True)
    outside = torch.zeros(2, 5, 6)

    class Filling(nn.Module):
        def forward(self, x):
            target = outside.detach() if alias else outside
            return target[0].copy_(up(x).tanh())

    right = torch.autograd.grad(head(up(x).tanh()).square().sum(), (x, up.weight))
    y = way(Filling(), head)(x)
    assert not so.is_discarded(outside) and torch.equal(outside[0], up(x).tanh())
    got = torch.autograd.grad(y.square().sum(), (x, up.weight))
    assert all(map(torch.equal, got, right))


def test_an_object_that_holds_an_output_twice():
    """Outputs of transformers have it as item and as attribute, which count as one reference."""
    up, x = nn.Linear(6, 6), torch.randn(5, 6, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint()
    out = ckpt.checkpoint(lambda x: transformers.modeling_outputs.BaseModelOutput(up(x)), x)
    with ckpt.consumer():
        y = out.last_hidden_state.sin()
    ckpt.discard_output_and_register_recompute()
    assert so.is_discarded(out.last_hidden_state)
    got = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(got, torch.autograd.grad(up(x).sin().sum(), x)[0])
