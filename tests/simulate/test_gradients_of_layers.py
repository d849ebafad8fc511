"""Replays of layers whose gradients differ from those of the recording."""

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.simulate import step as steps


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
    "decoder": Decoder,
}


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
