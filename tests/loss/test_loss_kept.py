"""The forward keeps the last tile of logits for the backward, which does not compute it again."""

import functools
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import storage_ops as so
from storage_ops import matmul
from storage_ops.loss.engine import kept
from storage_ops.matmul.aten import Aten

N, D, V = 120, 24, 3000
ROOMY = 16 << 20  # room for a whole tile, and for the copies of the row kernel in plain torch
HAS_KERNELS = so.info()["row_kernel"] != "plain torch"
BUDGETS = {"whole": 2 << 20, "half": 1 << 20, "slices": 400_000, "least": 100_000}


def problem(dtype=torch.float32, ignored=True):
    x, w = torch.randn(N, D).to(dtype), torch.randn(V, D).div(D**0.5).to(dtype)
    target = torch.randint(V, (N,))
    if ignored:
        target[::7] = -100
    return x.requires_grad_(), w.requires_grad_(), target


def of_logits(x, w, target):
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    z = x @ w.t()
    return torch.nn.functional.cross_entropy(z, target, reduction="none"), [x, w]


@pytest.fixture
def formed(monkeypatch):
    """Count the logits that each matrix product computes."""
    counts, logits = [], matmul.of(torch.float32, "cpu", 1).__class__.logits

    def noted(self, x, w, out, *rest):
        counts.append(out.numel())
        return logits(self, x, w, out, *rest)

    for kind in {Aten, matmul.of(torch.float32, "cpu", 1).__class__}:
        monkeypatch.setattr(kind, "logits", noted)
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("budget", BUDGETS)
def test_gradients_of_several_backward_passes(dtype, budget):
    x, w, target = problem(dtype)
    upstream = torch.randn(N)
    exact, leaves = of_logits(x, w, target)
    right = torch.autograd.grad(exact, leaves, upstream.double())
    # torch's products need float32 copies of 16-bit operands to sum in float32.
    ours = so.info()["cpu_products"] != "those of torch"
    wide = {torch.float64} | (set() if ours and HAS_KERNELS else {torch.float32, torch.bfloat16})
    loss = so.linear_cross_entropy(
        x,
        w,
        target,
        reduction="none",
        memory_budget=max(BUDGETS[budget], 500_000 * (dtype in wide)),
    )
    bound = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
    for retain in (True, True, False):
        got = torch.autograd.grad(loss, [x, w], upstream.to(loss.dtype), retain_graph=retain)
        for ours, expected in zip(got, right, strict=True):
            assert (ours.double() - expected).norm() <= bound * expected.norm()


def test_a_whole_tile_is_computed_once(formed):
    x, w, target = problem(ignored=False)
    loss = so.linear_cross_entropy(x, w, target, reduction="none", memory_budget=ROOMY)
    grads = torch.autograd.grad(loss.sum(), [x, w], retain_graph=True)
    assert sum(formed) == N * V
    second = torch.autograd.grad(loss.sum(), [x, w])  # the first backward has overwritten the tile
    assert sum(formed) == 2 * N * V
    for one, other in zip(grads, second, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("wanted", [[0], [1], [0, 1]])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_backward_of_some_inputs_or_with_other_threads_keeps_the_budget(wanted, threads):
    x, w, target = problem()
    ids = torch.randint(V, (N, 4))
    budget = 900_000
    with so.memory.measure() as m:
        values, _ = so.linear_cross_entropy(
            x, w, target, returns=("topk",), top_k=3, memory_budget=budget
        )
        picked = so.linear_cross_entropy(
            x, w, target, returns=("selected",), selected_ids=ids, memory_budget=budget
        )
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            leaves = [(x, w)[i] for i in wanted]
            got = torch.autograd.grad(values.sum(), leaves)
            got += torch.autograd.grad(picked.sum(), leaves)
        finally:
            torch.set_num_threads(before)
    returned = sum(g.nbytes for g in got) + values.nbytes * 3 + picked.nbytes
    returned += w.nbytes * (1 not in wanted)  # the forward stores logits in its gradient
    assert m.peak_bytes - returned <= 2 * budget  # only the first call keeps a tile
    z = torch.log_softmax(x.detach().double() @ w.detach().double().t(), -1)
    torch.testing.assert_close(
        picked.double(), z.gather(1, ids) * (target >= 0)[:, None], rtol=1e-4, atol=1e-5
    )


def test_one_call_at_a_time_keeps_a_tile(formed):
    x, w, target = problem(ignored=False)
    with so.memory.measure() as m:
        losses = [
            so.linear_cross_entropy(x, w, target, reduction="none", memory_budget=ROOMY)
            for _ in range(4)
        ]
    assert m.kept_bytes < 2 << 20  # four tiles are 5.8 MB
    formed.clear()
    sum(loss.sum() for loss in losses).backward()
    assert sum(formed) == 3 * N * V


def test_a_later_call_takes_the_memory_of_a_kept_tile(formed):
    x, w, target = problem(ignored=False)
    budget = 2 << 20
    with so.memory.measure() as m:
        loss = so.linear_cross_entropy(x, w, target, reduction="none", memory_budget=budget)
        with torch.no_grad():
            so.linear_cross_entropy(x, w, target, reduction="none", memory_budget=budget)
        so.linear_kl_div(x.detach(), w.detach(), x.detach(), w.detach(), memory_budget=budget)
        grads = torch.autograd.grad(loss.sum(), [x, w])
    assert m.peak_bytes - sum(g.nbytes for g in grads) <= budget
    assert sum(formed) == 5 * N * V


def test_a_kept_tile_is_freed_with_its_graph():
    x, w, target = problem()
    with so.memory.measure() as m:
        loss = so.linear_cross_entropy(x, w, target, reduction="none", memory_budget=2 << 20)
        values = loss.detach()
        del loss
        gc.collect()
    assert m.kept_bytes <= values.nbytes + 64
    assert all(t() is None for _, tensors in kept._kept.values() for t in tensors)


def copied(loss, *args):
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        return loss(*args)


def cached(loss, *args):
    saved_ops = [torch.ops.storage_ops.linear_cross_entropy.default]
    context = functools.partial(create_selective_checkpoint_contexts, saved_ops)
    return checkpoint(loss, *args, use_reentrant=False, context_fn=context)


def offloaded(loss, *args):
    with torch.autograd.graph.save_on_cpu():
        return loss(*args)


WAYS = {
    "saved tensors are copied": copied,
    "checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "reentrant checkpoint": functools.partial(checkpoint, use_reentrant=True),
    "selective checkpoint that saves the op": cached,
    "offloaded": offloaded,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hooks_and_checkpoints_around_the_loss(way, reduction, dtype):
    x, w, target = problem(dtype)

    def loss(x, w):
        options = {"reduction": reduction, "memory_budget": 2 << 20}
        return so.linear_cross_entropy(x, w, target, **options).square().sum()

    right = torch.autograd.grad(loss(x, w), [x, w])
    for _ in range(2):
        x.grad = w.grad = None
        WAYS[way](loss, x, w).backward()
        for one, other in zip((x.grad, w.grad), right, strict=True):
            torch.testing.assert_close(one, other)


def test_compiled_graphs_keep_no_tile():
    x, w, target = problem()
    plan = so.plan(N, D, V, torch.float32, reduction="none", memory_budget=ROOMY, device="cpu")
    assert plan.keeps and plan.products == 3

    def loss(x, w):
        return so.linear_cross_entropy(x, w, target, reduction="none", plan=plan)

    seen = []

    def backend(gm, inputs):
        seen.extend(n.args for n in gm.graph.nodes if "linear_cross" in str(n.target))
        return gm

    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    right = torch.autograd.grad(loss(x, w).sum(), [x, w])
    got = torch.autograd.grad(compiled(x, w).sum(), [x, w])
    assert len(seen) == 1 and plan.key.removesuffix(" keeps") in seen[0]
    for one, other in zip(got, right, strict=True):
        torch.testing.assert_close(one, other)


def check_simulation(step, rel):
    """Compare the simulated peak of a step with the measured one."""
    for _ in range(2):
        with so.memory.measure() as m:
            step()
    estimated = so.memory.estimate(step)
    assert estimated.peak_bytes - estimated.input_bytes == pytest.approx(m.peak_bytes, rel=rel)


@pytest.mark.kernels
def test_a_simulation_counts_the_kept_tile():
    x, w, target = problem(ignored=False)

    def step():
        loss = so.linear_cross_entropy(x, w, target, reduction="none", memory_budget=1 << 20)
        rest = torch.ones(400_000)  # while the tile is kept
        torch.autograd.grad(loss.sum() * rest[0], [x, w])

    check_simulation(step, rel=0.01)


def test_sums_into_a_buffer():
    x, w, target = problem(torch.bfloat16)
    total = torch.ones(V, D)
    loss = so.linear_cross_entropy(x, w, target, accumulate_into=total, memory_budget=1 << 20)
    loss.backward()
    exact, leaves = of_logits(x, w, target)
    right = torch.autograd.grad(exact.sum() / (target >= 0).sum(), leaves)
    assert (x.grad.double() - right[0]).norm() <= 0.01 * right[0].norm()
    assert (total.double() - 1 - right[1]).norm() <= 0.01 * right[1].norm()
