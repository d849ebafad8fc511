"""Ignored tokens whose hidden state is nan or infinite, as that of padding often is."""

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
COLUMNS = [0, 3]  # of the hidden states that are broken
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
    """Arguments of a call; hidden states of its ignored tokens are finite, or broken in COLUMNS."""
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
    made = {"input": x, "linear_weight": w, "linear_bias": b}
    made = {name: t.to(dtype).requires_grad_() for name, t in made.items()}
    if weighted:
        options["token_weight"] = weights
    if "weight" in options:  # of a class whose tokens count nothing, but are not ignored
        options["weight"] = torch.linspace(0, 1, VOCAB)
    if "selected" in options.get("returns", ()):
        options["selected_ids"] = torch.randint(VOCAB, (*SHAPE, 2), generator=random)
    if plan is not None:
        options["plan"] = Forced(plan)
    return made | {"target": target} | options


def outcome(given, function=so.linear_cross_entropy):
    """Every result, then the gradients of input, weight and bias."""
    leaves = [given[name] for name in ("input", "linear_weight", "linear_bias")]
    into = given.get("accumulate_into")
    found = function(**given)
    parts = []
    for part in found if isinstance(found, tuple) else (found,):
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
    """Tokens are not counted, for that would wait for the device."""
    for module in (loss_tokens, loss_picked):
        monkeypatch.setattr(module, "may_count", lambda _: False)


def compare(dtype, options, plan, exact=True):
    """Results must not depend on the hidden states of ignored tokens, to the last bit."""
    clean = outcome(arguments(False, dtype, plan, **options))
    found = outcome(arguments(True, dtype, plan, **options))
    assert all(part.isfinite().all() for part in clean)
    if not exact:  # 0 * nan in the columns of the weight's gradient that are multiplied
        broken, whole = found.pop(-2), clean.pop(-2)
        assert broken.isnan().any(0).nonzero().flatten().tolist() == COLUMNS
        others = [c for c in range(HIDDEN) if c not in COLUMNS]
        assert torch.equal(broken[:, others], whole[:, others])
    for one, other in zip(found, clean, strict=True):
        assert torch.equal(one, other)


def applies(dtype, options, plan):
    """Whether the strategy knows the options."""
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
    """Whatever the plan; of torch's loss all of that gradient is nan, and the input's too."""
    for options in OPTIONS:
        if applies(dtype, options, plan):
            compare(dtype, options, plan, exact=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most", [11, 14, "sync"])
def test_as_on_a_gpu_max_valid_keeps_ignored_tokens_out(most, dtype, as_on_a_gpu):
    """A bound above the number of valid tokens is filled up with ignored ones."""
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
def test_nothing_is_nan_that_is_not_nan_in_torch(dtype, reduction):
    """torch's loss is that of the other tokens too, but its gradients are nan."""

    def right(input, linear_weight, target, linear_bias, reduction):
        z = F.linear(input, linear_weight, linear_bias).flatten(0, -2)
        loss = F.cross_entropy(z, target.flatten(), reduction=reduction)
        return loss.view(target.shape) if reduction == "none" else loss

    given = arguments(True, dtype, reduction=reduction)
    ours = outcome(given)
    loss, dx, dw, db = outcome(given, right)
    torch.testing.assert_close(ours[0].to(dtype), loss, rtol=2e-2, atol=2e-2)
    assert dx.isnan().any() and dw.isnan().all() and db.isnan().all()
    assert all(part.isfinite().all() for part in ours)


@pytest.mark.in_turn
def test_compiled_losses_of_ignored_tokens_are_finite():
    """Where the loss becomes the op."""

    def loss(x, w, target):
        return F.cross_entropy(F.linear(x, w), target)

    x, w, target = torch.randn(64, 8), torch.randn(500, 8), torch.randint(500, (64,))
    target[5], results = -100, []
    for value in (1.0, math.nan):
        torch._dynamo.reset()
        x[5] = value
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        options = {"num_chunks": 4, "strict": True}
        found = torch.compile(loss, backend="storage_ops", options=options)(*leaves, target)
        results.append([found.detach(), *torch.autograd.grad(found, leaves)])
        torch.testing.assert_close(found, loss(*leaves, target))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["sft", "dpo", "orpo", "cpo", "simpo", "kto", "grpo", "kd"])
def test_losses_of_completions_do_not_depend_on_padding(name):
    given = {
        "kto": {"desirable": torch.tensor([True, False])},
        "grpo": {"advantages": torch.randn(2)},
        "kd": {"teacher_input": torch.randn(*SHAPE, 5), "teacher_weight": torch.randn(VOCAB, 5)},
    }.get(name, {})
    results = []
    for broken in (False, True):
        made = arguments(broken, torch.float32)
        results.append(outcome(made | given, getattr(so.losses, name)))
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)
