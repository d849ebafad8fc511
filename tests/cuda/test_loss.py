"""Linear cross-entropy on a GPU agrees with float64."""

import itertools

import pytest
import torch

import storage_ops as so
from storage_ops.loss import reference

from ..loss.test_linear_cross_entropy import REDUCTIONS, error, exact, problem, run, smallest_budget
from ..loss.test_loss_options import CHOICES, arguments, outputs
from .devices import DTYPES, busy, each_device, moved, raises, side_stream

# Bounds of the CPU tests (tests/loss), widened for float32 sums in another order.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def compare(device, arguments, **options):
    """Compare loss and gradients on the device with float64 on the CPU."""
    right, right_grads = exact(*arguments, **options)
    loss, grads = run(so.linear_cross_entropy, *moved(arguments, device), **moved(options, device))
    dtype = arguments[0].dtype
    assert loss.device.type == device and error(loss.cpu(), right) < TOLERANCE[dtype]
    for ours, expected in zip(grads, right_grads, strict=True):
        assert ours.dtype == dtype and error(ours.cpu(), expected) < TOLERANCE[dtype]


@each_device
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_reduction_and_budget(device, dtype, reduction, bias):
    arguments_ = problem(dtype=dtype, bias=bias)
    least = smallest_budget(*moved(arguments_, device), reduction=reduction)
    # A large upstream gradient, as from a loss scaler. In float16, small gradients would underflow.
    shape = len(arguments_[2]) if reduction == "none" else ()
    upstream = torch.rand(shape).double() * 64 + 64
    for budget in (None, least, 10 * least):
        right, right_grads = exact(*arguments_, upstream=upstream, reduction=reduction)
        on_device = moved((*arguments_, upstream), device)
        loss, grads = run(so.linear_cross_entropy, *on_device, reduction=reduction,
                          memory_budget=budget)  # fmt: skip
        assert error(loss.cpu(), right) < TOLERANCE[dtype]
        for ours, expected in zip(grads, right_grads, strict=True):
            assert ours.dtype == dtype and error(ours.cpu(), expected) < TOLERANCE[dtype]


@each_device
@pytest.mark.parametrize(
    "tokens, hidden, vocab",
    [
        pytest.param(512, 256, 5003, id="odd vocabulary"),
        pytest.param(1, 8, 2, id="one token"),
        pytest.param(33, 64, 50257, id="odd tokens"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_larger_and_odd_shapes(device, dtype, tokens, hidden, vocab):
    x, w, target, _ = problem(tokens, hidden, vocab, dtype, bias=False, ignored=0.0)
    # Logits below 2 are rounded by at most 2**-8 in bfloat16. With one row of two classes, the
    # error is that of two logits, without averaging.
    x *= 1.9 / (x.float() @ w.float().T).abs().max()
    compare(device, (x, w, target, None))


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [16, 128, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_few_tokens_are_complete_before_they_are_rounded(dtype, tokens, monkeypatch):
    # The vocabulary is the inner dimension of the input gradient's product, which cuBLAS splits.
    x, w, target, _ = problem(tokens, 256, 128256, dtype, bias=False, ignored=0.0)
    w = w / 16  # so that logits are about 1, and their rounding adds little
    upstream = torch.tensor(64.0 * tokens)  # so that gradients do not underflow in float16
    _, right = exact(x, w, target, None, upstream=upstream.double())
    runs = []
    for allowed in (True, False):
        name = f"allow_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_reduced_precision_reduction"
        monkeypatch.setattr(torch.backends.cuda.matmul, name, allowed)
        on_device = moved((x, w, target, None, upstream), "cuda")
        _, (grad, *_) = run(so.linear_cross_entropy, *on_device)
        runs.append(grad.cpu())
    assert torch.equal(*runs)
    # Logits, their gradient and the result are each rounded once.
    assert error(runs[0], right[0]) < torch.finfo(dtype).eps


def check_options(device, choices, dtype=torch.float64, tolerance=1e-10):
    """Compare a call with some options with the same call on the CPU, which tests/loss check."""
    kwargs_, leaves = arguments(choices, dtype)
    on_device = moved(kwargs_, device)
    ours, right = (outputs(so.linear_cross_entropy(**kwargs)) for kwargs in (on_device, kwargs_))
    grads = []
    for results, kwargs in ((ours, on_device), (right, kwargs_)):
        total = sum(
            (r.double() * torch.linspace(1, 2, r.numel(), device=r.device).view(r.shape)).sum()
            for r in results if r.requires_grad
        )  # fmt: skip
        inputs = [kwargs[name] for name in leaves]
        grads.append(torch.autograd.grad(total, inputs) if isinstance(total, torch.Tensor) else [])
    for a, b in zip((*ours, *grads[0]), (*right, *grads[1]), strict=True):
        assert a.device.type == device
        if b.is_floating_point():
            # If every token is ignored, the mean is nan.
            torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(a.cpu(), b)


@each_device
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: f"{choice[0]}{choice[1]}")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_option_alone(device, choice, dtype):
    check_options(device, [choice], dtype, 1e-10 if dtype == torch.float64 else 1e-4)


@pytest.mark.cuda
def test_every_pair_of_options():
    for pair in itertools.combinations(CHOICES, 2):
        if pair[0][0] != pair[1][0]:
            check_options("cuda", pair)


@each_device
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("share", [1.0, 0.1])
def test_a_target_out_of_range_affects_only_its_own_token(device, reduction, share):
    x, w, target, b = problem(ignored=0.2, vocab=1003)
    inputs = moved((x, w, target, b), device)
    # If a bad target replaces an ignored one, there is one more token.
    least = smallest_budget(*inputs, reduction=reduction) + 1024
    budget = int(max(least, share * len(x) * 1003 * 4))
    bad = [2, 17, 36]
    for wrong in (-1, 1003, 2**40, -(2**62)):
        broken = target.clone()
        broken[bad] = wrong
        options = {"reduction": reduction, "memory_budget": budget}
        on_device = moved((x, w, broken, b), device)
        if raises(device):
            with pytest.raises(RuntimeError, match="target"):
                run(so.linear_cross_entropy, *on_device, **options)
            continue
        loss, (dx, *_) = run(so.linear_cross_entropy, *on_device, **options)
        good = [i for i in range(len(x)) if i not in bad]
        if reduction == "none":
            assert loss[bad].isnan().all() and loss[good].isfinite().all()
        else:
            assert loss.isnan()
        assert dx[bad].isnan().all()
        if reduction != "mean":
            right = target.clone()
            right[bad] = -100
            _, expected = exact(x, w, right, b, reduction=reduction)
            assert error(dx[good].cpu(), expected[0][good]) < TOLERANCE[torch.float32]
    compare(device, (x, w, target, b))  # the device still works


@each_device
def test_only_ignored_tokens_give_nan_and_zero_gradients(device):
    x, w, target, b = problem()
    target.fill_(-100)
    loss, grads = run(so.linear_cross_entropy, *moved((x, w, target, b), device))
    assert loss.isnan() and all((g == 0).all() for g in grads)
    compare(device, (x, w, target, b), reduction="sum")
    inputs = moved((x[:0], w, target[:0], b), device)
    loss, grads = run(so.linear_cross_entropy, *inputs, reduction="sum")
    assert loss == 0 and [g.shape for g in grads] == [(0, 24), w.shape, b.shape]


@each_device
@pytest.mark.parametrize("max_valid", [20, 64])
def test_max_valid_leaves_ignored_tokens_out(device, max_valid):
    x, w, target, b = problem(64, ignored=0.0)
    target[torch.randperm(64)[:44]] = -100
    for reduction in REDUCTIONS:
        inputs = moved((x, w, target, b), device)
        loss, grads = run(
            so.linear_cross_entropy, *inputs, reduction=reduction, max_valid=max_valid
        )
        right, right_grads = exact(x, w, target, b, reduction=reduction)
        assert error(loss.cpu(), right) < 1e-5
        assert all(error(a.cpu(), e) < 1e-5 for a, e in zip(grads, right_grads, strict=True))


@each_device
def test_more_valid_tokens_than_promised_make_the_loss_nan(device):
    inputs = moved(problem(64, ignored=0.0), device)
    if raises(device):
        with pytest.raises(RuntimeError, match=r"`max_valid` is 63\. Expected at least 64"):
            run(so.linear_cross_entropy, *inputs, max_valid=63)
    else:
        assert run(so.linear_cross_entropy, *inputs, max_valid=63)[0].isnan()


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_the_product_in_16_bits(device, dtype):
    x, w, target, b = moved(problem(64, 32, 517), device)
    with torch.autocast(device, dtype):
        loss, grads = run(so.linear_cross_entropy, x, w, target, b, reduction="sum")
    low = (x.to(dtype).cpu(), w.to(dtype).cpu(), target.cpu(), b.to(dtype).cpu())
    right, right_grads = exact(*low, reduction="sum")
    assert loss.dtype == torch.float32 and error(loss.cpu(), right) < TOLERANCE[dtype]
    for ours, expected in zip(grads, right_grads, strict=True):
        assert ours.dtype == torch.float32 and error(ours.cpu(), expected) < TOLERANCE[dtype]


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accumulate_into_a_main_gradient(device, dtype):
    x, w, target, _ = problem(dtype=dtype, bias=False)
    right = exact(x, w, target, None, reduction="sum")[1][1]
    start = torch.randn(w.shape)
    main = start.clone().to(device)
    leaves = [t.to(device).requires_grad_() for t in (x, w)]
    for _ in range(2):
        so.linear_cross_entropy(
            *leaves, target.to(device), reduction="sum", accumulate_into=main
        ).backward()
    assert leaves[1].grad is None
    assert error(main.cpu().double() - start, 2 * right) < TOLERANCE[dtype]


@each_device
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_runs_give_the_same_bits(device, reduction):
    inputs = moved(problem(256, 64, 3001, torch.bfloat16), device)
    once, again = (run(so.linear_cross_entropy, *inputs, reduction=reduction) for _ in range(2))
    assert torch.equal(once[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(once[1], again[1], strict=True))


@each_device
def test_a_side_stream(device):
    inputs = problem(256, 64, 3001)
    with side_stream(device):
        busy(device)  # launches on another stream would read the arguments before the copies end
        compare(device, inputs)


@each_device
def test_functional_gradients_and_vmap(device):
    x, w, target, _ = moved(problem(ignored=0.0, bias=False), device)

    def loss(x, w):
        return so.linear_cross_entropy(x, w, target)

    grads = torch.func.grad(loss, argnums=(0, 1))(x, w)
    right = exact(x.cpu(), w.cpu(), target.cpu(), None)[1]
    assert all(error(a.cpu(), e) < 1e-5 for a, e in zip(grads, right, strict=True))
    batched = torch.vmap(loss, (0, None))(torch.stack((x, 2 * x)), w)
    torch.testing.assert_close(batched, torch.stack((loss(x, w), loss(2 * x, w))))


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"logit_scale": -0.5}])
def test_topk_of_many_classes_orders_ties_by_class(device, dtype, options):
    """Products of small integers are exact. With 5003 classes, groups are compared first."""
    x, w = (torch.randint(-2, 3, (n, 6)).to(dtype) for n in (300, 5003))
    target = torch.randint(5003, (300,))
    names = {"returns": ("topk",), "top_k": 17, **options}
    values, ids = so.linear_cross_entropy(*moved((x, w, target), device), **names)
    right = reference.linear_cross_entropy(x.double(), w.double(), target, **names)
    assert error(values.cpu(), right[0]) < 1e-5
    assert torch.equal(ids.cpu(), right[1])


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [1.1, 0.4])
def test_a_kept_tile_serves_one_backward(device, dtype, share):
    inputs = problem(300, 64, 5003, dtype, bias=False)
    upstream = torch.rand(300).double() * 64 + 64
    _, right = exact(*inputs, upstream=upstream, reduction="none")
    x, w, target, _ = moved(inputs, device)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    budget = int(share * 300 * 5056 * dtype.itemsize) + (1 << 20)
    loss = so.linear_cross_entropy(*leaves, target, reduction="none", memory_budget=budget)
    torch.full((4 << 20,), float("nan"), device=device)  # overwrites memory that was freed
    other = so.linear_cross_entropy(*leaves, target, reduction="none", memory_budget=budget)
    backwards = (other, True), (other, True), (loss, True), (loss, False), (other, False)
    for output, retain in backwards:
        grads = torch.autograd.grad(output, leaves, upstream.to(output), retain_graph=retain)
        for ours, expected in zip(grads, right, strict=False):
            assert error(ours.cpu(), expected) < TOLERANCE[dtype]
