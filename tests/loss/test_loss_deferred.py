"""Logits stay in the memory of the weight's gradient from the forward to a separate backward."""

import pytest
import torch
from torch.nn import functional as F

import storage_ops as so
from storage_ops import matmul
from storage_ops.loss.engine import kept
from storage_ops.loss.planning import plan as plans
from storage_ops.loss.planning import planner
from storage_ops.loss.row_function import run_of
from storage_ops.matmul.aten import Aten

from .test_loss_kept import check_simulation

V, DEVICE = 3000, "cpu"
# Tokens and hidden size. All logits wait if there are no more tokens than the hidden size.
SIZES = {"wait": (60, 64), "parked": (120, 64)}
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-12}


@pytest.fixture
def formed(monkeypatch):
    """Count the logits that each product computes."""
    kinds = {Aten, matmul.of(torch.float32, "cpu", 1).__class__}
    counts = []
    for kind in kinds:

        def noted(self, x, w, out, *rest, logits=kind.logits):
            counts.append(out.numel())
            return logits(self, x, w, out, *rest)

        monkeypatch.setattr(kind, "logits", noted)
    return counts


@pytest.fixture
def schedules(monkeypatch):
    """Return the schedules of all runs, in order."""
    seen = []

    def noted(*args):
        run = run_of(*args)
        seen.append(run.schedule)
        return run

    monkeypatch.setattr("storage_ops.loss.op.run_of", noted)
    return seen


def problem(tokens, hidden, dtype):
    x = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    w = torch.randn(V, hidden).div(hidden**0.5).to(dtype).requires_grad_()
    target = torch.randint(V, (tokens,))
    target[::7] = -100
    return x, w, target


def plan_for(tokens, hidden, dtype, columns=640, borrows=False):
    """Return a plan with one chunk of tokens and a tile for so many classes."""
    arguments = dtype, ("input", "weight"), "none", None, None, None, DEVICE
    p = plans.problem_of(tokens, hidden, V, *arguments)
    schedule = planner.schedule(p, "token-chunked", tokens, columns, 0, borrows)
    plan = planner.make(schedule)
    assert schedule.deferred and plan.keeps
    assert bool(plan.borrowed) == (borrows and dtype.itemsize < 4)
    return plan


def exact(x, w, target, loss):
    leaves = [t.detach().double().requires_grad_() for t in (x, w)]
    return torch.autograd.grad(loss(leaves[0] @ leaves[1].t(), target), leaves)


def check(got, right, dtype):
    for ours, expected in zip(got, right, strict=True):
        assert (ours.double() - expected).norm() <= BOUND[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("borrows", [False, True])
def test_gradients_of_several_backwards(formed, schedules, sizes, dtype, borrows):
    tokens, hidden = SIZES[sizes]
    x, w, target = problem(tokens, hidden, dtype)
    target.clamp_(min=0)
    upstream, plan = torch.randn(tokens), plan_for(tokens, hidden, dtype, borrows=borrows)

    def loss(z, target):
        return F.cross_entropy(z, target, reduction="none") @ upstream.double()

    with so.memory.measure() as m:
        ours = so.linear_cross_entropy(x, w, target, reduction="none", plan=plan)
        first = torch.autograd.grad(ours, [x, w], upstream.to(ours.dtype), retain_graph=True)
    assert all(s.deferred for s in schedules) and len(schedules) == 2
    # Borrowed classes are computed twice more, but one tile of them only once more. Logits without
    # room are computed once more.
    once = tokens * V
    again = tokens * (2 * plan.borrowed - min(plan.borrowed, plan.columns))
    assert sum(formed) == once + again if sizes == "wait" else sum(formed) <= 1.6 * once + again
    assert m.peak_bytes - sum(g.nbytes for g in first) - ours.nbytes <= plan.peak_bytes
    right = exact(x, w, target, loss)
    check(first, right, dtype)
    before = [g.clone() for g in first]
    for retain in (True, False):  # the first backward has overwritten the logits
        check(torch.autograd.grad(ours, [x, w], upstream.to(ours.dtype), retain_graph=retain),
              right, dtype)  # fmt: skip
    assert all(map(torch.equal, first, before))


def test_a_weight_gradient_is_an_ordinary_tensor():
    x, w, target = problem(*SIZES["wait"], torch.float32)
    options = {"reduction": "none", "plan": plan_for(*SIZES["wait"], torch.float32)}
    so.linear_cross_entropy(x, w, target, **options).sum().backward()
    assert w.grad._base is None and w.grad.is_contiguous() and w.grad.shape == w.shape
    assert w.grad.untyped_storage().nbytes() == w.grad.nbytes
    w.grad.detach_()
    first = w.grad.clone()
    so.linear_cross_entropy(x, w, target, **options).sum().backward()
    torch.testing.assert_close(w.grad, 2 * first)


@pytest.mark.parametrize("wanted", [[0], [1]])
def test_a_backward_of_some_arguments(schedules, wanted):
    sizes = SIZES["wait"]
    x, w, target = problem(*sizes, torch.float32)
    plan = plan_for(*sizes, torch.float32)
    with so.memory.measure() as m:
        loss = so.linear_cross_entropy(x, w, target, reduction="none", plan=plan)
        got = torch.autograd.grad(loss.sum(), [(x, w)[i] for i in wanted])
    assert schedules[0].deferred
    right = exact(x, w, target, lambda z, t: F.cross_entropy(z, t, reduction="sum"))
    check(got, [right[i] for i in wanted], torch.float32)
    assert (
        m.peak_bytes - loss.nbytes - max(w.nbytes, sum(g.nbytes for g in got))
        <= 2 * plan.peak_bytes
    )


OPTIONS = {
    "bias": lambda n: {"linear_bias": torch.randn(V, requires_grad=True)},
    "smoothing": lambda n: {"label_smoothing": 0.1},
    "soft-cap": lambda n: {"softcap": 5.0},
    "z-loss": lambda n: {"z_loss": 0.1, "token_weight": torch.rand(n)},
    "max_valid": lambda n: {"max_valid": n},
    "padding": lambda n: {"valid_classes": V - 100},
    "selected": lambda n: {"selected_ids": torch.randint(V, (n, 3)), "returns": ("selected",)},
    "topk": lambda n: {"top_k": 3, "returns": ("topk",)},
    "entropy": lambda n: {"returns": ("entropy",)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_options(schedules, sizes, name):
    tokens, hidden = SIZES[sizes]
    x, w, target = problem(tokens, hidden, torch.float32)
    target.clamp_(max=V - 101)
    options = OPTIONS[name](tokens)
    if name == "topk":  # the largest logits must not be nearly equal
        x = x.detach().mul(3).requires_grad_()
    leaves = [x, w, *(t for t in options.values() if getattr(t, "requires_grad", False))]
    upstream, results = None, []
    for plan in (plan_for(tokens, hidden, torch.float32), None):
        out = so.linear_cross_entropy(
            x, w, target, **{"reduction": "none", "plan": plan, "memory_budget": 1 << 30} | options
        )
        out = out[0] if name == "topk" else out
        upstream = torch.randn_like(out) if upstream is None else upstream
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    assert [s.deferred for s in schedules] == [True, True, False, False]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def copied(*args, **options):
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        return so.linear_cross_entropy(*args, **options)


def in_a_checkpoint(*args, **options):
    checkpoint = torch.utils.checkpoint.checkpoint
    return checkpoint(so.linear_cross_entropy, *args, use_reentrant=False, **options)


@pytest.mark.parametrize("call", [copied, in_a_checkpoint])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("borrows", [False, True])
def test_hooks_and_checkpoints(call, dtype, borrows):
    sizes = SIZES["wait"]
    x, w, target = problem(*sizes, dtype)
    plan = plan_for(*sizes, dtype, borrows=borrows)
    got = torch.autograd.grad(call(x, w, target, reduction="none", plan=plan).sum(), [x, w])
    right = exact(x, w, target, lambda z, t: F.cross_entropy(z, t, reduction="sum"))
    check(got, right, dtype)


def test_a_later_call_frees_the_memory(formed):
    sizes = SIZES["wait"]
    x, w, target = problem(*sizes, torch.float32)
    target.clamp_(min=0)
    options = {"reduction": "none", "plan": plan_for(*sizes, torch.float32)}
    with so.memory.measure() as m:
        losses = [so.linear_cross_entropy(x, w, target, **options) for _ in range(3)]
    assert m.kept_bytes < options["plan"].peak_bytes + w.nbytes + 3 * 8000
    formed.clear()
    got = torch.autograd.grad(sum(loss.sum() for loss in losses), [x, w])
    assert sum(formed) == 2 * sizes[0] * V
    right = exact(x, w, target, lambda z, t: 3 * F.cross_entropy(z, t, reduction="sum"))
    check(got, right, torch.float32)
    assert not kept._kept


def test_a_forward_alone_keeps_nothing():
    sizes = SIZES["wait"]
    x, w, target = problem(*sizes, torch.float32)
    options = {"reduction": "none", "plan": plan_for(*sizes, torch.float32)}
    with so.memory.measure() as m:
        so.linear_cross_entropy(x, w, target, **options)
    assert m.kept_bytes <= 64
    with so.memory.measure() as m, torch.no_grad():
        so.linear_cross_entropy(x, w, target, **options)
    assert m.peak_bytes <= options["plan"].peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_simulation_counts_the_memory(dtype):
    sizes = SIZES["wait"]
    x, w, target = problem(*sizes, dtype)
    target.clamp_(min=0)
    options = {"reduction": "none", "plan": plan_for(*sizes, dtype)}

    def step():
        loss = so.linear_cross_entropy(x, w, target, **options)
        rest = torch.ones(400_000)  # while the logits are kept
        torch.autograd.grad(loss.sum() * rest[0], [x, w])

    check_simulation(step, rel=0.02)


def test_vmap_of_a_backward():
    sizes = SIZES["wait"]
    x, w, target = problem(*sizes, torch.float32)
    plan = plan_for(*sizes, torch.float32)
    loss = so.linear_cross_entropy(x, w, target, reduction="none", plan=plan)
    upstream = torch.randn(2, sizes[0])
    batch = torch.autograd.grad(loss, [x, w], upstream, is_grads_batched=True)
    for k, row in enumerate(upstream):
        right = exact(x, w, target, lambda z, t, row=row: (
            F.cross_entropy(z, t, reduction="none") @ row.double()))  # fmt: skip
        check([g[k] for g in batch], right, torch.float32)


def test_the_planner_defers_only_what_a_backward_computes():
    p = planner.Problem(100, 200, 3000, Aten(4, cuda=True), in_forward=False, keeps=True)
    assert "token-chunked" in planner.allowed(p)
    for change in ({"keeps": False}, {"into": True}, {"wide_logits": True},
                   {"grads": (True, False, False)}, {"multiplied": 0.4}):  # fmt: skip
        assert "token-chunked" not in planner.allowed(planner.replace(p, **change)), change
