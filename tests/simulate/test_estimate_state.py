"""A simulation changes neither random states nor counters nor averages of a program."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import storage_ops as so


class Drawing(nn.Module):
    """Draws from the generators of the process and from its own, as augmentations do."""

    def __init__(self):
        super().__init__()
        self.linear, self.own = nn.Linear(8, 8), random.Random(0)
        self.draws = {"numpy": np.random.default_rng(0), "old": np.random.RandomState(0)}

    def forward(self, x):
        noise = np.random.rand() + self.draws["numpy"].random() + self.draws["old"].rand()
        return self.linear(x) * (random.random() + self.own.random() + noise) + torch.rand(8)


RUNS = {
    "estimate": lambda m, x: so.memory.estimate(lambda x: m(x).sum().backward(), x),
    "simulate_step": lambda m, x: so.memory.simulate_step(m, x),
    "fit": lambda m, x: so.fit(m, x, "1MiB"),
    "checkpoint_report": lambda m, x: so.checkpoint_report(m, x),
}


@pytest.mark.parametrize("run", RUNS)
def test_generators_draw_the_same_numbers_after_a_simulation(run):
    model, x = nn.Sequential(Drawing(), Drawing()), torch.randn(4, 8)
    other = copy.deepcopy(model)

    def seeded():
        random.seed(0), np.random.seed(0), torch.manual_seed(0)

    seeded()
    RUNS[run](model, x)
    got = model(x)
    seeded()
    assert torch.equal(got, other(x))


class Seeding(nn.Linear):
    """Seeds generators of torch in each forward, as Reformer does to draw the same hashes."""

    def __init__(self):
        super().__init__(8, 8)
        self.own = torch.Generator()

    def forward(self, x):
        torch.manual_seed(1)
        self.own.manual_seed(1)
        return super().forward(x) + torch.rand(8) + torch.rand(8, generator=self.own)


@pytest.mark.parametrize("run", RUNS)
def test_generators_of_torch_that_a_forward_seeds_are_as_before(run):
    model, x = nn.Sequential(Seeding()), torch.randn(4, 8)
    generators = torch.default_generator, model[0].own
    before = [generator.get_state() for generator in generators]
    RUNS[run](model, x)
    assert all(torch.equal(g.get_state(), s) for g, s in zip(generators, before, strict=True))


class Average:
    def __init__(self, model):
        self.copy = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.steps = 0

    def update(self, model):
        self.steps += 1
        for name, p in model.named_parameters():
            self.copy[name] = self.copy[name] * 0.9 + p.detach() * 0.1


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.average, self.losses = Average(self.model), []

    def step(self, x):
        loss = self.model(x).sum()
        loss.backward()
        self.model[1].running_mean = self.model[1].running_mean.clone()
        self.optimizer.step(), self.scheduler.step(), self.optimizer.zero_grad()
        self.average.update(self.model)
        self.losses.append(loss.detach())

    def state(self):
        return (
            self.scheduler.last_epoch, self.average.steps, self.losses[:],
            [*self.average.copy.values()], [*self.model.buffers()],
            [(group["lr"], group["initial_lr"]) for group in self.optimizer.param_groups],
            len(self.optimizer.state),
        )  # fmt: skip


TRAINER = None


def of_global(x):
    TRAINER.step(x)


class Foreign(Trainer):
    """A trainer from a library."""


Foreign.__module__ = "elsewhere.module"


@pytest.mark.parametrize("kind", [Trainer, Foreign])
@pytest.mark.parametrize("way", ["lambda", "global", "dictionary"])
def test_objects_that_a_function_reaches_are_restored(way, kind):
    trainer = kind()
    globals()["TRAINER"] = trainer
    trainers = {"first": trainer}
    fn = {
        "lambda": lambda x: trainer.step(x),
        "global": of_global,
        "dictionary": lambda x: trainers["first"].step(x),
    }[way]
    before = trainer.state()
    so.memory.estimate(fn, torch.randn(4, 8))
    assert all(map(same, trainer.state(), before))
    trainer.step(torch.randn(4, 8))


def same(a, b):
    if isinstance(a, list) and a and isinstance(a[0], torch.Tensor):
        return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
    return a == b


class Quantized(torch.optim.Optimizer):
    """Replaces its 8-bit momentum in each step."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            momentum = state["codes"].float() * state["scale"] if state else torch.zeros_like(p)
            momentum = momentum.mul_(0.9).add_(p.grad)
            state["scale"] = momentum.abs().max() / 127
            state["codes"] = (momentum / state["scale"]).round().to(torch.int8)
            p.sub_(momentum, alpha=0.01)


def test_a_state_that_each_step_replaces_counts_once():
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    optimizer, x = Quantized(model.parameters()), torch.randn(4, 128)
    before_a_step = so.memory.simulate_step(model, x, optimizer=optimizer)
    model(x).sum().backward()
    optimizer.step()
    after_a_step = so.memory.simulate_step(model, x, optimizer=optimizer)
    assert after_a_step.by_owner == before_a_step.by_owner
    assert after_a_step.by_owner["optimizer state"] < 1.1 * sum(
        p.numel() for p in model.parameters()
    )
