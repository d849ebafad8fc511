"""Generators and tensors that a region reaches other than by its arguments."""

import functools
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so

GENERATOR = torch.Generator()


class Holder:
    def __init__(self, generator):
        self.generator = generator


class Noisy(nn.Module):
    """Draws from a generator in an attribute if `own`, else from a global one."""

    def __init__(self, own=True):
        super().__init__()
        self.linear, self.own = nn.Linear(4, 4), own
        self.generator = GENERATOR if own else None

    def forward(self, x):
        return self.linear(x) * torch.rand(4, generator=self.generator if self.own else GENERATOR)


def noise_by_name(x):
    return x.sin() * torch.rand(4, generator=GENERATOR)


def closure(generator):
    return lambda x: x.sin() * torch.rand(4, generator=generator)


def of_holder(holder):
    return lambda x: x.sin() * torch.rand(4, generator=holder.generator)


def with_default(x, holder=Holder(GENERATOR)):  # noqa: B008
    return x.sin() * torch.rand(4, generator=holder.generator)


def method(x):
    return Noisy.forward(NOISY, x)


class Call:
    def __call__(self, x):
        return noise_by_name(x)


class Slotted(dict):
    """Raises another error than AttributeError for a missing attribute."""

    __slots__ = ()
    __getattr__ = dict.__getitem__


def inner(x):
    def noise():
        return torch.rand(4, generator=GENERATOR)

    return x.sin() * noise()


def in_a_list(holders, config):
    return lambda x: x.sin() * torch.rand(4, generator=holders[0][config["place"]])


NOISY = Noisy()
PRODUCERS = {
    "attribute": NOISY,
    "inside": nn.Sequential(nn.Linear(4, 4), Noisy()),
    "global of a module": Noisy(own=False),
    "global": noise_by_name,
    "global of a function that is called": lambda x: noise_by_name(x),
    "closure": closure(GENERATOR),
    "attribute of an object": of_holder(Holder(GENERATOR)),
    "default": with_default,
    "global module": method,
    "partial": functools.partial(with_default, holder=Holder(GENERATOR)),
    "bound": NOISY.forward,
    "object": Call(),
    "inner function": inner,
    "list": in_a_list([(1, GENERATOR)], Slotted(place=1)),
    "checkpointed": so.CheckpointWrapper(Noisy(own=False)),
}


def gradients(fn, x, parameters):
    GENERATOR.manual_seed(3)
    grads = torch.autograd.grad(fn(x).square().sum(), (x, *parameters))
    return grads, GENERATOR.get_state()


@pytest.mark.parametrize("name", PRODUCERS)
def test_generators_are_found(name):
    producer, down = PRODUCERS[name], nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    want, state = gradients(lambda x: down(producer(x)), x, down.parameters())
    got, after = gradients(so.output_discard(producer, down), x, down.parameters())
    assert all(map(torch.equal, got, want)) and torch.equal(state, after)


@pytest.mark.parametrize("options", [
    {}, {"use_reentrant": True}, {"ops_to_save": ["aten.addmm"]}, {"mode": "output_discard"},
])  # fmt: skip
@pytest.mark.parametrize("registered", [False, True])
def test_generators_of_checkpointed_layers(options, registered):
    """torch's own checkpoint restores only the default generators."""
    hidden = torch.Generator()

    class Layer(nn.Linear):
        def forward(self, x):
            generator = [GENERATOR, hidden][registered]
            return super().forward(x) * torch.rand(4, generator=generator)

    def run():
        GENERATOR.manual_seed(5), hidden.manual_seed(5), model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad for p in model.parameters()], hidden.get_state()

    model, x = nn.Sequential(Layer(4, 4), nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)
    want, state = run()
    handle = so.register_rng_tracker(hidden)
    try:
        so.apply_activation_checkpoint(model, {"layer_classes": ["Layer"], **options})
        got, after = run()
    finally:
        handle.remove()
    assert all(map(torch.equal, got, want)) and torch.equal(state, after)


@pytest.mark.parametrize("save", [
    {"ops_to_save": ["aten.rand"]}, {"ops_to_save": ["aten.poisson"]},
    {"ops_to_recompute": ["aten.randn"]},
])  # fmt: skip
def test_a_saved_random_op_advances_its_generator_in_the_recompute(save):
    class Layer(nn.Linear):
        def forward(self, x):
            noise = torch.poisson(torch.full((4,), 9.0), GENERATOR)
            noise = noise + torch.rand(4, generator=GENERATOR)
            return super().forward(x) * noise * torch.randn(4, generator=GENERATOR)

    layer, x = Layer(4, 4), torch.randn(3, 4, requires_grad=True)
    want, state = gradients(layer, x, layer.parameters())
    got, after = gradients(so.CheckpointWrapper(layer, **save), x, layer.parameters())
    assert all(map(torch.equal, got, want)) and torch.equal(state, after)


@pytest.mark.parametrize("source", [random, numpy.random], ids=["random", "numpy"])
def test_python_and_numpy_when_registered(source):
    x, down = torch.randn(3, 4, requires_grad=True), nn.Linear(4, 4)

    def step(fn):
        source.seed(0)
        return torch.autograd.grad(fn(x).square().sum(), (x, down.weight))

    def producer(x):
        return x.sin() * source.random()

    handle = so.register_rng_tracker(source)
    try:
        got = step(so.output_discard(producer, down))
    finally:
        handle.remove()
    assert all(map(torch.equal, got, step(lambda x: down(producer(x)))))
    changed = so.output_discard(producer, down, determinism_check="checksum")
    with pytest.raises(RuntimeError, match="checksum"):
        step(changed)


def modified(change, check="default"):
    """Run a step that calls `change(up, z)` before the backward."""
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    z = torch.randn(3, 4, requires_grad=True) * 1
    up.register_buffer("scale", torch.ones(8))
    producer = lambda: F.gelu(up(z.detach()) * up.scale + z.sum())  # noqa: E731
    y = so.output_discard(producer, down, determinism_check=check)()
    with torch.no_grad():
        change(up, z)
    y.sum().backward()


@pytest.mark.parametrize("change, shape", [
    (lambda up, z: up.weight.mul_(2), r"\(8, 4\)"), (lambda up, z: up.bias.add_(2), r"\(8,\)"),
    (lambda up, z: up.scale.add_(1), r"\(8,\)"), (lambda up, z: z.detach().mul_(2), r"\(3, 4\)"),
])  # fmt: skip
def test_a_changed_tensor_is_an_error_even_if_autograd_did_not_save_it(change, shape):
    with pytest.raises(RuntimeError, match=f"shape {shape} that .* uses was modified in place"):
        modified(change)


def test_a_changed_tensor_is_accepted_without_a_check():
    modified(lambda up, z: up.bias.add_(2), check="none")


def region(fn, x, change=lambda: None):
    """Return the gradients of a step that calls `change` before the backward."""
    torch.manual_seed(0)
    y = so.output_discard(fn, lambda h: h.exp())(x)
    with torch.no_grad():
        change()
    return torch.autograd.grad(y.sum(), x)[0]


def compiled(up, other):
    return torch.compile(lambda x: F.gelu(up(x)).sin(), backend="aot_eager")


def conditional(up, other):
    double, treble = (lambda x: x * 2), (lambda x: x * 3)
    return lambda x: torch.cond(x.sum() > 1e9, double, treble, (up(x),))


def of_its_size(up, other):
    return lambda x: up(x) * torch.ones_like(other)


@pytest.mark.parametrize("make", [compiled, conditional, of_its_size])
def test_another_tensor_may_change(make):
    up, other = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
    fn, x = make(up, other), torch.randn(3, 4, requires_grad=True)
    got = region(lambda x: fn(x) + 0 * other.shape[0], x, lambda: other.add_(1))
    assert torch.equal(got, torch.autograd.grad(fn(x).exp().sum(), x)[0])


def test_a_part_of_the_same_memory_may_change():
    """Some models have parameters in one buffer, and an optimizer that runs in backward."""
    up, other = nn.Linear(4, 4, bias=False), nn.Parameter(torch.zeros(4))
    flat = torch.randn(20)
    up.weight.data, other.data = flat[:16].view(4, 4), flat[16:]
    x = torch.randn(3, 4, requires_grad=True)
    region(lambda x: up(x) + 0 * len(other), x, lambda: other.add_(1))


def test_a_module_without_parameters_yet():
    lazy, x = nn.LazyLinear(4), torch.randn(3, 4, requires_grad=True)
    assert torch.equal(region(lambda x: lazy(x).sin(), x), region(lambda x: lazy(x).sin(), x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.inner = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(so.output_discard(lambda x: self.inner(self.up(x)), self.down)(x))


def test_tensors_that_a_region_reaches_but_does_not_read_may_change():
    """The region closes over the whole block, whose running statistics change in each forward."""
    block = Block()
    y = block(torch.randn(6, 4, requires_grad=True))
    block(torch.randn(6, 4))  # running statistics, as under gradient accumulation
    with torch.no_grad():
        block.down.bias.add_(1), block.norm.bias.add_(1)
    y.sum().backward()


def forces(x, up):
    z = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(up(z).sin().sum(), z, create_graph=True)
    return torch.cat([force, x], 1).sin()


def curvature(x, up):
    (g,) = torch.autograd.grad(up(F.dropout(x)).sin().square().sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sin().sum(), x, create_graph=True)
    return torch.cat([h * g, x], 1)


def force_as_a_number(x, up):
    z = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(up(z).sin().sum(), z)
    return torch.cat([force * x, up(x)[:, :4]], 1).sin()


def of_a_norm(x, up, norm=nn.BatchNorm1d(4)):  # noqa: B008
    h = up(norm(x)).sin()
    (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return torch.cat([h, g * h.sum()], 1)[:, :8]


def forgiving(x, up):
    h = up(x).sin()
    try:
        (g,) = torch.autograd.grad(h.exp().sum(), x, create_graph=True)
    except Exception:
        g = torch.zeros_like(x)
    return h * g.sum()


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("energy", [forces, curvature, force_as_a_number, of_a_norm, forgiving])
def test_a_region_with_a_backward_inside(energy, retain):
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    x = torch.randn(3, 4, requires_grad=True)

    def step(fn):
        torch.manual_seed(0)
        loss, wanted = fn(x, up).square().sum(), (x, up.weight, down.weight)
        if retain:
            torch.autograd.grad(loss, wanted, retain_graph=True)
        return torch.autograd.grad(loss, wanted)

    got = step(so.output_discard(energy, down))
    assert all(map(torch.equal, got, step(lambda x, up: down(energy(x, up)))))


def test_a_chain_is_not_entered_twice():
    chain = so.OutputDiscardChain()
    with chain, pytest.raises(RuntimeError, match="entered inside its own with block"):
        chain.__enter__()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
