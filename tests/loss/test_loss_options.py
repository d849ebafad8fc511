"""Every pair of options of linear cross-entropy agrees with the definition in float64."""

import functools
import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import storage_ops as so
from storage_ops import matmul
from storage_ops.loss import reference
from storage_ops.loss.engine import tokens as loss_rows
from storage_ops.loss.planning import planner
from storage_ops.loss.planning.problem import Problem
from storage_ops.loss.planning.schedule import TOKEN_CHUNKED, Schedule, waiting_widths
from storage_ops.matmul.aten import Aten

TOKENS, HIDDEN, VOCAB = 6, 3, 70
# Option -> the values to test. Every test creates new tensors.
OPTIONS = {
    "reduction": ["sum", "none"],
    "linear_bias": [lambda: torch.randn(VOCAB).double()],
    "weight": [lambda: torch.rand(VOCAB).double()],
    "label_smoothing": [0.2],
    "z_loss": [0.05],
    "softcap": [2.0],
    "logit_scale": [0.7],
    "token_weight": [lambda: torch.rand(2, TOKENS).double().round(decimals=1)],
    "shift": [True, 3],
    "target": [lambda: torch.softmax(torch.randn(2, TOKENS, VOCAB).double(), -1)],
    "valid_classes": [lambda: VOCAB - 5],
    "returns": [("nll", "lse", "entropy"), ("loss", "z_loss", "argmax", "correct"),
                ("loss", "selected"), ("selected", "topk", "entropy")],
    "frozen": ["input", "linear_weight"],
    "plan": ["token-chunked 5 70", "token-chunked 5 30", "vocab-sliced 12 64", "vocab-sliced 5 64",
             "running-rescale 5 64", "token-chunked 12 64", "token-chunked 12 64 0 1 1",
             "vocab-sliced 5 64 0 1 1"],
}  # fmt: skip
CHOICES = [(name, i) for name, values in OPTIONS.items() for i in range(len(values))]
# Without plans, argmax and topk: a tie in 16 bits need not be a tie in float64.
OTHERS = [choice for choice in CHOICES
          if choice[0] != "plan" and choice not in (("returns", 1), ("returns", 3))]  # fmt: skip
PAIRS = [pair for pair in itertools.combinations(CHOICES, 2) if pair[0][0] != pair[1][0]]


class Forced:
    """Use the plan with this key, because the planner would choose one tile for a small problem."""

    def __init__(self, key):
        self.key = key


def arguments(choices, dtype=torch.float64):
    """Return the arguments of a call with some of OPTIONS, and the names of the leaves."""
    chosen = {name: OPTIONS[name][i] for name, i in choices}
    kwargs = {name: value() if callable(value) else value for name, value in chosen.items()}
    kwargs.setdefault("target", torch.randint(kwargs.get("valid_classes", VOCAB), (2, TOKENS)))
    if not kwargs["target"].is_floating_point():
        kwargs["target"][torch.rand(2, TOKENS) < 0.2] = -100
    if "plan" in kwargs:
        kwargs["plan"] = Forced(kwargs["plan"])
    names, classes = kwargs.get("returns", ()), kwargs.get("valid_classes", VOCAB)
    if "selected" in names:  # ids include duplicates, ignored ones and the target
        ids = torch.randint(classes, (2, TOKENS, 5))
        ids[..., 1], ids[0, 0, 3] = ids[..., 0], -100
        if not kwargs["target"].is_floating_point():
            ids[..., 4] = kwargs["target"]
        kwargs["selected_ids"] = ids
    if "topk" in names:
        kwargs["top_k"] = 3
    frozen = kwargs.pop("frozen", None)
    kwargs |= {"input": torch.randn(2, TOKENS, HIDDEN).double(),
             "linear_weight": torch.randn(VOCAB, HIDDEN).double()}  # fmt: skip
    leaves = [n for n in ("input", "linear_weight", "linear_bias") if n in kwargs and n != frozen]
    for name in leaves:
        kwargs[name] = kwargs[name].to(dtype).requires_grad_()
    if frozen is not None:
        kwargs[frozen] = kwargs[frozen].to(dtype)
    return kwargs, leaves


def outputs(result):
    parts = result if isinstance(result, tuple) else (result,)
    return sum((outputs(part) if isinstance(part, tuple) else (part,) for part in parts), ())


def compare(choices, dtype=torch.float64, tolerance=1e-10):
    kwargs, leaves = arguments(choices, dtype)
    ours = outputs(so.linear_cross_entropy(**kwargs))
    double = {k: v.detach().double().requires_grad_(k in leaves)
              if isinstance(v, torch.Tensor) and v.is_floating_point() else v
              for k, v in kwargs.items()}  # fmt: skip
    right = outputs(reference.linear_cross_entropy(**double))
    assert [o.shape for o in ours] == [r.shape for r in right]
    for o, r in zip(ours, right, strict=True):
        if o.is_floating_point():
            torch.testing.assert_close(o.double(), r, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(o, r)
    upstream = [torch.rand_like(r) if r.requires_grad else None for r in right]
    pairs = [(o, r, u) for o, r, u in zip(ours, right, upstream, strict=True) if o.requires_grad]
    got = torch.autograd.grad([o for o, _, _ in pairs], [kwargs[n] for n in leaves],
                              [u.to(o.dtype) for o, _, u in pairs])  # fmt: skip
    expected = torch.autograd.grad([r for _, r, _ in pairs], [double[n] for n in leaves],
                                   [u for _, _, u in pairs])  # fmt: skip
    for name, g, e in zip(leaves, got, expected, strict=True):
        assert g.dtype == dtype
        scale = e.abs().max().item() + 1e-30
        torch.testing.assert_close(g.double(), e, rtol=0, atol=tolerance * scale + 1e-12, msg=name)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "+".join(f"{n}{i}" for n, i in p))
def test_pairs_of_options(pair):
    compare(pair)


@pytest.mark.parametrize("hidden", [11, 12, 20])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: f"{c[0]}{c[1]}")
def test_options_while_logits_are_stored_in_the_weight_gradient(choice, hidden, monkeypatch):
    monkeypatch.setitem(globals(), "VOCAB", 200)  # slices of 128 (stored, with room), 8 and 64
    monkeypatch.setitem(globals(), "HIDDEN", hidden)
    compare([*{"plan": 5, **dict([choice])}.items()])


@pytest.mark.parametrize("key", ["token-chunked 12 64 0 1 1", "vocab-sliced 5 64 0 1 1"])
@pytest.mark.parametrize("reduction", [[], [("reduction", 1)]])
def test_sums_in_the_weight_gradient_for_shifted_distributions(key, reduction, monkeypatch):
    """With shift, the input has one row more than there are tokens."""
    monkeypatch.setitem(OPTIONS, "plan", [key])
    compare([("plan", 0), ("shift", 0), ("target", 0), *reduction], torch.bfloat16, 0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rescaled_sums_in_the_dtype_of_a_frozen_weight(dtype):
    x, w = torch.randn(40, 8).to(dtype).requires_grad_(), torch.randn(200, 8).to(dtype)
    target = torch.randint(200, (40,))
    target[::3] = -100
    plan = Forced("running-rescale 16 64")
    so.linear_cross_entropy(x, w, target, plan=plan, accumulate_dtype=dtype).backward()
    a = x.detach().double().requires_grad_()
    reference.linear_cross_entropy(a, w.double(), target).backward()
    assert (x.grad.double() - a.grad).norm() <= 0.05 * a.grad.norm()


@pytest.mark.parametrize(
    "key, dtype, tolerance",
    [
pytest.param("token-chunked 12 64 0 1 1", torch.bfloat16, 0.05, id="tokens in bf16"),
pytest.param("vocab-sliced 5 64 0 1 1", torch.float16, 1e-2, id="classes in fp16"),
],
)  # fmt: skip
@pytest.mark.parametrize("hidden", [11, 20])
@pytest.mark.parametrize("choice", OTHERS, ids=lambda c: f"{c[0]}{c[1]}")
def test_options_while_sums_are_stored_in_the_weight_gradient(
    choice, hidden, key, dtype, tolerance, monkeypatch
):
    frozen = choice[0] == "frozen"  # without one of the gradients, no sums are stored
    borrowed, steps = [], Schedule._borrowed_last

    def noted(schedule, every):
        borrowed.extend([schedule.borrowed] * bool(schedule.borrowed and every))
        return steps(schedule, every)

    monkeypatch.setattr(Schedule, "_borrowed_last", noted)
    monkeypatch.setitem(globals(), "VOCAB", 200)
    monkeypatch.setitem(globals(), "HIDDEN", hidden)
    monkeypatch.setitem(OPTIONS, "plan", [key])
    compare([("plan", 0), choice], dtype, tolerance)
    assert all(borrowed) and len(borrowed) == (0 if frozen else 1)


@settings(max_examples=100)
@example(80, 80, 170, 64, 0, torch.bfloat16, False, True)  # too few classes to store sums
@example(2, 1, 129, 128, 0, torch.float32, False, False)  # a narrower slice has room for all tokens
@given(
    st.integers(1, 80), st.integers(1, 80), st.integers(2, 700), st.integers(1, 700),
    st.integers(0, 700), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_stored_logits_are_not_computed_again(
    tokens, hidden, vocab, columns, widest, dtype, own, borrows
):
    products = matmul.of(dtype, "cpu", torch.get_num_threads())
    p = Problem(tokens, hidden, vocab, products, sums_fp32=not own)
    plan = planner.make(planner.schedule(p, TOKEN_CHUNKED, tokens, columns, widest, borrows))
    room = 5 * 2 * tokens <= 4 * vocab  # sums use at most a fifth of the classes' rows
    assert bool(plan.borrowed) == (borrows and p.mixed and room)
    x, w = (torch.randn(n, hidden).to(dtype).requires_grad_() for n in (tokens, vocab))
    target, formed, form = torch.randint(vocab, (tokens,)), 0, type(products).logits

    def counted(ours, x, w, out):
        nonlocal formed
        formed += out.numel()
        form(ours, x, w, out.fill_(torch.nan))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(products), "logits", counted)
        accumulate = dtype if own else None
        loss = so.linear_cross_entropy(x, w, target, plan=plan, accumulate_dtype=accumulate)
        got = torch.autograd.grad(loss, (x, w))
    a, b = x.double(), w.double()
    right = reference.linear_cross_entropy(a, b, target)
    assert abs(loss - right) <= (1e-5 if dtype == torch.float32 else 3e-2) * (1 + right)
    expected = torch.autograd.grad(right, (x, w))
    for g, e, other in zip(got, expected, (w, x), strict=True):  # `other` is summed into g
        size = e.double().norm() + 0.1 * other.detach().double().norm() / tokens
        # Logits in bf16 have a relative error of 2^-9. A probability is a quotient of exponentials,
        # so its error is twice as large. Sums in bf16 lose accuracy with every tile.
        rounded = max(3e-2, 2 * (a @ b.T).detach().abs().max() / 2**9)
        bound = 1e-5 if dtype == torch.float32 else 0.2 if own else rounded
        assert (g.double() - e.double()).norm() <= bound * size
    # Every slice but the last, narrower one has room for as many rows as planned.
    predicted = (plan.products - 2) * tokens * vocab
    assert predicted - 1 <= formed <= predicted + tokens * plan.columns
    if hidden >= tokens and 64 <= plan.columns < vocab - plan.borrowed:
        widths = waiting_widths(p, plan.strategy, tokens, plan.columns, plan.borrowed)
        assert sum(widths) == vocab - plan.borrowed
        again = 2 * plan.borrowed - min(plan.borrowed, plan.columns)  # one tile only once
        assert formed == tokens * (vocab + again)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: f"{c[0]}{c[1]}")
def test_gradcheck(choice):
    kwargs, leaves = arguments([choice, ("linear_bias", 0)])
    rest = {k: v for k, v in kwargs.items() if k not in leaves}

    def differentiable(*values):
        results = outputs(so.linear_cross_entropy(**rest, **dict(zip(leaves, values, strict=True))))
        return tuple(o for o in results if o.requires_grad)

    assert torch.autograd.gradcheck(differentiable, [kwargs[n] for n in leaves], fast_mode=True)


@settings(max_examples=150)
@given(
    st.sets(st.sampled_from(CHOICES), max_size=8),
    st.sampled_from([(torch.float64, 1e-10), (torch.float32, 2e-4), (torch.bfloat16, 0.15),
                     (torch.float16, 2e-2)]),
)  # fmt: skip
def test_any_options_together(choices, kind):
    unique = dict(sorted(choices))
    if kind[0].itemsize == 2:  # a tie in 16 bits need not be a tie in float64
        unique.pop("returns", None)
    if not {"reduction", "returns"} & set(unique) and kind[0] == torch.float16:
        unique["reduction"] = 1
    compare(list(unique.items()), *kind)


@settings(max_examples=100)
@given(
    st.integers(0, 9), st.integers(0, 9), st.integers(1, 300), st.integers(1, 4),
    st.sampled_from(["contiguous", "transposed", "strided", "expanded"]), st.booleans(),
)  # fmt: skip
def test_shapes_and_strides(batch, tokens, vocab, hidden, layout, int32):
    def lay(t):
        if layout == "transposed":
            return t.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "strided":
            return torch.stack([t, t], -1).flatten(-2)[..., ::2]
        if layout == "expanded" and t.shape[0] > 1:
            return t[:1].expand(t.shape)
        return t

    x, w = (
        lay(torch.randn(batch, tokens, hidden).double()),
        lay(torch.randn(vocab, hidden).double()),
    )
    target = lay(torch.randint(vocab, (batch, tokens))).to(torch.int32 if int32 else torch.int64)
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    for reduction in ("sum", "none"):
        ours = so.linear_cross_entropy(x, w, target, reduction=reduction)
        right = reference.linear_cross_entropy(x, w, target, reduction=reduction)
        torch.testing.assert_close(ours, right)
        got = torch.autograd.grad(ours.sum(), (x, w))
        expected = torch.autograd.grad(right.sum(), (x, w))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("options", [{}, {"shift": True, "softcap": 2.0}, {"reduction": "none"},
                                     {"label_smoothing": 0.1, "weight": torch.rand(VOCAB)},
                                     {"memory_budget": 500_000, "logit_scale": 0.5}])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradient_of_probabilities(options, dtype):
    leaves = [
        torch.randn(2, 9, HIDDEN),
        torch.randn(VOCAB, HIDDEN),
        torch.randn(2, 9, VOCAB).softmax(-1),
    ]
    bias, leaves = torch.randn(VOCAB), [t.to(dtype).requires_grad_() for t in leaves]
    ours = so.linear_cross_entropy(*leaves, linear_bias=bias.to(dtype), **options).sum()
    double = [t.detach().double().requires_grad_() for t in leaves]
    right = reference.linear_cross_entropy(
        *double, linear_bias=bias.to(dtype).double(), **options
    ).sum()
    got, expected = torch.autograd.grad(ours, leaves), torch.autograd.grad(right, double)
    for g, e in zip(got, expected, strict=True):
        assert (g.double() - e).norm() <= {8: 1e-10, 4: 1e-5, 2: 2e-2}[dtype.itemsize] * e.norm()


VALUES = [float("inf"), float("-inf"), float("nan"), 1e4, -1e4]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", [None, "vocab-sliced 3 64", "token-chunked 2 70"])
@pytest.mark.parametrize("column", [0, 69, slice(None)])
def test_extreme_logits(value, key, column):
    x, w = torch.eye(4, 3).double(), torch.randn(VOCAB, 3).double()
    w[column, 0] = value
    kwargs = {"target": torch.tensor([0, 5, 69, 7]), "plan": None if key is None else Forced(key)}
    names = ("nll", "lse", "entropy", "argmax")
    ours = so.linear_cross_entropy(x[:, :3], w, **kwargs, returns=names)
    right = reference.linear_cross_entropy(x[:, :3], w, kwargs["target"], returns=names)
    for o, r in zip(ours, right, strict=True):
        torch.testing.assert_close(o, r, equal_nan=True)


def test_accumulate_into():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, w = torch.randn(50, 8).to(dtype), torch.randn(90, 8).to(dtype)
        target = torch.randint(90, (50,))
        buffer = torch.randn(90, 8)
        before = buffer.clone()
        for key in ("vocab-sliced 50 64", "vocab-sliced 7 90"):
            a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
            loss = so.linear_cross_entropy(a, b, target, accumulate_into=buffer, plan=Forced(key))
            (2 * loss).backward()
            assert b.grad is None and a.grad is not None
        p, q = x.double().requires_grad_(), w.double().requires_grad_()
        (4 * reference.linear_cross_entropy(p, q, target)).backward()
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(buffer.double(), before.double() + q.grad,
                                   rtol=tolerance, atol=tolerance)  # fmt: skip


def test_accumulate_dtype_trades_accuracy_for_memory():
    x, w = torch.randn(512, 64).bfloat16(), (torch.randn(3000, 64) / 8).bfloat16()
    target, wide, narrow = torch.randint(3000, (512,)), [], []
    exact = w.double().requires_grad_()
    reference.linear_cross_entropy(x.double(), exact, target).backward()
    for dtype, errors in ((None, wide), (torch.bfloat16, narrow)):
        leaf = w.detach().requires_grad_()
        so.linear_cross_entropy(x, leaf, target, accumulate_dtype=dtype,
                                plan=Forced("token-chunked 16 3000")).backward()  # fmt: skip
        errors.append((leaf.grad.double() - exact.grad).norm())
    if matmul.of(torch.bfloat16, "cpu").upcasts:
        assert wide == narrow
    else:
        assert wide[0] < narrow[0]
    p = Problem(512, 64, 3000, Aten(2))
    own = Problem(512, 64, 3000, Aten(2), sums_fp32=False)
    assert planner.smallest_budget(own) < planner.smallest_budget(p)


@pytest.mark.parametrize("kind", [None, "sync", 20])
def test_max_valid(kind):
    x, w = torch.randn(40, 8, requires_grad=True), torch.randn(90, 8, requires_grad=True)
    target = torch.randint(90, (40,))
    target[::2] = -100
    ours = so.linear_cross_entropy(x, w, target, max_valid=kind)
    right = reference.linear_cross_entropy(x, w, target)
    torch.testing.assert_close(ours, right)
    got, expected = (torch.autograd.grad(v, (x, w)) for v in (ours, right))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"returns": ("nll", "entropy")}, {}])
@pytest.mark.parametrize("most", [20, 33, 40])
def test_max_valid_without_reading_the_targets(options, most, monkeypatch):
    """On a GPU, valid tokens come first, and ignored ones fill the rest."""
    monkeypatch.setattr(loss_rows, "may_count", lambda _: False)
    x, w = torch.randn(40, 8, requires_grad=True), torch.randn(90, 8, requires_grad=True)
    target = torch.randint(90, (40,))
    target[::2] = -100
    upstream = torch.randn(40)
    both = []
    for function in (
        functools.partial(so.linear_cross_entropy, max_valid=most), reference.linear_cross_entropy
    ):  # fmt: skip
        out = function(x, w, target, **options)
        out = sum(out) if isinstance(out, tuple) else out
        both.append((out, *torch.autograd.grad((out * upstream).sum(), (x, w))))
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want)


def test_module_has_the_names_of_torch():
    head = so.LinearCrossEntropyLoss(8, 90, bias=True, weight=torch.rand(90), softcap=3.0)
    assert set(head.state_dict()) == {"weight", "linear.weight", "linear.bias"}
    assert (head.in_features, head.num_classes) == (8, 90) and "softcap=3.0" in repr(head)
    x, target = torch.randn(5, 8), torch.randint(90, (5,))
    right = reference.linear_cross_entropy(
        x, head.linear.weight, target, linear_bias=head.linear.bias, weight=head.weight, softcap=3.0
    )
    torch.testing.assert_close(head(x, target), right)
    with pytest.raises(TypeError, match=r"options \['soft_cap'\] are unknown. Expected some of"):
        so.LinearCrossEntropyLoss(8, 90, soft_cap=3.0)
    torch.nn.utils.parametrizations.weight_norm(head.linear)
    torch.testing.assert_close(head(x, target), right)
    torch.nn.utils.parametrize.remove_parametrizations(head.linear, "weight")
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        handle = getattr(head.linear, f"register_{kind}_hook")(lambda *args: None)
        with pytest.raises(TypeError, match=r"`linear` is torch.*Linear with hooks. Expected"):
            head(x, target)
        handle.remove()
    config = {"layer_classes": ["Linear"]}
    so.apply_activation_checkpoint(head, config)  # which does not change what the layer computes
    torch.testing.assert_close(head(x, target), right)
    so.remove_activation_checkpoint(head)
    head.linear.forward = lambda x: 2 * x
    so.apply_activation_checkpoint(head, config)
    with pytest.raises(TypeError, match=r"Expected torch.nn.Linear with a forward of its own"):
        head(x, target)
    so.remove_activation_checkpoint(head)
    del head.linear.forward
    head.linear = torch.nn.Sequential(head.linear)  # a wrapper like PEFT's adapters
    with pytest.raises(TypeError, match=r"`linear` is torch.*Sequential. Expected torch.nn.Linear"):
        head(x, target)
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):
        theirs = torch.nn.LinearCrossEntropyLoss(8, 90, bias=True)
        so.LinearCrossEntropyLoss(8, 90, bias=True).load_state_dict(theirs.state_dict())
