"""Replays of layers in steps that discard outputs."""

import pytest
import torch
from torch import nn

import storage_ops as so
from tests.simulate.test_step import replays_of


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Discarding(Layer):
    """Discards two outputs of its own."""

    def forward(self, x):
        with so.OutputDiscardChain() as chain:
            up = chain.checkpoint(self.up, chain.checkpoint(self.norm, x))
            down = self.down(up.tanh())
        return x + down


class Consuming(Layer):
    """Discards what it gets."""

    def forward(self, x):
        y = self.down(self.up(x.sin()).tanh())
        so.discard_storage(x, guard=None)
        return y


class Net(nn.Module):
    def __init__(self, *kinds):
        super().__init__()
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in kinds)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class InputsDiscarded(Net):
    """Discards what the layers get."""

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            region = so.OutputDiscardCheckpoint()
            y = layer(region.checkpoint(norm, x))
            region.discard_output_and_register_recompute(y)
            x = x + y
        return x.square().mean()


class StorageDiscarded(Net):
    """Discards what the layers get, and does not compute it again."""

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = norm(x)
            x = x + layer(y)
            so.discard_storage(y, guard=None)
        return x.square().mean()


class ResultsDiscarded(Net):
    """Discards what the layers return."""

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            region = so.OutputDiscardCheckpoint()
            y = region.checkpoint(layer, x)
            z = norm(y).tanh()
            region.discard_output_and_register_recompute(z)
            x = x + z
        return x.square().mean()


@pytest.mark.parametrize(
    ("net", "kinds", "replays"),
    [
        (Net, [Layer] * 3 + [Discarding], 3),
        (Net, [Discarding] * 3 + [Layer], 3),
        (Net, [Layer] + [Consuming] * 3, 0),
        (InputsDiscarded, [Layer] * 4, 0),
        (StorageDiscarded, [Layer] * 4, 0),
        (ResultsDiscarded, [Layer] * 4, 0),
    ],
)
def test_steps_that_discard(net, kinds, replays):
    assert replays_of(net(*kinds), torch.randn(32, 64)) == replays


@pytest.mark.parametrize(("names", "replays"), [("layers.3.norm", 3), ("layers.*.norm", 4)])
def test_layers_whose_modules_discard(names, replays):
    model, x = Net(*[Layer] * 4), torch.randn(32, 64)
    cfg = so.ActivationCheckpointConfig(layer_names=[names], mode="output_discard")
    so.apply_activation_checkpoint(model, cfg)
    assert replays_of(model, x) == replays
