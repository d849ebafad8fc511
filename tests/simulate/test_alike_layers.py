"""Layers with the same structure that still do not run the same ops in a step."""

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.simulate import step as steps


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.up(x)) * self.gate(x).softmax(-1).sum(-1, keepdim=True)


class HooksAtFirstForward(nn.Module):
    """Collects the outputs of routers by hooks that its first forward registers."""

    def __init__(self):
        super().__init__()
        self.layers, self.seen = nn.ModuleList(Router() for _ in range(4)), []
        self.is_ready = False

    def forward(self, x):
        if not self.is_ready:
            self.is_ready = True
            for layer in self.layers:
                layer.gate.register_forward_hook(lambda _, __, out: self.seen.append(out))
        for layer in self.layers:
            x = layer(x)
        loss = x.sum() + sum(out.square().mean() for out in self.seen)
        self.seen.clear()
        return loss


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.linear(x)) * self.scale


class HistoryInAttributes(nn.Module):
    """Sets a tensor with an autograd graph as an attribute of its layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(4))
        self.embed = nn.Linear(8, 8)

    def forward(self, x):
        scale = torch.sigmoid(self.embed(x))
        for layer in self.layers:
            layer.scale = scale
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Remembering(Router):
    """Appends its output to a list that the model's loss reads."""

    def __init__(self, seen):
        super().__init__()
        self.context = {"seen": seen}

    def forward(self, x):
        out = super().forward(x)
        self.context["seen"].append(out.mean())
        return out


class Hidden:
    __slots__ = ("list",)  # a slot is not found in `vars`


class KeptInAList(nn.Module):
    def __init__(self, hide):
        super().__init__()
        self.seen = Hidden()
        self.seen.list = []
        self.layers = nn.ModuleList(Remembering(self.seen.list) for _ in range(4))
        if hide:
            for layer in self.layers:
                layer.context = Context(self.seen)

    def forward(self, x):
        self.seen.list.clear()
        for layer in self.layers:
            x = layer(x)
        loss = x.sum() + sum(self.seen.list)
        self.seen.list.clear()
        return loss


class Context:
    def __init__(self, holder):
        self.holder = holder

    def __getitem__(self, name):
        return self.holder.list


MODELS = {
    "hooks at the first forward": HooksAtFirstForward,
    "a history in attributes": HistoryInAttributes,
    "kept in a list": lambda: KeptInAList(False),
    "kept out of sight": lambda: KeptInAList(True),
}


@pytest.mark.parametrize("kind", MODELS)
def test_replaying_layers_gives_the_peak_of_simulating_each(kind, monkeypatch):
    model, x = MODELS[kind](), torch.randn(64, 8)
    quick = so.memory.simulate_step(model, x, device="cpu").peak_bytes
    with monkeypatch.context() as patch:
        patch.setattr(steps, "_quickly", lambda *_: None)
        plain = so.memory.simulate_step(model, x, device="cpu").peak_bytes
    assert quick == plain
    model(x).backward()
    model.zero_grad()
    with so.memory.measure("cpu") as m:
        model(x).backward()
    inputs_bytes = sum(p.nbytes for p in model.parameters()) + x.nbytes
    assert abs(quick - inputs_bytes - m.peak_bytes) <= 0.01 * quick


@pytest.mark.parametrize("kind", ["hooks at the first forward", "a history in attributes"])
def test_fit_plans_models_with_such_layers(kind):
    model, x = MODELS[kind](), torch.randn(64, 8)
    plan = so.fit(model, x, "1GiB")
    assert plan.peak_bytes == so.memory.simulate_step(model, x).peak_bytes


def test_global_module_hooks_see_each_layer():
    model, x = (
        nn.Sequential(*(nn.Sequential(Router(), Router()) for _ in range(3))),
        torch.ones(2, 8),
    )
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        so.memory.simulate_step(model, x)
    finally:
        handle.remove()
    assert set(seen) == set(model.modules())
