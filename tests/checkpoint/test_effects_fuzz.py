"""Random regions with side effects, replaced parameters and errors leave eager mode's state."""

import contextlib
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

import storage_ops as so

from .test_left_behind import assert_nothing_is_left

WIDTH = 4
NOISE = torch.Generator()


class Region(nn.Module):
    """Runs the steps of a plan on its input. Each step may read and write the module's state."""

    def __init__(self, plan, dtype):
        super().__init__()
        self.plan, self.dtype = plan, dtype
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=dtype if not dtype.is_complex else torch.float64)
        self.register_buffer("state", torch.rand(WIDTH, dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("large", torch.ones(200, 200, dtype=torch.float64))
        self.note = torch.ones(WIDTH, dtype=dtype)
        self.register_parameter("scale", nn.Parameter(torch.rand(WIDTH, dtype=dtype)))

    def forward(self, x, box, extra):
        for step in self.plan:
            x = getattr(self, f"do_{step}")(x, box, extra)
        return x

    def do_linear(self, x, box, extra):
        return self.linear(x)

    def do_sin(self, x, box, extra):
        return x.sin()

    def do_scale(self, x, box, extra):
        return x * self.scale + extra.get("shift", 0)

    def do_norm(self, x, box, extra):
        return torch.complex(self.norm(x.real), x.imag) if x.is_complex() else self.norm(x)

    def do_conj(self, x, box, extra):
        return x.conj() if x.is_complex() else -x

    def do_negative(self, x, box, extra):
        return x * x.conj().imag if x.is_complex() else x * 2

    def do_dropout(self, x, box, extra):
        return x * (torch.rand(WIDTH, dtype=torch.float64) > 0.3)

    def do_noise(self, x, box, extra):
        return x * torch.rand(WIDTH, dtype=torch.float64, generator=self.noise)

    def do_copy(self, x, box, extra):
        y = x * self.state.clone()
        self.state.copy_(x.detach().mean(0).tanh())
        return y

    def do_data(self, x, box, extra):
        y = x + self.state.clone()
        self.state.data.mul_(0.5)
        return y

    def do_rebind(self, x, box, extra):
        y = x * self.state
        self.state = (self.state + x.detach().mean(0)).tanh()
        return y

    def do_note(self, x, box, extra):
        y = x * self.note
        self.note = x.detach().abs().mean(0).to(self.dtype)
        return y

    def do_count(self, x, box, extra):
        self.count += 1
        self.large[0, :WIDTH] += 0.5
        return x * self.count.item() * self.large[0, 0].item()

    def do_some(self, x, box, extra):
        """Write a buffer in some calls only."""
        y = x * self.state.clone()
        if x.detach().real.sum() > 0:
            self.state.mul_(0.9)
        return y

    def do_append(self, x, box, extra):
        box.append(x.real.square().mean())
        return x * len(box)

    def do_entry(self, x, box, extra):
        extra["seen"] = extra.get("seen", 0) + 1
        return x * extra["seen"]

    def do_object(self, x, box, extra):
        cache = extra["cache"]
        cache.items.append(x.detach().mean())
        cache.total = cache.total + cache.items[-1]
        return x * cache.total


class Cache:
    def __init__(self):
        self.items, self.total = [], 1.0


class RegionAndHead(nn.Module):
    def __init__(self, region, error):
        super().__init__()
        self.region, self.error = region, error
        self.head = nn.Linear(WIDTH, 2, dtype=region.dtype)

    def forward(self, x, box, extra):
        h = self.region(x, box, extra)
        if self.error is not None and len(box) > 2:
            raise self.error("on purpose")
        return self.head(h)


STEPS = [name[3:] for name in vars(Region) if name.startswith("do_")]
ERRORS = (KeyError, KeyboardInterrupt, SystemExit, GeneratorExit)
KINDS = {
    "full": {"mode": "full"},
    "no early stop": {"mode": "full", "early_stop": False},
    "debug": {"mode": "full", "debug": True},
    "selective": {"ops_to_save": ["aten.addmm", "aten.sin", "aten.mul"]},
    "output_discard": {"mode": "output_discard"},
    "checksum": {"mode": "output_discard", "determinism_check": "checksum"},
    "function": None,
}
CASES = st.fixed_dictionaries(
    {
        "plan": st.lists(st.sampled_from(STEPS), min_size=1, max_size=6),
        "kind": st.sampled_from(sorted(KINDS)),
        "dtype": st.sampled_from([torch.float64, torch.complex128]),
        "forwards": st.integers(1, 3),
        "backwards": st.sampled_from(["together", "in order", "reversed", "retained"]),
        "exchange": st.sampled_from(["no", "functional_call", "assigned"]),
        "error": st.sampled_from([None, None, None, *ERRORS]),
        "shift": st.booleans(),
        "seed": st.integers(0, 2**31),
    }
)


def wrapped(model, kind):
    options = KINDS[kind]
    if options is not None:
        so.apply_activation_checkpoint(model, {"layer_names": ["region"], **options})
        return model
    return so.output_discard(model.region, model.head)


def run(model, fn, case):
    """Return all that a step leaves: gradients, losses, containers, buffers, random numbers."""
    torch.manual_seed(case["seed"])
    NOISE.manual_seed(case["seed"])
    dtype, exchange = case["dtype"], case["exchange"]
    x = torch.randn(3, WIDTH, dtype=dtype, requires_grad=True)
    box, extra = [], {"cache": Cache()}
    if case["shift"]:
        extra["shift"] = torch.randn(WIDTH, dtype=dtype, requires_grad=True)
    named = {n: p for n, p in model.named_parameters() if n.startswith("region")}
    new = {n: torch.randn_like(p, requires_grad=True) for n, p in named.items()}
    old = dict(named)
    losses, raised = [], None
    for number in range(case["forwards"]):
        exchanged = contextlib.nullcontext()
        if exchange == "functional_call":
            exchanged = _reparametrize_module(model, {n: t for n, t in new.items() if number != 1})
        try:
            with exchanged:
                y = fn(x * (number + 1), box, extra)
        except ERRORS as error:
            raised = type(error)
            continue
        losses.append(y.abs().square().sum() + sum(box))
        if exchange == "assigned" and number == 0:
            model.region.scale = nn.Parameter(new["region.scale"].detach().clone())
            named["second scale"] = model.region.scale
    if case["backwards"] == "together":
        losses = [sum(losses)] if losses else []
    elif case["backwards"] == "reversed":
        losses.reverse()
    for number, loss in enumerate(losses):
        loss.backward(retain_graph=True)
        if case["backwards"] == "retained" and number == 0:
            loss.backward(retain_graph=True)
    leaves = [x, *old.values(), *new.values(), *model.head.parameters()]
    leaves += [named[n] for n in named if n == "second scale"] + [extra.get("shift", x)]
    state = [t.grad for t in leaves] + [loss.detach() for loss in losses]
    state += [t.detach() for t in (*box, *extra["cache"].items, *model.buffers())]
    state += [model.region.note, torch.get_rng_state(), NOISE.get_state()]
    state += [torch.as_tensor(extra["cache"].total), torch.tensor(extra.get("seen", 0))]
    return state, raised


def check(case):
    torch.manual_seed(case["seed"])
    # A plain function has no module around it that could fail.
    error = None if case["kind"] == "function" else case["error"]
    plain = RegionAndHead(Region(case["plan"], case["dtype"]), error)
    model = copy.deepcopy(plain)
    plain.region.noise = model.region.noise = NOISE
    right, right_error = run(plain, plain, case)
    got, error = run(model, wrapped(model, case["kind"]), case)
    assert_nothing_is_left()
    assert error is right_error and len(got) == len(right)
    for index, (a, b) in enumerate(zip(got, right, strict=True)):
        assert (a is None) == (b is None), index
        assert a is None or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), index


@settings(max_examples=150)
@given(CASES)
@pytest.mark.filterwarnings("ignore:.*modifies in place results of")
@pytest.mark.filterwarnings("ignore:the policy of the selective checkpoint saves nothing")
def test_random_regions_leave_the_state_of_eager_mode(case):
    check(case)
