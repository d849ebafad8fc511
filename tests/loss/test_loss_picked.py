"""Log-probabilities of selected classes, and of the most probable ones."""

import functools

import pytest
import torch

import storage_ops as so
from storage_ops.loss import picked as loss_picked
from storage_ops.loss import reference
from storage_ops.loss.engine import tokens as loss_tokens

from ..refused import refused
from .test_loss_options import Forced, outputs
from .test_planner import plans, smallest  # noqa: F401

KEYS = [
    None,
    "vocab-sliced 12 64",
    "vocab-sliced 5 64",
    "token-chunked 5 30",
    "token-chunked 4 200",
]


def problem(dtype=torch.float32, tokens=12, hidden=6, vocab=200, scale=1.0):
    x, w = torch.randn(tokens, hidden) * scale, torch.randn(vocab, hidden)
    target = torch.randint(vocab, (tokens,))
    target[::5] = -100
    return [x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()], target


def in_double(leaves):
    return [t.detach().double().requires_grad_() for t in leaves]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("options", [{}, {"softcap": 0.01}, {"logit_scale": -1.5}])
@pytest.mark.parametrize("vocab", [200, 5003])  # with 5003, groups of classes are compared first
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_orders_equal_logits_by_class(options, key, vocab, dtype):
    """Products of small integers are exact, so there are ties. A soft-cap makes more."""
    _, target = problem()
    x, w = torch.randint(-2, 3, (12, 6)).to(dtype), torch.randint(-2, 3, (vocab, 6)).to(dtype)
    plan = key and Forced(key)
    values, ids = so.linear_cross_entropy(
        x, w, target, plan=plan, returns=("topk",), top_k=17, **options
    )
    right = reference.linear_cross_entropy(
        x.float(), w.float(), target, returns=("topk",), top_k=17, **options
    )
    torch.testing.assert_close(values, right[0])
    assert torch.equal(ids, right[1])
    assert (values[:, :-1] == values[:, 1:]).sum() > 80


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [1, 7, 64])
def test_the_first_of_equal_elements_are_the_largest(dtype, k):
    values = torch.tensor([-torch.inf, -3, -1e-7, -0.0, 0.0, 1e-7, 2, torch.inf, torch.nan])
    z = values[torch.randint(len(values), (50, 64))].to(dtype)
    got = loss_picked._first_largest(z.clone(), k)
    wide = z.double().nan_to_num(torch.inf, torch.inf, -torch.inf)
    order = wide.sort(dim=1, descending=True, stable=True).indices[:, :k]
    place = got[1].sort(1)
    assert torch.equal(place.values, order.sort(1).values)
    assert torch.equal(got[0].double(), wide.gather(1, got[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("key", KEYS)
def test_the_gradient_of_the_targets_log_probability_is_that_of_nll(dtype, key):
    """It is rounded once. For a certain token, p - 1 would lose all digits if p was rounded."""
    leaves, target = problem(dtype, scale=4.0)
    with torch.no_grad():
        target[1:5] = (leaves[0].float() @ leaves[1].float().t()).argmax(1)[1:5]
    upstream, plan = torch.randn(12, 3), key and Forced(key)
    ids = target[:, None].expand(12, 3)  # the upstream gradients of the three are added
    (picked,) = (
        so.linear_cross_entropy(
            *leaves, target, plan=plan, returns=("selected",), selected_ids=ids
        ),
    )
    nll = so.linear_cross_entropy(*leaves, target, plan=plan, returns=("nll",))
    torch.testing.assert_close(picked, -nll[:, None].expand(12, 3), rtol=1e-5, atol=1e-6)
    got = torch.autograd.grad(picked, leaves, upstream)
    right = torch.autograd.grad(-nll, leaves, upstream.sum(1))
    double = in_double(leaves)
    exact = reference.linear_cross_entropy(*double, target, returns=("nll",))
    exact = torch.autograd.grad(-exact, double, upstream.sum(1).double())
    for g, e, true in zip(got, right, exact, strict=True):
        assert (g.double() - true).norm() <= 1.05 * (e.double() - true).norm() + 1e-6 * true.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_16_bits(dtype, wide):
    leaves, target = problem(dtype, 60, 16, 300)
    ids = torch.randint(300, (60, 7))
    names = {"returns": ("selected", "topk"), "selected_ids": ids, "top_k": 5}
    logits = torch.float32 if wide else None
    selected, (top, best) = so.linear_cross_entropy(*leaves, target, logits_dtype=logits, **names)
    double = in_double(leaves)
    names["selected_ids"] = torch.cat((ids, best.clamp(0)), 1)
    names["returns"] = ("selected",)
    names.pop("top_k")
    right = reference.linear_cross_entropy(*double, target, **names)
    both, upstream = torch.cat((selected, top), 1), torch.randn(60, 12)
    kept = (target != -100)[:, None]
    torch.testing.assert_close(
        both.double() * kept, right * kept, rtol=1e-4, atol=2e-6 if wide else 0.12
    )
    got = torch.autograd.grad(both, leaves, upstream)
    expected = torch.autograd.grad(right, double, upstream.double())
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == dtype and (g.double() - e).norm() <= 0.01 * e.norm()


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["selected", "topk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.5, 1 / 16])
def test_no_storage_has_the_size_of_the_logits(kind, dtype, share, plans):  # noqa: F811
    tokens, hidden, vocab = 500, 64, 16001
    leaves, target = problem(dtype, tokens, hidden, vocab)
    k = 8
    options = {"returns": (kind,), "top_k": k}
    if kind == "selected":
        ids = torch.randint(vocab, (tokens, k))
        options = {"returns": (kind,), "selected_ids": ids}
    least = smallest(*leaves, target, **options)
    budget = max(least, int(tokens * vocab * dtype.itemsize * share))
    with so.memory.measure() as m:
        result = so.linear_cross_entropy(*leaves, target, memory_budget=budget, **options)
        result = result[0] if kind == "topk" else result
        result.sum().backward()
    returned = sum(t.grad.nbytes for t in leaves) + tokens * k * (4 + 8 * (kind == "topk"))
    assert m.peak_bytes - returned <= max(plan.peak_bytes for plan in plans) <= budget
    assert budget < 0.6 * tokens * vocab * dtype.itemsize


@pytest.mark.parametrize("most", [8, 12])
def test_without_reading_the_targets(most, monkeypatch):
    """On a GPU, ignored tokens are computed too, or fill the rest up to max_valid."""
    for module in (loss_tokens, loss_picked):
        monkeypatch.setattr(module, "may_count", lambda _: False)
    leaves, target = problem(torch.float64)
    target[::2] = -100
    ids, both = torch.randint(200, (12, 4)), []
    ids[1, 1] = -100
    options = {"returns": ("selected", "topk"), "selected_ids": ids, "top_k": 3}
    upstream = torch.randn(12, 7).double()
    for function in (
        functools.partial(so.linear_cross_entropy, max_valid=most if most < 12 else None),
        reference.linear_cross_entropy,
    ):
        selected, (values, best) = function(*leaves, target, **options)
        picked = torch.cat((selected, values), 1)
        both.append((picked, best, *torch.autograd.grad(picked, leaves, upstream)))
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want)


def test_classes_out_of_range_on_a_gpu(monkeypatch):
    for module in (loss_tokens, loss_picked):
        monkeypatch.setattr(module, "may_count", lambda _: False)
    leaves, target = problem()
    ids = torch.randint(200, (12, 4))
    ids[1, 2], ids[2, 0], ids[0, 0] = 200, -3, 999  # the first token is ignored
    picked = so.linear_cross_entropy(*leaves, target, returns=("selected",), selected_ids=ids)
    wrong = torch.zeros(12, 4, dtype=torch.bool)
    wrong[1, 2] = wrong[2, 0] = True
    assert torch.equal(picked.isnan(), wrong)


def mixed(function, x, w, b, target, ids):
    loss, selected, (top, best) = function(
        x * 1.5, w, target, linear_bias=b, label_smoothing=0.1, shift=True, softcap=4.0,
        returns=("loss", "selected", "topk"), selected_ids=ids, top_k=3,
    )  # fmt: skip
    return loss + (selected * 0.5).sum() + (top.exp() * (best + 1)).sum()


@pytest.fixture
def sequences():
    leaves = [torch.randn(3, 5, 6), torch.randn(70, 6), torch.randn(70)]
    target, ids = torch.randint(70, (3, 5)), torch.randint(70, (3, 5, 2))
    target[0, 2] = -100
    return [t.requires_grad_() for t in leaves], target, ids


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled(sequences, backend, dynamic):
    torch._dynamo.reset()
    leaves, target, ids = sequences
    compiled = torch.compile(
        lambda *a: mixed(so.linear_cross_entropy, *a), fullgraph=True, backend=backend,
        dynamic=dynamic,
    )  # fmt: skip
    for tokens in (5, 4):
        cut = [leaves[0][:, :tokens].detach().requires_grad_(), *leaves[1:]]
        rest = target[:, :tokens], ids[:, :tokens]
        ours, right = compiled(*cut, *rest), mixed(reference.linear_cross_entropy, *cut, *rest)
        torch.testing.assert_close(ours, right)
        got, expected = (torch.autograd.grad(v, cut) for v in (ours, right))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_transforms(sequences):
    leaves, target, ids = sequences
    leaves = [t.detach().double() for t in leaves]

    def transformed(function):
        def loss(x, w, b, target, ids):
            return mixed(function, x, w, b, target, ids)

        whole = torch.func.grad(loss, (0, 1, 2))(*leaves, target, ids)
        per_sample = torch.vmap(torch.func.grad(loss, 1), (0, None, None, 0, 0))(
            *leaves, target, ids
        )
        return whole, per_sample

    ours, right = transformed(so.linear_cross_entropy), transformed(reference.linear_cross_entropy)
    torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pad", [-100, 0, 69, 70])
def test_a_selected_ignore_index_is_no_class(sequences, pad):
    """Padding may be a class of the vocabulary, which stays a class for topk."""
    leaves, target, ids = sequences
    target, ids = (
        t.clamp_min(0).masked_fill(torch.rand(t.shape) < 0.4, pad) for t in (target, ids)
    )
    with torch.no_grad():
        leaves[1][pad % 70] *= 3  # often among the most probable classes
    options = {"returns": ("selected", "topk"), "selected_ids": ids, "top_k": 3}
    selected, (top, _) = so.linear_cross_entropy(*leaves[:2], target, ignore_index=pad, **options)
    log_p = (leaves[0] @ leaves[1].t()).log_softmax(-1)
    counted = (target != pad).unsqueeze(-1)
    some = counted & (ids != pad)
    right = torch.where(some, log_p.gather(-1, torch.where(some, ids, 0)), 0)
    right_top = torch.where(counted, log_p.topk(3).values, 0)
    torch.testing.assert_close((selected, top), (right, right_top))
    upstream = torch.randn(3, 5, 2), torch.randn(3, 5, 3)
    for outputs_here, wanted in (((selected, top), (right, right_top)), ((selected,), (right,))):
        got, expected = (
            torch.autograd.grad(t, leaves[:2], upstream[: len(t)], retain_graph=True)
            for t in (outputs_here, wanted)
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_one_token():
    x, w = torch.randn(8, requires_grad=True), torch.randn(11, 8)
    ids = torch.randint(11, (3,))
    selected, (top, _) = so.linear_cross_entropy(
        x, w, torch.tensor(3), returns=("selected", "topk"), selected_ids=ids, top_k=2
    )
    right = (x @ w.t()).log_softmax(-1)
    torch.testing.assert_close((selected, top), (right[ids], right.topk(2).values))
    got, expected = (torch.autograd.grad(t.sum(), x) for t in (selected, right[ids]))
    torch.testing.assert_close(got, expected)


def test_no_grad_and_autocast(sequences):
    leaves, target, ids = sequences
    options = {"returns": ("selected", "topk"), "selected_ids": ids, "top_k": 2}
    with torch.no_grad():
        results = outputs(so.linear_cross_entropy(*leaves[:2], target, **options))
    assert not any(t.requires_grad for t in results)
    assert [tuple(t.shape) for t in results] == [(3, 5, 2), (3, 5, 2), (3, 5, 2)]
    with torch.autocast("cpu", torch.bfloat16):
        selected = so.linear_cross_entropy(*leaves[:2], target, **options)[0]
    assert selected.dtype == torch.float32
    torch.testing.assert_close(selected, results[0], rtol=0.1, atol=0.1)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        selected.sum().backward(create_graph=True)
        leaves[1].grad.sum().backward()


@pytest.mark.parametrize(
    "options, kind, message",
    [
        refused(
            ValueError,
            "`selected_ids` is None and returns is .* Expected a value",
            returns=("selected",),
        ),
        refused(
            ValueError, "`top_k` is given and returns is .* Expected .* exactly if 'topk'", top_k=3
        ),
        refused(ValueError, "`top_k` is 0. Expected 1 to 11", returns=("topk",), top_k=0),
        refused(ValueError, "`top_k` is 12. Expected 1 to 11", returns=("topk",), top_k=12),
        refused(ValueError, "Expected at most 10", returns=("topk",), top_k=11, valid_classes=10),
        refused(TypeError, "`top_k` is 2.0. Expected an int", returns=("topk",), top_k=2.0),
        refused(ValueError, "has shape", returns=("selected",), selected_ids=torch.zeros(5).long()),
        refused(ValueError, "K >= 1", returns=("selected",), selected_ids=torch.zeros(5, 0).long()),
        refused(TypeError, "Expected int64", returns=("selected",), selected_ids=torch.zeros(5, 2)),
        refused(TypeError, "`selected_ids` is a list", returns=("selected",), selected_ids=[1]),
        refused(
            RuntimeError,
            "`selected_ids` has 11, which is out of range. Expected ignore_index .-100. or a class",
            returns=("selected",),
            selected_ids=torch.full((5, 2), 11),
        ),
    ],
)
def test_wrong_arguments(options, kind, message):
    x, w, target = torch.randn(5, 8), torch.randn(11, 8), torch.randint(11, (5,))
    with pytest.raises(kind, match=message):
        so.linear_cross_entropy(x, w, target, **options)
