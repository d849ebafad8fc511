"""Options of checkpointed layers: a predicate, contexts, early stop, debugging, hooks."""

import contextlib
import copy
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import storage_ops as so
from storage_ops.checkpoint.saved import saved_tensors

from .blocks import Model, Ops, assert_same, make_input, step


def test_a_predicate_chooses_layers():
    seen = []

    def check_fn(name, module):
        seen.append(name)
        return name.startswith("layers.") and name.endswith(("1", "2"))

    model = Model(layers=4).double()
    x = make_input()
    right = step(model, x)
    so.apply_activation_checkpoint(model, {}, check_fn=check_fn)
    wrapped = [n for n, m in model.named_modules() if isinstance(m, so.CheckpointWrapper)]
    assert wrapped == ["layers.1", "layers.2"] and "layers.1.mlp" not in seen
    assert_same(step(model, x), right)


def test_a_predicate_is_called_for_layers_that_the_config_names():
    model = Model(layers=4)
    so.apply_activation_checkpoint(
        model, {"layer_classes": ["Block"]}, check_fn=lambda name, module: int(name[-1]) % 2
    )
    wrapped = [n for n, m in model.named_modules() if isinstance(m, so.CheckpointWrapper)]
    assert wrapped == ["layers.1", "layers.3"]
    with pytest.raises(ValueError, match=r"`check_fn`.* is true of no module"):
        so.apply_activation_checkpoint(Model(layers=1), {}, check_fn=lambda name, module: False)
    with pytest.raises(TypeError, match="`check_fn` is 'Block'"):
        so.apply_activation_checkpoint(Model(layers=1), {}, check_fn="Block")
    failing = Model(layers=1)
    with pytest.raises(KeyError):
        so.apply_activation_checkpoint(failing, {}, check_fn=lambda name, module: {}[name])
    assert not any(isinstance(m, so.CheckpointWrapper) for m in failing.modules())


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("options", [{}, {"ops_to_save": ["aten.exp"]}])
@pytest.mark.parametrize("width", [8, 256])
def test_early_stop(early_stop, options, width):
    """The recompute can stop before the last product, whose result backward does not need.

    It does not stop if the product is small.
    """
    layer = nn.Sequential(nn.Linear(4, width), nn.Sigmoid(), nn.Linear(width, width))
    if options:
        layer.append(nn.Identity())
        layer[1].forward = lambda x: x.exp()
    x = torch.randn(2, 4, requires_grad=True)
    right = torch.autograd.grad(layer(x).sum(), x)[0]
    so.CheckpointWrapper(layer, early_stop=early_stop, **options)
    loss = layer(x).sum()
    with Ops() as ops:
        loss.backward()
    stops = early_stop and width * width > saved_tensors.SMALL_ON_CPU
    assert ops.count["addmm"] == (1 if stops else 2) and torch.equal(x.grad, right)


def test_contexts_of_the_caller():
    layer, entered = nn.Sequential(nn.Linear(4, 8), nn.GELU()), []

    class Note:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *error):
            entered.append("end of " + self.name)

    so.CheckpointWrapper(layer, context_fn=lambda: (Note("forward"), Note("recompute")))
    y = layer(torch.randn(2, 4, requires_grad=True))
    assert entered == ["forward", "end of forward"]
    y.sum().backward()
    assert entered[2:] == ["recompute", "end of recompute"]
    saving = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    products = [torch.ops.aten.addmm.default]
    so.CheckpointWrapper(saving, context_fn=lambda: create_selective_checkpoint_contexts(products))
    loss = saving(torch.randn(2, 4, requires_grad=True)).sum()
    with Ops() as ops:
        loss.backward()
    assert not ops.count["addmm"] and ops.count["gelu"] == 1


@pytest.mark.parametrize("options, message", [
    ({"policy": "matmuls"}, "`context_fn` is given with mode 'selective'"),
    ({"use_reentrant": True}, "use_reentrant=True. Expected mode 'full'"),
])  # fmt: skip
def test_contexts_and_rules_exclude_one_another(options, message):
    with pytest.raises(ValueError, match=message):
        so.CheckpointWrapper(nn.Linear(4, 4), context_fn=lambda: (None, None), **options)


@pytest.mark.parametrize("contexts", [None, (), (1, 2), (contextlib.nullcontext(),)])
def test_a_context_fn_that_returns_no_two_contexts(contexts):
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    wrapped = so.CheckpointWrapper(nn.Linear(4, 4), context_fn=lambda: contexts)
    discarding = so.output_discard(layer, torch.exp, context_fn=lambda: contexts)
    debugging = so.output_discard(layer, torch.exp, context_fn=lambda: contexts, debug=True)
    for call in (wrapped, discarding, debugging, lambda x: so.graph.trace_step(discarding, x)):
        with pytest.raises(TypeError, match=r"`context_fn` returns .*\. Expected two context"):
            call(x)


def test_options_of_a_wrong_type():
    for name in ("debug", "early_stop", "respect_saved_tensors_hooks"):
        with pytest.raises(TypeError, match=f"`{name}` is 'yes'. Expected True or False"):
            so.CheckpointWrapper(nn.Linear(4, 4), **{name: "yes"})
    with pytest.raises(TypeError, match=r"`context_fn` is 3\. Expected a function"):
        so.CheckpointWrapper(nn.Linear(4, 4), context_fn=3)
    with pytest.raises(ValueError, match="`respect_saved_tensors_hooks` is True with mode 'full'"):
        so.CheckpointWrapper(nn.Linear(4, 4), respect_saved_tensors_hooks=True)


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        Changing.calls = 0  # on the class, because a recompute restores instance attributes

    def forward(self, x):
        Changing.calls += 1
        y = x.exp()
        return (y.sin() if self.calls == 1 else y[:1].cos()) * x


@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}])
@pytest.mark.filterwarnings("ignore:the policy of the selective checkpoint saves nothing")
def test_debug_names_the_first_op_that_differs(options):
    x = torch.randn(3, 4, requires_grad=True)
    layer = so.CheckpointWrapper(Changing(), **options)
    named = "op 1 was aten.sin in forward and aten.slice"  # policies always compare ops
    with pytest.raises(
        RuntimeError, match=named if options else "Set debug=True to see the first op"
    ):
        layer(x).sum().backward()
    layer = so.CheckpointWrapper(Changing(), debug=True, **options)
    line = r"test_wrapper_options\.py:\d+"
    with pytest.raises(RuntimeError, match=rf"op 1 was aten.sin.* at .*{line} .*slice.*{line}"):
        layer(x).sum().backward()


def test_results_that_a_policy_saves_go_through_hooks_if_requested():
    shapes, unpacked = [], []

    def pack(t):
        shapes.append(tuple(t.shape))
        return t.double() if t.is_floating_point() else t

    def unpack(t):
        unpacked.append(tuple(t.shape))
        return t.float()

    layer, x = nn.Sequential(nn.Linear(4, 8), nn.GELU()), torch.randn(2, 4, requires_grad=True)
    right = torch.autograd.grad(layer(x).sin().sum(), x)[0]
    for asked in (False, True):
        so.remove_activation_checkpoint(layer)
        options = {"respect_saved_tensors_hooks": True} if asked else {}
        so.CheckpointWrapper(layer, ops_to_save=["aten.addmm"], **options)
        for retain in (False, True):
            shapes.clear(), unpacked.clear()
            with saved_tensors_hooks(pack, unpack), warnings.catch_warnings():
                warnings.simplefilter("error")
                y = layer(x)
            assert shapes == [(2, 4), *([(2, 8)] if asked else [])]
            for _ in range(1 + retain):
                (grad,) = torch.autograd.grad(y.sin().sum(), x, retain_graph=retain)
                assert torch.equal(grad, right)
            assert ((2, 8) in unpacked) == asked


def test_hooks_offload_the_results_that_a_policy_saves():
    model, x = Model(layers=2).double(), make_input()
    right = step(model, x)
    so.apply_activation_checkpoint(
        model,
        {"layer_classes": ["Block"], "policy": "matmuls", "respect_saved_tensors_hooks": True},
    )

    class Offloaded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            with save_on_cpu():
                return self.inner(x)

    got = step(Offloaded(), x)
    got[1].update({n.removeprefix("inner."): got[1].pop(n) for n in list(got[1])})
    assert_same(got, right)


class Attends(nn.Module):
    """Uses higher-order ops: a branch, and attention with a function of its scores."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        h = self.linear(x)
        h = torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))
        return flex_attention(h[None], h[None], h[None], score_mod=lambda s, *at: s * 2)[0]


@pytest.mark.in_turn
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:.*lex_attention")
@pytest.mark.parametrize(
    "options", [{}, {"policy": "matmuls"}, {"policy": "attention"}, {"debug": True}]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_higher_order_ops(compiled, options):
    plain = Attends().requires_grad_(False)
    layer = so.CheckpointWrapper(copy.deepcopy(plain), **options)
    x = torch.randn(2, 8, 16)
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    torch.testing.assert_close(run(x), plain(x))


@pytest.mark.in_turn
@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}, {"debug": True}])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_branches(compiled, options):
    class Branches(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))

    layer, x = Branches(4, 4), torch.randn(3, 4, requires_grad=True)
    right = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
    so.CheckpointWrapper(layer, **options)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    got = torch.autograd.grad(run(x).square().sum(), (x, layer.weight))
    torch.testing.assert_close(got, right)


class Squared:
    def __call__(self, x):
        return x * x.sin()


FORWARDS = {
    "static": staticmethod(lambda x: x * x.sin()),
    "class": classmethod(lambda cls, x: x * x.sin() + isinstance(cls, type)),
    "built-in": staticmethod(torch.sin),
    "callable": Squared(),
    "partial method": functools.partialmethod(lambda self, y, x: x * x.sin() * y, 2),
}


@pytest.mark.parametrize("change", [so.CheckpointWrapper, lambda layer: so.tile(layer, 2)])
@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_a_forward_that_is_no_plain_method(forward, change):
    plain = type("Layer", (nn.Module,), {"forward": forward})()
    changed = copy.deepcopy(change(copy.deepcopy(plain)))
    x = torch.randn(3, 6, 4, requires_grad=True)
    for _ in range(4):
        y, right = changed(x), plain(x)
        assert torch.equal(y, right)
        weights = torch.randn_like(y)
        gradients = [torch.autograd.grad(out, x, weights) for out in (y, right)]
        assert torch.equal(*gradients[0], *gradients[1])
