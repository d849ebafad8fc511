"""Estimates of steps under autocast, whose cache of casts lives until the outermost block ends."""

import contextlib

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.fitting.step import StepLedger
from storage_ops.memory import simulate_step
from storage_ops.simulate import step as steps
from storage_ops.simulate.values.assume import Assumption

from .cpu_peaks import CPU


@pytest.fixture(autouse=True)
def without_onednn():
    """Multiply without oneDNN, which packs operands on processors with 16-bit products."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def model_and_input(mode=None):
    model = nn.Sequential(*(Block(64) for _ in range(4)))
    if mode is not None:
        cfg = so.ActivationCheckpointConfig(["Block"], mode=mode)
        so.apply_activation_checkpoint(model, cfg)
    return model, torch.randn(64, 64)


def loss_of(out):
    return out.float().square().mean()


def after(model, x, **kwargs):
    with torch.autocast("cpu", torch.bfloat16, **kwargs):
        loss = loss_of(model(x))
    loss.backward()


def inside(model, x, **kwargs):
    with torch.autocast("cpu", torch.bfloat16, **kwargs):
        loss_of(model(x)).backward()


def between(model, x, **kwargs):
    with torch.autocast("cpu", torch.bfloat16, **kwargs):
        with torch.autocast("cpu", torch.bfloat16, **kwargs):
            loss = loss_of(model(x))
        loss.backward()


def measured(step, model, x, **kwargs):
    """Return the measured peak of a step, including parameters and input."""
    before = sum(t.nbytes for t in (*model.parameters(), x))
    with so.memory.measure() as m:
        step(model, x, **kwargs)
    for p in model.parameters():
        p.grad = None
    return before + m.peak_bytes


def simulated(step, model, x, **kwargs):
    """Return the simulated peak of a step on a CPU, including parameters and input."""
    step_ledger = StepLedger(CPU, Assumption(None))
    with step_ledger.open(model, (x,), {}):
        step_ledger.run(lambda: step(model, x, **kwargs))
    return max(step_ledger.levels())


@pytest.mark.parametrize("step", [after, inside, between])
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_autocast_blocks_take_the_measured_memory(step, cache_enabled):
    model, x = model_and_input("full")
    peak = measured(step, model, x, cache_enabled=cache_enabled)
    assert simulated(step, model, x, cache_enabled=cache_enabled) == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("mode", [None, "full", "output_discard"])
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_a_step_in_a_block_runs_backward_after_it(mode, cache_enabled):
    model, x = model_and_input(mode)
    peak = measured(after, model, x, cache_enabled=cache_enabled)
    on_gpu = simulate_step(model, x, loss=loss_of, device="h100").peak_bytes
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
        e = simulate_step(model, x, loss=loss_of)
        with torch.autocast("cpu", enabled=False):
            assert simulate_step(model, x, loss=loss_of, device="h100").peak_bytes == on_gpu
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled() == cache_enabled
    assert e.peak_bytes == pytest.approx(peak, rel=0.01)
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0


def test_an_error_in_the_backward_restores_the_block():
    model, x = model_and_input()

    def fail(_):
        raise KeyError("mine")

    def loss(out):
        out.register_hook(fail)
        return loss_of(out)

    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        with contextlib.suppress(KeyError):
            simulate_step(model, x, loss=loss)
        assert torch.is_autocast_enabled("cpu")
        assert torch.autocast_increment_nesting() == 3 and torch.autocast_decrement_nesting() == 2


def test_a_plan_made_in_a_block_keeps_to_its_budget():
    model, x = model_and_input()
    x = torch.randn(1024, 64)
    with torch.autocast("cpu", torch.bfloat16):
        whole = simulate_step(model, x, loss=loss_of).peak_bytes
        plan = so.fit(model, x, int(0.9 * whole), loss=loss_of)
    plan.apply()
    assert plan.peak_bytes == pytest.approx(measured(after, model, x), rel=0.01)


class Gated(nn.Module):
    """A layer whose parameters are cast once. The casts are saved for the backward."""

    def __init__(self, bias=False, times=1):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias), nn.Linear(256, 64, bias)
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            x = x + self.down(torch.relu(self.up(x)))
        return x


class Outside(nn.Module):
    """Layers, with a parameter that is used before, between and after them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(4))
        self.shared = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        x = self.shared(x)
        for layer in self.layers:
            x = self.shared(layer(x))
        return x


# The first layer of a Sequential is of another kind, because its input needs no gradient.
LAYERS = {
    "no biases": (lambda: nn.Sequential(*(Gated() for _ in range(5))), 4),
    "biases": (lambda: nn.Sequential(*(Gated(bias=True) for _ in range(4))), 0),
    "a parameter twice": (lambda: nn.Sequential(*(Gated(times=2) for _ in range(4))), 0),
    "a parameter outside": (Outside, 4),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_equal_layers_are_replayed_if_the_cache_of_casts_allows_it(kind, monkeypatch):
    make, replays = LAYERS[kind]
    model, x, created = make(), torch.randn(64, 64), []

    class Counted(steps.Quick):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            created.append(self)

    monkeypatch.setattr(steps, "Quick", Counted)
    with torch.autocast("cpu", torch.bfloat16):
        quick = simulate_step(model, x, optimizer=torch.optim.AdamW, device="cpu")
        monkeypatch.setattr(steps, "_quickly", lambda *_: None)
        plain = simulate_step(model, x, optimizer=torch.optim.AdamW, device="cpu")
    assert created[0].count == replays and not created[0].is_spoiled
    assert quick.peak_bytes == plain.peak_bytes and quick.by_owner == plain.by_owner
