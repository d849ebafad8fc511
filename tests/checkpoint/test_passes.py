"""Frozen producers, arguments of Megatron's class, and several backward passes."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so


@pytest.mark.parametrize("way", ["hook", "block"])
@pytest.mark.parametrize("trainable", [False, True])
def test_a_frozen_producer(path, way, trainable):
    """Its output is freed, and recomputed if a trained consumer needs it."""
    up, down = nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 4).requires_grad_(trainable)
    x, ckpt = torch.randn(3, 4), so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(lambda x: F.gelu(up(x)), x)
    assert len(ckpt.outputs) == 1 and ckpt.outputs[0] is h
    if way == "hook":
        y = down(h)
        ckpt.discard_output_and_register_recompute(y)
    else:
        with ckpt.consumer():
            y = down(h)
        ckpt.discard_output_and_register_recompute()
    assert so.is_discarded(h) and ckpt.outputs is None
    assert torch.equal(y, down(F.gelu(up(x))))
    if trainable:
        got = torch.autograd.grad(y.sum(), down.parameters())
        right = torch.autograd.grad(down(F.gelu(up(x))).sum(), down.parameters())
        assert all(map(torch.equal, got, right)) and torch.equal(h, F.gelu(up(x)))


def test_an_output_that_a_frozen_region_did_not_create_is_not_freed(path):
    layer, table = nn.Linear(4, 4).requires_grad_(False), torch.randn(3, 4)

    def keeps(x):
        return table, layer.weight.view(-1), x[1:], torch.ones(2), (layer.weight * 2).view(-1)

    x, ckpt = torch.randn(3, 4), so.OutputDiscardCheckpoint()
    outputs = ckpt.checkpoint(keeps, x)
    with ckpt.consumer():
        y = sum(t.sum() for t in outputs)
    ckpt.discard_output_and_register_recompute(y)
    assert [so.is_discarded(t) for t in outputs] == [False] * 3 + [True, True]


@pytest.mark.parametrize("options, message", [
    ({"fp8": True}, "`fp8` is True. Expected None. Pass a context_fn"),
    ({"ckpt_manager": object()}, "`ckpt_manager` is .*. Expected None. Use an OutputDiscardChain"),
])  # fmt: skip
def test_arguments_of_megatrons_class(options, message):
    so.OutputDiscardCheckpoint(retain_input_tensors=True, fp8=False, ckpt_manager=None)
    with pytest.raises(TypeError, match=message):
        so.OutputDiscardCheckpoint(**options)


@pytest.mark.parametrize("kind", ["output_discard", "full", "selective"])
def test_graph_exec_groups_share_a_recompute(path, kind):
    """Pipeline schedules run several backward passes through one forward."""
    from torch.utils.checkpoint import GraphExecGroup

    calls = []  # an attribute would be restored

    class Layer(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return (x * self.weight[0]).sin(), (x * self.weight[1]).exp()

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = Layer(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            a, b = self.up(x)
            return self.down(a).sin().sum(), self.down(b).cos().sum()

    model, x = Heads(), torch.randn(3, 4, requires_grad=True)
    right = [torch.autograd.grad(model(x)[i], (x, model.up.weight)) for i in range(2)]
    rules = {"ops_to_save": ["aten.mul"]} if kind == "selective" else {}
    so.apply_activation_checkpoint(model, {"layer_names": ["up"], "mode": kind, **rules})
    for grouped in (True, False):
        calls.clear()
        first, second = model(x)
        with GraphExecGroup() if grouped else contextlib.nullcontext():
            got = [
                torch.autograd.grad(first, (x, model.up.weight), retain_graph=True),
                torch.autograd.grad(second, (x, model.up.weight)),
            ]
        assert all(map(torch.equal, got[0] + got[1], right[0] + right[1]))
        assert len(calls) == (2 if grouped else 3), grouped


@pytest.mark.parametrize("kind", ["output_discard", "full", "selective"])
def test_gradients_of_inputs_and_then_of_weights(path, kind):
    """Zero-bubble schedules compute gradients in this order."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.Linear(4, 4)
    )
    x = torch.randn(3, 4, requires_grad=True)
    right = torch.autograd.grad(model(x).sin().sum(), (x, *model.parameters()))
    rules = {"ops_to_save": ["aten.addmm"]} if kind == "selective" else {}
    so.apply_activation_checkpoint(model, {"layer_names": ["0"], "mode": kind, **rules})
    loss = model(x).sin().sum()
    got = torch.autograd.grad(loss, x, retain_graph=True)
    got += torch.autograd.grad(loss, tuple(model.parameters()))
    assert all(map(torch.equal, got, right))


def test_buffers_of_inference_mode_and_frozen_outputs_that_are_captured(path):
    with torch.inference_mode():
        layer = nn.Linear(4, 4)
        layer.register_buffer("table", torch.randn(4))
    x, frozen = torch.randn(3, 4, requires_grad=True), nn.Linear(4, 4).requires_grad_(False)
    ckpt = so.OutputDiscardCheckpoint()
    scale = ckpt.checkpoint(frozen, torch.randn(3, 4))
    run = so.output_discard(lambda x: x.sin() * scale + len(list(layer.buffers())), torch.exp)
    with ckpt.consumer():
        y = run(x)
    ckpt.discard_output_and_register_recompute()
    assert so.is_discarded(scale)
    y.sum().backward()
    right = torch.autograd.grad((x.sin() * scale + 1).exp().sum(), x)[0]
    torch.testing.assert_close(x.grad, right)


@pytest.mark.parametrize("way", ["chain", "regions"])
def test_the_output_of_a_region_in_a_variable_that_is_reassigned(path, way):
    """The second region reads the first output by a name that later has another value."""
    layers, x = [nn.Linear(4, 4) for _ in range(3)], torch.randn(3, 4, requires_grad=True)

    def step(checkpoint):
        h = x
        for layer in layers:
            h = checkpoint(lambda: layer(h).tanh())  # noqa: B023
        return h

    right = torch.autograd.grad(step(lambda fn: fn()).sin().sum(), x)[0]
    if way == "chain":
        with so.OutputDiscardChain() as chain:
            y = step(chain.checkpoint).sin()
    else:
        y = step(lambda fn: so.output_discard(fn, torch.clone)()).sin()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], right)


def test_buffers_of_modules_in_attributes_of_an_object(path):
    class Trainer:
        def __init__(self):
            self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def part(self, x):
            return self.model(x)

    trainer, x = Trainer(), torch.randn(3, 4, requires_grad=True)
    so.output_discard(trainer.part, torch.sin)(x).sum().backward()
    assert trainer.model[1].num_batches_tracked == 1
