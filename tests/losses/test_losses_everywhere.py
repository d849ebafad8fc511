"""Every loss works in all dtypes, under autocast, in torch.func, without gradients, compiled."""

import pytest
import torch

from storage_ops import losses

D, E, V, S, T = 6, 5, 23, 4, 7


def batch(dtype=torch.float64, length=T):
    """Return the tensors that losses take, by name, and targets, for four sequences."""
    sizes = {"x": (S, length, D), "w": (V, D), "ref": (S, length, E), "ref_w": (V, E), "a": (S,)}
    tensors = {k: torch.randn(size).mul(0.5).to(dtype) for k, size in sizes.items()}
    tensors["old"] = torch.rand(S, length - 1).log().to(dtype)
    target = torch.randint(V, (S, length))
    target[0, :2] = target[1, -1:] = -100
    tensors["x"].requires_grad_()
    tensors["w"].requires_grad_()
    return tensors, target


def call(name, x, w, tensors, target):
    reference = {"ref_input": tensors["ref"], "ref_weight": tensors["ref_w"]}
    sampled = {"old_logps": tensors["old"].float(), "kl_weight": 0.1, "entropy_weight": 0.1}
    arguments, options = (x, w, target), {"shift": True}
    if name == "dpo":
        options |= reference
    elif name == "kto":
        desirable = torch.tensor([True, False, True, True])
        arguments, options = (*arguments, desirable), options | reference
    elif name == "kd":
        arguments = (x, w, tensors["ref"], tensors["ref_w"], target)
    elif name in ("grpo", "dapo", "dr_grpo", "gspo"):
        arguments, options = (*arguments, tensors["a"].float()), options | reference | sampled
        options |= {
            "clip_low": 1.0,
            "clip_high": 1e3,
        }  # rounding does not decide whether a value is clipped
    return getattr(losses, name)(*arguments, **options)


def leaves(tensors):
    return tensors["x"], tensors["w"]


each_loss = pytest.mark.parametrize("name", losses.__all__)


@pytest.mark.slow
@each_loss
def test_gradcheck_and_transforms(name):
    tensors, target = batch()

    def loss(x, w):
        return call(name, x, w, tensors, target)

    assert torch.autograd.gradcheck(loss, leaves(tensors))
    value = loss(*leaves(tensors))
    grads = torch.autograd.grad(value, leaves(tensors))
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(*leaves(tensors)), grads)
    with torch.no_grad():
        alone = loss(*leaves(tensors))
    assert not alone.requires_grad
    torch.testing.assert_close(alone, value.detach())


@each_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_autocast(name, dtype):
    tensors, target = batch(dtype)
    wide = {k: v.detach().double().requires_grad_(v.requires_grad) for k, v in tensors.items()}
    loss = call(name, *leaves(tensors), tensors, target)
    right = call(name, *leaves(wide), wide, target)
    assert loss.dtype == torch.float32
    close = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(loss.double(), right, rtol=close, atol=close)
    grads = torch.autograd.grad(loss, leaves(tensors))
    for ours, wanted in zip(grads, torch.autograd.grad(right, leaves(wide)), strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - wanted).norm() <= 2 * close * wanted.norm() + 1e-6
    if dtype == torch.bfloat16:  # autocast rounds float32 arguments to bfloat16
        full = {k: v.detach().float().requires_grad_(v.requires_grad) for k, v in tensors.items()}
        with torch.autocast("cpu", dtype):
            expected = call(name, *leaves(full), full, target)
        torch.testing.assert_close(expected, loss)
        rounded = torch.autograd.grad(expected, leaves(full))
        assert all(g.dtype == torch.float32 for g in rounded)
        torch.testing.assert_close(rounded, tuple(g.float() for g in grads), rtol=0.1, atol=2e-2)


@pytest.mark.slow
@each_loss
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(name, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (T, T + 2):
        tensors, target = batch(torch.float32, length)
        ours = compiled(name, *leaves(tensors), tensors, target)
        right = call(name, *leaves(tensors), tensors, target)
        torch.testing.assert_close(ours, right)
        got, wanted = (torch.autograd.grad(v, leaves(tensors)) for v in (ours, right))
        torch.testing.assert_close(got, wanted)
