"""A simulation restores parameters that a step freezes, unfreezes or registers hooks on."""

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.memory import estimate


@pytest.fixture
def pair():
    return nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)


def state(*modules):
    return [
        (p.requires_grad, p.grad, dict(p._backward_hooks or {}), p._post_accumulate_grad_hooks)
        for module in modules
        for p in module.parameters()
    ]


def unfreeze_by_method(p):
    p.requires_grad_(True)


def unfreeze_by_attribute(p):
    p.requires_grad = True


@pytest.mark.parametrize("unfreeze", [unfreeze_by_method, unfreeze_by_attribute])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_step_that_unfreezes_changes_nothing(pair, hidden, unfreeze):
    critic, generator = pair
    x, models = torch.randn(2, 4), {"deep": [[[[critic, generator]]]]}
    old = generator.weight.grad = torch.randn(4, 4)

    def step(x):
        d, g = models["deep"][0][0][0] if hidden else (critic, generator)
        for p in d.parameters():
            unfreeze(p)
        g.requires_grad_(False)
        d(g(x)).sum().backward()

    def real():
        step(x)
        gradients = [p.grad for p in critic.parameters()]
        critic.requires_grad_(False), generator.requires_grad_(True), critic.zero_grad()
        return gradients

    expected, before = real(), state(critic, generator)
    estimate(step, x)
    assert state(critic, generator) == before and generator.weight.grad is old
    assert all(map(torch.equal, real(), expected))


def test_estimates_count_gradients_of_parameters_that_a_step_unfreezes(pair):
    critic, x = pair[0], torch.randn(2, 4)

    def step(x):
        critic.requires_grad_(True)
        critic(x).sum().backward()

    e = estimate(step, x)
    assert e.kept_bytes - e.input_bytes == 2 * 512


def test_hooks_that_a_step_registers_are_removed(pair):
    layer, x = pair[1], torch.randn(2, 4)
    calls = []
    first = layer.weight.register_hook(lambda g: calls.append("first"))

    def step(x):
        layer.weight.register_hook(lambda g: g * 2)
        layer.bias.register_hook(lambda g: g * 2)
        layer.bias.register_post_accumulate_grad_hook(lambda p: calls.append("last"))
        layer(x).sum().backward()

    estimate(step, x)
    calls.clear()
    layer(x).sum().backward()
    assert calls == ["first"] and layer.bias.grad.eq(2).all()
    first.remove()


def test_a_model_that_unfreezes_itself_is_simulated(pair):
    class Unfreezes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = pair[0]

        def forward(self, x):
            return self.inner.requires_grad_(True)(x)

    model, x = Unfreezes(), torch.randn(2, 4)
    so.memory.simulate_step(model, x, device="cpu")
    assert [(p.requires_grad, p.grad) for p in model.parameters()] == [(False, None)] * 2


class Cloned(nn.Sequential):
    def forward(self, x):
        return super().forward(x.clone())


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_simulation_between_forward_and_backward_changes_nothing(is_inference):
    model = Cloned(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with torch.inference_mode(is_inference):
        x = torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(x).square().mean()
    versions = [t._version for t in (*model.parameters(), *model.buffers())]
    so.memory.simulate_step(model, x, optimizer=optimizer)
    assert [t._version for t in (*model.parameters(), *model.buffers())] == versions
    loss.backward()  # autograd checks that no saved tensor was written to
