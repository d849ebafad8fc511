"""`gradient_tolerance` leaves classes out of gradients within its bound. Losses stay exact."""

from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import storage_ops
from storage_ops import losses
from storage_ops.loss import reference
from storage_ops.loss.engine import run, selection, sums
from storage_ops.loss.planning import cost
from storage_ops.matmul import of
from storage_ops.memory import estimate, measure

ops = torch.ops.storage_ops


def peaked(tokens, size, classes, dtype=torch.float64, sure=1.0):
    """Return a head whose classes have frequencies like words, and targets drawn from it."""
    x = torch.randn(tokens, size, dtype=torch.float64)
    w = torch.randn(classes, size, dtype=torch.float64) * sure / size**0.5
    x[:, 0] = 1
    w[:, 0] -= (
        1.2
        * sure
        * torch.arange(1.0, classes + 1, dtype=torch.float64)[torch.randperm(classes)].log()
    )
    x, w = x.to(dtype), w.to(dtype)
    target = (x.double() @ w.double().T).softmax(1).multinomial(1).squeeze(1)
    return x.requires_grad_(), w.requires_grad_(), target


@pytest.fixture(autouse=True)
def selects_even_without_a_gain(request, monkeypatch):
    """Select classes also in small heads, where that saves no time."""
    if request.node.name not in ("test_a_small_head_is_exact", "test_plans"):
        monkeypatch.setattr(cost, "selecting", lambda p, share, _: replace(p, multiplied=share))


def test_a_small_head_is_exact():
    """Selecting classes would take longer than the products."""
    x, w, target = peaked(300, 8, 5000)
    got, expected = call(x, w, target, 0.3), call(x, w, target)
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


def call(x, w, target, tolerance=0.0, **options):
    """Return the loss, the left-out probability of each token, and the gradients."""
    loss, dropped = storage_ops.linear_cross_entropy(
        x, w, target, gradient_tolerance=tolerance, returns=("loss", "dropped"), **options
    )
    return loss, dropped, *torch.autograd.grad(loss, (x, w))


def relative(got, expected):
    return ((got - expected).double().norm() / expected.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tolerance", [0.03, 0.1, 0.5])
def test_the_bound_of_each_token(dtype, tolerance):
    x, w, target = peaked(500, 64, 6000, dtype)
    loss, dropped, *grads = call(x, w, target, tolerance, memory_budget="96 MiB", reduction="sum")
    exact, nothing, *expected = call(x, w, target, memory_budget="96 MiB", reduction="sum")
    torch.testing.assert_close(loss, exact)  # not bit for bit, because the tiles differ
    assert not nothing.any()
    assert dropped.max() <= tolerance
    assert dropped.max() > tolerance / 2  # something is left out
    far = (grads[0] - expected[0]).double().norm(dim=1)
    largest = w.detach().double().norm(dim=1).max()
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert (far <= dropped.double() * largest + rounding * expected[0].double().norm(dim=1)).all()
    for got, wanted in zip(grads, expected, strict=True):
        assert relative(got, wanted) < 0.6 * tolerance + rounding / 2


def test_targets_are_exact():
    """Targets with nearly no probability have exact gradients."""
    x, w, _ = peaked(300, 32, 6000)
    target = (x @ w.T).argmin(1)
    _, dropped, *grads = call(x, w, target, 0.3)
    expected = call(x, w, target)[2:]
    assert dropped.max() > 0.1
    rows = target.unique()
    assert relative(grads[1][rows], expected[1][rows]) < 1e-2
    assert relative(grads[0], expected[0]) < 0.05


def test_left_out_classes_are_replaced_by_the_product_of_their_margins():
    x, w, target = peaked(200, 32, 5000)
    x, w = x.detach(), w.detach()
    probabilities = (x @ w.T).softmax(1)
    dz = probabilities.clone()
    dz[torch.arange(200), target] -= 1

    def masses(out, buckets):
        ops._tile_sums(
            out, probabilities.log(), torch.zeros_like(x[:, 0]), None, None, buckets, 0.0, 1.0
        )

    chosen = selection.select(
        masses, target, dz.shape, x, 0.2, None, torch.ones(200, dtype=x.dtype)
    )
    kept = chosen.buckets.long() < chosen.needs.unsqueeze(1)
    torch.testing.assert_close(chosen.dropped, torch.where(kept, 0, probabilities).sum(1))
    assert kept[torch.arange(200), target].all()
    approximated = torch.where(kept, dz, 0)
    used = len(chosen.counts)
    for bucket in range(used + 1):
        inside = (chosen.buckets == bucket) if bucket < used else (chosen.buckets >= used)
        left = torch.where(kept | ~inside, 0, dz)
        if total := left.sum():
            approximated += left.sum(1, keepdim=True) * left.sum(0) / total
    for add in (False, True):
        into_input, into_weight = torch.zeros_like(x), torch.ones_like(w)
        selection.multiply(
            chosen, of(torch.float64, "cpu", 2), gathers(dz), x, w, into_input, into_weight, add
        )
        torch.testing.assert_close(into_input, (approximated @ w)[chosen.tokens])
        torch.testing.assert_close(into_weight, add + approximated.T @ x)


def gathers(dz):
    """Return a function that gathers parts of the gradient `dz` for `multiply`."""

    def gather(out, kept, *places):
        reference.gather_gradient(out, kept, dz, *places, *(None,) * 5, 0.0, 1.0)

    return gather


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="mean"),
        pytest.param({"z_loss": 1e-2, "logit_scale": 0.7}, id="z-loss"),
        pytest.param({"softcap": 8.0, "logit_scale": 1.5}, id="softcap"),
        pytest.param({"token_weight": torch.linspace(-2, 3, 400)}, id="token weights"),
        pytest.param({"weight": torch.linspace(0.1, 2, 5000)}, id="class weights"),
    ],
)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_margins_equal_the_sums_of_the_gradient(monkeypatch, options, reduction):
    """They are computed from masses and the tokens' factors, without a pass over the gradient."""
    x, w, target = peaked(400, 32, 5000)
    options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    seen, multiply = [], sums.multiply

    def checked(chosen, matmul, gather, x, w, *args):
        every, places = torch.arange(len(x)), torch.arange(len(w)) * len(x)
        dz = torch.empty(len(w) * len(x), dtype=x.dtype)
        gather(dz, None, every, places, torch.full_like(places, len(x)))
        dz, inner = dz.view(len(w), len(x)).t(), chosen.buckets > 0  # without targets
        columns = dz.abs().sum(0)
        torch.testing.assert_close(chosen.margins.columns[inner], columns[inner])
        if "softcap" not in options:  # slopes of a soft-cap are only in the columns' margins
            used, buckets = len(chosen.counts), chosen.buckets.long()
            left = dz.masked_fill(buckets < chosen.needs.unsqueeze(1), 0)
            expected = dz.new_zeros(len(dz), used + 1)
            expected.index_add_(1, buckets.clamp(max=used), left)
            torch.testing.assert_close(chosen.margins.left, expected[chosen.tokens])
        seen.append(len(dz))
        multiply(chosen, matmul, gather, x, w, *args)

    monkeypatch.setattr(sums, "multiply", checked)
    loss, lse = storage_ops.linear_cross_entropy(
        x,
        w,
        target,
        gradient_tolerance=0.2,
        returns=("loss", "lse"),
        reduction=reduction,
        **options,
    )
    ((loss * torch.rand_like(loss)).sum() + 0.1 * (lse * torch.rand_like(lse)).sum()).backward()
    assert seen


def test_a_tolerance_of_zero_changes_nothing():
    x, w, target = peaked(300, 32, 2000, torch.bfloat16)
    loss = storage_ops.linear_cross_entropy(x, w, target)
    for gradient, expected in zip(
        call(x, w, target, 0.0)[2:], torch.autograd.grad(loss, (x, w)), strict=True
    ):
        assert gradient.equal(expected)


def test_two_runs_have_the_same_bits():
    x, w, target = peaked(700, 32, 5000, torch.float32)
    first, second = (call(x, w, target, 0.05, memory_budget="8 MiB") for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_a_head_with_uniform_probabilities_is_exact():
    """If all classes have similar probabilities, as at the start of training, none is left out."""
    x, w, target = peaked(400, 32, 4000, sure=1e-3)
    got, expected = call(x, w, target, 0.01), call(x, w, target)
    assert not got[1].any()
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


def options():
    return st.fixed_dictionaries(
        {},
        optional={
            "softcap": st.sampled_from([2.0, 30.0]),
            "logit_scale": st.sampled_from([0.5, 1.5]),
            "z_loss": st.just(1e-3),
            "memory_budget": st.sampled_from(["1 MiB", "4 MiB"]),
            "shift": st.just(1),
            "reduction": st.sampled_from(["sum", "mean"]),
        },
    )


@pytest.mark.in_turn
@hypothesis.given(
    st.integers(0, 40), st.integers(1, 12), st.integers(1, 300),
    st.sampled_from([1e-4, 1e-2, 0.2, 0.9]), st.sampled_from([0.0, 1.0, 8.0]),
    st.sampled_from([torch.float64, torch.float32]), options(), st.booleans(), st.integers(0, 99),
)  # fmt: skip
@hypothesis.settings(max_examples=60, deadline=None)
def test_any_shape(tokens, size, classes, tolerance, sure, dtype, more, biased, seed):
    """Inputs include ties, duplicate and ignored targets, a single class, and logits of -inf."""
    torch.manual_seed(seed)
    x = torch.randn(2, tokens, size, dtype=dtype).requires_grad_()
    w = (torch.randn(classes, size, dtype=dtype) * sure).requires_grad_()
    target = torch.randint(classes, (2, tokens))
    target[torch.rand(2, tokens) < 0.2] = -100
    bias = torch.randn(classes, dtype=dtype) if biased else None
    if biased and classes > 1:
        bias[torch.rand(classes) < 0.3] = -torch.inf
        bias[target.clamp(min=0)] = 1.0
        bias.requires_grad_(dtype == torch.float64)
    more = {"reduction": "sum", **more}
    try:
        loss, dropped = storage_ops.linear_cross_entropy(
            x, w, target, linear_bias=bias, gradient_tolerance=tolerance,
            returns=("loss", "dropped"), **more,
        )  # fmt: skip
    except ValueError as error:
        assert "memory_budget" in str(error)
        return
    exact = storage_ops.linear_cross_entropy(x, w, target, linear_bias=bias, **more)
    torch.testing.assert_close(loss, exact, equal_nan=True)
    assert (dropped <= tolerance * (1 + 1e-5)).all()
    inputs = [t for t in (x, w, bias) if t is not None and t.requires_grad]
    grads, expected = (torch.autograd.grad(each, inputs) for each in (loss, exact))
    if not dropped.any() and dtype == torch.float64:
        for got, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(got, wanted, equal_nan=True)
    valid = (target[:, 1:] if more.get("shift") else target).ne(-100).sum().clamp(min=1)
    factor = more.get("logit_scale", 1.0) * (1 + 0.1 * loss.abs() * bool(more.get("z_loss")))
    bound = 2 * tolerance * w.detach().norm(dim=1).max() * factor.detach() + 1e-4
    if loss.isfinite() and x.numel():
        assert (grads[0] - expected[0]).norm(dim=-1).max() <= bound * valid


@pytest.mark.parametrize("options", [
    {"reduction": "none"}, {"returns": ("loss", "nll")}, {"accumulate": True}, {"half": True},
])  # fmt: skip
def test_gradients_that_are_computed_in_the_backward(options):
    half, accumulate = options.pop("half", False), options.pop("accumulate", False)
    x, w, target = peaked(300, 32, 5000, torch.float16 if half else torch.float32, sure=2.0)
    grads = []
    for tolerance in (0.0, 0.1):
        into = torch.zeros_like(w, dtype=torch.float32) if accumulate else None
        result = storage_ops.linear_cross_entropy(
            x, w, target, gradient_tolerance=tolerance, accumulate_into=into, **options
        )
        loss = result[0] if isinstance(result, tuple) else result
        leaves = [x] if accumulate else [x, w]
        gradients = torch.autograd.grad(loss.sum() * 8, leaves, allow_unused=True)
        if accumulate:
            w.grad = None
            loss = storage_ops.linear_cross_entropy(
                x, w, target, gradient_tolerance=tolerance, accumulate_into=into, **options
            )
            loss.backward()
            gradients = (*gradients, into)
        grads.append([g.double() for g in gradients if g is not None])
    for got, expected in zip(*grads, strict=True):
        assert 1e-5 < relative(got, expected) < 0.06


def test_a_share_of_the_classes():
    x, w, target = peaked(300, 32, 5000)
    few = call(x, w, target, 0.5, max_classes=0.05)
    many = call(x, w, target, 0.5, max_classes=0.5)
    exact = call(x, w, target)
    assert few[1].mean() > 3 * many[1].mean() > 0
    for a, b, c in zip(few[2:], many[2:], exact[2:], strict=True):
        assert 0.1 > relative(a, c) > 2 * relative(b, c)
    whole = call(x, w, target, 0.5, max_classes=1)
    assert not whole[1].any()
    torch.testing.assert_close(whole[2:], exact[2:])


def test_token_weights_of_both_signs():
    """Advantages have both signs, so sums over all tokens may cancel."""
    x, w, target = peaked(300, 32, 5000)
    weights = torch.randn(300, dtype=torch.float64)
    weights -= weights.mean()
    grads = []
    for tolerance in (0.0, 0.1):
        losses = storage_ops.linear_cross_entropy(
            x, w, target, gradient_tolerance=tolerance, reduction="none"
        )
        grads.append(torch.autograd.grad((losses * weights).sum(), (x, w)))
    for exact, got in zip(*grads, strict=True):
        assert 1e-5 < relative(got, exact) < 0.06


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_a_frozen_input_or_weight(frozen):
    x, w, target = peaked(300, 32, 5000)
    both = call(x, w, target, 0.05)[2:]
    (x if frozen == "input" else w).requires_grad_(False)
    loss = storage_ops.linear_cross_entropy(x, w, target, gradient_tolerance=0.05)
    loss.backward()
    got, expected = (w.grad, both[1]) if frozen == "input" else (x.grad, both[0])
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 400])
@pytest.mark.parametrize("tolerance", [0.01, 0.2, 0.6])
def test_within_memory_budget(dtype, size, tolerance):
    x, w, target = peaked(900, size, 5000, dtype)
    wide = w.nbytes * (2 if dtype == torch.bfloat16 else 0)  # the weight's gradient in float32
    for budget in (3 << 20, 7 << 20, 24 << 20):
        call(x, w, target, tolerance, memory_budget=budget + wide)
        with measure() as m:
            results = call(x, w, target, tolerance, memory_budget=budget + wide)
        assert m.peak_bytes - sum(t.nbytes for t in results) <= budget + wide


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend):
    x, w, target = peaked(300, 32, 5000, torch.float32)

    def step(x, w, target):
        return storage_ops.linear_cross_entropy(
            x, w, target, gradient_tolerance=0.05, returns=("loss", "dropped")
        )

    for dynamic in (False, True):
        torch._dynamo.reset()
        loss, dropped = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)(
            x, w, target
        )
        expected = call(x, w, target, 0.05)
        assert loss.equal(expected[0])
        assert dropped.equal(expected[1])
        torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), expected[2:])


def test_transforms_and_autocast():
    x, w, target = peaked(200, 32, 5000, torch.float32)

    def loss(x, w):
        return storage_ops.linear_cross_entropy(x, w, target, gradient_tolerance=0.05)

    expected = call(x, w, target, 0.05)[2:]
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(x, w), expected)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(x, w)
    narrow = torch.autograd.grad(value, (x, w))
    assert all(relative(a, b) < 0.03 for a, b in zip(narrow, expected, strict=True))


def test_a_simulation_multiplies_all_classes():
    x, w, target = peaked(300, 32, 5000, torch.float32)

    def step():
        return call(x, w, target, 0.05)

    assert estimate(step).peak_bytes > 0


def test_without_gradients_nothing_is_dropped():
    x, w, target = peaked(30, 16, 500)
    with torch.no_grad():
        _, dropped = storage_ops.linear_cross_entropy(
            x, w, target, gradient_tolerance=0.1, returns=("loss", "dropped")
        )
    assert dropped.shape == target.shape
    assert not dropped.any()


def test_a_nan_in_a_token_affects_no_other_token():
    """The gradients of all other tokens stay within their bound."""
    x, w, target = peaked(200, 32, 5000)
    with torch.no_grad():
        x[3] = torch.nan
    _, _, grad, _ = call(x, w, target, 0.05, reduction="sum")
    _, _, expected, _ = call(x, w, target, reduction="sum")
    others = torch.arange(200) != 3
    assert grad[3].isnan().all()
    assert relative(grad[others], expected[others]) < 0.03


ERRORS = {
    "not a number": ({"gradient_tolerance": "0.1"}, TypeError, "`gradient_tolerance` is '0.1'"),
    "one": ({"gradient_tolerance": 1.0}, ValueError, "`gradient_tolerance` is 1.0"),
    "negative": ({"gradient_tolerance": -0.1}, ValueError, "`gradient_tolerance` is -0.1"),
    "a tensor": ({"gradient_tolerance": torch.tensor(0.1)}, TypeError, "`gradient_tolerance` is"),
    "smoothed": ({"gradient_tolerance": 0.1, "label_smoothing": 0.1}, ValueError, "smoothing` is"),
    "entropy": (
        {"gradient_tolerance": 0.1, "returns": ("loss", "entropy")}, ValueError, "`returns` is",
    ),
    "share alone": ({"max_classes": 0.5}, ValueError, "`max_classes` is 0.5"),
    "no share": ({"gradient_tolerance": 0.1, "max_classes": 0}, ValueError, "`max_classes` is 0"),
    "later": (
        {"gradient_tolerance": 0.1, "reduction": "none", "returns": ("loss", "dropped")},
        ValueError, "`returns` has 'dropped'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    options, kind, text = ERRORS[name]
    x, w, target = peaked(8, 4, 20)
    with pytest.raises(kind, match=text):
        storage_ops.linear_cross_entropy(x, w, target, **options)


def test_distributions_are_refused():
    x, w, _ = peaked(8, 4, 20)
    with pytest.raises(TypeError, match=r"`target` is torch\.float64. Expected class indices"):
        storage_ops.linear_cross_entropy(x, w, torch.rand_like(x @ w.T), gradient_tolerance=0.1)


def test_plans():
    exact = storage_ops.plan(4096, 4096, 128256, device="h200")
    third = storage_ops.plan(4096, 4096, 128256, device="h200", gradient_tolerance=3e-3, share=0.35)
    assert third.seconds < 0.65 * exact.seconds
    assert third.products < 1.8
    small = storage_ops.plan(32768, 384, 50257, device="h100", gradient_tolerance=3e-3)
    assert small == storage_ops.plan(32768, 384, 50257, device="h100")  # selecting takes longer
    with pytest.raises(ValueError, match=r"`share` is 0\.5. Expected None"):
        storage_ops.plan(8, 8, 8, share=0.5, device="h200")
    with pytest.raises(ValueError, match=r"`gradient_tolerance` is 2\. Expected"):
        storage_ops.plan(8, 8, 8, gradient_tolerance=2, device="h200")


@pytest.mark.parametrize("name", ["sft", "simpo"])
def test_losses_built_on_linear_cross_entropy(name):
    x, w, target = peaked(512, 32, 5000, torch.float32)
    x, target = x.detach().view(4, 128, 32).requires_grad_(), target.view(4, 128)
    exact, got = (
        torch.autograd.grad(
            getattr(losses, name)(x, w, target, gradient_tolerance=tolerance), (x, w)
        )
        for tolerance in (0.0, 0.05)
    )
    for a, b in zip(got, exact, strict=True):
        assert 1e-5 < relative(a, b) < 0.05


@pytest.mark.parametrize(
    ("strategy", "budget", "several"),
    [
        pytest.param("vocab-sliced", "1.5 MiB", True, id="narrow"),
        pytest.param("token-chunked", "8 MiB", False, id="whole"),
    ],
)
def test_after_a_tile_that_is_dense(monkeypatch, strategy, budget, several):
    """After a dense narrow tile, other tiles are still tried. After a dense wide one, none is."""
    x, w, target = peaked(300, 32, 6000, torch.float32)
    plan = storage_ops.plan(
        300, 32, 6000, "float32", device="cpu", strategy=strategy, memory_budget=budget,
        gradient_tolerance=0.3, share=0.4,
    )  # fmt: skip
    tiles, select = [], run.select

    def first_is_dense(*args):
        tiles.append(args[2])
        return None if len(tiles) == 1 else select(*args)

    monkeypatch.setattr(run, "select", first_is_dense)
    _, dropped, *grads = call(x, w, target, 0.3, plan=plan)
    assert (len(tiles) > 1) == several
    assert (dropped.max() > 0) == several
    for got, expected in zip(grads, call(x, w, target)[2:], strict=True):
        assert relative(got, expected) < 0.2
