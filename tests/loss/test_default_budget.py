"""Default budgets: a share of a GPU's memory where that saves time, otherwise 1 GiB."""

import pytest
import torch

import storage_ops as so
from storage_ops.divergence import plan as divergence
from storage_ops.loss.planning import budgets, devices, planner
from storage_ops.loss.planning import plan as plans
from storage_ops.matmul.aten import Aten

from ..cuda_emulation.gpu import pretended

GIB = 1 << 30
R3 = (8192, 4096, 151936)
BOTH, INPUT, NONE = ("input", "weight"), ("input",), ()
CHOOSE = {module: module.choose for module in (planner, divergence)}


def forget():
    for module, choose in CHOOSE.items():
        module.default_budget.cache_clear()
        choose.cache_clear()


@pytest.fixture(autouse=True)
def forgotten():
    """Forget plans, which depend on limits that tests replace."""
    yield
    forget()


def default(tokens, hidden, vocab, device, grads=BOTH, reduction="mean"):
    """Return the default budget, its plan, and the plan for at most 1 GiB of logits."""
    dtypes = "bf16", grads, reduction, None, None, None
    p = plans.problem_of(tokens, hidden, vocab, *dtypes, device)
    rates = devices.named(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets, "OF_MEMORY", rates.memory)
        forget()
        small = planner.choose(p, None, rates)
    forget()
    return planner.default_budget(p, rates), planner.choose(p, None, rates), small


@pytest.mark.parametrize("device", ["h200", "h100", "b200", "gh200"])
def test_results_per_token_compute_no_logits_twice(device):
    budget, plan, small = default(*R3, device, reduction="none")
    assert plan.products == 3 and plan.keeps
    assert plan.flops == 3 * 2 * 8192 * 4096 * 151936
    assert plan.peak_bytes <= budget <= devices.GPUS[device].memory // 32 + (128 << 20)
    assert small.products > 3.05 and small.seconds > 1.03 * plan.seconds


@pytest.mark.parametrize("device", ["h200", "l40s", "rtx4090"])
@pytest.mark.parametrize("grads", [NONE, INPUT])
def test_memory_that_saves_no_time_is_not_taken(device, grads):
    _, plan, small = default(*R3, device, grads)
    assert plan == small and plan.peak_bytes < 1.2 * GIB


@pytest.mark.parametrize("device", ["rtx4090", "rtx5090"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_on_small_gpus_logits_may_take_a_gibibyte(device, reduction):
    _, plan, small = default(*R3, device, reduction=reduction)
    assert plan == small


def test_bounds():
    assert budgets.most(devices.named("cpu")) == GIB
    assert budgets.most(devices.GPUS["h200"]) == 139 * GIB // 32
    assert budgets.bounded(5, GIB) == 32 << 20
    assert budgets.bounded(3 * GIB, GIB) == GIB
    assert budgets.bounded(3 * GIB, 4 * GIB) == 3 * GIB


@pytest.fixture
def formed(monkeypatch):
    """Count the logits that products compute, on a GPU that the CPU stands for."""
    with pretended(torch.ops.storage_ops, True):
        counts, logits = [], Aten.logits

        def noted(self, x, w, out, *rest):
            counts.append(out.numel())
            return logits(self, x, w, out, *rest)

        monkeypatch.setattr(Aten, "logits", noted)
        yield counts


def noted(monkeypatch, module):
    """Return a list to which every call of `module.choose` adds its default budget."""
    limits, choose = [], module.choose

    def wrapper(*args):
        *sizes, memory_budget, rates = args
        assert memory_budget is None
        forget()
        limits.append(module.default_budget(*sizes, rates))
        return choose(*args)

    monkeypatch.setattr(module, "choose", wrapper)
    return limits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["loss", "divergence"])
@pytest.mark.parametrize("share", [True, False], ids=["large GPU", "small GPU"])
def test_a_call_keeps_to_its_default(monkeypatch, formed, dtype, kind, share):
    """Sizes and limits are some thousand times smaller than on a GPU."""
    tokens, hidden, vocab = 256, 64, 6000
    logits = tokens * vocab * dtype.itemsize
    monkeypatch.setattr(budgets, "LEAST", 0)
    monkeypatch.setattr(budgets, "GIB", logits // 4)
    largest = logits * 9 // 8 if share else 1
    monkeypatch.setattr(budgets, "OF_MEMORY", devices.GPUS["h100"].memory // largest)
    x, w = torch.randn(tokens, hidden), torch.randn(vocab, hidden) / 8
    x, w = (t.to(dtype).requires_grad_() for t in (x, w))
    target = torch.randint(vocab, (tokens,))
    limits = noted(monkeypatch, planner if kind == "loss" else divergence)
    with so.memory.measure() as m:
        if kind == "loss":
            loss = so.linear_cross_entropy(x, w, target, reduction="none")
        else:
            loss = so.linear_kl_div(x, w, x.detach(), w.detach().flip(0), reduction="none")
        grads = torch.autograd.grad(loss.sum(), [x, w])
    if kind == "loss":
        assert sum(formed) == tokens * vocab if share else sum(formed) > 1.5 * tokens * vocab
        room = tokens * 6400 * dtype.itemsize // (1 if share else 4) + (300 << 10)
        assert max(limits) <= room
    assert m.peak_bytes - sum(g.nbytes for g in grads) - loss.nbytes <= min(limits)
