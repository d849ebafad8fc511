"""Side effects of regions in a traced step happen once, as in eager mode without regions."""

import copy

import pytest
import torch
from torch import nn

from storage_ops import graph

from . import effects
from .effects import FUNCTIONS, LAYERS, REGIONS, WIDTH, nothing, pairs


def state_of(model):
    tensors = {name: t for name, t in vars(model).items() if isinstance(t, torch.Tensor)}
    for name, module in model.named_modules():
        tensors |= {
            f"{name}.{k}": t for k, t in vars(module).items() if isinstance(t, torch.Tensor)
        }
    tensors |= dict(model.named_buffers()) | dict(model.named_parameters())
    return {name: t.detach().clone() for name, t in tensors.items()}


def trained(model, region, xs, traced, calls=2):
    """Return losses, gradients and the state of a model after each of several steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step(x):
        total = x
        for _ in range(calls):  # a later call of the region reads state that an earlier one wrote
            total = total + region(model, total * 0.5)
        loss = total.square().mean()
        return loss.detach(), torch.autograd.grad(loss, [x, *parameters])

    if traced:
        before = state_of(model)
        step = graph.trace_step(step, xs[0])
        torch.testing.assert_close(state_of(model), before, rtol=0, atol=0)
        graph.remat(step.gm, verify=True)
    results = []
    for x in xs:
        results.append((step(x), state_of(model), torch.get_rng_state()))
    return results


def compare(make, region, calls=2):
    """Compare a trace with regions bit for bit with eager mode without regions."""
    model = make()
    with torch.no_grad():
        model(torch.randn(4, WIDTH))  # a first call initialises the layer's state
    xs = [torch.randn(4, WIDTH, requires_grad=True) for _ in range(3)]
    state, other = torch.get_rng_state(), copy.deepcopy(model)
    eager = trained(model, nothing, xs, False, calls)
    torch.set_rng_state(state)
    traced = trained(other, region, xs, True, calls)
    torch.testing.assert_close(traced, eager, rtol=0, atol=0)


@pytest.mark.in_turn
@pytest.mark.parametrize("layer, region", pairs(LAYERS, REGIONS))
def test_effects_happen_once(layer, region):
    compare(LAYERS[layer], REGIONS[region])


def same_as_eager(make, region, *args):
    """Compare a traced step with regions with an eager step without regions."""
    results = []
    for traced in (False, True):
        torch.manual_seed(0)
        step = make(region if traced else nothing)
        if traced:
            step = graph.trace_step(step, *args)
            graph.remat(step.gm, verify=True)
        results.append([copy.deepcopy(step(*args)) for _ in range(2)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    return results[1]


class Auxiliary(effects.EffectBetweenLayers):
    """Puts a loss into a list and a count into a dictionary of its caller."""

    def effect(self, x):
        self.losses.append(x.square().mean())
        self.counts["rows"] = self.counts.get("rows", 0) + (x > 0).sum()
        return x.sin()

    def forward(self, x, losses, counts):
        self.losses, self.counts = losses, counts
        try:
            return super().forward(x)
        finally:
            del self.losses, self.counts


@pytest.mark.parametrize("region", REGIONS)
def test_a_layer_appends_to_a_list_once(region):
    def make(region):
        layer = Auxiliary()

        def step(x):
            losses, counts = [], {}
            y = region(layer, x, losses, counts)
            y = region(layer, y, losses, counts)
            assert len(losses) == 2
            loss = y.sum() + 0.1 * losses[0] + 0.2 * losses[1]
            gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
            return loss.detach(), gradients, [t.detach() for t in losses], counts

        return step

    same_as_eager(make, REGIONS[region], torch.randn(4, WIDTH, requires_grad=True))


@pytest.mark.parametrize("region", REGIONS)
def test_a_region_gets_the_callers_tensor_objects(region):
    def make(region):
        seen = []

        class Looks(nn.Linear):
            def forward(self, x, w, table):
                seen.append((x.is_leaf, type(w), w.is_leaf, id(w) in table, id(x) in table))
                return super().forward(x) * getattr(w, "scale", 1.0) @ w

        layer, w = Looks(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))
        w.scale = 3.0

        def step(x):
            x = x * 2
            x.scale = 5.0
            y = region(layer, x, w, {id(w): "w", id(x): "x"})
            (y * x.scale).square().sum().backward()
            gradients = [p.grad for p in (w, *layer.parameters())]
            w.grad = layer.weight.grad = layer.bias.grad = None
            assert seen[-1] == (False, nn.Parameter, True, True, True)
            return gradients

        return step

    same_as_eager(make, REGIONS[region], torch.randn(4, WIDTH, requires_grad=True))


def test_arguments_of_a_step_keep_their_type_and_attributes():
    x, w = torch.randn(4, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))
    w.scale = 3.0

    def step(x, w):
        assert isinstance(w, nn.Parameter) and w.is_leaf and not isinstance(x, nn.Parameter)
        y = effects.not_reentrant(lambda x: (x @ w).sin() * w.scale, x)
        return torch.autograd.grad(y.sum(), w)

    traced = graph.trace_step(step, x, w)
    assert torch.equal(traced(x, w)[0], step(x, w)[0])
    w.scale = 2.0
    with pytest.raises(
        ValueError, match=r"args\[1\]\.scale is 2\.0. Expected 3\.0, as when traced"
    ):
        traced(x, w)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("region", REGIONS)
def test_parameters_replaced_for_a_call(region, inner):
    """As in meta-learning, the loss is at parameters after a step of gradient descent."""

    def make(region):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = effects.LAYERS["Replaced"](), nn.Linear(WIDTH, 1)

            def forward(self, x):
                return self.head(region(self.body, x))

        net = Net()

        def step(x, parameters):
            loss_at = lambda p: torch.func.functional_call(net, p, (x,)).square().mean()  # noqa: E731
            new = {name: p * 2 for name, p in parameters.items()}
            if inner:
                loss = loss_at(new)
                gradients = torch.autograd.grad(loss, list(new.values()), create_graph=True)
                new = {n: p - 0.1 * g for (n, p), g in zip(new.items(), gradients, strict=True)}
            loss = loss_at(new) + loss_at(dict(net.named_parameters()))
            targets = [*parameters.values(), *net.parameters()]
            return loss.detach(), torch.autograd.grad(loss, targets)

        return step

    parameters = {
        name: torch.randn_like(p, requires_grad=True)
        for name, p in [
            *((f"body.{n}", p) for n, p in effects.LAYERS["Replaced"]().named_parameters()),
            *((f"head.{n}", p) for n, p in nn.Linear(WIDTH, 1).named_parameters()),
        ]
    }
    x = torch.randn(4, WIDTH)
    same_as_eager(make, REGIONS[region], x, parameters)


@pytest.mark.parametrize("region", FUNCTIONS)
def test_a_parameter_modified_before_backward(region):
    """A trace refuses what eager mode refuses, and otherwise has the gradients of eager mode."""
    weight, shift = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def step(x, which, by_data, region=FUNCTIONS[region]):
        y = region(lambda x: ((x @ weight).tanh() + shift).sin(), x)
        with torch.no_grad():
            (which.data if by_data else which).mul_(0.5)
        gradients = torch.autograd.grad(y.sum(), [weight, shift])
        with torch.no_grad():
            (which.data if by_data else which).mul_(2)
        return gradients

    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    for by_data in (False, True):
        step_shift = lambda x, region, b=by_data: step(x, shift, b, region)  # noqa: E731
        traced = graph.trace_step(lambda x: step_shift(x, FUNCTIONS[region]), x)  # noqa: B023
        graph.remat(traced.gm, verify=True)
        torch.testing.assert_close(traced(x), step_shift(x, nothing), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.trace_step(lambda x: step(x, weight, False), x)


def test_state_in_closures_and_containers():
    def make(region):
        weight, total = nn.Parameter(torch.randn(WIDTH, WIDTH)), torch.zeros(WIDTH)

        class State:
            pass

        state = State()
        state.pair, state.by_name = (
            (torch.zeros(WIDTH), torch.ones(WIDTH)),
            {"h": torch.ones(WIDTH)},
        )
        rows = [torch.zeros(WIDTH)]

        def layer(x):
            nonlocal total
            y = (
                x @ weight + total + state.pair[0] * state.pair[1] + state.by_name["h"] + rows[0]
            ).sin()
            mean = y.detach().mean(0)
            total, state.pair = total + mean, (state.pair[1], mean)
            state.by_name = {"h": state.by_name["h"] * 0.5}
            rows[0] = rows[0] - mean
            return y

        def step(x):
            (gradient,) = torch.autograd.grad(region(layer, x).sum(), weight)
            return gradient

        return lambda x: (step(x), total, state.pair, state.by_name, rows)

    same_as_eager(make, effects.not_reentrant, torch.randn(4, WIDTH))


def test_unsupported_state_is_an_error_and_does_not_change():
    model = nn.Module()
    model.register_buffer("none", None)
    model.weight = nn.Parameter(torch.ones(WIDTH))
    model.register_buffer("seen", torch.zeros(WIDTH))
    pair, weight, seen = (1, 2), model.weight, model.seen
    model.pair = pair

    def step(x, how):
        y = effects.not_reentrant(lambda x: x * model.weight, x)
        how(y)
        return torch.autograd.grad(y.sum(), x)

    def none(y):
        model.none = y.detach()

    def parameter(y):
        model.weight = nn.Parameter(y.detach())

    def deletes(y):
        del model.seen

    def several(y):
        model.pair = (y, y)

    x = torch.randn(WIDTH, requires_grad=True)
    for how, name in (
        (none, r"model\.none"),
        (parameter, r"model\.weight"),
        (several, r"model\.pair"),
    ):
        with pytest.raises(RuntimeError, match=f"keeps a tensor of the step in .*{name}"):
            graph.trace_step(lambda x: step(x, how), x)  # noqa: B023
        assert model.none is None and model.weight is weight and model.pair is pair
    with pytest.raises(RuntimeError, match=r"deletes model\.seen"):
        graph.trace_step(lambda x: step(x, deletes), x)
    assert model.seen is seen


def test_a_buffer_with_an_autograd_graph_is_detached():
    w, total = nn.Parameter(torch.ones(3)), torch.zeros(3)

    def step(x):
        total.add_(x * w)
        return torch.autograd.grad(total.sum(), w)

    traced = graph.trace_step(step, torch.ones(3))
    assert total.is_leaf and not total.requires_grad and total._version == 0
    assert torch.equal(traced(torch.ones(3))[0], torch.ones(3)) and torch.equal(
        total, torch.ones(3)
    )


def test_an_op_that_compiles_itself_works_after_the_trace():
    def step(x):
        y, z = torch.cond(x.sum() > 0, lambda x: (x.sin(), 2 * x), lambda x: (x.cos(), -x), (x,))
        return y + z

    torch._dynamo.reset()
    x = torch.randn(4)
    traced = graph.trace_step(step, x)
    for y in (x.abs(), -x.abs()):
        assert torch.equal(traced(y), step(y))
