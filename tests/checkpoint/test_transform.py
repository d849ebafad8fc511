"""Checkpointed layers of a config: gradients, recomputed ops, memory, and the model's interface."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import storage_ops as so

from .blocks import MLP, Block, Model, assert_same, make_input, step

Config = so.ActivationCheckpointConfig


def wrapped_names(model):
    return [
        name
        for name, m in model.named_modules()
        if isinstance(m, so.CheckpointWrapper) and m._checkpointing is not None
    ]


def checkpointed(model, **options):
    options.setdefault("layer_classes", ["Block"])
    return so.apply_activation_checkpoint(copy.deepcopy(model), Config(**options))


# Options, and how many mm (of 4 in a block), bmm (of 2) and gelu (of 1) the backward repeats.
MODES = [
    ({}, (4, 2, 1)),
    ({"use_reentrant": True}, (4, 2, 1)),
    ({"use_reentrant": False, "ops_to_save": ["aten.mm"]}, (0, 2, 1)),
    ({"ops_to_save": ["torch.ops.aten.mm.default"]}, (0, 2, 1)),
    ({"ops_to_save": [torch.ops.aten.bmm]}, (4, 0, 1)),
    ({"ops_to_save": ["aten.mm", "aten.bmm"], "ops_to_recompute": ["aten.mm"]}, (4, 0, 1)),
    ({"ops_to_recompute": ["aten.mm"]}, (4, 0, 0)),
    ({"policy": "matmuls"}, (0, 0, 1)),
    # Products in order: qkv, scores, values, out, up, down. The 1st, 3rd and 5th are saved.
    ({"policy": ["every_other_mm", "attention"]}, (2, 1, 1)),
    ({"policy": so.policies.every_kth(so.policies.save("aten.mm"), 3)}, (2, 2, 1)),
    ({"policy": lambda ctx, op, *args, **kwargs: op is torch.ops.aten.gelu.default}, (4, 2, 0)),
    ({"mm_shapes_to_save": ["*.mlp.up"]}, (3, 2, 1)),
    ({"policy": "matmuls", "mm_shapes_to_recompute": ["*.up", "*.qkv"]}, (2, 0, 1)),
    ({"preserve_rng_state": True, "determinism_check": "none"}, (4, 2, 1)),
    ({"layer_classes": ["GELU", "Dropout"], "mode": "output_discard"}, (0, 0, 1)),
    ({"layer_classes": [], "layer_names": ["*.up"], "mode": "output_discard"}, (1, 0, 0)),
]


@pytest.mark.parametrize(("options", "repeated"), MODES)
def test_gradients_random_numbers_and_recomputed_ops(options, repeated):
    model, x = Model(layers=3).double(), make_input()
    right = step(model, x)
    got = step(checkpointed(model, **options), x)
    assert_same(got, right)
    recomputed = [got[3][op] - right[3][op] for op in ("mm", "bmm", "gelu")]
    assert recomputed == [3 * n for n in repeated]


def test_without_preserved_random_numbers_the_recompute_draws_new_ones():
    model, x = checkpointed(Model(), preserve_rng_state=False), make_input(dtype=torch.float32)
    loss = model(x).sum()
    state = torch.get_rng_state()
    loss.backward()
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_frozen_input_and_frozen_layers():
    model, x = Model().double(), make_input().detach()
    model.layers[1].requires_grad_(False)
    torch.manual_seed(1)
    model(x).sum().backward()
    wrapped = checkpointed(model, ops_to_save=["aten.mm"])
    wrapped.zero_grad()
    torch.manual_seed(1)
    wrapped(x).sum().backward()
    for (name, a), b in zip(wrapped.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("options", [{}, {"use_reentrant": True}, {"policy": "matmuls"}])
def test_kwargs_containers_and_values_that_are_not_tensors(options):
    model, x = Model().double(), make_input()
    mask = torch.rand(6, 6, dtype=torch.float64, requires_grad=True)
    inputs = {"scale": 0.5, "extra": {"mask": mask}, "flag": "on"}
    right = step(model, x, **inputs)
    expected, mask.grad = mask.grad, None
    assert_same(step(checkpointed(model, **options), x, **inputs), right)
    torch.testing.assert_close(mask.grad, expected, rtol=1e-12, atol=0)


class Dictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, context_fn=None, debug=None):
        h = self.linear(x)
        return {"h": h.sin(), "pair": (h.exp(), "text")}, debug


@pytest.mark.parametrize("options", [{}, {"use_reentrant": True}, {"policy": "matmuls"}])
def test_outputs_that_are_containers_and_keywords_that_checkpoint_has_too(options):
    x, module = make_input(dtype=torch.float32), Dictionary()
    right = torch.autograd.grad(
        sum(t.sum() for t in (module(x)[0]["h"], module(x)[0]["pair"][0])), x
    )
    so.CheckpointWrapper(module, **options)
    out, debug = module(x, context_fn=3, debug="yes")
    assert debug == "yes" and out["pair"][1] == "text"
    (out["h"].sum() + out["pair"][0].sum()).backward()
    torch.testing.assert_close(x.grad, right[0])


@pytest.mark.parametrize("where", ["argument", "keyword", "container"])
def test_an_input_modified_in_place_before_backward_is_an_error(where):
    model, x = checkpointed(Model(layers=1).double()), make_input()
    mask = torch.rand(6, 6, dtype=torch.float64)
    other = x * 2
    layer = model.layers[0]
    if where == "argument":
        y, changed = layer(other), other
    else:
        y, changed = layer(other, extra={"mask": mask}), mask
    changed.mul_(2)
    name = "0" if where == "argument" else "'extra'"
    with pytest.raises(RuntimeError, match=f"argument {name} of Block, or a tensor in it, was mod"):
        y.sum().backward()


@pytest.mark.in_turn
def test_memory_between_forward_and_backward():
    model = Model(layers=3, width=64, dropout=0.0)
    x = torch.randn(8, 64, 64, requires_grad=True)
    kept = {}
    for name, options in {
        "plain": None,
        "full": {},
        "selective": {"mm_shapes_to_save": ["*.down"]},
        "discard": {"layer_classes": [], "layer_names": ["*.act"], "mode": "output_discard"},
    }.items():
        module = model if options is None else checkpointed(model, **options)
        with so.memory.measure() as m:
            out = module(x)
        kept[name] = m.kept_bytes
        report = so.checkpoint_report(module, x)
        states = 0 if options is None else 3 * 5056  # states of the random-number generator
        assert abs(report.kept_bytes + states - m.kept_bytes) < 9000, (name, report)
        assert report.plain_bytes == so.checkpoint_report(model, x).plain_bytes
        out.sum().backward()
        del out
    activation = 8 * 64 * 64 * 4
    # A selective checkpoint keeps one product in each layer, as large as the layer's input.
    assert kept["selective"] - kept["full"] == pytest.approx(3 * activation, rel=0.01)
    # The discarded tensor is the output of the wide activation.
    assert kept["plain"] - kept["discard"] == pytest.approx(3 * 4 * activation, rel=0.01)
    assert kept["full"] < 0.2 * kept["plain"]


def test_state_dict_names_and_loading_both_ways():
    model = Model()
    keys, names = list(model.state_dict()), [n for n, _ in model.named_parameters()]
    wrapped = checkpointed(model)
    assert list(wrapped.state_dict()) == keys
    assert [n for n, _ in wrapped.named_parameters()] == names
    assert [n for n, _ in wrapped.named_modules()] == [n for n, _ in model.named_modules()]
    other = Model()
    assert not wrapped.load_state_dict(other.state_dict()).missing_keys
    assert not model.load_state_dict(wrapped.state_dict()).unexpected_keys
    assert torch.equal(model.head.weight, other.head.weight)
    assert repr(wrapped) == repr(model)


def test_attributes_isinstance_and_mode():
    model = Model()
    block = model.layers[0]
    assert so.apply_activation_checkpoint(model, Config(["Block"])) is model
    assert model.layers[0] is block and isinstance(block, Block)
    assert isinstance(block, so.CheckpointWrapper) and type(block).__name__ == "Block"
    assert block.note == "a block" and block.attention.dropout == 0.2
    block.note = "changed"
    assert block.note == "changed" and not model.eval().layers[0].training
    other = type(block)(8)  # a user's code may create another layer of the same class
    assert other.mlp.up.in_features == 8 and other(torch.ones(1, 2, 8)).shape == (1, 2, 8)


@pytest.mark.parametrize(
    "options", [{}, {"ops_to_save": ["aten.mm"]}, {"policy": "every_other_mm"}]
)
def test_deepcopy_and_pickle_keep_the_checkpoint(options):
    model, x = checkpointed(Model().double(), **options), make_input()
    right = step(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    copies.append(torch.load(file, weights_only=False))
    for module in copies:
        got = step(module, x)
        assert_same(got, right)
        assert got[3] == right[3] and len(wrapped_names(module)) == 4
        assert module.layers[0].attention is not model.layers[0].attention
        so.apply_activation_checkpoint(module, Config(["Block"], **options))  # equal: idempotent
    plain = pickle.loads(pickle.dumps(so.remove_activation_checkpoint(model)))
    assert type(plain.layers[0]) is Block


def test_hooks_run_once_and_see_real_values():
    model, x = Model(layers=1).double(), make_input()
    layer, calls = model.layers[0], []
    layer.register_forward_pre_hook(lambda m, a, k: calls.append("pre"), with_kwargs=True)
    layer.register_forward_hook(lambda m, a, out: calls.append("post") or out * 2)
    layer.register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
    right = step(model, x)
    seen, calls[:] = list(calls), []
    so.apply_activation_checkpoint(model, Config(["Block"]))
    assert_same(step(model, x), right)
    assert calls == seen == ["pre", "post", "backward"]


def test_removal_restores_the_class_and_the_forward():
    model, x = Model().double(), make_input()
    right = step(model, x)
    for cfg in (Config(["Block"]), Config(layer_names=["*.act"], mode="output_discard")):
        so.apply_activation_checkpoint(model, cfg)
        assert wrapped_names(model)
        assert so.remove_activation_checkpoint(model) is model
        assert type(model.layers[0]) is Block and type(model.layers[0].mlp.act) is nn.GELU
        assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
        got = step(model, x)
        assert_same(got, right)
        assert got[3] == right[3]
    assert so.remove_activation_checkpoint(model) is model


def test_applying_twice_is_applying_once():
    model, x = checkpointed(Model().double(), policy="matmuls"), make_input()
    before = step(model, x)
    so.apply_activation_checkpoint(model, Config(["Block"], policy="matmuls"))
    after = step(model, x)
    assert after[3] == before[3] and len(wrapped_names(model)) == 4
    with pytest.raises(
        RuntimeError, match=r"Block is checkpointed already, as .*. Pass the same options"
    ):
        so.apply_activation_checkpoint(model, Config(["Block", "Linear"]))
    assert len(wrapped_names(model)) == 4


def test_of_nested_matches_only_the_outermost_is_checkpointed():
    model = checkpointed(Model(), layer_classes=["Block", "MLP"])
    assert wrapped_names(model) == [f"layers.{i}" for i in range(4)]
    model = checkpointed(Model(), layer_classes=["MLP"], layer_names=["layers.0"])
    assert wrapped_names(model) == ["layers.0", "layers.1.mlp", "layers.2.mlp", "layers.3.mlp"]


def test_a_layer_within_a_layer_by_two_configs():
    model, x = Model().double(), make_input()
    right = step(model, x)
    so.apply_activation_checkpoint(model, Config(["MLP"], policy="matmuls"))
    so.apply_activation_checkpoint(model, Config(layer_names=["*.act"], mode="output_discard"))
    so.apply_activation_checkpoint(model, Config(["Block"]))
    assert_same(step(model, x), right)


def test_the_root_itself():
    for cfg in (Config(["Block"]), Config(layer_names=[""])):
        block, x = Block().double(), make_input()
        right = step(block, x)
        assert so.apply_activation_checkpoint(block, cfg) is block
        got = step(block, x)
        assert_same(got, right)
        assert got[3]["mm"] > right[3]["mm"] and wrapped_names(block) == [""]
    with pytest.raises(ValueError, match="no module around the layer '' uses its output"):
        so.apply_activation_checkpoint(Block(), Config(["Block"], mode="output_discard"))


def test_shared_layers_are_checkpointed_once():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Block()
            self.second = self.first
            self.third = nn.Sequential(self.first)

        def forward(self, x):
            return self.third(self.second(self.first(x)))

    model, x = Shared().double(), make_input()
    right = step(model, x)
    for names in (["first"], ["second"], ["third.0"], ["*"]):
        wrapped = so.apply_activation_checkpoint(copy.deepcopy(model), Config(layer_names=names))
        assert isinstance(wrapped.second, so.CheckpointWrapper) and wrapped.first is wrapped.second
        assert_same(step(wrapped, x), right)
        assert sum(layer.checkpointed for layer in so.checkpoint_report(wrapped).layers) <= 2


@pytest.mark.parametrize(("k", "expected"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3]), (3, [2]), (5, [4])])
def test_every_kth(k, expected):
    model = checkpointed(Model(layers=5), every_k=k)
    assert wrapped_names(model) == [f"layers.{i}" for i in expected]


def test_patterns_match_dots_and_are_case_sensitive():
    model = checkpointed(Model(), layer_classes=None, layer_names=["layers.[02].mlp"])
    assert wrapped_names(model) == ["layers.0.mlp", "layers.2.mlp"]
    assert isinstance(model.layers[0].mlp, MLP)


def test_report_and_log(caplog):
    model = Model(layers=5)
    so.apply_activation_checkpoint(model, Config(["MLP"], policy="matmuls", every_k=2))
    with caplog.at_level("INFO", "storage_ops"):
        so.apply_activation_checkpoint(model, Config(["Attention"]))
    report = so.checkpoint_report(model)
    rows = [(r.class_name, r.mode, r.checkpointed, r.total) for r in report.layers]
    assert sorted(rows) == [("Attention", "full", 5, 5), ("MLP", "selective", 2, 5)]
    assert "2 of 5" in str(report) and "2 of 5" in caplog.text and report.kept_bytes is None
    state = [b.clone() for b in model.state_dict().values()]
    with_inputs = so.checkpoint_report(model, torch.randn(2, 6, 16))
    assert 0 < with_inputs.kept_bytes < with_inputs.plain_bytes
    assert "kept for backward" in str(with_inputs)
    assert all(torch.equal(a, b) for a, b in zip(state, model.state_dict().values(), strict=True))
    assert len(wrapped_names(model)) == 7


def test_without_grad_a_layer_is_a_plain_call():
    model, x = Model().double().eval(), make_input()
    right = model(x)
    for options in ({}, {"use_reentrant": True}, {"policy": "matmuls"}):
        wrapped = checkpointed(model, **options)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(wrapped(x), right)


def test_retained_graph_and_double_backward():
    model, x = checkpointed(Model().double(), policy="matmuls"), make_input()
    loss = model(x).square().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], first)
    plain = Model(dropout=0.0).double()

    def penalty(module):
        grad = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(grad.square().sum(), x)[0]

    torch.testing.assert_close(penalty(checkpointed(plain, policy="matmuls")), penalty(plain))


@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}, {"use_reentrant": True}])
def test_transforms_of_torch_func(options):
    plain, x = Model(layers=2, dropout=0.0).double(), make_input()
    right = torch.autograd.grad(plain(x).square().sum(), tuple(plain.parameters()))
    model = checkpointed(plain, **options)
    loss = lambda p: torch.func.functional_call(model, p, (x,)).square().sum()  # noqa: E731
    got = torch.func.grad(loss)({n: p.detach() for n, p in model.named_parameters()})
    for a, b in zip(got.values(), right, strict=True):
        torch.testing.assert_close(a, b)


def test_determinism_check():
    calls = []

    class Changing(nn.Module):
        def forward(self, x):
            calls.append(1)
            return x.expand(len(calls), 3).sin().sum(0)

    x = torch.randn(3, requires_grad=True)
    for options in ({}, {"policy": "matmuls"}):
        layer = so.CheckpointWrapper(Changing(), **options)
        calls.clear()
        with pytest.raises(Exception, match="metadata or contents differ"):
            layer(x).sum().backward()
        layer = so.CheckpointWrapper(Changing(), determinism_check="none", **options)
        calls.clear()
        layer(x).sum().backward()


@pytest.mark.parametrize("first", [False, True])
def test_parametrizations_are_removed_from_a_checkpointed_layer(first):
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    if first:
        so.CheckpointWrapper(layer)
    for name in ("weight", "bias"):
        parametrize.register_parametrization(layer, name, nn.Tanh())
    right = nn.functional.linear(x, layer.weight.detach(), layer.bias.detach())
    so.CheckpointWrapper(layer)
    kept = so.remove_activation_checkpoint(so.CheckpointWrapper(copy.deepcopy(layer)))
    assert not isinstance(kept, so.CheckpointWrapper) and torch.equal(kept(x), right)
    for name in ("weight", "bias"):
        assert torch.equal(layer(x), right) and isinstance(layer, so.CheckpointWrapper)
        parametrize.remove_parametrizations(layer, name)
    assert torch.equal(layer(x), right) and isinstance(layer, so.CheckpointWrapper)
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert type(so.remove_activation_checkpoint(layer)) is nn.Linear
