"""The memory of traced steps, and the time that tracing takes."""

import contextlib
import cProfile
import time
from itertools import pairwise

import pytest
import torch

from storage_ops import graph
from storage_ops.graph.recompute.remat import recompute
from storage_ops.memory import measure

from .models import GPT, MODES, batch, gpt_step


def peaks(mode, dropout):
    """Return the peak bytes of one step: eager, traced, and predicted from the graph."""
    model = GPT(layers=4, width=64, heads=4, vocab=256, context=64, dropout=dropout, mode=mode)
    step, data = gpt_step(model), batch(256, 8, 64)
    traced = graph.trace_step(step, *data)
    measured = []
    for run in (step, traced):
        run(*data)
        model.zero_grad()
        with measure() as m:
            run(*data)
        model.zero_grad()
        measured.append(m.peak_bytes)
    return *measured, traced.peak.peak_bytes


@pytest.mark.in_turn
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_traced_peak_is_the_eager_one_with_the_same_policy(dropout):
    peaks_by_mode = {mode: peaks(mode, dropout) for mode in MODES}
    for mode, (eager, traced, predicted) in peaks_by_mode.items():
        assert traced <= 1.05 * eager, (mode, peaks_by_mode)
        assert abs(predicted - traced) <= 0.01 * traced, (mode, peaks_by_mode)
        if mode != "none":
            assert traced < 0.9 * peaks_by_mode["none"][1], (mode, peaks_by_mode)


def test_schedule_counts_views_once_and_outputs_to_the_end():
    def step(x):
        a = x + 1  # 1024 bytes, with its view
        b = a.view(16, 16).t() * 2  # 1024
        return b.sum(), (a * 3)[:16]  # 4, then 1024, of which a part is returned

    traced = graph.trace_step(step, torch.ones(256))
    levels = [traced.peak.timeline[n.name] for n in traced.gm.graph.nodes]
    assert max(levels) == traced.peak.peak_bytes == 2052
    assert levels[-1] == 1028


def trace_and_recompute(measured, layers, **sizes):
    """Return the costs of recording a step, and of rewriting its graph to recompute."""
    sizes = {"width": 16, "heads": 2, "vocab": 32, "context": 8, **sizes}
    model = GPT(layers=layers, mode="full", **sizes)
    data = batch(32, 2, sizes["context"])
    with measured() as both:
        step = graph.trace_step(gpt_step(model), *data)
    before = step.gm.meta["storage_ops_before"]
    with measured() as remat:
        recompute(before, foreign=False)
    return both[0] - remat[0], remat[0]


@contextlib.contextmanager
def seconds():
    start, cost = time.process_time(), []
    yield cost
    cost.append(time.process_time() - start)


@contextlib.contextmanager
def calls():
    """Count Python calls, whose number is the same in every run, unlike time."""
    cost, profile = [], cProfile.Profile(builtins=False)
    with profile:
        yield cost
    cost.append(sum(entry.callcount for entry in profile.getstats()))


@pytest.mark.slow
def test_work_grows_linearly_in_layers():
    trace_and_recompute(calls, 3)  # fills caches
    sizes = (2, 4, 16)
    costs = {n: trace_and_recompute(calls, n) for n in sizes}
    for part in range(2):
        steps = [(costs[m][part] - costs[n][part]) / (m - n) for n, m in pairwise(sizes)]
        assert max(steps) < 1.15 * min(steps), costs


@pytest.mark.slow
def test_gpt2_small_is_traced_within_a_minute():
    sizes = {"width": 768, "heads": 12, "vocab": 50257, "context": 1024}
    trace, remat = trace_and_recompute(seconds, 12, **sizes)
    assert trace < 60 and remat < 5
