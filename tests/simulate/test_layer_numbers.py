"""Equal layers that store their index are simulated once, unless they use the index."""

import dataclasses
import types

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.fitting.probe import Probe
from storage_ops.fitting.search import Search
from storage_ops.simulate import step as steps
from storage_ops.simulate.layers import replay_cache
from storage_ops.simulate.module_kinds import Kinds
from storage_ops.simulate.plain_values import Watch, would_answer

pytestmark = pytest.mark.in_turn

ADAM = torch.optim.AdamW


@dataclasses.dataclass
class Config:
    place: int
    width: int = 32


class Layer(nn.Module):
    def __init__(self, does=None, **attributes):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.does = does
        vars(self).update(attributes)

    def forward(self, x):
        y = self.up(x)
        if self.does is not None:
            y = self.does(self, y)
        return x + self.down(y.tanh())


STORED = {
    "layer_idx": lambda i: {"layer_idx": i},
    "depth": lambda i: {"depth": i},
    "from one": lambda i: {"index_in_stack": i + 1},
    "string": lambda i: {"prefix": f"layers.{i}"},
    "dataclass": lambda i: {"config": Config(i)},
    "namespace": lambda i: {"config": types.SimpleNamespace(inner={"at": [i]})},
}


def model_of(stored, does=None, count=24):
    layers = (Layer(does, **stored(i)) for i in range(count))
    return nn.Sequential(nn.Linear(32, 32), *layers)


@pytest.fixture
def counts(monkeypatch):
    """Count the recordings of `simulate_step`, and the simulations of layers by `fit`."""
    numbers = {"recorded": 0, "probed": 0}

    def counted(cls, name, what):
        plain = getattr(cls, name)

        def call(*args):
            numbers[what] += 1
            return plain(*args)

        monkeypatch.setattr(cls, name, call)

    counted(replay_cache.Quick, "_record", "recorded")
    counted(Probe, "_run", "probed")
    return numbers


def simulated_singly(model, x, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(steps, "_quickly", lambda *_: None)
        return so.memory.simulate_step(model, x, optimizer=ADAM).peak_bytes


@pytest.mark.parametrize("how", STORED)
def test_equal_layers_cost_one_simulation(how, counts, monkeypatch):
    model, x = model_of(STORED[how]), torch.randn(4, 32)
    before = [{k: v for k, v in vars(m).items() if k[0] != "_"} for m in model]
    peak = so.memory.simulate_step(model, x, optimizer=ADAM).peak_bytes
    # The second recording leaves out the last layer, whose gradient is expanded.
    assert counts["recorded"] == 2
    assert peak == simulated_singly(model, x, monkeypatch)
    search = Search(model, x, optimizer=ADAM, actions=["full"])
    # Two kinds, each kept and recomputed: the last layer (expanded gradient), and all others.
    assert counts["probed"] == 4
    assert abs(search.problem.peak([0] * 24) - peak) <= 0.001 * peak
    assert [{k: v for k, v in vars(m).items() if k[0] != "_"} for m in model] == before


def dropped(m, y):
    keep = 1 - m.n / 8
    return y * y.new_empty(len(y), 1).bernoulli_(keep).div_(keep)


def repeated(m, y):
    count = int((torch.ones(1) * (m.n + 1)).item())
    return torch.stack([y] * count).sum(0)


WIDE = {
    "parity": (lambda m, y: y.exp() if m.n % 2 else y, 2),
    "few": (lambda m, y: y.exp() if m.n < 2 else y, 2),
    "member": (lambda m, y: y.exp() if m.n in (1, 3) else y, 2),
    "key": (lambda m, y: y.exp() if {1: 1}.get(m.n) else y, 6),
    "list": (lambda m, y: y.exp() if [0, 1, 0, 1, 0, 1][m.n] else y, 6),
    "size": (lambda m, y: y + torch.ones(m.n + 1, 1).expand(-1, 64).sum(0), 6),
    "truth": (lambda m, y: y.exp() if m.n else y, 2),
    "string": (lambda m, y: y.exp() if str(m.n) == "1" else y, 6),
    "class": (lambda m, y: y.exp() if isinstance(m.n, int) else y, 1),
    "scale": (lambda m, y: 2 - (m.n + y * m.n) / (m.n + 0.5) * 3, 1),
    "drop path": (dropped, 1),
    "known values": (repeated, 6),
    "roll": (lambda m, y: y.roll((m.n % 2, 0), (0, 1)), 2),
    "dropout": (lambda m, y: nn.functional.dropout(y, m.n / 8), 6),
}  # fmt: skip


@pytest.mark.parametrize("what", WIDE)
def test_layers_that_use_their_index(what, counts, monkeypatch):
    does, kinds = WIDE[what]
    model, x = model_of(lambda i: {"n": i}, does, 6), torch.randn(4, 32)
    peak = so.memory.simulate_step(model, x, optimizer=ADAM).peak_bytes
    assert peak == simulated_singly(model, x, monkeypatch)
    search = Search(model, x, optimizer=ADAM, actions=["full"])
    assert abs(search.problem.peak([0] * 6) - peak) <= 0.001 * peak
    assert 2 * kinds <= counts["probed"] <= 2 * min(kinds + 3, 6)
    assert [m.n for m in model[1:]] == list(range(6))


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, number):
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.repeat(64, 1, 1).sum(0) if ctx.number == 1 else gradient, None


def test_layers_that_use_their_index_in_backward(monkeypatch):
    model = model_of(lambda i: {"n": i}, lambda m, y: InBackward.apply(y, m.n), 4)
    x = torch.randn(256, 32)
    peak = so.memory.simulate_step(model, x, optimizer=ADAM).peak_bytes
    assert peak == simulated_singly(model, x, monkeypatch)
    search = Search(model, x, optimizer=ADAM, actions=["full"])
    assert abs(search.problem.peak([0] * 4) - peak) <= 0.001 * peak


KEPT = []


class Kept(Layer):
    def forward(self, x):
        KEPT.append(self.n)
        return super().forward(x)


def test_no_watched_value_is_left_behind():
    model = nn.Sequential(*(Kept(n=i) for i in range(4)))
    so.fit(model, torch.randn(4, 32), "1GiB")
    assert {hash(n) + 1 for n in KEPT} == {1, 2, 3, 4}
    assert [m.n for m in model] == list(range(4))


def test_hooks_and_functions_are_compared_by_code_and_values():
    def scaled(factor):
        return lambda module, inputs, out: out * factor

    model = nn.Sequential(*(Layer() for _ in range(4)))
    for layer, factor in zip(model, (2, 2, 3, None), strict=True):
        if factor is not None:
            layer.register_forward_hook(scaled(factor))
    kinds = Kinds(model)
    groups = [kinds.kind_of(layer).group for layer in model]
    assert groups[0] is groups[1] and len(set(groups)) == 3


def test_recorded_answers_are_reused_for_equivalent_values():
    holder = {"n": 7}
    watch = Watch({0: (holder, "n")}, may_know=lambda t: True)
    with watch:
        n = holder["n"]
        assert not isinstance(n, str) and isinstance(n, int) and n is not None
        assert (n * 2 + 1) % 5 == 0 and -n < 0 and 3 + n > n - 1
        with pytest.raises(ZeroDivisionError):
            1 // (n - 7)
    del n
    assert holder == {"n": 7} and not watch.is_kept and not watch.is_refused
    assert would_answer(watch.answers, [7]) and not would_answer(watch.answers, [2])
