"""Replays of random layers with three inputs and two results are as if each layer is simulated."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so
from storage_ops.simulate import step

pytestmark = pytest.mark.in_turn
SIZE = 16
OPS = {
    "linear": lambda a, b, layer: layer.linear(a),
    "other": lambda a, b, layer: layer.other(a),
    "norm": lambda a, b, layer: layer.norm(a),
    "add": lambda a, b, layer: a + b,
    "mul": lambda a, b, layer: a * b,
    "tanh": lambda a, b, layer: a.tanh(),
    "cat": lambda a, b, layer: torch.cat([a, b], -1)[..., 8 : 8 + SIZE],
    "transpose": lambda a, b, layer: a.transpose(0, 1).contiguous().transpose(0, 1),
    "mean": lambda a, b, layer: a - b.mean(-1, keepdim=True),
    "chunk": lambda a, b, layer: torch.cat(a.chunk(2, -1)[::-1], -1),
    "view": lambda a, b, layer: a.reshape(-1, SIZE).view(a.shape),
    "dropout": lambda a, b, layer: F.dropout(a, 0.1),
    "relu": lambda a, b, layer: (a + 1).relu_(),
}


class Layer(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.program, self.norm = program, nn.LayerNorm(SIZE)
        self.linear, self.other = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, *values):
        values = list(values)
        for name, i, j in self.program:
            values.append(OPS[name](values[i % len(values)], values[j % len(values)], self))
        return values[-1], values[-2]


class Model(nn.Module):
    def __init__(self, program, way):
        super().__init__()
        self.first, self.way = nn.Linear(SIZE, SIZE), way
        self.layers = nn.ModuleList(Layer(program) for _ in range(4))

    def forward(self, x):
        condition, y = self.first(x), self.first(x).tanh()
        x = x if self.way == "data" else self.first(x).sin()
        for layer in self.layers:
            a, b = layer(x, y, condition)
            x, y = (a, y) if self.way == "one result" else (a, b)
        return (x * y).square().mean() + y.exp().mean()


# Programs in which the timelines once differed: the layer's results share a gradient, or only one
# of them is used, or a gradient that leaves is added to, or is a view.
FOUND = {
    "one result": "norm 2 1, add 3 2, tanh 3 0, cat 4 4, relu 1 5, mul 7 2, mul 4 6",
    "data": "norm 2 1, relu 5 1, linear 0 2, add 1 3, norm 3 4",
    "shared": "chunk 0 1, tanh 1 0, linear 1 0, add 1 0, norm 2 0",
    "view": "dropout 0 1, tanh 1 0, transpose 2 1, chunk 0 1, other 1 2, linear 6 1, add 6 1",
    "own": "add 1 2, view 1 0, add 1 0, mean 4 5, mul 5 2, add 1 5",
    "result and its view": "linear 0 2, dropout 0 1, relu 1 0, add 0 1, view 6 0",
}


def simulated(model, x):
    e = so.memory.simulate_step(model, x)
    return e.by_owner, [s.nbytes for s in e.timeline]


def compare(program, way, patch):
    model, x = Model(program, way), torch.randn(4, 6, SIZE)
    quick = simulated(model, x)
    patch.setattr(step, "_quickly", lambda *_: None)
    assert simulated(model, x) == quick


@pytest.mark.parametrize("way", FOUND)
def test_programs_that_were_found(way, monkeypatch):
    steps = (text.split() for text in FOUND[way].split(", "))
    compare([(name, int(i), int(j)) for name, i, j in steps], way, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["data", "one result", "both"])
@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed, way, monkeypatch):
    numbers = random.Random(f"{seed} {way}")
    names = numbers.choices([*OPS], k=numbers.randint(3, 9))
    compare([(n, numbers.randrange(20), numbers.randrange(20)) for n in names], way, monkeypatch)
