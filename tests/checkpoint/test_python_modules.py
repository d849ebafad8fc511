"""Regions write once to variables of a Python module, such as `stats.SEEN`."""

import types

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.checkpoint.state import known_walks

from .paths import both_paths

path = both_paths(known_walks)
CALLS = 5  # in the last ones the walk is known

SOURCE = """
import torch

GENERATOR = torch.Generator()
SEEN = torch.zeros(4)


class Counts:
    def __init__(self):
        self.calls, self.rows = 0, torch.zeros(())


counts = Counts()


def count(x):
    SEEN.add_(x.detach().sum(0))
    counts.calls += 1
    counts.rows += len(x)
    return x * torch.rand(4, generator=GENERATOR)
"""


def new_module():
    module = types.ModuleType("team.stats")
    exec(SOURCE, vars(module))  # the functions of the module have its globals
    return module


stats, team = new_module(), types.ModuleType("team")


class CallsFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return stats.count(self.linear(x)).sin()


class CallsFunctionOfPackage(CallsFunction):
    def forward(self, x):
        return team.stats.count(self.linear(x)).sin()


class WritesVariables(CallsFunction):
    def forward(self, x):
        x = self.linear(x)
        stats.SEEN.add_(x.detach().sum(0))
        stats.counts.calls += 1
        stats.counts.rows += len(x)
        return x.sin() * torch.rand(4, generator=stats.GENERATOR)


def values_of(module):
    counts, generator = module.counts, module.GENERATOR
    return [module.SEEN.tolist(), counts.calls, counts.rows.item(), generator.get_state().tolist()]


def same_state(monkeypatch):
    """Set the Python modules to their first state."""
    module = new_module()
    monkeypatch.setitem(globals(), "stats", module)
    monkeypatch.setattr(team, "stats", module, raising=False)
    return module


@pytest.mark.parametrize("kind", [CallsFunction, CallsFunctionOfPackage, WritesVariables])
def test_variables_are_written_once(kind, monkeypatch, path):
    layer, inputs = kind(), [torch.randn(3, 4) for _ in range(CALLS)]

    def train(call):
        module, seen = same_state(monkeypatch), []
        for x in inputs:
            layer.zero_grad()
            out = call(x)
            after_forward = values_of(module)
            out.sum().backward()
            assert values_of(module) == after_forward
            seen.append((after_forward, out.detach(), layer.linear.weight.grad.clone()))
        return seen

    for got, expected in zip(train(so.CheckpointWrapper(layer)), train(layer), strict=True):
        assert got[0] == expected[0]
        torch.testing.assert_close(got[1:], expected[1:], rtol=0, atol=0)


def test_a_function_that_is_replaced_later_is_found(monkeypatch, path):
    module, other = same_state(monkeypatch), new_module()
    wrapped = so.CheckpointWrapper(CallsFunction())
    for _ in range(CALLS):
        wrapped(torch.randn(3, 4)).sum().backward()
    module.count = other.count
    out = wrapped(torch.randn(3, 4))
    after_forward = values_of(other)
    out.sum().backward()
    assert values_of(other) == after_forward
    assert (module.counts.calls, other.counts.calls) == (CALLS, 1)


class Lazy(types.ModuleType):
    """A Python module that is not loaded yet."""

    def __getattribute__(self, name):
        raise RuntimeError(f"loads for {name}")


lazy = Lazy("team.lazy")


class Undecided(CallsFunction):
    def forward(self, x):
        return super().forward(x) if self.training else lazy.count(x)


def test_the_search_loads_no_module(monkeypatch, path):
    same_state(monkeypatch)
    wrapped = so.CheckpointWrapper(Undecided())
    for _ in range(CALLS):
        wrapped(torch.randn(3, 4)).sum().backward()
    assert stats.counts.calls == CALLS
