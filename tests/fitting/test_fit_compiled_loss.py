"""Plans that choose the budget of a loss compiled by torch.compile(backend="storage_ops")."""

import copy

import pytest
import torch

import storage_ops
from storage_ops.fitting.search import Search
from storage_ops.memory import simulate_step
from tests.simulate.test_estimate_compiled import losses, measured_peak, parts

from .test_fit_heads import smallest_of

pytestmark = pytest.mark.in_turn

parts = parts  # a fixture
ACTIONS = ["full", "selective", "linear_cross_entropy"]


def gradients(model, x, head, labels, loss):
    for p in (*model.parameters(), *head.parameters()):
        p.grad = None
    loss(model(x)).backward()
    return [p.grad.clone() for p in (*model.parameters(), *head.parameters())]


def compiled(function, **options):
    return torch.compile(function, backend="storage_ops", fullgraph=True, options=options)


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", ["recognised", "chunked"])
def test_measured_peaks(parts, name):
    model, x, head, labels = parts
    plain = losses(head, labels)[name]
    loss = compiled(plain, strict=True, memory_budget="8 MiB")
    right = gradients(*parts, plain)
    none = measured_peak(*parts, loss)  # compiled, with the user's own budget
    search = Search(model, x, loss, actions=ACTIONS)
    assert simulate_step(model, x, loss=loss).peak_bytes == pytest.approx(none, rel=0.03)
    least = smallest_of(search)
    assert least < smallest_of(Search(model, x, loss, actions=ACTIONS[:2])) - (4 << 20)
    plan = search.plan(least)
    assert [row.names for row in plan.rows if "linear_cross" in row.action] == [["(loss)"]]
    plan.apply()
    with pytest.raises(RuntimeError, match="the loss has the budget of a plan"):
        storage_ops.fit(model, x, "1GiB", loss=loss)
    peak = measured_peak(*parts, loss)
    assert plan.peak_bytes <= least and peak <= 1.03 * least
    assert peak < none - (4 << 20)
    for ours, theirs in zip(gradients(*parts, loss), right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    plan.undo()
    assert measured_peak(*parts, loss) == pytest.approx(none, rel=1e-3)


def test_saved_and_loaded(parts, tmp_path):
    model, x, head, labels = parts
    loss = compiled(losses(head, labels)["recognised"])
    search = Search(model, x, loss, actions=ACTIONS)
    plan = search.plan(smallest_of(search))
    plan.save(tmp_path / "fit.json")
    copied = copy.deepcopy(model)
    with pytest.raises(ValueError, match="the loss that fit was given, which was compiled"):
        storage_ops.load_fit(tmp_path / "fit.json", copied, losses(head, labels)["recognised"])
    other = compiled(losses(head, labels)["recognised"])
    loaded = storage_ops.load_fit(tmp_path / "fit.json", copied, other)
    assert str(loaded) == str(plan)
    loaded.apply()
    assert simulate_step(copied, x, loss=other).peak_bytes == plan.peak_bytes
    loaded.undo()
