"""The solver's choice of actions is as good as the best of all choices."""

import itertools
import random
from dataclasses import replace

import pytest

from storage_ops.fitting import solve
from storage_ops.fitting.solve import ActionProblem, Option


def drawn(seed, casts=False):
    rng = random.Random(seed)
    kinds = []
    for _ in range(rng.randint(1, 2)):
        options = [Option(rng.randint(50, 100), rng.randint(100, 200), 0.0)]
        for _ in range(rng.randint(1, 4)):
            kept = rng.randint(-5, 90)
            options.append(Option(kept, kept + rng.randint(0, 150), rng.random()))
        kinds.append(with_casts(options, rng) if casts else options)
    calls = [rng.choice(kinds) for _ in range(rng.randint(1, 5))]
    between = [rng.randint(0, 120) for _ in range(len(calls) + 1)]
    return ActionProblem(calls, between, (), [n // 2 for n in between] if casts else ())


def with_casts(options, rng):
    """Return options with casts. One that keeps less also takes less in the forward."""
    in_forward = sorted(rng.randint(50, 200) for _ in options)
    by_kept = sorted(range(len(options)), key=lambda i: options[i].kept)
    taken = dict(zip(by_kept, in_forward, strict=True))
    return [
        replace(o, casts=max(taken[i] - o.kept, 0), in_forward=o.highest - rng.randint(0, 50))
        for i, o in enumerate(options)
    ]


def everything(problem):
    choices = itertools.product(*(range(len(o)) for o in problem.options))
    return [(problem.peak(c), problem.seconds(c)) for c in choices]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("casts", [False, True])
def test_no_other_choice_is_better(seed, casts):
    problem = drawn(seed, casts)
    outcomes = everything(problem)
    assert problem.peak(problem.smallest()) == min(peak for peak, _ in outcomes)
    for budget in sorted({peak for peak, _ in outcomes}):
        best = min(seconds for peak, seconds in outcomes if peak <= budget)
        choice = problem.fastest(budget)
        assert problem.peak(choice) <= budget
        assert problem.seconds(choice) == pytest.approx(best, abs=1e-9)
    assert problem.fastest(min(peak for peak, _ in outcomes) - 1) is None


def test_the_smallest_choice_if_one_that_keeps_less_takes_more_in_the_forward():
    options = [Option(100, 200, 0.0, 0, 200), Option(0, 100, 1.0, 300, 100)]
    problem = ActionProblem([options] * 3, [0] * 4)
    peaks = [peak for peak, _ in everything(problem)]
    assert problem.peak([0, 0, 0]) == min(peaks)
    assert problem.smallest() == [0, 0, 0]


@pytest.mark.in_turn
def test_with_many_states_the_choice_is_within_two_percent(monkeypatch):
    rng = random.Random(5)
    options = [Option(0, 100, 1.0)] + [
        Option(k, k + 100, 1.0 - (k / 1000) ** rng.uniform(0.5, 0.9)) for k in range(40, 1000, 97)
    ]
    problem = ActionProblem([options] * 40, [0] * 41)
    budgets = range(2000, 40000, 2777)
    exact = [problem.seconds(problem.fastest(b)) for b in budgets]
    monkeypatch.setattr(solve, "_MOST", 300)
    rough = [problem.seconds(problem.fastest(b)) for b in budgets]
    assert all(r <= e * 1.02 + 1e-9 for r, e in zip(rough, exact, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_calls_of_one_layer_have_one_action(seed):
    """A layer that runs twice has one action, and the plan is no worse than simple ones."""
    alone = drawn(seed)
    layers = len(alone.options)
    between = [*alone.between, *alone.between[:layers]]
    repeated = [[i, layers + i] for i in range(0, layers, 2)]
    problem = ActionProblem([*alone.options, *alone.options], between, repeated)
    leanest = [min(range(len(o)), key=lambda i: o[i].kept) for o in problem.options]
    simple = [[0] * (2 * layers), leanest]
    for budget in sorted({problem.peak(choice) for choice in simple}):
        choice = problem.fastest(budget)
        assert problem.peak(choice) <= budget
        assert all(choice[i] == choice[layers + i] for i, _ in repeated)
        fits = [problem.seconds(c) for c in simple if problem.peak(c) <= budget]
        assert problem.seconds(choice) <= min(fits) + 1e-9
    assert problem.peak(problem.smallest()) <= min(map(problem.peak, simple))


def test_a_layer_that_runs_twice_takes_no_action_that_another_one_makes_needless():
    small = [Option(50, 60, 0.0), Option(0, 10, 0.5)]  # saves more bytes for a second
    large = [Option(90, 100, 0.0), Option(0, 10, 1.0)]
    problem = ActionProblem([small, large] * 2, [0] * 5, [[0, 2], [1, 3]])
    assert problem.fastest(120) == [0, 1, 0, 1]


def test_the_moment_of_the_peak():
    options = [Option(10, 40, 0.0)]
    moment = ActionProblem([options, options], [5, 6, 45]).at_peak([0, 0])
    assert (moment.level, moment.alive, moment.running) == (65, 2, None)
    moment = ActionProblem([options, options], [5, 6, 7]).at_peak([0, 0])
    assert (moment.level, moment.alive, moment.running) == (50, 1, 1)


def test_casts_count_in_the_forward_only():
    options = [Option(10, 40, 0.0, casts=100, in_forward=30)]
    moment = ActionProblem([options, options], [5, 6, 45], (), [5, 6, 7]).at_peak([0, 0])
    assert (moment.level, moment.alive, moment.has_casts) == (2 * 110 + 7, 2, True)
    moment = ActionProblem([options], [5, 6], (), [5, 6]).at_peak([0])
    assert (moment.level, moment.alive, moment.has_casts) == (116, 1, True)
