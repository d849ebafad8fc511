"""Wrong arguments, targets out of range, and unsupported derivatives are errors."""

import functools
import math
import types
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import storage_ops as so
from storage_ops.loss import reference

from ..refused import refused


def arguments(**changes):
    defaults = {
        "input": torch.randn(5, 8),
        "linear_weight": torch.randn(11, 8),
        "target": torch.randint(11, (5,)),
        "linear_bias": None,
    }
    return {**defaults, **changes}


@pytest.mark.parametrize(
    "changes, kind, message",
    [
        refused(ValueError, "`reduction` is 'avg'. Expected one of", reduction="avg"),
        refused(ValueError, "`reduction` is array.* Expected one of", reduction=np.zeros(2)),
        refused(ValueError, "`max_valid` is array.* Expected None", max_valid=np.zeros(2)),
        refused(ValueError, "`logits_dtype` is .* Expected one of", logits_dtype=np.zeros(2)),
        refused(
            TypeError, "`input` is torch.int64. Expected a float", input=torch.ones(5, 8).long()
        ),
        refused(
            ValueError, r"shape \(11, 7\). Expected \(V, D\)", linear_weight=torch.randn(11, 7)
        ),
        refused(ValueError, r"shape \(8,\). Expected \(V, D\)", linear_weight=torch.randn(8)),
        refused(
            TypeError, "`input` is a tensor of layout torch.s", input=torch.randn(5, 8).to_sparse()
        ),
        refused(
            TypeError, "`linear_weight` is a ten", linear_weight=torch.randn(11, 8).to_sparse()
        ),
        refused(TypeError, "`softcap` is True. Expected a number", softcap=True),
        refused(TypeError, "`label_smoothing` is True. Expected a number", label_smoothing=True),
        refused(
            ValueError, r"`target` has shape \(5,\). Expected \(5, 11\)", target=torch.randn(5)
        ),
        refused(
            TypeError, "`target` is torch.bool. Expected int64, int32", target=torch.ones(5).bool()
        ),
        refused(ValueError, r"`weight` has shape \(5,\). Expected \(11,\)", weight=torch.ones(5)),
        refused(
            TypeError, "`weight` is torch.int64. Expected a float", weight=torch.ones(11).long()
        ),
        refused(
            ValueError, r"`token_weight` has shape \(4,\). Expected", token_weight=torch.ones(4)
        ),
        refused(
            ValueError, "`label_smoothing` is 1.5. Expected a number from 0", label_smoothing=1.5
        ),
        refused(ValueError, "`softcap` is 0.0. Expected None or a positive", softcap=0.0),
        refused(ValueError, "`valid_classes` is 0. Expected None or a count >= 1", valid_classes=0),
        refused(
            ValueError, "`valid_classes` is True. Expected None or a count", valid_classes=True
        ),
        refused(ValueError, "`valid_classes` is 1000. Expected 1 to ", valid_classes=1000),
        refused(ValueError, "`input_grad` is 'sum'. Expected one of", input_grad="sum"),
        refused(TypeError, "`check_ranks` is 1. Expected True or False", check_ranks=1),
        refused(ValueError, "`max_valid` is -1. Expected None, 'sync' or a count", max_valid=-1),
        refused(ValueError, "`max_valid` is True. Expected None, 'sync'", max_valid=True),
        refused(
            RuntimeError, "`max_valid` is 4. Expected at least 5, the number of tok", max_valid=4
        ),
        refused(ValueError, r"one of \(None, torch.float32\)", accumulate_dtype=torch.float16),
        refused(TypeError, "`linear_weight` is None. Expected a torch.Tensor", linear_weight=None),
        refused(TypeError, "`weight` is a list. Expected a torch.Tensor", weight=[1.0]),
        refused(
            TypeError,
            "`linear_weight` is a Linear. Expected its weight, a torch.Tensor",
            linear_weight=torch.nn.Linear(4, 7),
        ),
        refused(
            TypeError,
            "torch.int64. Expected a floating dtype, or",
            token_weight=torch.ones(5).long(),
        ),
        refused(
            TypeError, "`logit_scale` is a tensor. Expected a number", logit_scale=torch.ones(())
        ),
        refused(TypeError, "`z_loss` is a tensor. Expected a number", z_loss=torch.ones(())),
        refused(TypeError, "`softcap` is a tensor. Expected a number", softcap=torch.ones(())),
        refused(TypeError, "`ignore_index` is 1.5. Expected an int, or None", ignore_index=1.5),
        refused(
            TypeError, "`memory_budget` is True. Expected a number of bytes", memory_budget=True
        ),
        refused(
            ValueError, "`memory_budget` is 'much'. Expected a number of", memory_budget="much"
        ),
        refused(TypeError, "`shift` is 'yes'. Expected True, False or a number", shift="yes"),
        refused(TypeError, "`shift` is 2.5. Expected True, False or a number", shift=2.5),
        refused(ValueError, "`shift` is -1. Expected a number of tokens >= 0", shift=-1),
        refused(ValueError, "`reduction` is 'mean'. Expected 'sum' with a divisor", divisor=3),
        refused(TypeError, "`divisor` is '3'. Expected a number", divisor="3", reduction="sum"),
        refused(
            ValueError, r"shape \(1,\). Expected a real", divisor=torch.ones(1), reduction="sum"
        ),
        refused(
            ValueError,
            "`divisor` requires grad. Expected a tensor that needs none",
            divisor=torch.ones((), requires_grad=True),
            reduction="sum",
        ),
        refused(ValueError, "Expected a value in the range of int64", ignore_index=2**63),
        refused(ValueError, "Expected None, 'sync' or a count >= 0 of 64 bits", max_valid=2**63),
        refused(ValueError, "Expected None or a count >= 1 of 64 bits", valid_classes=2**63),
        refused(ValueError, "Expected a number of tokens >= 0 of 64 bits", shift=2**63),
        refused(ValueError, "Expected a number of bytes, 0 or more", memory_budget=-(2**63) - 1),
        refused(ValueError, "`z_loss` is nan. Expected a number from -1e", z_loss=math.nan),
        refused(ValueError, "`z_loss` is -inf. Expected a number from -1e", z_loss=-math.inf),
        refused(ValueError, "`z_loss` is 100.* Expected a number from -1e", z_loss=10**400),
        refused(ValueError, "`logit_scale` is nan. Expected a number", logit_scale=math.nan),
        refused(ValueError, "`logit_scale` is 1e[+]39. Expected a number", logit_scale=1e39),
        refused(ValueError, "`softcap` is nan. Expected None or a p", softcap=math.nan),
        refused(TypeError, "Fraction.* Expected a number", z_loss=Fraction(1, 2)),
        refused(ValueError, "`divisor` is inf. Expected", divisor=math.inf, reduction="sum"),
        refused(ValueError, "`divisor` is 1e[+]39. Expected", divisor=1e39, reduction="sum"),
        refused(ValueError, "`returns` is 'loss'. Expected a sequence of some of", returns="loss"),
        refused(ValueError, r"`returns` is \{'loss'\}. Expected a sequence", returns={"loss"}),
        refused(ValueError, r"`returns` is \('los',\). Expected a sequence", returns=("los",)),
        refused(ValueError, r"`returns` is \(\['loss'\],\). Expected", returns=(["loss"],)),
        refused(
            ValueError,
            r"`input` has shape \(8,\). Expected \(..., T, D\) with shift",
            shift=True,
            input=torch.randn(8),
            target=torch.tensor(1),
        ),
        refused(
            ValueError, "`weight` requires grad. Expec", weight=torch.ones(11, requires_grad=True)
        ),
        refused(
            ValueError, "`token_weight` requires", token_weight=torch.ones(5, requires_grad=True)
        ),
        refused(ValueError, "`linear_weight` does not require", accumulate_into=torch.zeros(11, 8)),
        refused(
            TypeError, "`accumulate_into` is torch", accumulate_into=torch.zeros(11, 8).bfloat16()
        ),
        refused(
            ValueError, r"`accumulate_into` has shape \(8, 11", accumulate_into=torch.zeros(8, 11)
        ),
        refused(
            ValueError, r"shape \(6,\). Expected the shape of input", target=torch.ones(6).long()
        ),
        refused(ValueError, r"shape \(8,\). Expected \(11,\)", linear_bias=torch.randn(8)),
        refused(TypeError, "`linear_bias` is torch.float64", linear_bias=torch.randn(11).double()),
        refused(TypeError, "Expected torch.float32", linear_weight=torch.randn(11, 8).bfloat16()),
        refused(
            ValueError, "is on meta. Expected", linear_weight=torch.randn(11, 8, device="meta")
        ),
        refused(
            ValueError,
            r"shape \(0, 8\). Expected at least one class",
            linear_weight=torch.randn(0, 8),
        ),
        refused(
            ValueError, "`softcap` is 1e[+]39. Expected None or a positive number", softcap=1e39
        ),
        refused(TypeError, "`softcap` is '3'. Expected a number", softcap="3"),
        refused(TypeError, "`label_smoothing` is None. Expected a number", label_smoothing=None),
        refused(TypeError, r"`z_loss` is \[0.1\]. Expected a number", z_loss=[0.1]),
        refused(TypeError, "`ignore_index` is 'a'. Expected an int, or None", ignore_index="a"),
        refused(ValueError, "`max_valid` is 1.5. Expected None, 'sync' or a count", max_valid=1.5),
        refused(
            TypeError, "`plan` is 'fast'. Expected the result of storage_ops.plan", plan="fast"
        ),
        refused(TypeError, "`process_group` is 'world'. Expected a process", process_group="world"),
        refused(
            ValueError,
            "Expected class indices as target for 'correct' with a process_group",
            process_group=types.SimpleNamespace(group_name="all"),
            returns=("correct",),
            target=torch.ones(5, 11) / 11,
        ),
        refused(ValueError, "`returns` is 3. Expected a sequence of some of", returns=3),
        refused(
            TypeError, r"`memory_budget` is \[1\]. Expected a number of bytes", memory_budget=[1]
        ),
        refused(ValueError, "`memory_budget` is 10 bytes. Expected at least", memory_budget=10),
    ],
)
def test_wrong_arguments(changes, kind, message):
    with pytest.raises(kind, match=message):
        so.linear_cross_entropy(**arguments(**changes))


@pytest.mark.parametrize(
    "into, strides",
    [
        (torch.zeros(1, 8).expand(11, 8), r"\(0, 1\)"),
        (torch.zeros(8, 11).t(), r"\(1, 11\)"),
        (torch.zeros(11, 16)[:, ::2], r"\(16, 2\)"),
    ],
)
def test_accumulate_into_must_have_contiguous_rows(into, strides):
    kwargs = arguments(linear_weight=torch.randn(11, 8, requires_grad=True), accumulate_into=into)
    rule = f"`accumulate_into` has strides {strides}. Expected rows that are contiguous"
    with pytest.raises(ValueError, match=rule):
        so.linear_cross_entropy(**kwargs)


@pytest.mark.parametrize("wrong", [11, -1, 2**40])
@pytest.mark.parametrize("kernel", ["native", "reference"])
def test_target_out_of_range(wrong, kernel, monkeypatch):
    kwargs = arguments()
    kwargs["target"][3] = wrong
    message = (
        rf"^linear_cross_entropy: `target` {wrong} is out of range. Expected ignore_index \(-100\) "
        r"or a class index from 0 to 10\.$"
    )
    with pytest.raises(RuntimeError, match=message):
        if kernel == "native":
            so.linear_cross_entropy(**kwargs)
        else:
            logits = kwargs["input"] @ kwargs["linear_weight"].t()
            reference.cross_entropy_rows(
                logits,
                kwargs["target"],
                None,
                None,
                None,
                torch.zeros(6, 5),
                None,
                0,
                11,
                -100,
                0.0,
                1.0,
                0.0,
                1,
            )


@pytest.mark.parametrize("name", ["linear_weight", "linear_bias"])
def test_autocast_casts_no_float64(name):
    """`F.linear` refuses it too."""
    call = arguments(linear_bias=torch.randn(11))
    call[name] = call[name].double()
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(TypeError, match=f"`{name}` is torch.float64. Expected torch.bfloat16"):
            so.linear_cross_entropy(**call)
        with pytest.raises(RuntimeError, match="dtype"):
            F.linear(call["input"], call["linear_weight"], call["linear_bias"])


def test_integer_inputs_are_refused_under_autocast():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="`input` is torch"):
        so.linear_cross_entropy(**arguments(input=torch.ones(5, 8).long()))


def test_double_backward_is_refused():
    kwargs = arguments()
    x, w = kwargs["input"].requires_grad_(), kwargs["linear_weight"].requires_grad_()
    grad = torch.autograd.grad(so.linear_cross_entropy(**kwargs), x, create_graph=True)[0]
    first = torch.autograd.grad(so.linear_cross_entropy(**kwargs), x)[0]
    assert torch.equal(grad, first)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grad.pow(2).sum().backward()
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum() + w.sum() * 0, x)


@pytest.mark.parametrize("name", ["input", "linear_weight", "target", "weight", "token_weight"])
def test_forward_mode_is_refused(name):
    kwargs = arguments(
        target=torch.softmax(torch.randn(5, 11), 1),
        weight=torch.ones(11),
        token_weight=torch.ones(5),
    )
    with forward_ad.dual_level():
        kwargs[name] = forward_ad.make_dual(kwargs[name], torch.ones_like(kwargs[name]))
        with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
            so.linear_cross_entropy(**kwargs)


def test_forward_mode_of_torch_func_is_refused():
    kwargs = arguments()

    def loss(w):
        return so.linear_cross_entropy(**{**kwargs, "linear_weight": w})

    with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
        torch.func.jvp(loss, (kwargs["linear_weight"],), (kwargs["linear_weight"],))


def raw(x, w, target, mask):
    """Call the op directly, for a mean with gradients computed in the forward."""
    return torch.ops.storage_ops.linear_cross_entropy(
        x, w, target, None, None, None, None, "mean", -100, 0.0, 0.0, 0.0, 1.0, False, None, None,
        None, "", "", True, mask, [False] * 4,
    )  # fmt: skip


def test_a_backward_does_not_scale_gradients_that_the_raw_op_returned():
    kwargs = arguments()
    x, w = kwargs["input"].requires_grad_(), kwargs["linear_weight"].requires_grad_()
    loss, *_, grad_input, _, _ = raw(x, w, kwargs["target"], [True, True, False])
    before = grad_input.clone()
    (3 * loss).backward()
    assert torch.equal(grad_input, before)
    torch.testing.assert_close(x.grad, 3 * before)


def test_raw_op_with_too_small_a_mask_still_gives_right_gradients():
    kwargs = arguments()
    x, w = kwargs["input"].requires_grad_(), kwargs["linear_weight"].requires_grad_()
    loss, *_ = raw(x, w, kwargs["target"], [False, False, False])
    loss.backward()
    right = torch.autograd.grad(so.linear_cross_entropy(x, w, kwargs["target"]), (x, w))
    torch.testing.assert_close((x.grad, w.grad), tuple(right))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_like_linear(reduction):
    kwargs = arguments()
    x, w = kwargs["input"].requires_grad_(), kwargs["linear_weight"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ours = so.linear_cross_entropy(**kwargs, reduction=reduction).sum()
        logits = F.linear(x, w, kwargs["linear_bias"])
        right = F.cross_entropy(logits, kwargs["target"], reduction=reduction).sum()
    assert ours.dtype == right.dtype == torch.float32
    torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)
    ours.backward()  # outside of autocast, as in every training loop
    expected = torch.autograd.grad(right, (x, w))
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, expected[0], rtol=5e-2, atol=2e-2)
    torch.testing.assert_close(w.grad, expected[1], rtol=5e-2, atol=2e-2)


@pytest.mark.parametrize(
    "changes, kind, message",
    [
        refused(TypeError, "`in_features` is 8.0. Expected an integer", in_features=8.0),
        refused(TypeError, "`num_classes` is True. Expected an integer", num_classes=True),
        refused(ValueError, "`num_classes` is 0. Expected at least 1", num_classes=0),
        refused(TypeError, "`out_features` is 2. Expected a tuple of sizes", out_features=2),
        refused(ValueError, "`out_features` is -2. Expected at least 1", out_features=(3, -2)),
        refused(TypeError, "`bias` is 'no'. Expected True or False", bias="no"),
        refused(TypeError, "`weight` is a list. Expected a torch.Tensor", weight=[1.0]),
        refused(ValueError, "`reduction` is 'avg'. Expected one of", reduction="avg"),
    ],
)
def test_wrong_arguments_of_the_module(changes, kind, message):
    sizes = {"in_features": np.int64(8), "num_classes": 11}
    so.LinearCrossEntropyLoss(**sizes)
    with pytest.raises(kind, match=f"^LinearCrossEntropyLoss: {message}"):
        so.LinearCrossEntropyLoss(**{**sizes, **changes})


def heads(hidden=8, vocab=11):
    """Return functions of hidden states and a weight, by the names in their errors."""
    x, w = torch.randn(2, 5, hidden), torch.randn(vocab, hidden)
    t, module = torch.randint(vocab, (2, 5)), so.LinearCrossEntropyLoss(hidden, vocab)
    losses = so.losses

    def through_module(input, linear_weight):
        module.linear.weight = torch.nn.Parameter(linear_weight)
        return module(input, t)

    policies = {
        f"losses.{name}": (
            "linear_cross_entropy: `linear_weight`", "input",
            functools.partial(getattr(losses, name), target=t, **more),
        )
        for name, more in {
            "sft": {}, "dpo": {}, "cpo": {}, "orpo": {}, "simpo": {},
            "kto": {"desirable": torch.ones(2).bool()}, "grpo": {"advantages": torch.randn(2)},
            "dapo": {"advantages": torch.randn(2)}, "gspo": {"advantages": torch.randn(2)},
        }.items()
    }  # fmt: skip
    return {
        "linear_cross_entropy": (
            "linear_cross_entropy: `linear_weight`", "input",
            lambda x, w: so.linear_cross_entropy(x, w, t),
        ),
        "module": ("linear_cross_entropy: `linear_weight`", "input", through_module),
        "linear_kl_div": (
            "linear_kl_div: `linear_weight`", "input", lambda a, b: so.linear_kl_div(a, b, x, w),
        ),
        "teacher": (
            "linear_kl_div: `teacher_weight`", "teacher_input",
            lambda a, b: so.linear_kl_div(x, w, a, b),
        ),
        "kd": (
            "linear_kl_div: `linear_weight`", "input", lambda a, b: losses.kd(a, b, x, w, t),
        ),
        "reference": (
            "losses.dpo: `ref_weight`", "ref_input",
            lambda a, b: losses.dpo(x, w, t, ref_input=a, ref_weight=b),
        ),
        **policies,
    }  # fmt: skip


@pytest.mark.parametrize("name", list(heads()))
def test_logits_and_transposed_weights_are_named(name):
    weight, states, call = heads()[name]
    x, w = torch.randn(2, 5, 8), torch.randn(11, 8)
    call(x, w)
    logits = f"`{states}` looks like logits: pass the hidden states"
    transposed = f"{weight.split()[1]} looks transposed, as if it were (D, V): pass "
    for wrong, first, second in (
        ((x @ w.T, w), logits, transposed),
        ((x, w.T), transposed, logits),
        ((x, w.T.contiguous()), transposed, logits),
    ):
        with pytest.raises(ValueError) as error:
            call(*wrong)
        message = str(error.value)
        assert message.startswith(f"{weight} has shape {tuple(wrong[1].shape)}. Expected (V, D)")
        assert 0 < message.index(first) < message.index(second)
    with pytest.raises(ValueError) as error:
        call(torch.randn(2, 5, 7), w)
    assert "looks" not in str(error.value)


def test_logits_for_a_weight_of_positions_are_named():
    w, t = torch.randn(11, 3, 8), torch.randint(11, (5, 3))
    with pytest.raises(ValueError, match=r"\(11, 3, 8\). Expected \(V, d_1, ..., D\) .* logits"):
        so.linear_cross_entropy(torch.randn(5, 11), w, t)


def test_nested_hidden_states_are_named():
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])
    w = torch.randn(11, 8)
    for call in (
        lambda: so.linear_cross_entropy(nested, w, torch.randint(11, (5,))),
        lambda: so.linear_kl_div(nested, w, nested, w),
    ):
        with pytest.raises(TypeError, match=r"`input` is a nested tensor\. Expected a dense one"):
            call()
