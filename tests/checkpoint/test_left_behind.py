"""Errors leave no state behind, and a region before its backward does not affect other code."""

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import storage_ops as so
from storage_ops.checkpoint.discard import scope
from storage_ops.checkpoint.saved import guard
from storage_ops.checkpoint.saved.outputs import producers

from .blocks import Calls


class Raises(nn.Module):
    error = None

    def forward(self, x):
        if self.error is not None:
            raise self.error("on purpose")
        return x.sin()


def model(mode):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Raises())
    return so.apply_activation_checkpoint(module, {"layer_names": ["0"], "mode": mode})


def assert_nothing_is_left():
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not scope._scopes.open and not so.checkpoint.state.execution.is_disabled()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.func.grad(torch.sin)(torch.tensor(0.0)) == 1


ERRORS = (KeyError, KeyboardInterrupt, SystemExit, GeneratorExit)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("mode", ["full", "output_discard"])
def test_an_error_around_a_layer(mode, error):
    module, x = model(mode), torch.randn(2, 4, requires_grad=True)
    right = torch.autograd.grad(module(x).sum(), x)[0]
    module[2].error = error
    for _ in range(2):
        with pytest.raises(error):
            module(x)
        assert_nothing_is_left()
    module[2].error = None
    assert torch.equal(torch.autograd.grad(module(x).sum(), x)[0], right)
    assert not [r for r in producers.values() if r.outputs.discardable]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["full", "selective", "reentrant", "region"])
def test_an_error_inside_of_a_region(kind, again, error):
    class Layer(nn.Linear):
        fails, calls = True, 0

        def forward(self, x):
            self.h.add_(1)
            Layer.calls += 1  # an attribute of the layer does not count the recompute
            if self.fails and self.calls == 1 + again:
                torch.set_default_dtype(torch.float32)
                raise error("on purpose")
            return super().forward(x * self.h)

    layer, x = Layer(4, 4), torch.randn(2, 4, requires_grad=True)
    layer.register_buffer("h", torch.zeros(4))
    options = {
        "full": {}, "selective": {"policy": "matmuls"}, "reentrant": {"use_reentrant": True},
    }  # fmt: skip
    run = layer
    if kind == "region":
        run = so.output_discard(layer, torch.sin)
    else:
        so.CheckpointWrapper(layer, **options[kind])
    random = torch.get_rng_state()
    with pytest.raises(error):
        run(x).sum().backward()
    assert_nothing_is_left()
    assert torch.equal(torch.get_rng_state(), random) and (layer.h == 1).all()
    layer.fails, x.grad = False, None
    run(x).sum().backward()
    assert (layer.h == 2).all()


def test_a_backward_inside_of_a_region_leaves_no_scope_open():
    """Interatomic potentials do this: their forces are gradients of an energy."""
    module, x = model("output_discard"), torch.randn(2, 4, requires_grad=True)

    def force(x):
        return torch.autograd.grad(module(x).sum(), x, create_graph=True)[0]

    for fn in (so.output_discard(force, torch.sin), so.CheckpointWrapper(Calls(force))):
        for _ in range(3):
            got = torch.autograd.grad(fn(x).square().sum(), x)[0]
            assert_nothing_is_left()
        y = force(x).sin() if fn is not None and not isinstance(fn, nn.Module) else force(x)
        assert torch.equal(got, torch.autograd.grad(y.square().sum(), x)[0])


@pytest.mark.parametrize("mode", ["full", "output_discard"])
def test_torch_func_while_a_region_awaits_its_backward(mode):
    module, x = (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(),
        torch.randn(2, 4, dtype=torch.float64, requires_grad=True),
    )
    so.apply_activation_checkpoint(module, {"layer_names": ["0"], "mode": mode})
    loss = lambda x: module(x).square().sum()  # noqa: E731
    plain = lambda x: module[1](nn.functional.linear(x, module[0].weight, module[0].bias))  # noqa: E731
    waiting = loss(x)
    right = torch.autograd.grad(plain(x).square().sum(), x)[0]
    assert torch.equal(torch.func.grad(loss)(x), right)
    per_sample = torch.func.vmap(torch.func.grad(loss))(x)
    torch.testing.assert_close(per_sample, right)
    hessian = torch.func.hessian(lambda x: plain(x).square().sum())(x)
    torch.testing.assert_close(torch.func.hessian(loss)(x), hessian)
    torch.testing.assert_close(torch.func.jacfwd(loss)(x), right)
    torch.testing.assert_close(torch.func.jacrev(loss)(x), right)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with torch.no_grad():
            tangent = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
    torch.testing.assert_close(tangent, right.sum())
    waiting.backward()
    assert torch.equal(x.grad, right)


@pytest.mark.parametrize("mode", ["full", "output_discard", "selective"])
def test_a_lazy_layer_stays_checkpointed(mode):
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    options = {"layer_names": ["0"], "mode": mode}
    options |= {"policy": "matmuls"} if mode == "selective" else {}
    so.apply_activation_checkpoint(lazy, options)
    for _ in range(2):
        x = torch.randn(3, 5, requires_grad=True)
        lazy(x).sum().backward()
        assert isinstance(lazy[0], so.CheckpointWrapper) and isinstance(lazy[0], nn.Linear)
        right = torch.autograd.grad(
            lazy[1](nn.functional.linear(x, lazy[0].weight, lazy[0].bias)).sum(), x
        )[0]
        assert torch.equal(x.grad, right)
    so.remove_activation_checkpoint(lazy)
    assert type(lazy[0]) is nn.Linear


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["full", "output_discard", "selective"])
def test_a_trace_of_torch_jit(mode):
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    right = module(x)
    options = {"policy": "matmuls"} if mode == "selective" else {}
    so.apply_activation_checkpoint(module, {"layer_names": ["0"], "mode": mode, **options})
    traced = torch.jit.trace(module, x)
    assert torch.equal(traced(x), right) and torch.equal(traced(x), right)
    assert not [r for r in producers.values() if r.outputs.discardable]


@pytest.mark.parametrize("mode", ["full", "output_discard", "selective"])
def test_disabled_checkpoints_are_plain_calls(mode):
    calls = []

    class Layer(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x).sin()

    module, x = nn.Sequential(Layer(4, 4), nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    options = {"policy": "matmuls"} if mode == "selective" else {}
    so.apply_activation_checkpoint(module, {"layer_names": ["0"], "mode": mode, **options})
    with so.disable_checkpointing():
        y = module(x)
        with pytest.raises(KeyError), so.disable_checkpointing():
            raise KeyError
        h = so.output_discard(lambda x: calls.append(2) or x.sin(), torch.sin)(x)
    y.sum().backward()
    h.sum().backward()
    assert calls == [1, 2]
    y = module(x)
    with so.disable_checkpointing():  # both the inner and the outer checkpoint recompute
        y.sum().backward()
    assert calls == [1, 2, 1, 1]


def test_nested_regions_in_a_backward_under_disabled_checkpoints():
    inner = so.CheckpointWrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x = torch.randn(2, 4, requires_grad=True)
    y = checkpoint(inner, x, use_reentrant=False)
    outer = so.CheckpointWrapper(nn.Sequential(inner, nn.Linear(4, 2)))
    z = outer(x)
    with so.disable_checkpointing():
        z.sum().backward()
    y.sum().backward()
    right = torch.autograd.grad(inner(x).sum() + outer[1](inner(x)).sum(), x)[0]
    torch.testing.assert_close(x.grad, right)


def test_checkpoints_that_are_disabled_in_a_trace():
    layer, x = so.CheckpointWrapper(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())), torch.ones(2, 4)

    def step(x, off):
        with so.disable_checkpointing() if off else contextlib.nullcontext():
            loss = layer(x).square().sum()
        loss.backward()
        return loss.detach()

    counts = []
    for off in (False, True):
        traced = so.graph.trace_step(step, x, off)
        targets = [n.target for n in traced.gm.graph.nodes]
        counts.append(targets.count(torch.ops.aten.sigmoid.default))
        layer.zero_grad()
    assert counts == [2, 1]


@pytest.mark.parametrize("passes", [0, 1])
def test_a_graph_that_is_never_released(passes):
    """The consumer saves results of its own ops."""
    down, x = nn.Linear(4, 4), torch.randn(4, 4, requires_grad=True)
    inputs = []

    def act(x):
        inputs.append(weakref.ref(x))
        return x.sin()

    y = so.output_discard(act, lambda h: down(torch.tanh(h)).exp())(x * 1)
    for _ in range(passes):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    del y
    gc.collect()
    assert inputs[0]() is None


def test_a_discard_in_debug_mode_whose_graph_is_dropped():
    up, down = nn.Linear(4, 4), nn.Linear(4, 4)
    before = len(guard._messages)
    for _ in range(3):
        so.output_discard(up, down, debug=True)(torch.randn(2, 4))
    gc.collect()
    assert len(guard._messages) == before


def test_a_generated_class_is_freed_with_its_modules():
    class Local(nn.Linear):
        pass

    wrapped = so.CheckpointWrapper(Local(4, 4))
    reference = weakref.ref(type(wrapped))
    second = so.CheckpointWrapper(Local(4, 4))
    assert type(second) is reference()
    assert type(so.remove_activation_checkpoint(second)) is Local
    del wrapped, second
    gc.collect()
    assert reference() is None


class Interrupts(TorchDispatchMode):
    """Raises a KeyboardInterrupt in place of one op."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1:
            raise KeyboardInterrupt
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["output_discard", "full"])
def test_an_interrupt_at_any_op_keeps_no_region(mode):
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh() * x

    x = torch.randn(4, 4, requires_grad=True)
    for at in itertools.count():
        layer = Layer(4, 4)
        if mode == "full":
            step = so.CheckpointWrapper(layer)
        else:
            step = so.output_discard(layer, lambda h: h.sin() * h)
        alive = weakref.ref(layer)
        with Interrupts(at) as mode_of_interrupt, contextlib.suppress(KeyboardInterrupt):
            step(x).sum().backward()
        del step, layer
        x.grad = None
        x.sin().sum().backward()  # torch's queue then drops the interrupted pass
        if alive() is not None:
            gc.collect()
        assert alive() is None, f"an interrupt at op {at} keeps a region"
        if mode_of_interrupt.left >= 0:
            break
    assert at > 10
