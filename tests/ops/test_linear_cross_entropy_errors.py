"""Wrong arguments, targets out of range, and the derivatives that do not exist."""

import pytest
import torch

import storage_ops as so
from storage_ops.ops import reference


def arguments(**changes):
    given = {
        "input": torch.randn(5, 8),
        "linear_weight": torch.randn(11, 8),
        "target": torch.randint(11, (5,)),
        "linear_bias": None,
    }
    return {**given, **changes}


@pytest.mark.parametrize(
    "changes, kind, message",
    [
        ({"reduction": "avg"}, ValueError, "reduction is 'avg'; expected one of"),
        ({"input": torch.ones(5, 8).long()}, TypeError, "input is torch.int64; expected a float"),
        ({"linear_weight": torch.randn(11, 7)}, ValueError, r"shape \(11, 7\); expected \(V, D\)"),
        ({"linear_weight": torch.randn(8)}, ValueError, r"shape \(8,\); expected \(V, D\)"),
        ({"target": torch.randn(5)}, TypeError, "target is torch.float32; expected int64 or int32"),
        ({"target": torch.ones(6).long()}, ValueError, r"shape \(6,\); expected that of input"),
        ({"linear_bias": torch.randn(8)}, ValueError, r"shape \(8,\); expected \(11,\)"),
        ({"linear_bias": torch.randn(11).double()}, TypeError, "linear_bias is torch.float64"),
        ({"linear_weight": torch.randn(11, 8).bfloat16()}, TypeError, "expected torch.float32"),
        ({"linear_weight": torch.randn(11, 8, device="meta")}, ValueError, "is on meta; expected"),
        ({"memory_budget": 10}, ValueError, "memory_budget is 10 bytes; expected at least"),
    ],
)
def test_wrong_arguments(changes, kind, message):
    with pytest.raises(kind, match=message):
        so.linear_cross_entropy(**arguments(**changes))


@pytest.mark.parametrize("wrong", [11, -1, 2**40])
@pytest.mark.parametrize("kernel", ["native", "reference"])
def test_target_out_of_range(wrong, kernel, monkeypatch):
    given = arguments()
    given["target"][3] = wrong
    message = rf"target {wrong} is out of range; expected ignore_index \(-100\) or a class index"
    with pytest.raises(RuntimeError, match=message):
        if kernel == "native":
            so.linear_cross_entropy(**given)
        else:
            logits = given["input"] @ given["linear_weight"].t()
            reference.cross_entropy_rows(
                logits, given["target"], None, torch.ones(()), torch.empty(5), -100, True
            )


def test_autocast_takes_no_integers():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="input is torch"):
        so.linear_cross_entropy(**arguments(input=torch.ones(5, 8).long()))


def test_double_backward_is_refused():
    given = arguments()
    x, w = given["input"].requires_grad_(), given["linear_weight"].requires_grad_()
    grad = torch.autograd.grad(so.linear_cross_entropy(**given), x, create_graph=True)[0]
    first = torch.autograd.grad(so.linear_cross_entropy(**given), x)[0]
    assert torch.equal(grad, first)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grad.pow(2).sum().backward()
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum() + w.sum() * 0, x)


def test_forward_mode_is_refused():
    given = arguments()

    def loss(w):
        return so.linear_cross_entropy(**{**given, "linear_weight": w})

    with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
        torch.func.jvp(loss, (given["linear_weight"],), (given["linear_weight"],))


def test_gradient_outputs_of_the_raw_op_are_not_scaled_under_the_caller():
    given = arguments()
    x, w = given["input"].requires_grad_(), given["linear_weight"].requires_grad_()
    loss, grad_input, _, _ = torch.ops.storage_ops.linear_cross_entropy(
        x, w, given["target"], None, "mean", -100, None, [True, True, False]
    )
    before = grad_input.clone()
    (3 * loss).backward()
    assert torch.equal(grad_input, before)
    assert torch.allclose(x.grad, 3 * before)


def test_raw_op_with_too_small_a_mask_still_gives_right_gradients():
    given = arguments()
    x, w = given["input"].requires_grad_(), given["linear_weight"].requires_grad_()
    loss, *_ = torch.ops.storage_ops.linear_cross_entropy(
        x, w, given["target"], None, "mean", -100, None, [False, False, False]
    )
    loss.backward()
    right = torch.autograd.grad(so.linear_cross_entropy(x, w, given["target"]), (x, w))
    assert torch.allclose(x.grad, right[0]) and torch.allclose(w.grad, right[1])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_like_linear(reduction):
    given = arguments()
    x, w = given["input"].requires_grad_(), given["linear_weight"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ours = so.linear_cross_entropy(**given, reduction=reduction).sum()
        right = reference.linear_cross_entropy(**given, reduction=reduction).sum()
    assert ours.dtype == right.dtype == torch.float32
    torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)
    ours.backward()  # outside of autocast, as in every training loop
    expected = torch.autograd.grad(right, (x, w))
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, expected[0], rtol=5e-2, atol=2e-2)
    torch.testing.assert_close(w.grad, expected[1], rtol=5e-2, atol=2e-2)
