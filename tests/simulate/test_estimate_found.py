"""Simulations find optimizers, schedulers and modules behind helper functions."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from storage_ops.memory import estimate

NAMES = {}  # objects that helper functions read, set by each test
EVERY_OPTIMIZER = []
KEPT = {}


class Trainer:
    """Holds a model, its optimizer and its scheduler, as trainers do."""

    def __init__(self, model, optimizer, scheduler):
        self.model, self.scheduler = model, scheduler
        self.optimizers = [optimizer]
        self.state = SimpleNamespace(optimizer=optimizer)

    def forward_backward(self, x):
        self.model(x).square().sum().backward()

    def by_list(self, x):
        self.forward_backward(x)
        for optimizer in self.optimizers:
            optimizer.step()
        self.scheduler.step()

    def by_state(self, x):
        self.forward_backward(x)
        self.state.optimizer.step()


def step_all():
    for optimizer in EVERY_OPTIMIZER:
        optimizer.step()
    NAMES["scheduler"].step()


def by_helper(x):
    NAMES["model"](x).square().sum().backward()
    step_all()


def by_function_of_another_package(x):
    NAMES["model"](x).square().sum().backward()
    NAMES["step"]()


def made_step(optimizer):
    """Return a function of another module, whose globals a simulation does not search."""
    scope = {"found": {"deep": [[[[optimizer]]]]}, "__name__": "elsewhere.module"}
    exec("def step():\n    found['deep'][0][0][0][0].step()", scope)
    return scope["step"]


@pytest.fixture
def program():
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    NAMES.update(model=model, scheduler=scheduler, step=made_step(optimizer))
    EVERY_OPTIMIZER[:] = [optimizer]
    yield SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler)
    NAMES.clear(), EVERY_OPTIMIZER.clear(), KEPT.clear()


def ways_of(program):
    trainer = Trainer(program.model, program.optimizer, program.scheduler)
    return {
        "list": trainer.by_list,
        "state": trainer.by_state,
        "closure": lambda x: trainer.by_list(x),
        "helper": by_helper,
        "another package": by_function_of_another_package,
    }


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("way", ["list", "state", "closure", "helper", "another package"])
def test_optimizers_behind_helpers_are_counted_and_restored(program, way, warm):
    x, optimizer = torch.randn(64, 256), program.optimizer

    def direct(x):
        program.model(x).square().sum().backward()
        optimizer.step()

    if warm:
        direct(x)
        optimizer.zero_grad()
    before = {p: dict(state) for p, state in optimizer.state.items()}
    group, expected = dict(optimizer.param_groups[0]), estimate(direct, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimated = estimate(ways_of(program)[way], x)
    assert estimated.peak_bytes == expected.peak_bytes
    assert estimated.by_owner == expected.by_owner
    assert {p: dict(state) for p, state in optimizer.state.items()} == before
    assert dict(optimizer.param_groups[0]) == group
    assert program.scheduler.last_epoch == 0
    assert all(p.grad is None for p in program.model.parameters())
    direct(x)  # a real step works afterwards


def test_an_error_in_a_step_behind_a_helper_leaves_nothing(program):
    def fails(x):
        by_function_of_another_package(x)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        estimate(fails, torch.randn(64, 256))
    assert not program.optimizer.state
    assert program.optimizer.param_groups[0]["foreach"] is None


class Keeper:
    """Hides its attributes, because simulations do not search objects of the standard library."""

    __module__ = "threading"


class Inner:
    last = None


def test_simulated_tensors_that_stay_behind_cause_a_warning():
    keeper, layer = Keeper(), nn.Linear(8, 4)
    keeper.inner = Inner()

    def keep(y):
        keeper.inner.last = y.detach()

    def step(x):
        y = layer(x)
        keep(y)
        return y.sum()

    with pytest.warns(UserWarning, match=r"left 1 simulated .* \(2, 4\) in Inner, under 'last'"):
        estimate(step, torch.randn(2, 8))


def test_tensors_in_a_deep_dictionary_are_removed(recwarn):
    KEPT["deeper"] = {"first": torch.ones(1)}
    layer = nn.Linear(8, 4)

    def step(x):
        y = layer(x)
        KEPT["deeper"]["last"] = y.detach()
        return y.sum()

    estimate(step, torch.randn(2, 8))
    assert list(KEPT["deeper"]) == ["first"] and not recwarn
    KEPT.clear()
