"""Ignored tokens with nan or infinite hidden states, as padding often has, change no result."""

import math

import pytest
import torch
from torch.nn import functional as F

import storage_ops as so
from storage_ops.loss import picked as loss_picked
from storage_ops.loss.engine import tokens as loss_tokens

from .test_loss_options import Forced

SHAPE, HIDDEN, VOCAB = (2, 7), 12, 200
IGNORED = {(0, 2): math.nan, (1, 0): math.inf, (1, 5): -math.inf}
COLUMNS = [0, 3]  # columns of the hidden states that have nan or inf
PLANS = [
    None, "token-chunked 12 64 0 1 1", "token-chunked 5 200", "vocab-sliced 5 64 0 1 1",
    "vocab-sliced 14 32", "running-rescale 5 64",
]  # fmt: skip
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"shift": 1}, {"weighted": True},
    {"shift": 2, "weighted": True}, {"label_smoothing": 0.1, "z_loss": 0.01}, {"softcap": 5.0},
    {"weight": 0.0, "label_smoothing": 0.1},
    {"returns": ("loss", "nll", "lse", "entropy", "argmax", "correct", "z_loss")},
    {"returns": ("selected", "topk"), "top_k": 3},
]  # fmt: skip


def arguments(broken, dtype, plan=None, weighted=False, **options):
    """Return arguments whose ignored tokens have nan or inf in COLUMNS if `broken`."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(*SHAPE, HIDDEN, generator=random)
    w, b = (torch.randn(VOCAB, *size, generator=random) for size in ((HIDDEN,), ()))
    target = torch.randint(VOCAB, SHAPE, generator=random)
    weights, shift = torch.ones(SHAPE), options.get("shift", 0)
    for (row, place), value in IGNORED.items():
        x[row, place, COLUMNS] = value if broken else 1.0
        if weighted and place + shift < SHAPE[1]:
            weights[row, place + shift] = 0
        elif place + shift < SHAPE[1]:
            target[row, place + shift] = -100
    tensors = {"input": x, "linear_weight": w, "linear_bias": b}
    tensors = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
    if weighted:
        options["token_weight"] = weights
    if "weight" in options:  # a class of weight 0: its tokens are not ignored
        options["weight"] = torch.linspace(0, 1, VOCAB)
    if "selected" in options.get("returns", ()):
        options["selected_ids"] = torch.randint(VOCAB, (*SHAPE, 2), generator=random)
    if plan is not None:
        options["plan"] = Forced(plan)
    return tensors | {"target": target} | options


def outcome(kwargs, function=so.linear_cross_entropy):
    """Return every result, then the gradients of input, weight and bias."""
    leaves = [kwargs[name] for name in ("input", "linear_weight", "linear_bias")]
    into = kwargs.get("accumulate_into")
    result = function(**kwargs)
    parts = []
    for part in result if isinstance(result, tuple) else (result,):
        parts += part if isinstance(part, tuple) else [part]
    random = torch.Generator().manual_seed(1)
    upstream = [torch.rand(p.shape, generator=random) for p in parts if p.requires_grad]
    total = sum((p * u).sum() for p, u in zip([p for p in parts if p.requires_grad], upstream,
                                              strict=True))  # fmt: skip
    if into is not None:
        total.backward()
        return [p.detach() for p in parts] + [leaves[0].grad, into, leaves[2].grad]
    return [p.detach() for p in parts] + list(torch.autograd.grad(total, leaves))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Do not count valid tokens, because on a GPU this would wait for the device."""
    for module in (loss_tokens, loss_picked):
        monkeypatch.setattr(module, "may_count", lambda _: False)


def compare(dtype, options, plan, exact=True):
    """Check that no bit of the results depends on the hidden states of ignored tokens."""
    clean = outcome(arguments(False, dtype, plan, **options))
    results = outcome(arguments(True, dtype, plan, **options))
    assert all(part.isfinite().all() for part in clean)
    if not exact:  # the weight's gradient has 0 * nan in COLUMNS
        broken, whole = results.pop(-2), clean.pop(-2)
        assert broken.isnan().any(0).nonzero().flatten().tolist() == COLUMNS
        others = [c for c in range(HIDDEN) if c not in COLUMNS]
        assert torch.equal(broken[:, others], whole[:, others])
    for one, other in zip(results, clean, strict=True):
        assert torch.equal(one, other)


def applies(dtype, options, plan):
    """Return True if the strategy supports the options."""
    late = "returns" in options or options.get("reduction") == "none" or dtype == torch.float16
    smooth_cap = options.get("softcap") and options.get("label_smoothing")
    return not (str(plan).startswith("running-rescale") and (late or smooth_cap))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_no_result_depends_on_ignored_tokens(plan, dtype):
    for options in OPTIONS:
        if applies(dtype, options, plan):
            compare(dtype, options, plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_as_on_a_gpu_only_columns_of_the_weights_gradient_are_nan(plan, dtype, as_on_a_gpu):
    """With torch's loss, all of this gradient is nan, and the input's gradient too."""
    for options in OPTIONS:
        if applies(dtype, options, plan):
            compare(dtype, options, plan, exact=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most", [11, 14, "sync"])
def test_as_on_a_gpu_max_valid_keeps_ignored_tokens_out(most, dtype, as_on_a_gpu):
    """If the bound is above the number of valid tokens, ignored tokens fill the rest."""
    for plan in PLANS[::2]:
        for options in OPTIONS:
            if applies(dtype, options, plan):
                compare(dtype, {**options, "max_valid": most}, plan)


def test_a_buffer_for_the_weights_gradient_stays_finite():
    results = []
    for broken in (False, True):
        into = torch.ones(VOCAB, HIDDEN)
        results.append(outcome(arguments(broken, torch.bfloat16, accumulate_into=into)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_gradients_that_are_nan_in_torch_can_be_nan(dtype, reduction):
    """torch's loss also ignores these tokens, but its gradients are nan."""

    def right(input, linear_weight, target, linear_bias, reduction):
        z = F.linear(input, linear_weight, linear_bias).flatten(0, -2)
        loss = F.cross_entropy(z, target.flatten(), reduction=reduction)
        return loss.view(target.shape) if reduction == "none" else loss

    kwargs = arguments(True, dtype, reduction=reduction)
    ours = outcome(kwargs)
    loss, dx, dw, db = outcome(kwargs, right)
    torch.testing.assert_close(ours[0].to(dtype), loss, rtol=2e-2, atol=2e-2)
    assert dx.isnan().any() and dw.isnan().all() and db.isnan().all()
    assert all(part.isfinite().all() for part in ours)


@pytest.mark.in_turn
def test_compiled_losses_of_ignored_tokens_are_finite():
    """Compilation replaces this loss by the op."""

    def loss(x, w, target):
        return F.cross_entropy(F.linear(x, w), target)

    x, w, target = torch.randn(64, 8), torch.randn(500, 8), torch.randint(500, (64,))
    target[5], results = -100, []
    for value in (1.0, math.nan):
        torch._dynamo.reset()
        x[5] = value
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        options = {"num_chunks": 4, "strict": True}
        compiled_loss = torch.compile(loss, backend="storage_ops", options=options)(*leaves, target)
        results.append([compiled_loss.detach(), *torch.autograd.grad(compiled_loss, leaves)])
        torch.testing.assert_close(compiled_loss, loss(*leaves, target))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["sft", "dpo", "orpo", "cpo", "simpo", "kto", "grpo", "kd"])
def test_losses_of_completions_do_not_depend_on_padding(name):
    extra = {
        "kto": {"desirable": torch.tensor([True, False])},
        "grpo": {"advantages": torch.randn(2)},
        "kd": {"teacher_input": torch.randn(*SHAPE, 5), "teacher_weight": torch.randn(VOCAB, 5)},
    }.get(name, {})
    results = []
    for broken in (False, True):
        kwargs = arguments(broken, torch.float32)
        results.append(outcome(kwargs | extra, getattr(so.losses, name)))
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)
