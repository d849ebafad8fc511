"""Checkpointed and tiled modules under torch.fx, and torch.func inside of regions."""

import copy
import importlib

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import storage_ops as so


@pytest.mark.parametrize("mode", ["full", "selective", "output_discard", "reentrant", "tile"])
def test_symbolic_traces_are_those_of_the_plain_model(mode):
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4))
    plain = torch.fx.symbolic_trace(model).graph
    if mode == "tile":
        so.tile(inner, 2, dim=0)
    else:
        options = {"use_reentrant": True} if mode == "reentrant" else {"mode": mode}
        if mode == "selective":
            options["policy"] = "matmuls"
        so.apply_activation_checkpoint(model, {"layer_names": ["1"], **options})
    traced, x = torch.fx.symbolic_trace(model), torch.randn(4, 4)
    assert str(traced.graph) == str(plain)
    torch.testing.assert_close(traced(x), model(x))


def test_transforms_of_torch_func_in_a_region_are_refused_by_name():
    class Forces(nn.Module):
        def forward(self, x):
            return torch.func.grad(lambda t: t.sin().sum())(x)

    x = torch.randn(4, requires_grad=True)
    for run in (so.CheckpointWrapper(Forces()), so.output_discard(Forces(), torch.square)):
        with pytest.raises(RuntimeError, match=r"Forces calls a transform of torch.func.*Use"):
            run(x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize(
    "module", [nn.Conv1d(4, 4, 1), nn.Sequential(nn.Conv2d(4, 8, 1), nn.GELU())]
)
def test_convolutions_cannot_be_tiled(module):
    with pytest.raises(TypeError, match="is a convolution, whose channels are in dimension 1"):
        so.tile(module, 2)
    assert not isinstance(module, so.checkpoint.layers.tile.Tiled)


def test_inference_tensors_as_arguments():
    with torch.inference_mode():
        other = torch.randn(3, 4)

    class Shift(nn.Module):
        def forward(self, x, other):
            return (x.sin() + other).exp()

    x = torch.randn(3, 4, requires_grad=True)
    right = torch.autograd.grad(Shift()(x, other).sin().sum(), x)
    for run in (so.CheckpointWrapper(Shift()), so.output_discard(Shift(), lambda h: h)):
        assert torch.equal(torch.autograd.grad(run(x, other).sin().sum(), x)[0], right[0])
    with so.OutputDiscardChain() as chain:
        y = chain.checkpoint(Shift(), chain.checkpoint(torch.neg, -x), other).sin().sum()
    assert torch.equal(torch.autograd.grad(y, x)[0], right[0])


def test_jagged_tensors_with_offsets_from_outside_and_inside_of_a_region():
    offsets = torch.tensor([0, 1, 3])

    def region(x, offsets):
        return torch.nested.nested_tensor_from_jagged(x.sin(), offsets).exp().values()

    x = torch.randn(3, 4, requires_grad=True)
    right = torch.autograd.grad(region(x, offsets).sum(), x)
    y = so.output_discard(region, torch.sum)(x, offsets)
    assert torch.equal(torch.autograd.grad(y, x)[0], right[0])
    y = so.output_discard(lambda x: region(x, offsets.clone()), torch.sum)(x)
    with pytest.raises(RuntimeError, match=r"is a jagged tensor.*Create the offsets outside"):
        y.backward()
    layer = so.CheckpointWrapper(
        Called(lambda x: region(x, offsets.clone())), policy=lambda ctx, op, *a, **k: True
    )
    with pytest.raises(RuntimeError, match=r"aten.exp of .* differ.*Create the offsets outside"):
        layer(x).sum().backward()


class Called(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


WRAPPED = {
    "full": so.CheckpointWrapper,
    "selective": lambda m: so.CheckpointWrapper(m, policy=lambda ctx, op, *a, **k: True),
    "discarding": lambda m: so.OutputDiscard(m, torch.sin),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_dual_numbers_inside_and_after_a_forward_ad_level(name):
    layer, x, tangent = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    last = torch.sin if name == "discarding" else lambda y: y
    run = WRAPPED[name](Called(lambda x: layer(x).exp()))

    def loss(fn):
        y, moved = forward_ad.unpack_dual(fn(forward_ad.make_dual(x, tangent)))
        return y.sum() + moved.sum()

    with forward_ad.dual_level():
        right = torch.autograd.grad(loss(lambda x: last(layer(x).exp())), (x, layer.weight))
        assert all(map(torch.equal, torch.autograd.grad(loss(run), (x, layer.weight)), right))
        late, later = loss(run), loss(run)
    with pytest.raises(RuntimeError, match=r"dual_level.. block that has ended"):
        late.backward()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="block that has ended"):
        later.backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_reentrant_checkpoints_refuse_unsupported_arguments():
    layer = nn.Sequential(nn.Linear(4, 4))
    so.apply_activation_checkpoint(layer, {"layer_names": ["0"], "use_reentrant": True})
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    nested = torch.nested.nested_tensor(parts, layout=torch.strided, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"Linear is a nested tensor.*use_reentrant=False"):
        layer(nested)
    x = torch.randn(3, 4, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.randn(3, 4))
        with pytest.raises(RuntimeError, match=r"Linear is a dual number.*use_reentrant=False"):
            layer(dual)


@pytest.mark.parametrize("name", WRAPPED)
def test_inference_mode_inside_of_a_region(name):
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    last = torch.sin if name == "discarding" else lambda y: y

    def region(x):
        with torch.inference_mode():
            t = x.sin()
            t.add_(1)
        return layer(x * t.sum()).exp()

    right = torch.autograd.grad(last(region(x)).sum(), (x, layer.weight))
    got = torch.autograd.grad(WRAPPED[name](Called(region))(x).sum(), (x, layer.weight))
    assert all(map(torch.equal, got, right))


@pytest.mark.in_turn
def test_compiled_autograd_over_eager_regions():
    """Compiled autograd traces saved-tensor hooks. The recompute runs outside of its graph."""
    make = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))  # noqa: E731
    plain = nn.Sequential(make(), make(), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    so.apply_activation_checkpoint(model, {"layer_names": ["0"]})
    so.apply_activation_checkpoint(model, {"layer_names": ["1"], "mode": "output_discard"})
    compiled_autograd = importlib.import_module("torch._dynamo.compiled_autograd")
    for _ in range(2):
        x, results = torch.randn(3, 4), []
        for module in (plain, model):
            module.zero_grad()
            loss = module(x).square().sum()
            if module is plain:
                loss.backward()
            else:
                with compiled_autograd._enable(torch.compile(backend="aot_eager")):
                    loss.backward()
            results.append([p.grad for p in module.parameters()])
        torch.testing.assert_close(*results)
