"""Layers that change during a step, or whose weights get several gradients, are told apart."""

import functools

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.simulate import step as steps

from .cpu_peaks import measured_peak, simulated_peak


class Layer(nn.Module):
    """A layer that takes more memory the larger its count is."""

    count = 1

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def counted(self):
        return self.count

    def forward(self, x):
        x = x + self.down(self.up(x).tanh())
        n = 40 * int(self.counted())
        return x + x.repeat(n, 1).exp().view(n, *x.shape).mean(0)


class InObject(Layer):
    """Counts its calls in an object that all layers share."""

    def __init__(self, shared, key, step):
        super().__init__()
        self.shared, self.key, self.step = shared, key, step

    def counted(self):
        self.shared[self.key] = self.step(self.shared[self.key])
        return self.shared[self.key]


class InBuffer(Layer):
    def __init__(self, count):
        super().__init__()
        self.register_buffer("number", count)

    def counted(self):
        return self.number


class Counting(InBuffer):
    """Changes the value that it reads, in a tensor that all layers share."""

    def counted(self):
        return self.number.remainder_(3).add_(1)


class Net(nn.Module):
    """Calls its layers after a function has changed them."""

    def __init__(self, kind, before=None):
        super().__init__()
        self.layers, self.before = nn.ModuleList(kind() for _ in range(5)), before

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if self.before is not None:
                self.before(i, layer)
            x = layer(x)
        return x.square().mean()


class Twice(Net):
    """Calls each layer twice, so that its second gradients are added to the first ones."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(layer(x))
        return x.square().mean()


class Penalised(Net):
    """Adds the squares of weights to the loss."""

    def forward(self, x):
        loss = super().forward(x)
        return loss + sum(layer.up.weight.square().mean() for layer in self.layers)


def set_attribute(i, layer):
    layer.count = i + 1


def set_attribute_of_child(i, layer):
    layer.up.count = i + 1


def set_mode(i, layer):
    layer.train(i % 2 == 1)


def set_tensor(tensors, i, layer):
    layer.count = tensors[i]


def freeze(i, layer):
    layer.requires_grad_(i % 2 == 0)


class OfChild(Layer):
    def counted(self):
        return getattr(self.up, "count", 1)


class OfMode(Layer):
    def counted(self):
        return 4 if self.training else 1


MODELS = {
    "called twice": lambda: Twice(Layer),
    "a penalty": lambda: Penalised(Layer),
    "a shared number": lambda: Net(
        functools.partial(InObject, {"count": 0}, "count", lambda n: n % 5 + 1)
    ),
    "a shared flag": lambda: Net(
        functools.partial(InObject, {"count": 2}, "count", lambda n: 3 - n)
    ),
    "an attribute": lambda: Net(Layer, set_attribute),
    "an attribute of a child": lambda: Net(OfChild, set_attribute_of_child),
    "the mode": lambda: Net(OfMode, set_mode),
    "a frozen layer": lambda: Net(Layer, freeze),
    "a tensor": lambda: Net(Layer, functools.partial(set_tensor, torch.arange(1, 6).unbind())),
    "a new tensor": lambda: Net(Layer, lambda i, layer: set_attribute(i, layer) or set_tensor(
        {i: torch.tensor(i + 1)}, i, layer)),
    "a buffer": lambda: Net(
        lambda: InBuffer(torch.tensor(1)), lambda i, layer: layer.number.fill_(i + 1)
    ),
    "data of a buffer": lambda: Net(
        lambda: InBuffer(torch.tensor(1)), lambda i, layer: layer.number.data.fill_(i + 1)
    ),
    "a shared buffer": lambda: Net(functools.partial(Counting, torch.tensor(0))),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_change_in_a_step_are_simulated_as_they_are_called(name, monkeypatch):
    quick = so.memory.simulate_step(MODELS[name](), torch.randn(16, 64))
    monkeypatch.setattr(steps, "_quickly", lambda *_: None)
    plain = so.memory.simulate_step(MODELS[name](), torch.randn(16, 64))
    assert quick.by_owner == plain.by_owner
    assert [s.nbytes for s in quick.timeline] == [s.nbytes for s in plain.timeline]


@pytest.mark.parametrize("name", MODELS)
def test_their_peaks_are_those_of_real_steps(name):
    def fresh():
        model = MODELS[name]()
        return model, sum(t.nbytes for t in {*model.parameters(), *model.buffers()})

    model, before = fresh()
    x = torch.randn(16, 64)
    peak = so.memory.simulate_step(model, x).peak_bytes
    model, _ = fresh()  # a simulation leaves a step of the first model to be measured
    with so.memory.measure("cpu") as m:
        model(x).backward()
    assert abs(peak - before - x.nbytes - m.peak_bytes) <= 1e-3 * peak


def test_one_gradient_for_two_inputs_is_added_up_in_new_memory():
    # The gradient of the outer sum goes to `x` twice. Autograd does not add it to itself in place.
    first, x = nn.Linear(64, 64), torch.randn(256, 64)
    others = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]

    def run():
        y = first(x)
        for layer in others:
            y = y + (y + layer(y))
        y.square().mean().backward()
        first.zero_grad(), [layer.zero_grad() for layer in others]

    assert simulated_peak(run) == measured_peak(run)
