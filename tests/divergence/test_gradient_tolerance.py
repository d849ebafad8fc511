"""`gradient_tolerance` of a divergence: its bound for each token, and the exact parts."""

from dataclasses import replace

import pytest
import torch

import storage_ops
from storage_ops import losses
from storage_ops.loss.engine import sums
from storage_ops.loss.planning import cost
from storage_ops.memory import measure

CLASSES, SIZE = 5000, 32
DIVERGENCES = ["forward", "reverse", "jsd", "tvd"]


@pytest.fixture
def shares(monkeypatch):
    """Make small heads select. Return the share of classes that they multiply in each tile."""
    multiplied, multiply = [], sums.multiply

    def counted(chosen, *args):
        bounds, tokens = chosen.bounds, len(chosen.tokens)
        gathered = sum(count * (bounds[k + 1] - bounds[k]) for k, count in enumerate(chosen.counts))
        rest = chosen.flat * (bounds[-1] - bounds[len(chosen.counts)])
        multiplied.append((gathered + rest) / tokens / bounds[-1])
        multiply(chosen, *args)

    monkeypatch.setattr(cost, "selecting", lambda p, share, _: replace(p, multiplied=share))
    monkeypatch.setattr(sums, "multiply", counted)
    return multiplied


def heads(tokens=300, dtype=torch.float64):
    """Return a student and a teacher whose classes have frequencies like those of words."""
    x = torch.randn(tokens, SIZE, dtype=torch.float64)
    w = torch.randn(CLASSES, SIZE, dtype=torch.float64) / SIZE**0.5
    x[:, 0] = 1
    w[:, 0] -= 1.5 * torch.arange(1.0, CLASSES + 1)[torch.randperm(CLASSES)].log()
    teacher, head = x + 0.5 * torch.randn_like(x), w + 0.05 * torch.randn_like(w)
    student = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
    return *student, teacher.to(dtype), head.to(dtype)


def gradients(args, tolerance, weight=None, **options):
    loss = storage_ops.linear_kl_div(*args, gradient_tolerance=tolerance, **options)
    upstream = loss.sum() if weight is None else (loss * weight).sum()
    return loss.detach(), *torch.autograd.grad(upstream, args[:2])


def relative(ours, expected):
    return ((ours - expected).double().norm() / expected.double().norm()).item()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_bound_of_each_token(shares, divergence, dtype, temperature):
    args, tolerance = heads(dtype=dtype), 0.1
    how = {"divergence": divergence, "temperature": temperature, "reduction": "sum"}
    loss, *ours = gradients(args, tolerance, **how)
    exact, *expected = gradients(args, 0.0, **how)
    assert loss.equal(exact)
    assert min(shares) < 0.8
    far = (ours[0] - expected[0]).double().norm(dim=1)
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-5
    most = tolerance * args[1].detach().double().norm(dim=1).max()
    assert (far <= most + rounding * expected[0].double().norm(dim=1)).all()
    assert far.max() > most / 100  # some classes are left out
    assert relative(ours[1], expected[1]) < 0.5


def test_a_smaller_tolerance_has_a_smaller_error(shares):
    args = heads(dtype=torch.float32)
    _, *expected = gradients(args, 0.0)
    errors = []
    for tolerance in (0.3, 0.1, 0.03):
        _, *ours = gradients(args, tolerance)
        errors.append([relative(a, b) for a, b in zip(ours, expected, strict=True)])
    assert errors[0] > errors[1] > errors[2]
    assert sorted(shares) == shares


def test_zero_equals_the_default(shares):
    args = heads(dtype=torch.bfloat16)
    loss = storage_ops.linear_kl_div(*args)
    expected = torch.autograd.grad(loss, args[:2])
    _, *ours = gradients(args, 0.0)
    assert all(a.equal(b) for a, b in zip(ours, expected, strict=True))
    assert not shares


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_weights_and_upstream_do_not_change_the_classes_left_out(shares, reduction):
    """A token leaves out the same classes with weight 1e-6, -3 or 1."""
    args, tokens = heads(), 300
    weight = torch.randn(tokens, dtype=torch.float64)
    weight[:3] = torch.tensor([0, 1e-6, -3])
    how = {"token_weight": weight, "reduction": reduction, "divergence": "jsd"}
    upstream_gradient = None if reduction == "mean" else torch.rand(tokens, dtype=torch.float64)
    _, *ours = gradients(args, 0.05, upstream_gradient, **how)
    _, *expected = gradients(args, 0.0, upstream_gradient, **how)
    upstream = weight / weight.sum() if upstream_gradient is None else weight * upstream_gradient
    most = 0.05 * args[1].detach().norm(dim=1).max() * upstream.abs()
    far = (ours[0] - expected[0]).norm(dim=1)
    assert (far <= most * (1 + 1e-6) + 1e-14).all()
    assert far[0] == 0
    assert min(shares) < 0.8


def test_targets_keep_their_gradient(shares):
    """Targets with nearly no probability keep their gradient beside a divergence."""
    args = heads()
    target = (args[0] @ args[1].T).argmin(1)
    how = {"target": target, "target_weight": 0.5, "reduction": "sum"}
    _, *ours = gradients(args, 0.2, **how)
    _, *expected = gradients(args, 0.0, **how)
    assert min(shares) < 0.8
    rows = target.unique()
    torch.testing.assert_close(ours[1][rows], expected[1][rows])


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_a_stored_teacher(shares, tail):
    x, w, teacher, head = heads()
    stored = torch.log_softmax(teacher @ head.T, 1).topk(20)
    args = x, w
    how = {"teacher_topk": tuple(stored), "teacher_tail": tail, "reduction": "sum"}
    _, *ours = gradients(args, 0.05, **how)
    _, *expected = gradients(args, 0.0, **how)
    far = (ours[0] - expected[0]).norm(dim=1)
    assert (far <= 0.05 * w.detach().norm(dim=1).max()).all()
    assert min(shares) < 0.8


@pytest.mark.parametrize("budget", ["5 MiB", "24 MiB", None])
def test_budgets(shares, budget):
    args = heads(700, torch.float32)
    _, *expected = gradients(args, 0.0, memory_budget=budget)
    with measure() as measured:
        _, *ours = gradients(args, 0.02, memory_budget=budget)
    assert shares or budget == "5 MiB"  # 5 MiB has room for few tokens at a time
    assert relative(ours[0], expected[0]) < 0.2
    if budget:
        outputs = sum(t.nbytes for t in ours)
        assert measured.peak_bytes - outputs <= int(budget.split()[0]) * 2**20


def test_only_the_token_with_nan_is_nan(shares):
    x, w, teacher, head = heads()
    spoilt = teacher.clone()
    spoilt[5] = torch.nan
    _, ours, _ = gradients((x, w, spoilt, head), 0.05, reduction="sum")
    _, expected, _ = gradients((x, w, teacher, head), 0.0, reduction="sum")
    assert ours[5].isnan().all()
    others = torch.arange(len(x)) != 5
    assert relative(ours[others], expected[others]) < 0.1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.in_turn
def test_compiled(shares, backend):
    args = heads(dtype=torch.float32)

    def loss(*args):
        return storage_ops.linear_kl_div(*args, gradient_tolerance=0.05)

    expected = gradients(args, 0.05)
    for dynamic in (False, True):
        torch._dynamo.reset()
        value = torch.compile(loss, fullgraph=True, backend=backend, dynamic=dynamic)(*args)
        ours = value.detach(), *torch.autograd.grad(value, args[:2])
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert len(shares) == 3


def test_transforms_and_autocast(shares):
    args = heads(dtype=torch.float32)

    def loss(x, w):
        return storage_ops.linear_kl_div(x, w, *args[2:], gradient_tolerance=0.05)

    expected = gradients(args, 0.05)[1:]
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(*args[:2]), expected)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(*args[:2])
    narrow = torch.autograd.grad(value, args[:2])
    assert len(shares) == 3
    assert all(relative(a, b) < 0.1 for a, b in zip(narrow, expected, strict=True))


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_kd_passes_the_option_on(shares, alpha):
    args, target = heads(dtype=torch.float32), torch.randint(CLASSES, (300,))
    loss = losses.kd(*args, target, alpha=alpha, gradient_tolerance=0.05)
    ours = torch.autograd.grad(loss, args[:2])
    expected = torch.autograd.grad(losses.kd(*args, target, alpha=alpha), args[:2])
    assert shares
    assert all(relative(a, b) < 0.2 for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize(
    ("tolerance", "error", "message"),
    [
        pytest.param(1.0, ValueError, "`gradient_tolerance` is 1.0. Expected a pro", id="one"),
        pytest.param(-0.1, ValueError, "`gradient_tolerance` is -0.1", id="negative"),
        pytest.param("1e-3", TypeError, "`gradient_tolerance` is", id="text"),
    ],
)
def test_errors(tolerance, error, message):
    with pytest.raises(error, match=message):
        storage_ops.linear_kl_div(*heads(4), gradient_tolerance=tolerance)
