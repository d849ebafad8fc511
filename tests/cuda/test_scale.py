"""`_scale` multiplies a gradient by the upstream number, and skips the work for 1."""

import pytest
import torch

import storage_ops as so

from .devices import DTYPES, captured, each_device

SCALE = torch.ops.storage_ops._scale
NAN = float("nan")


@each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by", [1.0, 0.37, 0.0, -2.0, float("inf"), NAN])
@pytest.mark.parametrize("count", [0, 1, 7, 4099, 3 * (1 << 15) + 5])
@pytest.mark.parametrize("first", [0, 1])  # first element: 1 is not on a 16-byte boundary
def test_products(device, dtype, by, count, first):
    numbers = torch.randn(count, dtype=torch.float64).to(dtype)
    numbers[: count // 9] = NAN
    whole = torch.full((first + count + 64,), 7, dtype=dtype, device=device)
    scaled = whole[first : first + count]
    scaled.copy_(numbers)
    factor = torch.tensor(by, dtype=torch.promote_types(dtype, torch.float32), device=device)
    SCALE(scaled, factor)
    right = (numbers.to(factor.dtype) * by).to(dtype)
    torch.testing.assert_close(scaled.cpu(), right, rtol=0, atol=0, equal_nan=True)
    scaled.fill_(7)
    assert (whole == 7).all()


@each_device
def test_other_shapes_of_the_same_memory(device):
    matrix = torch.randn(3, 5, 7, device=device)
    right = matrix * 0.5
    SCALE(matrix, torch.tensor([[0.5]], device=device).squeeze())
    assert torch.equal(matrix, right)


@pytest.mark.cuda
@pytest.mark.parametrize("wrong", ["strided", "two", "cpu", "dtype", "integers"])
def test_errors(wrong):
    numbers, factor = torch.ones(4, 4, device="cuda"), torch.tensor(2.0, device="cuda")
    numbers = {"strided": numbers.t()[:2], "integers": numbers.int()}.get(wrong, numbers)
    factor = {"two": factor.repeat(2), "cpu": factor.cpu(), "dtype": factor.double()}.get(
        wrong, factor
    )
    with pytest.raises(RuntimeError, match="_scale: "):
        SCALE(numbers, factor)
    assert (numbers == 1).all()


@each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_that_are_scaled_before_backward(device, dtype):
    x, w, b = torch.randn(24, 16), torch.randn(90, 16), torch.randn(90)
    target, by = torch.randint(90, (24,), device=device), torch.tensor(1.0, device=device)
    leaves = [t.to(device, dtype).requires_grad_() for t in (x, w, b)]
    (so.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2])).backward()
    once = [leaf.grad.clone() for leaf in leaves]

    def step():
        for leaf in leaves:
            leaf.grad = None
        loss = so.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2])
        (loss * by).backward()
        return [leaf.grad for leaf in leaves]

    run = captured(device, step)
    for value in (1.0, 8.0, 1.0, 0.375):  # the captured launches read the value on the device
        by.fill_(value)
        scaled = run()
        for ours, first in zip(scaled, once, strict=True):
            wide = first.to(torch.promote_types(dtype, torch.float32))
            # float16 gradients are computed with the factor, so small ones do not underflow.
            rtol = 4e-3 if dtype == torch.float16 else 0
            torch.testing.assert_close(ours, (wide * value).to(dtype), rtol=rtol, atol=rtol / 100)


def test_a_factor_of_one_skips_the_multiplication(monkeypatch):
    numbers, right = torch.full((3,), NAN), torch.ones(3)
    monkeypatch.setattr(torch.Tensor, "mul_", lambda self, by: self.copy_(right))
    SCALE(numbers, torch.tensor(1.0))
    assert numbers.isnan().all()
    SCALE(numbers, torch.tensor(1.5))
    assert torch.equal(numbers, right)
