"""Layers on whose class torch has put a class of its own, as FSDP2 and parametrizations do."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import storage_ops as so
from storage_ops.foundation.values import is_module_of_torch


class Recurrent(nn.Module):
    """Reads a state that its last call has set, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.state, self.calls, self.norms = 0.0, 0, []

    def forward(self, x):
        h = (x @ self.weight + self.state).tanh()
        self.state, self.calls = h.detach(), self.calls + 1
        self.norms.append(h.detach().norm())
        return h.sin()


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", Half())


def sharded(layer):
    # FSDP2 and `replicate` do this, but need a process group.
    body = {"__module__": "torch.distributed.fsdp"}
    layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), body)


def both(layer):
    parametrized(layer)
    sharded(layer)


def steps(model):
    results, x = [], torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(5):
        loss = model(x).square().sum()
        results += torch.autograd.grad(loss, (x, *model.parameters()))
        results += [layer.state for layer in model]
    return results, [(layer.calls, len(layer.norms)) for layer in model]


@pytest.mark.parametrize("config", [{}, {"policy": "matmuls"}, {"mode": "output_discard"}])
@pytest.mark.parametrize("put_on_top", [parametrized, sharded, both])
def test_effects_happen_once(put_on_top, config):
    model = nn.Sequential(Recurrent(), Recurrent())
    for layer in model:
        put_on_top(layer)
    checkpointed = copy.deepcopy(model)
    so.apply_activation_checkpoint(checkpointed, {"layer_names": ["*"], **config})
    torch.manual_seed(0)
    results, counts = steps(model)
    torch.manual_seed(0)
    again, counts_again = steps(checkpointed)
    assert all(map(torch.equal, again, results)) and counts_again == counts


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
@pytest.mark.parametrize("is_layer", [False, True])
def test_a_parametrized_module_is_freed(kind, is_layer):
    linear = getattr(parametrizations, kind)(nn.Linear(4, 4))
    layer = so.CheckpointWrapper(linear if is_layer else nn.Sequential(linear, nn.ReLU()))
    for _ in range(5):
        layer(torch.randn(2, 4)).sum().backward()
    references = [weakref.ref(module) for module in layer.modules()]
    del linear, layer
    gc.collect()
    assert not any(reference() for reference in references)


def test_which_modules_are_of_torch():
    class Local(nn.Linear):
        pass

    local, plain = Local(4, 4), nn.Linear(4, 4)
    assert is_module_of_torch(type(plain)) and not is_module_of_torch(Local)
    for module in (local, plain):
        so.CheckpointWrapper(module)
        both(module)
    assert is_module_of_torch(type(plain)) and not is_module_of_torch(type(local))


def test_a_forward_that_is_assigned_to_the_class_before_wrapping_runs():
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x).sin()

    def forward(self, x, scale=1.0):
        return nn.Linear.forward(self, x).cos() * scale

    first, second = so.CheckpointWrapper(Layer(4, 4)), Layer(4, 4)
    Layer.forward = forward
    second, x = so.CheckpointWrapper(second), torch.randn(3, 4)
    torch.testing.assert_close(second(x, scale=2.0), forward(second, x, 2.0), rtol=0, atol=0)
    torch.testing.assert_close(first(x), nn.Linear.forward(first, x).sin(), rtol=0, atol=0)
    assert isinstance(copy.deepcopy(second), Layer)
