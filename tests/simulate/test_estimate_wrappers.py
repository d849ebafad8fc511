"""Estimates with wrapper subclasses, such as quantized weights, and with assigned `.data`."""

import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import storage_ops as so
from storage_ops.memory import estimate, explain_oom, limit, simulate_step, will_it_fit

from .cpu_peaks import check
from .models import run
from .test_step import measured


class Int8(torch.Tensor):
    """A weight of 8-bit codes and a scale for each row, which only their module reads."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, t):
        scale = t.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return cls((t / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(**parts)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)

    def whole(self):
        return self.codes * self.scale


class Adapted(nn.Module):
    """A frozen 8-bit layer with a low-rank adapter, followed by a wide op."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(Int8.of(torch.randn(4 * width, width)), requires_grad=False)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        wide = F.linear(x, self.weight.whole()) + self.b(self.a(x))
        return x + self.down(F.gelu(wide).tanh())


class Halved(torch.optim.Optimizer):
    """SGD with momentum in 8 bits."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            momentum = self.state[p].setdefault("momentum", Int8.of(torch.zeros_like(p)))
            whole = momentum.whole() * 0.9 + p.grad
            new = Int8.of(whole)
            momentum.codes.copy_(new.codes)
            momentum.scale.copy_(new.scale)
            p.add_(whole, alpha=-0.1)


def peak_of(model, x, optimizer):
    """Return the measured peak, with the bytes of the inner tensors of wrappers."""
    peak = measured(model, x, torch.sum, optimizer)
    states = [t for state in optimizer.state.values() for t in state.values()]
    for t in (*model.parameters(), *states):
        if isinstance(t, Int8):
            peak += t.codes.nbytes + t.scale.nbytes - t.nbytes
    return peak


@pytest.fixture
def model():
    return nn.Sequential(*(Adapted(64) for _ in range(4)))


def test_states_and_weights_of_8_bits(model):
    x = torch.randn(256, 64)
    step = simulate_step(model, x, loss=torch.sum, optimizer=Halved)
    assert step.by_owner["optimizer state"] < 0.3 * sum(
        p.nbytes for p in model.parameters() if p.requires_grad
    )
    optimizer = Halved([p for p in model.parameters() if p.requires_grad])
    got = peak_of(model, x, optimizer)
    assert abs(step.peak_bytes - got) <= 1024
    with_states = simulate_step(model, x, loss=torch.sum, optimizer=optimizer)
    assert abs(with_states.peak_bytes - got) <= 1024


@pytest.mark.in_turn
def test_a_plan_for_weights_of_8_bits(model):
    x, whole = torch.randn(256, 64), simulate_step(model, torch.randn(256, 64), loss=torch.sum)
    model(x).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    plan = so.fit(model, x, budget=int(0.7 * whole.peak_bytes), loss=torch.sum)
    plan.apply()
    got = peak_of(model, x, torch.optim.SGD(model.parameters(), 0))
    assert abs(plan.peak_bytes - got) <= 1024
    model(x).sum().backward()
    for p, g in zip((p for p in model.parameters() if p.requires_grad), gradients, strict=True):
        assert torch.equal(p.grad, g)


def test_limit_and_explain_oom_count_inner_tensors(model, monkeypatch):
    module = importlib.import_module("storage_ops.oom.explain_oom")
    monkeypatch.setattr(module, "advise", lambda *_: (None, ""))  # advice would take long
    x, optimizer = torch.randn(256, 64), Halved([p for p in model.parameters() if p.requires_grad])
    peak = peak_of(model, x, optimizer)
    with limit(peak + 4096):
        run(model, x, torch.sum, optimizer)
    optimizer.zero_grad()
    with pytest.raises(torch.OutOfMemoryError), limit(peak - 4096), explain_oom() as told:
        run(model, x, torch.sum, optimizer)
    states = sum(
        t.nbytes
        for s in optimizer.state.values()
        for t in (s["momentum"].codes, s["momentum"].scale)
    )
    assert told.by_owner["optimizer state of Halved"] == states
    of_weights = model[0].weight.codes.nbytes + model[0].weight.scale.nbytes
    assert told.by_owner["parameters of 0"] == of_weights


def test_a_wrapper_that_computes():
    a = TwoTensor(torch.randn(8, 8), torch.randn(8, 8)).requires_grad_()
    e = estimate(lambda: (a * 2).sin())
    assert e.input_bytes == 2 * 512 and e.peak_bytes == 6 * 512


class Clipped(nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data.clamp(-0.01, 0.01)
        return super().forward(x)


class Assigning(torch.optim.SGD):
    """Assigns `.data`, as optimizers of bitsandbytes and older code do."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data = p.data.contiguous()
            p.data = p.data - 0.1 * p.grad
            p.data.mul_(0.5)


@pytest.mark.in_turn
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("call", ["simulate_step", "will_it_fit", "fit", "estimate"])
def test_assigned_data_is_restored(call, device):
    """A simulation assigns memory that does not exist, so the model must get its own back."""
    model = nn.Sequential(Clipped(64, 64), nn.GELU(), Clipped(64, 64)).to(device)
    x, before = torch.randn(16, 64, device=device), [p.data_ptr() for p in model.parameters()]
    values = [p.detach().clone() for p in model.parameters()]
    peak = {
        "simulate_step": lambda: simulate_step(model, x, optimizer=Assigning).peak_bytes,
        "will_it_fit": lambda: will_it_fit(model, x, optimizer=Assigning, device="cpu").peak_bytes,
        "fit": lambda: so.fit(model, x, budget="1GiB", optimizer=Assigning).peak_bytes,
        "estimate": lambda: estimate(lambda x: model(x).sum().backward(), x).peak_bytes,
    }[call]()
    assert peak > 4 * 64 * 64 * 4
    assert [p.data_ptr() for p in model.parameters()] == before
    assert all(p.device.type == device and type(p.data) is torch.Tensor for p in model.parameters())
    if device == "cpu":
        assert all(map(torch.equal, model.parameters(), values))


def test_replaced_memory_counts_once():
    t = torch.zeros(1024)

    def fn():
        t.data = torch.ones(1024)
        t.data.add_(1)  # writes to the new memory, and the old memory is free
        return t.data + t

    e = estimate(fn)
    assert e.peak_bytes == 2 * 4096 and t.sum() == 0  # old and new memory, then new memory and sum


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(4, dtype=torch.float64)])
def test_data_of_another_kind_is_refused(value):
    t = torch.zeros(4)

    def fn():
        t.data = value

    with pytest.raises(
        RuntimeError, match=r"estimate: the simulated code sets .data of a \(4,\) tensor of torch"
    ):
        estimate(fn)
    assert t.shape == (4,) and t.dtype == torch.float32


def from_tensors(x, lengths):
    return torch.nested.nested_tensor([t[:n] for t, n in zip(x, lengths, strict=True)],
                                      layout=torch.jagged)  # fmt: skip


def from_offsets(x, lengths):
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(x[torch.arange(60) < lengths[:, None]], offsets)


def from_slices(x, lengths):
    starts = torch.zeros_like(lengths)
    return torch.nested.narrow(x, 1, starts, lengths, layout=torch.jagged).contiguous()


@pytest.mark.parametrize("made", [from_tensors, from_offsets, from_slices])
def test_jagged_tensors_that_a_function_creates(made):
    layer, x = nn.Linear(32, 96), torch.randn(4, 60, 32)
    lengths = torch.tensor([60, 12, 33, 5])

    def run():
        jagged = made(x, lengths)
        out = F.layer_norm(layer(jagged).relu() + layer(jagged), (96,))
        out.values().square().mean().backward()
        layer.zero_grad()

    check(run, 0.01)
