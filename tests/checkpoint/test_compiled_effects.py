"""Side effects of a compiled region happen once, and its gradients are those of eager mode.

The reference is eager mode without regions, because torch.compile and torch.utils.checkpoint give
wrong gradients for some of these models.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import storage_ops
from storage_ops.checkpoint.region import lowering

from ..graph import effects
from ..graph.effects import LAYERS, WIDTH, Config, Holder, nothing, pairs

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd"),
]
# Dynamo does not trace the op of torch.ao's fake quantization.
COMPILED = {name: layer for name, layer in LAYERS.items() if name != "Quantized"}
FUNCTIONS = {
    name: effects.FUNCTIONS[name]
    for name in ("output_discard", "OutputDiscardCheckpoint", "OutputDiscardChain")
}
WRAPPERS = {
    "wrapper, full": {"mode": "full"},
    "wrapper, selective": {"ops_to_save": ["aten.addmm"]},
    "wrapper, output_discard": {"mode": "output_discard"},
}
REGIONS = [*FUNCTIONS, *WRAPPERS]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=True):
        yield
    torch._dynamo.reset()


class Twice(nn.Module):
    """Calls a layer in a region, twice."""

    def __init__(self, layer, region="none", calls=2):
        super().__init__()
        self.holder, self.calls = Holder(layer), calls
        self.call = FUNCTIONS.get(region, nothing)
        if region in WRAPPERS:
            storage_ops.apply_activation_checkpoint(
                self.holder, Config(layer_names=["layer"], **WRAPPERS[region])
            )
            self.call = lambda layer, *args: self.holder(*args)

    def forward(self, x, *args):
        for _ in range(self.calls):
            x = x + self.call(self.holder.layer, x * 0.5, *args)
        return x


def state_of(model):
    modules = (vars(m) for m in model.modules())
    tensors = [t for values in modules for t in values.values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone() for t in (*tensors, *model.buffers(), *model.parameters())]


def trained(model, call, xs):
    parameters = [p for p in model.parameters() if p.requires_grad]
    results = []
    for x in xs:
        loss = call(x).square().mean()
        results.append(
            (loss.detach(), torch.autograd.grad(loss, [x, *parameters]), state_of(model))
        )
    return results


def compare(layer, region, backend):
    layer = layer()
    with torch.no_grad():
        layer(torch.randn(4, WIDTH))  # a first call initialises the layer's state
    xs = [torch.randn(4, WIDTH, requires_grad=True) for _ in range(3)]
    plain, model = Twice(copy.deepcopy(layer)), Twice(layer, region)
    state = torch.get_rng_state()
    right = trained(plain, plain, xs)
    torch.set_rng_state(state)
    got = trained(model, torch.compile(model, backend=backend, fullgraph=True), xs)
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layer, region", pairs(COMPILED, REGIONS))
def test_effects_happen_once(layer, region):
    compare(COMPILED[layer], region, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("region", ["output_discard", "wrapper, full", "wrapper, selective"])
@pytest.mark.parametrize("layer", ["BatchNorm", "StatisticsRead", "Viewed", "Router", "Noise"])
def test_inductor(layer, region):
    if layer == "Noise" and not lowering._HAS_NUMBERS:
        pytest.skip("Inductor of this torch draws in another order in forward and backward alike")
    compare(COMPILED[layer], region, "inductor")


class Appends(effects.EffectBetweenLayers):
    def forward(self, x, losses, counts):
        y = torch.tanh(self.up(x))
        losses.append(y.square().mean())
        counts["rows"] = counts.get("rows", 0) + (y > 0).sum()
        return self.down(y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "region, backend",
    [
        *((region, "aot_eager") for region in REGIONS),
        (REGIONS[0], "inductor"),
        *(pytest.param(region, "inductor", marks=pytest.mark.slow) for region in REGIONS[1:]),
    ],
)
def test_a_layer_appends_to_a_list_once(region, backend):
    layer, x = Appends(), torch.randn(4, WIDTH, requires_grad=True)

    def step(model, x):
        losses, counts = [], {}
        y = model(x, losses, counts)
        return y.sum() + sum(losses), losses, counts

    results = []
    for compiled in (False, True):
        model = Twice(layer, region if compiled else "none")
        run = partial(step, model)
        run = torch.compile(run, backend=backend, fullgraph=True) if compiled else run
        loss, losses, counts = run(x)
        assert len(losses) == 2
        gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
        results.append((loss.detach(), gradients, [t.detach() for t in losses], counts))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.in_turn
@pytest.mark.parametrize("region", REGIONS)
def test_parameters_replaced_by_functional_call(region):
    layer, x = LAYERS["Copied"](), torch.randn(4, WIDTH)
    results = []
    for compiled in (False, True):
        model = Twice(copy.deepcopy(layer), region if compiled else "none")
        new = {n: torch.randn_like(p, requires_grad=True) for n, p in model.named_parameters()}
        new = {n: p.detach().fill_(0.3).requires_grad_() for n, p in new.items()}
        call = lambda new, x, model=model: torch.func.functional_call(model, new, (x,))  # noqa: E731
        call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
        y = call(new, x)
        gradients = torch.autograd.grad(y.sum(), list(new.values()))
        results.append((y.detach(), gradients, [b.clone() for b in model.buffers()]))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.in_turn
def test_settings_of_dynamo_are_restored_after_an_error():
    def fails(x):
        torch._dynamo.graph_break()
        return x

    config = torch._dynamo.config
    for setting in (False, True):
        with config.patch({lowering._SIDE_EFFECTS: setting}):
            for fn in (torch.sin, fails):
                model = storage_ops.output_discard(fn, torch.cos)
                for fullgraph in (True, False):
                    torch._dynamo.reset()
                    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
                    x = torch.randn(3, requires_grad=True)
                    if fn is fails and fullgraph:
                        with pytest.raises(torch._dynamo.exc.Unsupported):
                            compiled(x)
                    else:
                        torch.testing.assert_close(compiled(x), fn(x).cos())
                    assert getattr(config, lowering._SIDE_EFFECTS) is setting
