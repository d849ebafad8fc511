"""Layers with side effects in their forward, and regions to run them in."""

import os
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import storage_ops
from storage_ops import ActivationCheckpointConfig as Config

from .models import selective

WIDTH = 6


class EffectBetweenLayers(nn.Module):
    """Has linear layers before and after the op with the effect, so regions recompute them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.effect(self.up(x))))


class BatchNorm(EffectBetweenLayers):
    def __init__(self, **options):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, **options)

    def effect(self, x):
        return self.norm(x)


class BatchNorm2d(EffectBetweenLayers):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)

    def effect(self, x):
        y = self.norm(self.conv(x.view(-1, 2, 1, WIDTH // 2)))
        return y.reshape(x.shape)


class StatisticsRead(EffectBetweenLayers):
    """Reads the statistics before and after the batch norm writes them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def effect(self, x):
        before = (x - self.norm.running_mean).sin()
        return before * self.norm(x) + (x * 2 - self.norm.running_mean).cos()


class Copied(EffectBetweenLayers):
    """Writes a recurrent state in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("h", torch.zeros(WIDTH))

    def effect(self, x):
        y = (x + self.h).sin()
        self.h.copy_(y.detach().mean(0))
        return y


class Viewed(EffectBetweenLayers):
    """Takes a view of the state before it writes the state, and reads the view before and after."""

    def __init__(self):
        super().__init__()
        self.register_buffer("h", torch.zeros(2, WIDTH))

    def effect(self, x):
        row = self.h[1]
        y = (x + row).sin()
        self.h[1] = y.detach().mean(0)
        self.h.mul_(0.5)
        return (y - row).cos() + self.h.sum()


class Replaced(EffectBetweenLayers):
    """Replaces its recurrent state by a new tensor each time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("h", torch.zeros(WIDTH))

    def effect(self, x):
        y = (x + self.h).sin()
        self.h = y.detach().mean(0)
        return y


class Attribute(EffectBetweenLayers):
    """Replaces its state, which is an attribute instead of a buffer."""

    def __init__(self):
        super().__init__()
        self.h = torch.zeros(WIDTH)

    effect = Replaced.effect


class Swapped(EffectBetweenLayers):
    """Swaps two states."""

    def __init__(self):
        super().__init__()
        self.register_buffer("old", torch.zeros(WIDTH))
        self.register_buffer("new", torch.ones(WIDTH))

    def effect(self, x):
        y = (x + self.old - 2 * self.new).sin()
        self.old, self.new = self.new, self.old
        self.new.copy_(y.detach().mean(0))
        return y


class Quantized(EffectBetweenLayers):
    """Uses torch.ao's fake quantization, whose scale depends on the values so far."""

    def __init__(self):
        super().__init__()
        self.quantize = torch.ao.quantization.FusedMovingAvgObsFakeQuantize(
            observer=torch.ao.quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
        )

    def effect(self, x):
        return self.quantize(x).sin()


class Spectral(EffectBetweenLayers):
    """Uses the old spectral_norm, which iterates on buffers and sets the weight as an attribute."""

    def __init__(self):
        super().__init__()
        self.inner = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def effect(self, x):
        return self.inner(x)


class Parametrized(EffectBetweenLayers):
    """Uses the new spectral_norm."""

    def __init__(self):
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def effect(self, x):
        return self.inner(x)


class Router(EffectBetweenLayers):
    """Counts the tokens of each expert, and corrects its choice by the counts."""

    def __init__(self, experts=3):
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.Parameter(torch.randn(experts, WIDTH))
        self.register_buffer("load", torch.zeros(experts, dtype=torch.long))

    def effect(self, x):
        scores = self.gate(x).softmax(-1)
        chosen = (scores.detach() - 0.01 * self.load).argmax(-1)
        taken = F.one_hot(chosen, len(self.load))
        self.load.add_(taken.sum(0))
        return x * ((scores * taken) @ self.experts)


class Noise(EffectBetweenLayers):
    """Draws random numbers into a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.zeros(WIDTH))

    def effect(self, x):
        self.noise.normal_()
        return (x + self.noise).sin() + F.dropout(x, 0.3)


class Average(EffectBetweenLayers):
    """Updates moving averages in several buffers by one op."""

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.zeros(WIDTH))
        self.register_buffer("b", torch.ones(WIDTH))

    def effect(self, x):
        y = (x + self.a - self.b).sin()
        seen = [y.detach().mean(0), y.detach().square().mean(0)]
        torch._foreach_mul_([self.a, self.b], 0.9)
        torch._foreach_add_([self.a, self.b], seen, alpha=0.1)
        return (y - self.a + self.b).cos()


class Parameter(EffectBetweenLayers):
    """Scales a parameter down in place, under no_grad."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def effect(self, x):
        y = (x + self.shift).sin()
        with torch.no_grad():
            self.shift.mul_(0.5)
        return (y + self.shift).cos()


class Input(EffectBetweenLayers):
    """Modifies its input in place."""

    def effect(self, x):
        return x.sin()

    def forward(self, x):
        x = x.mul_(2).sin_()
        return super().forward(x) + x


LAYERS = {
    kind.__name__: kind
    for kind in (
        BatchNorm, BatchNorm2d, StatisticsRead, Copied, Viewed, Replaced, Attribute, Swapped,
        Quantized, Spectral, Parametrized, Router, Noise, Average, Parameter, Input,
    )
}  # fmt: skip


def nothing(fn, *args):
    return torch.sin(fn(*args))


def not_reentrant(fn, *args):
    return torch.sin(checkpoint(fn, *args, use_reentrant=False))


def selectively(fn, *args):
    return torch.sin(checkpoint(fn, *args, use_reentrant=False, context_fn=selective()))


def reentrant(fn, *args):
    return torch.sin(checkpoint(fn, *args, use_reentrant=True))


def nested(fn, *args):
    inner = partial(checkpoint, fn, use_reentrant=False)
    return torch.sin(checkpoint(lambda *args: inner(*args), *args, use_reentrant=False))


def discarded(fn, *args):
    return storage_ops.output_discard(fn, torch.sin)(*args)


def discarded_by_hand(fn, *args):
    region = storage_ops.OutputDiscardCheckpoint()
    y = torch.sin(region.checkpoint(fn, *args))
    region.discard_output_and_register_recompute(y)
    return y


def chained(fn, *args):
    with storage_ops.OutputDiscardChain() as chain:
        return torch.sin(chain.checkpoint(fn, *args))


class Holder(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return torch.sin(self.layer(*args))


def wrapped(fn, *args, **options):
    """Call a module in a checkpoint wrapper. Call a function that is not a module directly."""
    holder = Holder(fn)
    if isinstance(fn, nn.Module):
        storage_ops.apply_activation_checkpoint(holder, Config(layer_names=["layer"], **options))
    return holder(*args)


FUNCTIONS = {
    "not reentrant": not_reentrant,
    "selective": selectively,
    "reentrant": reentrant,
    "nested": nested,
    "output_discard": discarded,
    "OutputDiscardCheckpoint": discarded_by_hand,
    "OutputDiscardChain": chained,
}
WRAPPERS = {
    "wrapper, full": partial(wrapped, mode="full"),
    "wrapper, selective": partial(wrapped, ops_to_save=["aten.addmm"]),
    "wrapper, reentrant": partial(wrapped, mode="full", use_reentrant=True),
    "wrapper, output_discard": partial(wrapped, mode="output_discard"),
}
REGIONS = FUNCTIONS | WRAPPERS


def pairs(layers, regions):
    """Return every layer with every kind of region. In CI, a sixth of them covers every layer."""
    step = 6 if os.environ.get("CI") else 1
    return [
        (layer, region)
        for i, layer in enumerate(layers)
        for j, region in enumerate(regions)
        if (i + j) % step == 0
    ]
