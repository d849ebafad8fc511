"""Replays of layers whose gradients differ from those of the recording."""

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.simulate import step as steps
from storage_ops.simulate.layers import replay


class Two(nn.Module):
    """Returns two results that need gradients."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        x = x + self.down(self.up(x).tanh())
        return x, self.up(x).exp().cos()


class Mixing(nn.Module):
    """Returns a transposed view, whose gradient is not transposed."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    def forward(self, x):
        return self.mix(x.transpose(0, 1)).transpose(0, 1)


class Early(nn.Module):
    """Computes the gradient of its input first."""

    def __init__(self):
        super().__init__()
        self.own, self.of_input = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, memory, x):
        own = self.own(x).tanh().exp().sin()
        return own + self.of_input(memory)


class Pair(nn.Sequential):
    """Ends with a module that gets the gradient of its result."""

    def __init__(self):
        parts = (nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(2))
        super().__init__(*parts)


class Joint(nn.Module):
    """Has two streams, both of which read one condition twice, as blocks of diffusion models do."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Linear(64, 64), nn.Linear(64, 64)
        self.own, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, y, condition):
        scale, shift = self.scale(condition.sigmoid()), self.shift(condition.tanh())
        both = self.own(x * scale) + self.other(y + shift)
        return x + both.tanh(), y + (both * shift).sigmoid()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.exp()


class Attention(nn.Module):
    """Gets one tensor as several arguments, and uses it in a node of Python too."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4)

    def forward(self, query, key, value):
        if query is not key:
            return query
        attended, _ = self.attention(query, key, value, need_weights=False)
        return Doubled.apply(attended, query) + Doubled.apply(query, query)


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers, self.first = nn.ModuleList(kind() for _ in range(4)), nn.Linear(64, 64)


class Unused(Net):
    """Drops the second results of layers."""

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return x.square().mean()


class UsedOnce(Net):
    """Uses the second result of the last layer only."""

    def forward(self, x):
        for layer in self.layers:
            x, second = layer(x)
        return x.square().mean() + second.square().mean()


class Chain(Net):
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Conditioned(Net):
    def forward(self, x):
        condition, y = self.first(x), self.first(x).exp()
        for layer in self.layers:
            x, y = layer(x, y, condition)
        return (x * y).square().mean()


class Repeated(Net):
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, x, x)
        return x.square().mean()


class Transposed(Net):
    """Gives the last layer a gradient with other strides than the other layers get."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x.t().contiguous() ** 2).mean()


class Memory(Net):
    """Uses one tensor in each layer, which gets their gradients."""

    def forward(self, x):
        memory = self.first(x)
        return sum(layer(memory, x) for layer in self.layers).square().mean()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(64, 4, 128, batch_first=True), 3
        )

    def forward(self, x):
        x = x.view(4, 32, 64)
        return self.decoder(x, self.first(x)).square().mean()


MODELS = {
    "unused": lambda: Unused(Two),
    "used once": lambda: UsedOnce(Two),
    "transposed": lambda: Chain(Mixing),
    "early": lambda: Memory(Early),
    "conditioned": lambda: Conditioned(Joint),
    "other strides": lambda: Transposed(Pair),
    "one tensor": lambda: Repeated(Attention),
    "decoder": Decoder,
}
# Layers whose gradients leave at several moments, or of which one gets another gradient.
LAYERS = {
    "early": Early, "conditioned": Joint, "decoder": nn.TransformerDecoderLayer,
    "other strides": Pair, "one tensor": Attention,
}  # fmt: skip


def shape(name):
    return (8, 16, 64) if name == "transposed" else (128, 64)


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_as_if_each_layer_is_simulated(name, monkeypatch):
    model, x = MODELS[name](), torch.randn(shape(name))
    quick = so.memory.simulate_step(model, x)
    monkeypatch.setattr(steps, "_quickly", lambda *_: None)
    plain = so.memory.simulate_step(model, x)
    assert quick.by_owner == plain.by_owner
    assert [s.nbytes for s in quick.timeline] == [s.nbytes for s in plain.timeline]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "decoder"])
def test_their_peaks_are_those_of_real_steps(name):
    model, x = MODELS[name](), torch.randn(shape(name))
    peak = so.memory.simulate_step(model, x).peak_bytes
    with so.memory.measure("cpu") as m:
        model(x).backward()
    before = sum(p.nbytes for p in model.parameters()) + x.nbytes
    assert abs(peak - before - m.peak_bytes) <= 1e-3 * peak


@pytest.mark.parametrize(("name", "layer"), LAYERS.items())
def test_layers_are_simulated_once(name, layer, monkeypatch):
    runs, plain = [], replay.Replay

    class Noted(plain):
        def __init__(self, simulation, recording, module, *rest):
            runs[-1].append(module)
            super().__init__(simulation, recording, module, *rest)

    def simulated(*args):
        runs.append([])
        return simulate(*args)

    simulate = steps._simulate
    monkeypatch.setattr(steps, "_simulate", simulated)
    monkeypatch.setattr(replay, "Replay", Noted)
    model = MODELS[name]()
    so.memory.simulate_step(model, torch.randn(shape(name)))
    layers = [m for m in model.modules() if type(m) is layer]
    first = 1 if name in ("conditioned", "other strides") else 0
    assert len(layers) - first <= sum(m in layers for m in runs[-1])
