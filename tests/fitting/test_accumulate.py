"""Steps with gradient accumulation: their peaks, plans for them, and advice."""

import pytest
import torch
from torch import nn

import storage_ops
from storage_ops.fitting.search import Search
from storage_ops.memory import explain_oom, limit, measure, simulate_step, will_it_fit
from tests.simulate.models import MODELS, build, run
from tests.simulate.test_step import checkpointed, measured, replays_of

pytestmark = pytest.mark.in_turn

ADAM = torch.optim.AdamW


@pytest.mark.slow
@pytest.mark.parametrize("way", ["none", "full", "matmuls"])
@pytest.mark.parametrize("name", MODELS)
def test_peaks_and_recordings(name, way):
    model, batch, loss = build(name, torch.float32)
    checkpointed(model, way)
    how = {"loss": loss, "optimizer": ADAM}
    assert replays_of(model, batch, accumulate=True, **how) >= 2
    e = simulate_step(model, batch, accumulate=True, **how)
    peak = measured(model, batch, loss, ADAM(model.parameters()), accumulate=True)
    assert peak <= 1.01 * e.peak_bytes
    if way != "matmuls":  # attention in plain ops may add its mask to a product, which is not saved
        assert peak >= 0.99 * e.peak_bytes
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert e.by_owner["gradients"] == trained
    assert e.peak_bytes > simulate_step(model, batch, **how).peak_bytes
    assert all(p.grad is None for p in model.parameters())


@pytest.fixture
def gpt():
    return build("gpt", torch.float32)


def test_plans(gpt):
    model, batch, loss = gpt
    search = Search(model, batch, loss, ADAM, accumulate=True)
    most = search.problem.peak([0] * len(search.problem.options))
    assert (
        most == simulate_step(model, batch, loss=loss, optimizer=ADAM, accumulate=True).peak_bytes
    )
    least = search.problem.peak(search.problem.smallest())
    for share in (0.0, 0.5):
        budget = int(least + (most - least) * share)
        plan = search.plan(budget)
        plan.apply()
        assert (
            measured(model, batch, loss, ADAM(model.parameters()), accumulate=True) <= budget * 1.01
        )
        plan.undo()


def test_advice_and_reports(gpt):
    model, batch, loss = gpt
    peaks = [
        will_it_fit(model, batch, "1GiB", loss, ADAM, "cpu", accumulate).peak_bytes
        for accumulate in (False, True)
    ]
    assert peaks[0] < peaks[1]
    run(model, batch, loss)
    with (
        pytest.raises(torch.OutOfMemoryError),
        explain_oom(loss=loss, optimizer=ADAM) as report,
        limit(int(peaks[1] * 0.9)),
    ):
        run(model, batch, loss)
    assert "where gradients of earlier batches are there" in report.advice
    assert report.plan.peak_bytes <= peaks[1] * 0.9


class Twice(nn.Module):
    """Encodes two inputs with the same layers, as contrastive losses do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        )

    def forward(self, x, y):
        return (self.layers(x) * self.layers(y)).mean()


@pytest.mark.parametrize("accumulate", [False, True])
def test_layers_that_run_twice(accumulate):
    """Autograd holds the gradient of the second call until that of the first is added."""
    model, batch = Twice(), (torch.randn(32, 64), torch.randn(32, 64))
    e = simulate_step(model, batch, accumulate=accumulate)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if accumulate else None
    with measure() as m:
        model(*batch).backward()
    static = sum(t.nbytes for t in (*batch, *model.parameters()))
    static += accumulate * sum(p.nbytes for p in model.parameters())
    assert e.peak_bytes == m.peak_bytes + static
    search = Search(model, batch, accumulate=accumulate, actions=["full"])
    for action in (0, 1):
        choice = [action] * 8
        computed = search.problem.peak(choice)
        assert computed == pytest.approx(search._simulated(0, choice).peak_bytes, rel=1e-3)
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize("accumulate", [False, True])
def test_casts_of_layers_that_run_twice(accumulate):
    model, batch = Twice(), (torch.randn(512, 64), torch.randn(512, 64))
    with torch.autocast("cpu", torch.bfloat16):
        search = Search(model, batch, accumulate=accumulate, actions=["full"])
        keep = [0] * 8
        computed = search.problem.peak(keep)
        assert search._simulated(0, keep).peak_bytes == pytest.approx(computed, rel=1e-3)


def test_a_plan_uses_the_room_that_is_left():
    """For checkpointed layers that run twice under autocast, more is computed than they take."""
    model, batch = Twice(), (torch.randn(128, 64), torch.randn(128, 64))
    with torch.autocast("cpu", torch.bfloat16):
        search = Search(model, batch, actions=["full"])
        budget = search._simulated(0, [0, 1, 1, 0] * 2).peak_bytes
        computed = search.problem.seconds(search.problem.fastest(budget))
        plan = search.plan(budget)
    assert plan.peak_bytes <= budget and plan.seconds < 0.8 * computed


class InTurns(nn.Module):
    """Runs all its layers, and then all of them again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(6)
        )

    def forward(self, x):
        for layer in [*self.layers, *self.layers]:
            x = x + layer(x)
        return x.float().sum()


def test_a_larger_budget_does_not_cost_more_time():
    """A faster plan that turns out too large does not end the search for another one."""
    model, batch = InTurns(), torch.randn(512, 256)
    with torch.autocast("cpu", torch.bfloat16):
        search = Search(model, batch)
        low, high = search.smallest(), search._simulated(0, [0] * 12).peak_bytes
        budgets = [low + (high - low) * i // 20 for i in range(21)]
        seconds = [search.plan(budget).seconds for budget in budgets]
    assert seconds == sorted(seconds, reverse=True)


def test_gradients_of_a_module_with_an_attribute_named_sparse():
    """Only embeddings have sparse gradients."""
    model = nn.Linear(256, 256)
    peaks = []
    for model.sparse in (False, True):
        peaks.append(simulate_step(model, torch.randn(2, 256), accumulate=True).peak_bytes)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("call", [simulate_step, will_it_fit, storage_ops.fit])
def test_a_number_of_batches_is_not_accepted(call):
    budget = ("1GiB",) if call is not simulate_step else ()
    with pytest.raises(TypeError, match=r"`accumulate` is 4\. Expected True if gradients of sev"):
        call(torch.nn.Linear(2, 2), torch.ones(2), *budget, accumulate=4)
