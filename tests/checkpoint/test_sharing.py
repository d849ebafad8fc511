"""If several models share an activation module, a checkpoint changes only one model."""

import copy
import pickle

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.checkpoint.layers import transform

from .blocks import assert_same, step

SHARED = nn.SiLU()
MEMORY = []  # storages of the activations' outputs


class Feed(nn.Module):
    def __init__(self, act=SHARED):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.act = self.same_act = act

    def forward(self, x):
        h = self.same_act(self.up(x))
        MEMORY.append(h.untyped_storage())
        return x + self.down(h)


def make(count=3, act=SHARED):
    return nn.Sequential(*(Feed(act) for _ in range(count))).double()


def apply(model, **options):
    options = {"layer_names": ["*.act"], "mode": "output_discard", **options}
    return so.apply_activation_checkpoint(model, options)


@pytest.mark.parametrize("options", [{}, {"mode": "full"}, {"layer_names": None,
                                     "layer_classes": ["SiLU"]}])  # fmt: skip
def test_one_model_of_two(options):
    model, other = make(), make()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    right, others = step(copy.deepcopy(model), x), step(copy.deepcopy(other), x)
    apply(model, **options)
    assert type(SHARED) is nn.SiLU and all(layer.act is SHARED for layer in other)
    acts = [layer.act for layer in model]
    assert all(isinstance(act, so.CheckpointWrapper) for act in acts) and len(set(acts)) == 3
    assert all(layer.act is layer.same_act for layer in model)
    before = list(acts)
    assert [layer.act for layer in apply(model, **options)] == before  # once more: nothing changes
    assert_same(step(model, x), right)
    assert_same(step(other, x), others)
    for same in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert_same(step(so.remove_activation_checkpoint(same), x), right)
        assert len({id(layer.act) for layer in same}) == 1
    so.remove_activation_checkpoint(model)
    assert all(layer.act is layer.same_act is SHARED for layer in model)
    assert "_stands_for" not in vars(SHARED)


def test_every_layer_frees_its_own_output():
    model = apply(make())
    MEMORY.clear()
    out = model(torch.randn(4, 8, dtype=torch.float64, requires_grad=True))
    assert out.requires_grad and [memory.nbytes() for memory in MEMORY] == [0, 0, 0]


def test_hooks_and_attributes_are_those_of_one_module():
    act, calls = nn.Dropout(0.0), []
    model = apply(make(1, act))
    model[0].act.register_forward_hook(lambda *args: calls.append("copy"))
    act.register_forward_hook(lambda *args: calls.append("shared"))
    model.eval()
    model[0].act.p = 0.5
    model(torch.randn(4, 8, dtype=torch.float64))
    assert calls == ["copy", "shared"] and act.training and act.p == 0.0
    so.remove_activation_checkpoint(model)
    assert model[0].act is act and not act.training and act.p == 0.5


class Counting(nn.Module):
    """Has state, so a copy would behave differently."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return torch.relu(x)


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        return torch.relu(x)


@pytest.mark.parametrize("kind", [Counting, Remembering, nn.PReLU])
def test_a_shared_module_with_state_is_not_copied(kind):
    act = kind()
    model = apply(make(2, act))
    assert model[0].act is model[1].act is act and isinstance(act, so.CheckpointWrapper)
    so.remove_activation_checkpoint(model)
    assert type(act) is kind


def test_an_interrupt_leaves_nothing_behind(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    model = make()
    monkeypatch.setattr(transform.scope, "hold", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apply(model)
    assert type(SHARED) is nn.SiLU and all(layer.act is layer.same_act is SHARED for layer in model)


@pytest.mark.in_turn
def test_a_plan_changes_only_its_model():
    model, other, x = make().float(), make().float(), torch.randn(64, 8)

    def loss(out):
        return out.square().mean()

    plain = so.memory.simulate_step(model, x, loss=loss, device="cpu").peak_bytes
    plan = so.fit(model, x, budget=int(0.97 * plain), loss=loss, actions=["output_discard"])
    plan.apply()
    assert any(isinstance(m, so.CheckpointWrapper) for m in model.modules())
    assert not any(isinstance(m, so.CheckpointWrapper) for m in other.modules())
    peak = so.memory.simulate_step(model, x, loss=loss, device="cpu").peak_bytes
    assert peak == plan.peak_bytes
    so.fit(other, x, budget="1GiB", loss=loss)
    plan.undo()
    assert all(layer.act is SHARED for layer in model)
