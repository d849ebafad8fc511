"""With mode "output_discard", a layer's output is freed when its parent module returns."""

import copy
import dataclasses
import gc
import importlib
import pickle
import weakref

import pytest
import torch
import transformers
from torch import nn

import storage_ops as so

from .blocks import MLP, Block, Model, assert_same, make_input, step

Config = so.ActivationCheckpointConfig


def discarding(model, **options):
    options.setdefault("layer_classes", ["GELU"])
    return so.apply_activation_checkpoint(model, Config(mode="output_discard", **options))


class Watched(MLP):
    """Notes the storage of its activation, and can keep the activation itself."""

    keeps = False

    def forward(self, x):
        h = self.act(self.up(x))
        self.seen = h if self.keeps else None
        self.memory = weakref.ref(h.untyped_storage())
        self.freed_early = so.is_discarded(h)
        return self.dropout(self.down(h))

    def is_freed(self):
        return self.memory().nbytes() == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layer_classes": ["Block"]},
        {"layer_classes": ["MLP", "Attention"]},
        {"layer_classes": ["Linear"]},
        {"layer_classes": None, "layer_names": ["*.up", "*.act"]},
        {"determinism_check": "checksum"},
        {"determinism_check": "none", "every_k": 2},
    ],
)
def test_gradients_are_those_of_eager(options):
    model, x = Model(layers=3).double(), make_input()
    right = step(model, x)
    assert_same(step(discarding(model, **options), x), right)


def test_the_output_is_freed_when_the_parent_returns():
    module, x = discarding(Watched(16, 0.0).double()), make_input()
    y = module(x)
    assert not module.freed_early and module.is_freed()
    y.sum().backward()


def test_an_output_that_the_parent_stores_is_kept():
    module, x = discarding(Watched(16, 0.0).double()), make_input()
    module.keeps = True
    y = module(x)
    assert not module.is_freed() and torch.equal(module.seen, module.act(module.up(x)))
    y.sum().backward()


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    inner: list


@pytest.mark.parametrize("make", [
    lambda y, h: Output(y, [h]), lambda y, h: {"y": y, "inner": (h.view(-1),)},
    lambda y, h: transformers.utils.ModelOutput(y=y, inner=[h]),
])  # fmt: skip
def test_an_output_that_the_parent_returns_in_an_object_is_kept(make):
    class Both(MLP):
        def forward(self, x):
            h = self.act(self.up(x))
            return make(self.down(h), h)

    module, x = Both(16, 0.0).double(), make_input()
    loss = lambda out: out["y"].square().sum() + out["inner"][0].square().sum()  # noqa: E731
    as_dict = lambda out: out if isinstance(out, dict) else vars(out)  # noqa: E731
    right = torch.autograd.grad(loss(as_dict(module(x))), x)[0]
    out = as_dict(discarding(module)(x))
    assert not so.is_discarded(out["inner"][0])
    assert torch.equal(torch.autograd.grad(loss(out), x)[0], right)


def test_an_output_that_the_parent_returns_is_kept():
    class Both(MLP):
        def forward(self, x):
            h = self.act(self.up(x))
            return self.down(h), h.view(-1)

    plain, x = Both(16, 0.0).double(), make_input()
    right = torch.autograd.grad(sum(t.square().sum() for t in plain(x)), x)[0]
    y, h = discarding(plain)(x)
    assert not so.is_discarded(h)
    assert torch.equal(torch.autograd.grad(y.square().sum() + h.square().sum(), x)[0], right)


def test_a_layer_called_outside_of_its_parent_keeps_its_output():
    module, x = discarding(MLP(16, 0.0)), torch.randn(2, 16, requires_grad=True)
    h = module.act(x)
    h.sum().backward()
    assert not so.is_discarded(h) and x.grad is not None


def test_after_an_exception_the_next_forward_is_right():
    class Failing(MLP):
        fails = False

        def forward(self, x):
            h = self.act(self.up(x))
            if self.fails:
                raise KeyError("on purpose")
            return self.down(h)

    plain, x = Failing(16, 0.0).double(), make_input()
    right = step(plain, x)
    module = discarding(plain)
    module.fails = True
    for _ in range(2):
        with pytest.raises(KeyError, match="on purpose"):
            module(x)
    module.fails = False
    assert_same(step(module, x), right)
    h = module.act(x)  # outside of its parent's forward
    assert not so.is_discarded(h)


def test_copies_and_pickles_discard_too():
    module, x = discarding(Watched(16, 0.0).double()), make_input()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other(x).sum().backward()
        y = other(x)
        assert other.is_freed()
        cls = type(discarding(other))
        assert cls is type(module) and cls.__name__ == "Watched"
        so.remove_activation_checkpoint(other)
        y = other(x)
        assert not other.is_freed() and type(other) is Watched and y.requires_grad


def test_other_hooks_of_the_parent_stay():
    module = MLP(16, 0.0)
    calls = []
    module.register_forward_hook(lambda *args: calls.append("hook"))
    discarding(module)
    so.remove_activation_checkpoint(module)
    module(torch.randn(2, 16))
    assert calls == ["hook"]


def test_a_parent_accepts_only_one_set_of_options():
    model = discarding(Model(layers=2), layer_classes=None, layer_names=["*.act"])
    with pytest.raises(
        RuntimeError, match=r"MLP already frees outputs of layers, with .*Pass the same"
    ):
        discarding(model, layer_names=["*.up"], determinism_check="none", layer_classes=None)
    assert type(model.layers[0].mlp.up) is nn.Linear
    discarding(model, layer_names=["*.up"], layer_classes=None)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_freed(mode):
    module = discarding(Watched(16, 0.0))
    module.keeps = True
    with mode():
        module(torch.randn(2, 16))
    assert not module.is_freed()


OPTIONS = [{}, {"policy": "matmuls"}, {"mode": "output_discard", "layer_classes": ["GELU"]}]


@pytest.mark.parametrize("options", OPTIONS)
def test_nothing_is_alive_after_backward_without_the_garbage_collector(options):
    # The first dispatch mode of a process imports torch._dynamo, where `torch.fx.wrap` leaves a
    # cycle that keeps the calling frames alive.
    importlib.import_module("torch._dynamo")
    model = Model(layers=2)
    so.apply_activation_checkpoint(model, Config(**{"layer_classes": ["Block"], **options}))
    references = []
    for layer in model.layers:
        hook = lambda m, a, out: references.append(weakref.ref(out.untyped_storage())) or None  # noqa: E731
        layer.mlp.act.register_forward_hook(hook)
        layer.register_forward_hook(hook)
    x = make_input(dtype=torch.float32)
    gc.collect()
    gc.disable()
    try:
        y = model(x).sum()
        y.backward()
        del y
        assert references and [ref() for ref in references] == [None] * len(references)
    finally:
        gc.enable()


@pytest.mark.parametrize("options", OPTIONS)
def test_saved_tensors_that_are_offloaded(options):
    model, x = Model(layers=2).double(), make_input()
    right = step(model, x)
    so.apply_activation_checkpoint(model, Config(**{"layer_classes": ["Block"], **options}))

    class Offloaded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                return self.inner(x)

    got = step(Offloaded(), x)
    got[1].update({n.removeprefix("inner."): got[1].pop(n) for n in list(got[1])})
    assert_same(got, right)


def test_a_block_is_still_a_block():
    model = discarding(Model(layers=1), layer_classes=["Block"])
    assert isinstance(model.layers[0], Block) and isinstance(model.layers[0], so.CheckpointWrapper)


class Wraps(torch.Tensor):
    """Wraps a tensor without `__tensor_flatten__`, which would name the inner tensor."""

    @staticmethod
    def __new__(cls, inner):
        wrap = torch.Tensor._make_wrapper_subclass
        return wrap(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        unwrap = lambda t: t.inner if isinstance(t, cls) else t  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, op(*args, **kwargs))


def test_an_output_with_unknown_inner_tensors_is_kept_and_reported(path):
    class Wrapping(nn.Linear):
        def forward(self, x):
            return super().forward(Wraps(x.detach()))

    model, x = nn.Sequential(Wrapping(4, 4), nn.Linear(4, 2)), torch.randn(3, 4)
    right = model(x).inner.detach()
    so.apply_activation_checkpoint(model, {"layer_names": ["0"], "mode": "output_discard"})
    report = so.checkpoint_report(model, x)
    assert report.kept_classes == ("Wraps",) and "outputs that are kept: Wraps" in str(report)
    for _ in range(2):
        y = model(x)
        assert torch.equal(y.inner, right)
        y.sum().backward()
    up, down = nn.Linear(4, 4), nn.Linear(4, 2)
    y = so.output_discard(lambda x: up(Wraps(x)), lambda h: down(h))(x)  # h is dropped
    y.sum().backward()
    assert up.weight.grad is not None


def test_a_parent_whose_class_cannot_change_is_refused_and_nothing_changes():
    class Slotted(MLP):
        __slots__ = ("more",)

        def __setattr__(self, name, value):
            if name == "__class__":
                raise TypeError("on purpose")
            super().__setattr__(name, value)

    model = nn.Sequential(MLP(16, 0.0), Slotted(16, 0.0))
    classes = [type(m) for m in model.modules()]
    with pytest.raises(TypeError, match="The class of Slotted cannot change: on purpose"):
        discarding(model)
    assert [type(m) for m in model.modules()] == classes
    assert not any("_discarding" in vars(m) for m in model.modules())


def test_a_layer_that_is_also_a_parent():
    model, x = nn.Sequential(MLP(16, 0.0), nn.Linear(16, 2)).double(), make_input()
    right = step(model, x)
    for first in (True, False):
        for layer, options in [("0", {}), ("0.act", {"mode": "output_discard"})][
            :: 1 if first else -1
        ]:
            so.apply_activation_checkpoint(model, {"layer_names": [layer], **options})
        assert_same(step(model, x), right)
        assert_same(step(pickle.loads(pickle.dumps(model)), x), right)
        so.remove_activation_checkpoint(model)
        assert [type(m) for m in model.modules()][1:3] == [MLP, nn.Linear]


@pytest.mark.parametrize("through_data", [False, True])
def test_an_output_that_the_parent_modifies_in_place_is_kept(through_data):
    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            if through_data:
                h.data += x
            else:
                h += x
            return self.c(self.b(h).relu_())

    plain, x = Adding(), torch.randn(3, 4)
    right = torch.autograd.grad(plain(x).square().sum(), plain.parameters())
    check = "checksum" if through_data else "default"
    names = {"layer_classes": None, "layer_names": ["a", "b"]}
    module = discarding(plain, determinism_check=check, **names)
    got = torch.autograd.grad(module(x).square().sum(), module.parameters())
    assert all(map(torch.equal, got, right))


def test_a_row_of_more_regions_than_the_recursion_limit():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            for _ in range(600):
                x = self.cell(x)
            return x.sin()

    plain, x = Recurrent(), torch.randn(2, 4)
    right = torch.autograd.grad(plain(x).sum(), plain.parameters())
    module = discarding(plain, layer_classes=None, layer_names=["cell"])
    got = torch.autograd.grad(module(x).sum(), module.parameters())
    assert all(map(torch.equal, got, right))
