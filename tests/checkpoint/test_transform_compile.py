"""Checkpointed layers under torch.compile: the whole model and single blocks, in one graph each."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import storage_ops as so

from .blocks import Block, Model, assert_same, make_input, step

Config = so.ActivationCheckpointConfig
# Options, and how many mm (of 4 in a block) and bmm (of 2) the compiled backward repeats. It does
# not need the result of the last mm.
OPTIONS = [
    ({}, (3, 2)),
    ({"ops_to_save": ["aten.mm"]}, (0, 2)),
    ({"policy": "every_other_mm"}, (1, 1)),
    ({"use_reentrant": True}, (3, 2)),
    ({"layer_classes": ["GELU"], "mode": "output_discard"}, (0, 0)),
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting(counts):
    """Return a backend that counts mm and bmm in forward and backward graphs."""

    def compiler(graph, inputs):
        for node in graph.graph.nodes:
            for op in ("mm", "bmm"):
                counts[op] = counts.get(op, 0) + (
                    node.target is getattr(torch.ops.aten, op).default
                )
        return graph.forward

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


def assert_close(got, right):
    torch.testing.assert_close(got[0], right[0])
    grads = {name.replace("_orig_mod.", ""): grad for name, grad in got[1].items()}
    assert grads.keys() == right[1].keys()
    for name, grad in right[1].items():
        torch.testing.assert_close(grads[name], grad, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "repeated"), OPTIONS)
def test_the_whole_model_in_one_graph(options, repeated):
    model, x = Model(layers=2, dropout=0.0).double(), make_input()
    kwargs = {"scale": 0.5, "extra": {"mask": torch.rand(6, 6, dtype=torch.float64)}}
    right, plain, counts = step(model, x, **kwargs), {}, {}
    step(torch.compile(model, fullgraph=True, backend=counting(plain)), x, **kwargs)
    cfg = Config(**{"layer_classes": ["Block"], **options})
    wrapped = so.apply_activation_checkpoint(copy.deepcopy(model), cfg)
    got = step(torch.compile(wrapped, fullgraph=True, backend=counting(counts)), x, **kwargs)
    assert_close(got, right)
    assert [counts[op] - plain[op] for op in ("mm", "bmm")] == [2 * n for n in repeated]


@pytest.mark.in_turn
@pytest.mark.parametrize("order", ["checkpoint first", "compile first", "module.compile()"])
@pytest.mark.parametrize(("options", "repeated"), [OPTIONS[0], OPTIONS[1]])
def test_block_by_block(order, options, repeated):
    model, x = Model(layers=2, dropout=0.0).double(), make_input()
    right, counts = step(model, x), {}
    cfg = Config(["Block"], **options)
    if order == "checkpoint first":
        so.apply_activation_checkpoint(model, cfg)
    for index, layer in enumerate(model.layers):
        if order == "module.compile()":
            layer.compile(fullgraph=True, backend=counting(counts))
        else:
            compiled = torch.compile(layer, fullgraph=True, backend=counting(counts))
            model.layers[index] = compiled
    if order != "checkpoint first":
        so.apply_activation_checkpoint(model, cfg)
        so.apply_activation_checkpoint(model, cfg)
    got = step(model, x)
    assert_close(got, right)
    assert isinstance(getattr(model.layers[0], "_orig_mod", model.layers[0]), Block)
    assert counts["mm"] == 2 * (4 + 8 + repeated[0])  # forward, backward, recompute


def test_a_policy_that_saves_nothing_warns_when_it_is_compiled():
    layer = so.CheckpointWrapper(nn.Linear(4, 4), ops_to_save=["aten.mm"])
    with pytest.warns(UserWarning, match=r"saves nothing in Linear, .* Its ops are .*aten.addmm"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(2, 4))
    layer = so.CheckpointWrapper(nn.Linear(4, 4), ops_to_save=["aten.addmm"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The policy of the selective")
        torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(2, 4))


def test_a_policy_that_expects_more_calls_warns_when_it_is_compiled():
    policy = so.policies.save_calls([("aten::addmm", 0), ("aten::mm", 0), ("aten::addmm", 1)])
    context_fn = functools.partial(so.policies.contexts, policy, "a layer")
    f = lambda x, w: checkpoint(  # noqa: E731
        lambda x: (torch.addmm(x, x, w) @ w).sin(), x, use_reentrant=False, context_fn=context_fn
    )
    x, w = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2)
    with pytest.warns(UserWarning, match=r"a layer makes fewer calls of aten.addmm where"):
        torch.compile(f, fullgraph=True, backend="aot_eager")(x, w)
    f(x, w)  # without a warning in eager code


def test_names_match_without_the_prefix_that_compile_adds():
    model = torch.compile(Model(), backend="eager")
    so.apply_activation_checkpoint(model, Config(layer_names=["layers.1"]))
    assert isinstance(model._orig_mod.layers[1], so.CheckpointWrapper)


@pytest.mark.slow
def test_inductor():
    model, x = Model(layers=2, dropout=0.0), make_input(dtype=torch.float32)
    right = step(model, x)
    so.apply_activation_checkpoint(model, Config(["Block"], policy="matmuls"))
    got = step(torch.compile(model, fullgraph=True), x)
    torch.testing.assert_close(got[1]["x"], right[1]["x"], rtol=1e-4, atol=1e-5)


def test_dropout_in_a_compiled_block_has_the_gradients_of_its_own_mask():
    """For an input of ones, the output shows the mask of the forward."""

    class Layer(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x.exp(), 0.5)

    layer = so.CheckpointWrapper(Layer())
    x = torch.zeros(64, 64, requires_grad=True)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    y.sum().backward()
    assert torch.equal(x.grad, y) and 0 < (y == 0).float().mean() < 1


@pytest.mark.parametrize("options", [{}, {"ops_to_save": ["aten.mm"]}])
@pytest.mark.parametrize("preserve", [True, False])
def test_a_backend_that_runs_the_checkpoint_repeats_random_numbers(options, preserve):
    model, x = Model(layers=2, dropout=0.2 if preserve else 0.0).double(), make_input()
    right = step(model, x)
    cfg = Config(["Block"], preserve_rng_state=preserve, **options)
    so.apply_activation_checkpoint(model, cfg)
    model.compile(fullgraph=True, backend="eager")
    assert_same(step(model, x), right)


def test_a_layer_that_is_called_with_changing_numbers():
    """From the second number on, Dynamo traces a symbol."""

    class Layer(nn.Linear):
        def forward(self, x, scale, *, rows, part):
            return super().forward(x)[part] * scale + rows

    layer = so.CheckpointWrapper(Layer(4, 4))
    layer.compile(fullgraph=True, backend="aot_eager")
    for rows in (3, 4, 5):
        x = torch.randn(rows, 4, requires_grad=True)
        y = layer(x, rows / 2, rows=rows, part=slice(1, None))
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(y, (x @ layer.weight.T + layer.bias)[1:] * rows / 2 + rows)
        torch.testing.assert_close(grad[1], layer.weight.sum(0) * rows / 2)


def test_eager_checkpoint_around_a_compiled_function():
    weight = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    inner = torch.compile(lambda x: (x @ weight).sin(), backend="aot_eager", fullgraph=True)

    class Layer(nn.Module):
        def forward(self, x):
            return inner(x) @ weight

    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    right = torch.autograd.grad(Layer()(x).sum(), (x, weight))
    got = torch.autograd.grad(so.CheckpointWrapper(Layer())(x).sum(), (x, weight))
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.in_turn
def test_a_model_that_ran_compiled_is_recompiled_after_checkpoints_are_applied_and_removed():
    model, x = Model(layers=2, dropout=0.0).double(), make_input()
    counts = {}
    compiled = torch.compile(model, fullgraph=True, backend=counting(counts))
    seen = []
    for change in (None, so.apply_activation_checkpoint, so.remove_activation_checkpoint):
        counts.clear()
        if change is so.apply_activation_checkpoint:
            change(model, Config(["Block"]))
        elif change is not None:
            change(model)
        step(compiled, x)
        seen.append(counts.get("mm"))
    assert seen[1] == seen[0] + 2 * 3 and seen[2] in (None, seen[0])
