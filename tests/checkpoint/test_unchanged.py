"""Tiles, reports and simulations leave nothing behind in a module's attributes and containers."""

import collections
import copy

import pytest
import torch
from torch import nn

import storage_ops
from storage_ops import memory
from storage_ops.checkpoint.layers.tile import bytes_of_tile
from storage_ops.checkpoint.layers.tile_run import TiledModule
from storage_ops.checkpoint.state.unchanged import places_of, replaced


def report(model, x):
    storage_ops.apply_activation_checkpoint(model, {"layer_names": ["0"]})
    storage_ops.checkpoint_report(model, x)
    storage_ops.remove_activation_checkpoint(model)


def estimate(model, x):
    memory.estimate(lambda x: model(x).sum().backward(), x)


def fit(model, x):
    storage_ops.fit(model, x, budget="1GiB", optimizer=torch.optim.SGD)


RUNS = {
    "checkpoint_report": report,
    "tile": lambda m, x: storage_ops.tile(m, 3)(x),
    "tile by budget": lambda m, x: storage_ops.tile(m, budget="1MiB")(x),
    "estimate": estimate,
    "simulate_step": memory.simulate_step,
    "will_it_fit": lambda m, x: memory.will_it_fit(m, x, budget="1GiB"),
    "fit": fit,
}


class Cell(nn.Module):
    """Has tensors and numbers in attributes, containers and an object."""

    class Cache:
        def __init__(self):
            self.kept, self.count = [], 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(8))
        self.scale, self.is_ready = None, False
        self.linear.weight.scales = torch.ones(8)  # bitsandbytes sets such an attribute
        self.by_size, self.recent = {}, collections.deque(maxlen=2)
        self.cache = self.Cache()

    def forward(self, x):
        scales = getattr(self.linear.weight, "scales", None)
        if scales is not None:  # the first call moves the scales
            self.scales, self.linear.weight.scales = scales, None
        if not self.is_ready:
            self.scale, self.is_ready = torch.linspace(0.5, 1, 8), True
        if 8 not in self.by_size:
            self.by_size[8] = [torch.ones(8)]
        y = self.linear(x) * self.scale * self.by_size[8][0]
        self.recent.append(y.detach())
        self.cache.kept.append(y.detach())
        self.cache.count += 1
        self.total = self.total + 1
        return y


def kept(cell):
    values = cell.scale, cell.is_ready, cell.cache.count, list(cell.by_size), cell.total
    values += id(cell.linear.weight.scales), id(getattr(cell, "scales", None))
    return [*values, *map(id, cell.recent), *map(id, cell.cache.kept)]


SIMULATIONS = [name for name in RUNS if name != "tile"]


@pytest.mark.in_turn
@pytest.mark.parametrize("after", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize("run", SIMULATIONS)
def test_a_simulation_leaves_nothing_in_a_module(run, after):
    model = nn.Sequential(Cell(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    x = torch.randn(2, 5, 8)
    if after:
        model(x)
    before = kept(model[0])
    if run == "tile by budget":  # tiling also runs the module
        tiled = TiledModule(model, type(model).forward, 1, 1)
        bytes_of_tile(tiled, x, 2)
    else:
        RUNS[run](model, x)
    assert all(a is b or a == b for a, b in zip(kept(model[0]), before, strict=True))
    model(x).sum().backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())
    assert type(model[0].scale) is torch.Tensor


def test_a_module_with_a_lazy_cache_is_tiled_by_budget():
    cell = storage_ops.tile(Cell(), budget="100KiB")
    for _ in range(2):
        cell(torch.randn(2, 5, 8)).sum().backward()
    assert type(cell.linear.weight.grad) is torch.Tensor


def test_arguments_of_a_function_are_restored():
    state = {"seen": []}

    def fn(x, state):
        state["seen"].append(x + 1)
        state["last"] = x

    memory.estimate(fn, torch.randn(3), state)
    assert state == {"seen": []}


@pytest.mark.parametrize("run", RUNS)
def test_a_module_in_two_places_keeps_its_parameters(run):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())] * 3)
            self.layers[0].register_buffer("kept", torch.ones(8))
            self.last = nn.Linear(8, 8)
            self.last.bias = self.layers[0][0].bias

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) * layer.kept
            return self.last(x)

    plain = nn.Sequential(Shared(), nn.Identity()).double()
    model = copy.deepcopy(plain)
    before = [*model.parameters(), *model.buffers()]
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    RUNS[run](model, x)
    now = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(now, before, strict=True))
    for module in (model, plain):
        module.zero_grad()
        for _ in range(2):
            module(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)


def test_an_interrupt_while_parameters_are_put_back():
    class Parameters(dict):
        """Raises KeyboardInterrupt once, when the second parameter is put back."""

        def __setitem__(self, name, t):
            writes.append(name)
            if len(writes) == 4:
                raise KeyboardInterrupt
            super().__setitem__(name, t)

    writes = []
    module = nn.Linear(2, 2)
    module._parameters = Parameters(module._parameters)
    weight, bias = module.parameters()
    places = [(where, name, t.detach()) for where, name, t in places_of(module)]
    with pytest.raises(KeyboardInterrupt), replaced(places):
        assert module.weight is not weight
    assert module.weight is weight and module.bias is bias
