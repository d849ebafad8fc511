import dataclasses
import itertools
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import storage_ops as so
from storage_ops.loss import op as loss_autograd
from storage_ops.loss.planning import cost, devices, planner, schedule
from storage_ops.loss.planning.problem import Problem, padded, parts
from storage_ops.matmul import Kind, scratch
from storage_ops.matmul.aten import Aten, is_fast
from storage_ops.matmul.packed import Packed, rounds

SIZES = st.integers(1, 5000)
ITEMS = st.sampled_from([2, 4, 8])
THREADS = st.integers(1, 4)
PROBLEMS = st.builds(
    Problem,
    SIZES,
    SIZES,
    SIZES,
    st.builds(Aten, ITEMS, THREADS)
    | st.builds(lambda item, threads: Packed(item, threads, item == 2), ITEMS, THREADS),
    grads=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    sums_fp32=st.booleans(),
    in_forward=st.booleans(),
    gathers=st.booleans(),
    left_out=st.integers(0, 5000),
)


# In this example, the scratch memory of one thread is four bytes larger than that of three.
@example(Problem(1, 2688, 1, Packed(4, 3, False), grads=(False,) * 3), 0.0)
@given(PROBLEMS, st.floats(0, 1))
def test_plans_keep_to_the_budget(p, share):
    least = planner.smallest_budget(p)
    most = planner.peak_bytes(p, schedule.VOCAB_SLICED, p.tokens, p.vocab)
    budget = least + int(share * max(2 * most - least, 0))
    plan = planner.choose(p, budget)
    assert plan.peak_bytes <= budget
    assert (plan.num_chunks - 1) * plan.rows < p.tokens <= plan.num_chunks * plan.rows
    rest = p.vocab - plan.borrowed
    waiting = schedule.waiting_widths(p, plan.strategy, plan.rows, plan.columns, plan.borrowed)
    assert plan.widest == plan.columns or (sum(waiting) == rest and plan.widest <= max(waiting))
    slices = sum(parts(width, plan.widest) for width in waiting)
    slices += parts(rest - sum(waiting), plan.columns)
    assert plan.num_slices == slices + parts(plan.borrowed, plan.columns)
    assert plan.strategy in planner.allowed(p)
    again = planner.make(planner.schedule_of(p, plan.key))
    assert dataclasses.replace(again, seconds=plan.seconds) == plan  # more seconds on fewer threads
    others = [c.seconds for c in planner.candidates(p, budget, devices.named("cpu"))]
    # There are no candidates if the budget has no room for all threads.
    assert plan.seconds <= min(others) if others else plan.threads < p.matmul.threads
    with pytest.raises(ValueError, match=f"Expected at least {least}"):
        planner.choose(p, least - 1)


@given(SIZES, SIZES, SIZES, SIZES)
def test_stored_logits_are_read_before_they_are_overwritten(vocab, rows, hidden, columns):
    columns = min(columns, vocab)
    p = Problem(rows, hidden, vocab, Aten(4))
    sizes = schedule.waiting_widths(p, schedule.TOKEN_CHUNKED, rows, columns)
    assert sum(sizes) <= vocab and sizes[-1] == columns and min(sizes) > 0
    if rows <= hidden and columns >= 64 and columns == schedule.unpadded(columns) < vocab:
        assert sum(sizes) == vocab
    for width, following in itertools.pairwise(sizes):
        assert rows * padded(width) <= following * hidden


@given(PROBLEMS)
def test_the_default_budget_is_always_enough(p):
    for rates in (devices.named("cpu"), devices.GPUS["h200"]):
        assert planner.choose(p, None, rates).peak_bytes <= planner.default_budget(p, rates)


def test_choices():
    p = Problem(2048, 768, 50257, Aten(4))
    assert planner.choose(p, 1 << 40).strategy == schedule.TOKEN_CHUNKED
    assert (
        planner.choose(dataclasses.replace(p, into=True), 8 << 20).strategy == schedule.VOCAB_SLICED
    )
    # The logits of 768 of the 2048 rows are stored in the weight gradient.
    tight = planner.choose(p, 4 << 20)
    assert tight.strategy == schedule.TOKEN_CHUNKED and 3.6 < tight.products < 3.625
    assert planner.choose(dataclasses.replace(p, tokens=768), 2 << 20).products == 3
    # A quarter of the logits has no room for the rows' state, so a few classes are computed twice.
    quarter = planner.choose(p, 2048 * 50257)
    assert (quarter.num_chunks, quarter.num_slices) == (4, 2) and 3 < quarter.products < 3.01
    frozen = dataclasses.replace(p, grads=(True, False, False))
    assert planner.choose(frozen, 4 << 20).strategy == schedule.RUNNING_RESCALE
    assert planner.choose(frozen, 4 << 20).products == 2
    assert planner.choose(dataclasses.replace(p, grads=(False,) * 3)).products == 1
    assert planner.choose(dataclasses.replace(p, in_forward=False)).products == 4
    assert planner.choose(dataclasses.replace(p, tokens=0)).num_chunks == 0


@pytest.fixture
def plans(monkeypatch):
    """Return a list to which every call adds its plan."""
    followed = []

    def noted(*args, **kwargs):
        run = run_of(*args, **kwargs)
        followed.append(planner.make(run.schedule))
        return run

    run_of = loss_autograd.run_of
    monkeypatch.setattr(loss_autograd, "run_of", noted)
    return followed


def smallest(*tensors, **options):
    """Return the smallest budget of a call, from the error for a budget of 0."""
    with pytest.raises(ValueError, match="`memory_budget` is 0 bytes") as error:
        so.linear_cross_entropy(*tensors, memory_budget=0, **options)
    return int(re.search(r"Expected at least (\d+)", str(error.value))[1])


GRADS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.25, 1 / 16, 1 / 64])
@pytest.mark.parametrize("grads", GRADS)
@pytest.mark.parametrize(
    "dtype, own", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("sizes", [(2000, 128, 16001), (250, 300, 64001)])
def test_measured_peak_is_what_was_planned(sizes, dtype, own, share, grads, late, plans):
    tokens, hidden, vocab = sizes
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=grads[0])
    w = torch.randn(vocab, hidden, dtype=dtype, requires_grad=grads[1])
    target = torch.randint(vocab, (tokens,))
    options = {"accumulate_dtype": dtype if own else None, "reduction": "none" if late else "mean"}
    least = smallest(x, w, target, **options)
    budget = max(int(tokens * vocab * x.element_size() * share), least)

    def step():
        loss = so.linear_cross_entropy(x, w, target, memory_budget=budget, **options).sum()
        if any(grads):
            loss.backward()

    with so.memory.measure() as m:
        step()
    returned = sum(t.grad.nbytes for t in (x, w) if t.grad is not None)
    assert m.peak_bytes - returned <= budget
    # With gradients in the backward, the forward runs before gradients exist.
    predicted = [plans[0].peak_bytes] + [p.peak_bytes + returned for p in plans[late:]]
    assert m.peak_bytes <= max(predicted)
    # The plan may reserve more than is used. 16-bit products may pack operands in less memory, the
    # row kernel in plain torch copies less without options, and tokens have fewer numbers without
    # gradients.
    reserved = (1 << 20) * torch.get_num_threads() * (dtype.itemsize < 4)
    reserved += 24 * tokens * (not any(grads))
    if so.info()["row_kernel"] == "plain torch":
        reserved += 4 * cost.PLAIN_COPIES * cost.plain_rows(tokens, vocab) * vocab
    assert m.peak_bytes >= 0.95 * max(predicted) - reserved


@pytest.mark.in_turn
@settings(max_examples=50)
@given(
    tokens=st.integers(1, 40),
    hidden=st.sampled_from([8, 60, 300, 2100]),
    vocab=st.integers(2, 6000),
    grads=st.sampled_from([(True, True), (True, False), (False, True)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    own=st.booleans(),
    threads=st.sampled_from([1, 2, 3, 7, 64]),
    room=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
)
@example(250, 300, 64001, (True, True), torch.bfloat16, True, 2, 0.016)  # slices in one pass
def test_any_number_of_threads_keeps_to_the_budget(
    tokens, hidden, vocab, grads, dtype, own, threads, room
):
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=grads[0])
    w = torch.randn(vocab, hidden, dtype=dtype, requires_grad=grads[1])
    target, before = torch.randint(vocab, (tokens,)), torch.get_num_threads()
    sums = dtype if own else None
    torch.set_num_threads(threads)
    try:
        least = smallest(x, w, target, accumulate_dtype=sums)
        budget = least + int(room * tokens * vocab * x.element_size())
        with so.memory.measure() as m:
            so.linear_cross_entropy(
                x, w, target, memory_budget=budget, accumulate_dtype=sums
            ).backward()
    finally:
        torch.set_num_threads(before)
    assert m.peak_bytes - sum(t.grad.nbytes for t in (x, w) if t.grad is not None) <= budget


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind",
    ["ignored", "mostly ignored", "bias", "wide bias", "strided bias", "probabilities",
     "strided probabilities", "weightless", "class weights", "strided", "outputs",
     "accumulate_into", "wide logits", "wide logits with a bias", "selected",
     "topk"],
)  # fmt: skip
@pytest.mark.parametrize("tokens, hidden", [(700, 96), (300, 700)])
def test_no_option_goes_beyond_the_budget(tokens, hidden, dtype, kind):
    vocab = 6001
    x, w = torch.randn(tokens, hidden).to(dtype), torch.randn(vocab, hidden).to(dtype)
    target, budget = torch.randint(vocab, (tokens,)), 4 << 20
    options = {}
    if kind == "ignored":
        target[::2] = -100
    elif kind == "mostly ignored":
        target[torch.rand(tokens) < 0.95], budget = -100, 3_500_000
    elif kind == "bias":
        options["linear_bias"] = torch.randn(vocab).to(dtype).requires_grad_()
    elif kind == "wide bias":
        options["linear_bias"] = torch.randn(vocab, requires_grad=True)
    elif kind == "strided bias":
        options["linear_bias"] = torch.randn(vocab, 2).to(dtype)[:, 0]
    elif kind.startswith("wide logits"):
        options["logits_dtype"] = torch.float32
        if kind.endswith("bias"):
            options["linear_bias"] = torch.randn(vocab).to(dtype).requires_grad_()
    elif kind in ("probabilities", "weightless"):
        target = torch.softmax(torch.randn(tokens, vocab), 1)
        if kind == "weightless":
            options["token_weight"] = (torch.rand(tokens) < 0.7).float()
    elif kind == "strided probabilities":
        target = torch.softmax(torch.randn(vocab, tokens), 0).t()
    elif kind == "class weights":
        options |= {"weight": torch.rand(vocab).double(), "label_smoothing": 0.1}
    elif kind == "strided":
        x = torch.randn(tokens, 2 * hidden).to(dtype)[:, ::2]
        w = torch.randn(vocab, 2 * hidden).to(dtype)[:, ::2]
        budget += x.nbytes + w.nbytes
    elif kind == "selected":
        options |= {"returns": ("selected",), "selected_ids": torch.randint(vocab, (tokens, 9))}
    elif kind == "topk":
        options |= {"returns": ("topk",), "top_k": 9, "linear_bias": torch.randn(vocab).to(dtype)}
    elif kind == "outputs":
        options["returns"] = ("nll", "entropy", "argmax")
    else:
        options["accumulate_into"] = torch.zeros(vocab, hidden)
    x.requires_grad_()
    w.requires_grad_()
    with so.memory.measure() as m:
        result = so.linear_cross_entropy(x, w, target, memory_budget=budget, **options)
        outputs = result if isinstance(result, tuple) else (result,)
        outputs = (outputs[0],) if kind == "topk" else outputs
        (outputs[0].sum() + (outputs[1].sum() if len(outputs) > 1 else 0)).backward()
    leaves = [x, w, *(t for t in options.values() if isinstance(t, torch.Tensor))]
    returned = sum(t.grad.nbytes for t in leaves if t.grad is not None)
    returned += sum(t.nbytes for t in outputs)
    assert m.peak_bytes - returned <= budget


@pytest.mark.parametrize("kind", ["class weights", "strided bias", "strided probabilities"])
def test_the_smallest_budget_has_room_for_copies_of_arguments(kind):
    tokens, hidden, vocab = 8, 8, 3000
    x = torch.randn(tokens, hidden, requires_grad=True)
    w, target, options = torch.randn(vocab, hidden), torch.randint(vocab, (tokens,)), {}
    if kind == "class weights":
        options["weight"] = torch.rand(vocab).double()
    elif kind == "strided bias":
        options["linear_bias"] = torch.randn(vocab, 2)[:, 0]
    else:
        target = torch.softmax(torch.randn(vocab, tokens), 0).t()
    least = smallest(x, w, target, **options)
    with so.memory.measure() as m:
        so.linear_cross_entropy(x, w, target, memory_budget=least, **options).backward()
    assert m.peak_bytes - x.grad.nbytes <= least


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_smallest_budget_has_room_for_the_state_of_ignored_tokens(dtype, reduction):
    x, w = torch.randn(9000, 4, dtype=dtype), torch.randn(70, 4, dtype=dtype)
    target = torch.full((9000,), -100)
    target[:20] = 3
    budget = smallest(x.requires_grad_(), w.requires_grad_(), target, reduction=reduction)
    with so.memory.measure() as m:
        loss = so.linear_cross_entropy(x, w, target, memory_budget=budget, reduction=reduction)
        loss.backward(torch.ones_like(loss))
    assert m.peak_bytes - x.grad.nbytes - w.grad.nbytes - 2 * loss.nbytes <= budget


@pytest.mark.parametrize("vocab", [2049, 2112, 2560, 3000])
def test_tiles_stay_wide_if_logits_are_stored_in_the_weight_gradient(vocab):
    p = Problem(1024, 256, vocab, Packed(2, rounds=True))
    plan = planner.choose(p, max(1 << 20, planner.smallest_budget(p)))
    assert plan.columns >= 64 and plan.seconds < 4 * planner.choose(p).seconds


def test_on_arm_a_budget_includes_the_copy_of_a_weight():
    sizes = Kind.LOGITS, 7, 1001, 64, False
    assert Aten(4, packs=True).scratch_bytes(*sizes) == 4 * 64 * 1008
    assert Aten(4).scratch_bytes(*sizes) == Aten(8, packs=True).scratch_bytes(*sizes) == 0
    assert Aten(4, packs=True).scratch_bytes(Kind.INPUT, *sizes[1:]) == 0
    upcast, packed = (Aten(2, upcasts=True, packs=p).scratch_bytes(*sizes) for p in (False, True))
    assert packed - upcast == 4 * 64 * 1008  # the slice of the weight in float32: all classes


@pytest.mark.parametrize("ask, cached", [(rounds, scratch.kind), (is_fast, is_fast)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_facts_of_the_processor_are_read_outside_of_dispatch_modes(ask, cached, dtype):
    class Fake(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            raise AssertionError(f"the mode saw {op}")

    want = ask(dtype)
    cached.cache_clear()
    with Fake():
        assert ask(dtype) == want
