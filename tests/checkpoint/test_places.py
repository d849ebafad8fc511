"""A recompute sees the attributes, containers and objects that the forward saw."""

import collections
import contextlib
import dataclasses
import functools
import random
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so

from .test_effects import KINDS, pair, same_state, steps

Pair = collections.namedtuple("Pair", "weight other")
OUTER = types.SimpleNamespace()
PLACES = {
    "attribute": (lambda m, w: setattr(m, "w", w), lambda m: m.w),
    "item of a list": (lambda m, w: m.box.__setitem__(0, w), lambda m: m.box[0]),
    "item of a dictionary": (lambda m, w: m.named.__setitem__("w", w), lambda m: m.named["w"]),
    "tuple": (lambda m, w: setattr(m, "both", (w, 1)), lambda m: m.both[0]),
    "named tuple": (lambda m, w: setattr(m, "pair", Pair(w, 1)), lambda m: m.pair.weight),
    "object": (lambda m, w: setattr(m.config, "w", w), lambda m: m.settings.w),
    "object in a list": (lambda m, w: setattr(m.configs[0], "w", w), lambda m: m.configs[0].w),
    "global object": (lambda m, w: setattr(OUTER, "w", w), lambda m: OUTER.w),
}


class Hypernetwork(nn.Module):
    """Its weight is set from outside before each call. Another network computes the weight."""

    def __init__(self, read):
        super().__init__()
        self.read, self.bias = read, nn.Parameter(torch.zeros(6))
        self.box, self.named = [None], {}
        self.config, self.configs = types.SimpleNamespace(), [types.SimpleNamespace()]

    @property
    def settings(self):
        return self.config

    def forward(self, x):
        return torch.tanh(F.linear(x, self.read(self), self.bias))


@pytest.mark.parametrize("kind", ["full", "selective", "composed"])
@pytest.mark.parametrize("way", ["replaced", "kept elsewhere", "plain", "removed"])
@pytest.mark.parametrize("place", PLACES)
def test_the_recompute_uses_the_tensor_of_the_forward(place, way, kind):
    put, read = PLACES[place]
    plain, plain_model, fn, model = pair(kind, lambda: Hypernetwork(read))
    x, codes, network = torch.randn(5, 4), torch.randn(3, 3), nn.Linear(3, 24)
    results = []
    for call, module in ((plain, plain_model), (fn, model)):
        loss, kept = 0, []
        for code in codes:
            weight = network(code).view(6, 4)
            weight = weight.detach() if way == "plain" else weight
            kept += [weight] if way == "kept elsewhere" else []
            put(module.layer, weight)
            loss = loss + call(x).square().sum()
            last = weight
            del weight
        if way == "removed":
            put(module.layer, last := None)
        network.zero_grad()
        loss.backward()
        assert read(module.layer) is last
        results.append([p.grad for p in (*network.parameters(), *module.parameters())])
        network.zero_grad(set_to_none=True)
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


class Flagged(nn.Module):
    rate = 2

    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.squares = nn.Linear(4, 6), 1.0, False
        self.config, self.calls = types.SimpleNamespace(shift=0.5), 0

    def forward(self, x):
        self.calls += 1
        y = self.linear(x) * self.scale + self.config.shift + self.rate
        return y.square().sin() if self.squares else y.sin()


@contextlib.contextmanager
def during(owner, **values):
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(before)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "reentrant"])
def test_values_that_are_set_around_the_forward(kind):
    plain, plain_model, fn, model = pair(kind, Flagged)
    results, xs = [], torch.randn(2, 5, 4)
    for call, module in ((plain, plain_model), (fn, model)):
        layer = module.layer
        with during(layer, scale=3.0, squares=True, rate=5), during(layer.config, shift=-1.0):
            y = call(xs[0])
        (y.sum() + call(xs[1]).sum()).backward()
        assert (layer.scale, layer.squares, layer.config.shift) == (1.0, False, 0.5)
        assert layer.rate == 2 and "rate" not in vars(layer) and layer.calls >= 2
        results.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *results))


@dataclasses.dataclass
class Data:
    held: object


@dataclasses.dataclass(slots=True)
class Slots:
    held: object


class Owner:
    def __init__(self, held):
        self.held = held

    def noise(self, x):
        return torch.rand(x.shape[-1], generator=self.held)


def drawn(generator, x):
    return torch.rand(x.shape[-1], generator=generator)


HELD = {
    "object": (Owner, lambda h, x: h.noise(x)),
    "dataclass": (Data, lambda h, x: drawn(h.held, x)),
    "slots": (Slots, lambda h, x: drawn(h.held, x)),
    "namespace": (lambda g: types.SimpleNamespace(g=g), lambda h, x: drawn(h.g, x)),
    "method": (lambda g: Owner(g).noise, lambda h, x: h(x)),
    "closure": (lambda g: lambda x: drawn(g, x), lambda h, x: h(x)),
    "partial": (lambda g: functools.partial(drawn, g), lambda h, x: h(x)),
    "tuple": (lambda g: (g,), lambda h, x: drawn(h[0], x)),
    "nested": (lambda g: [Owner([g])], lambda h, x: drawn(h[0].held[0], x)),
}


@pytest.mark.parametrize("kind", ["full", "selective", "output_discard", "composed"])
@pytest.mark.parametrize("place", HELD)
def test_generators_that_an_attribute_leads_to(place, kind):
    make, draw = HELD[place]
    generator = torch.Generator()

    class Noisy(nn.Linear):
        held = None

        def forward(self, x):
            y = super().forward(x)
            return y * self.noise(y)

        def noise(self, y):
            return draw(self.held, y)

    plain, plain_model, fn, model = pair(kind, lambda: Noisy(4, 6))
    plain_model.layer.held, model.layer.held = make(generator), make(generator)
    results, inputs = [], [torch.randn(5, 4)]
    for call, module in ((plain, plain_model), (fn, model)):
        generator.manual_seed(0)
        results.append([*steps(call, module, inputs)[0], generator.get_state()])
    assert all(map(torch.equal, *results))


OTHERS = {  # functions that create a generator, draw from it, and return its state
    "Python": (random.Random, lambda g: g.random(), lambda g: g.getstate()),
    "numpy": (np.random.default_rng, lambda g: g.random(), lambda g: str(g.bit_generator.state)),
    "numpy, older": (np.random.RandomState, lambda g: g.rand(), lambda g: str(g.get_state())),
    "the system": (random.SystemRandom, lambda g: g.random() * 0, lambda g: None),
}


@pytest.mark.parametrize("kind", ["full", "selective", "output_discard", "composed"])
@pytest.mark.parametrize("place", ["attribute", "object", "closure"])
@pytest.mark.parametrize("library", OTHERS)
def test_generators_of_other_libraries(library, place, kind):
    make, draw, state_of = OTHERS[library]

    class Noisy(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y * y.new_tensor([self.draw() for _ in range(6)])

    plain, plain_model, fn, model = pair(kind, lambda: Noisy(4, 6))
    results, inputs = [], [torch.randn(5, 4)]
    for call, module in ((plain, plain_model), (fn, model)):
        generator = make(7)
        if place == "attribute":
            module.layer.generator = generator
            module.layer.draw = types.MethodType(lambda self: draw(self.generator), module.layer)
        elif place == "object":
            module.layer.draw = functools.partial(lambda data: draw(data.held), Data(generator))
        else:
            module.layer.draw = lambda generator=generator: draw(generator)
        results.append((*steps(call, module, inputs)[0], state_of(generator)))
    (*grads, state), (*right, right_state) = results
    assert all(map(torch.equal, grads, right)) and state == right_state


class Normalises:
    def __init__(self, norm):
        self.norm = norm

    def __call__(self, x):
        return self.norm(x)


NORM = {
    "lambda": lambda norm: lambda x: norm(x),
    "partial": lambda norm: functools.partial(lambda n, x: n(x), norm),
    "object": Normalises,
    "method": lambda norm: Normalises(norm).__call__,
    "weak reference": lambda norm: functools.partial(lambda ref, x: ref()(x), weakref.ref(norm)),
    "list": lambda norm: lambda x, found=[norm]: found[0](x),
}


@pytest.mark.parametrize("kind", ["full", "selective", "output_discard", "composed"])
@pytest.mark.parametrize("place", NORM)
def test_statistics_of_modules_that_an_attribute_leads_to(place, kind):
    norms, held = [nn.BatchNorm1d(6), nn.BatchNorm1d(6)], NORM[place]

    class Uses(nn.Linear):
        held = None

        def forward(self, x):
            return self.held(super().forward(x)).sin()

    plain, plain_model, fn, model = pair(kind, lambda: Uses(4, 6))
    vars(plain_model.layer)["held"], vars(model.layer)["held"] = map(held, norms)
    inputs = [torch.randn(5, 4) for _ in range(2)]
    right, got = steps(plain, plain_model, inputs), steps(fn, model, inputs)
    assert all(map(torch.equal, got[-1], right[-1]))
    same_state(*norms)


class Statistic:
    def __init__(self):
        self.mean = torch.zeros(6)

    def replace(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.mean

    def write(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.mean.clone()


@pytest.mark.parametrize("kind", ["full", "selective", "output_discard", "composed"])
def test_state_that_modules_of_a_class_share(kind):
    class Shared(nn.Linear):
        generator, mean, named = torch.Generator(), torch.zeros(6), {}

        def forward(self, x):
            y = super().forward(x)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean(0))
                self.named["last"] = self.named["last"] + y.mean(0)
            noise = torch.rand(6, generator=self.generator)
            return torch.tanh(y * noise - self.mean.clone() + self.named["last"])

    plain, plain_model, fn, model = pair(kind, lambda: Shared(4, 6))
    results, inputs = [], [torch.randn(5, 4)]
    for call, module in ((plain, plain_model), (fn, model)):
        Shared.generator.manual_seed(0)
        Shared.mean.zero_()
        Shared.named["last"] = torch.zeros(6)
        grads = steps(call, module, inputs)[0]
        state = [Shared.generator.get_state(), Shared.mean.clone(), Shared.named["last"]]
        results.append([*grads, *state])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kind", ["full", "selective", "output_discard", "composed"])
@pytest.mark.parametrize("how", ["replace", "write"])
def test_a_statistic_in_an_object(how, kind):
    class Centred(nn.Linear):
        def __init__(self):
            super().__init__(4, 6)
            self.statistic = Statistic()

        def forward(self, x):
            y = super().forward(x)
            return torch.tanh(y - getattr(self.statistic, how)(y))

    plain, plain_model, fn, model = pair(kind, Centred)
    inputs = [torch.randn(5, 4) for _ in range(2)]
    right, got = steps(plain, plain_model, inputs), steps(fn, model, inputs)
    assert all(map(torch.equal, got[-1], right[-1]))
    assert torch.equal(model.layer.statistic.mean, plain_model.layer.statistic.mean)


def test_a_logged_output_in_a_list_keeps_no_earlier_step_alive():
    class Logs(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.log = [None]

        def forward(self, x):
            y = super().forward(x).sin()
            self.log[0] = y
            return y

    layer, refs = so.CheckpointWrapper(Logs()), []
    for _ in range(5):
        y = layer(torch.randn(2, 4, requires_grad=True) * 1)
        refs.append(weakref.ref(y))
        y.sum().backward()
        del y
    assert [ref() is not None for ref in refs] == [False] * 4 + [True]


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "reentrant"])
@pytest.mark.parametrize("thaws", [False, True])
def test_a_parameter_that_is_frozen_or_thawed_before_the_backward(thaws, kind):
    make = lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6))  # noqa: E731
    plain, plain_model, fn, model = pair(kind, make)
    results, x = [], torch.randn(3, 4)
    for call, module in ((plain, plain_model), (fn, model)):
        weights = module.layer[0].weight, module.layer[2].weight
        for weight in weights:
            weight.requires_grad_(not thaws)
        y = call(x.clone().requires_grad_())
        for weight in weights:
            weight.requires_grad_(thaws)
        y.square().sum().backward()
        assert all(weight.requires_grad == thaws for weight in weights)
        results.append([p.grad for p in module.parameters()])
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("kind", ["full", "selective", "output_discard", "composed", "reentrant"])
@pytest.mark.parametrize("when", ["forward", "backward", "both"])
def test_weights_that_parametrizations_cache(when, kind):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            linear = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
            self.first, self.linear = nn.Linear(4, 6), linear

        def forward(self, x):
            return self.linear(self.linear(self.first(x)).tanh()).tanh()

    plain, plain_model, fn, model = pair(kind, Twice)
    results, x = [], torch.randn(3, 4, requires_grad=True)
    cached = nn.utils.parametrize.cached
    for call, module in ((plain, plain_model), (fn, model)):
        with cached() if when != "backward" else contextlib.nullcontext():
            y = call(x) + call(x * 2)
            if when == "both":
                y.sum().backward()
        with cached() if when == "backward" else contextlib.nullcontext():
            if when != "both":
                y.sum().backward()
        results.append([p.grad for p in module.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert nn.utils.parametrize._cache_enabled == 0 and not nn.utils.parametrize._cache


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_lazy_norm_counts_its_first_batch_once(mode):
    def trained(checkpointed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Tanh()))
        if checkpointed:
            save = {"ops_to_save": ["aten.addmm"]} if mode == "selective" else {}
            so.apply_activation_checkpoint(model, {"layer_names": ["0"], "mode": mode, **save})
        for x in inputs:
            model(x).square().sum().backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    inputs = [torch.randn(5, 4) for _ in range(2)]
    assert all(map(torch.equal, trained(True), trained(False)))


@dataclasses.dataclass(slots=True)
class Memory:
    """A state without a `__dict__`."""

    state: torch.Tensor | float = 0.0
    calls: int = 0
    norms: list = dataclasses.field(default_factory=list)

    def step(self, h):
        self.state, self.calls = h.detach() + self.state, self.calls + 1
        self.norms.append(h.detach().norm())
        return h * self.state


class WithMemory(nn.Module):
    def __init__(self, memory=None):
        super().__init__()
        self.linear, self.memory = nn.Linear(4, 6), memory

    def forward(self, x, memory=None):
        return (memory or self.memory).step(self.linear(x).tanh())


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}])
def test_an_object_with_slots_is_written_once(options, is_argument):
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        memory = Memory()
        model = nn.ModuleList([WithMemory(None if is_argument else memory)])
        if checkpointed:
            so.apply_activation_checkpoint(model, {"layer_names": ["0"], **options})
        given = {"memory": memory} if is_argument else {}
        for _ in range(3):
            x = torch.randn(3, 4)
            (model[0](x, **given) * model[0](-x, **given)).sum().backward()
        assert memory.calls == len(memory.norms) == 6
        results.append([memory.state, *memory.norms, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "reentrant"])
def test_the_recompute_uses_the_submodules_of_the_forward(kind):
    def layer():
        return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 6)))

    plain, plain_model, fn, model = pair(kind, layer)
    x = torch.randn(3, 4)
    for _ in range(4):
        results = []
        for call, module in ((plain, plain_model), (fn, model)):
            module.zero_grad()
            y = call(x)
            inner, parameters = module.layer[1], list(module.parameters())
            torch.manual_seed(0)
            inner[0], module.layer[1] = nn.GELU(), nn.Sequential(nn.Tanh(), nn.Linear(6, 6))
            now = module.layer[1]
            y.square().sum().backward()
            assert module.layer[1] is now and type(inner[0]) is nn.GELU
            results.append([p.grad for p in parameters])
        assert all(map(torch.equal, *results))


def test_a_submodule_that_the_forward_creates_is_created_once():
    class Grows(nn.Module):
        def forward(self, x):
            if not hasattr(self, "linear"):
                self.linear = nn.Linear(4, 4)
            return self.linear(x).tanh()

    layer, x = so.CheckpointWrapper(Grows()), torch.randn(3, 4, requires_grad=True)
    layer(x).sum().backward()
    weight, bias = layer.linear.parameters()
    (right,) = torch.autograd.grad(layer.linear(x).tanh().sum(), weight)
    assert torch.equal(weight.grad, right) and bias.grad is not None
