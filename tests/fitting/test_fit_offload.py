"""Plans that save results in host memory. A CPU simulates the link."""

import copy

import pytest
import torch

import storage_ops
from storage_ops.fitting.search import Search

from ..link import simulated_copies
from .models import MODELS, llama
from .test_fit import ADAM, asking_is_free, gradients, measured_peak  # noqa: F401

pytestmark = pytest.mark.usefixtures("asking_is_free")
ACTIONS = ["output_discard", "selective", "full", "offload"]
FAST = 1e12


def extremes(search):
    problem = search.problem
    return problem.peak(problem.smallest()), problem.peak([0] * len(problem.options))


def is_used(plan):
    return any(action.offloaded for _, action in plan._actions)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_plans_over_a_fast_link_are_faster_and_exact(name):
    model, batch = MODELS[name]()
    expected = gradients(copy.deepcopy(model), batch)
    with simulated_copies(FAST) as link:
        plain = Search(model, batch, optimizer=ADAM)
        search = Search(model, batch, optimizer=ADAM, actions=ACTIONS)
        low, high = extremes(plain)
        before, used = None, 0
        for share in (0.05, 0.3, 0.6, 0.9):
            budget = int(low + (high - low) * share)
            plan, other = search.plan(budget), plain.plan(budget)
            assert not is_used(other) and plan.seconds <= other.seconds
            assert before is None or plan.seconds <= before
            before = plan.seconds
            used += is_used(plan)
            plan.apply()
            for ours, theirs in zip(gradients(model, batch), expected, strict=True):
                assert torch.equal(ours, theirs)
            model.zero_grad()
            state = copy.deepcopy(model.state_dict())
            # Some allocations of 64 bytes inside torch are not simulated.
            assert measured_peak(model, batch) <= plan.peak_bytes * 1.001 <= budget * 1.001
            model.load_state_dict(state)
            plan.undo()
        assert used and link.log


@pytest.mark.slow
def test_plans_offload_only_as_much_as_the_link_hides():
    model, batch = llama()
    budget = sum(extremes(Search(model, batch, optimizer=ADAM))) // 2
    asked = {"optimizer": ADAM, "actions": ACTIONS}
    assert not is_used(storage_ops.fit(model, batch, budget, **asked))  # a CPU has no link
    sent = []
    for rate in (1e5, 1e9, 4e9, FAST):
        with simulated_copies(rate):
            search = Search(model, batch, **asked)
            variants = search._variants[1:]
            costs = [c for way in variants for each in way.costs for _, c in each]
            sent.append(max((c.away for c in costs), default=0))
            for cost in costs:
                backward = cost.seconds - cost.forward_seconds
                assert cost.away <= rate * min(cost.forward_seconds, backward)
    assert sent[0] == 0 and sent == sorted(sent) and sent[1] < sent[-1]


@pytest.mark.in_turn
def test_named_devices_have_links_and_plans_print_offloaded_bytes(tmp_path):
    with torch.device("meta"):
        model, _ = llama()
    batch = tuple(torch.zeros(64, 96, dtype=torch.int64, device="meta") for _ in range(2))
    for device in ("h100", "a100"):
        search = Search(model, batch, None, ADAM, device, ACTIONS)
        assert len(search._variants) == 2
    low, high = extremes(search)
    plan = search.plan((low + high) // 2)
    assert is_used(plan) and any("in host memory" in row.action for row in plan.rows)
    plan.save(tmp_path / "fit.json")
    loaded = storage_ops.load_fit(tmp_path / "fit.json", model)
    assert loaded._actions == plan._actions
