"""The emulated `_scale` passes the tests for a GPU."""

import pytest
import torch

from ..borrow import borrowed
from ..cuda import test_scale as on_gpu

pytestmark = pytest.mark.in_turn

OF_OTHER_KERNELS = frozenset(
    {"test_errors", "test_losses_that_are_scaled_before_backward",
     "test_a_factor_of_one_skips_the_multiplication"}
)  # fmt: skip
globals().update(borrowed(on_gpu, without=OF_OTHER_KERNELS))


@pytest.fixture(scope="module", autouse=True)
def in_place_of_the_kernel(compiled):
    calls = compiled.calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_gpu, "SCALE", compiled._scale)
        yield
    assert compiled.calls > calls


@pytest.mark.parametrize("wrong", ["strided", "two", "dtype", "integers"])
def test_errors(compiled, wrong):
    numbers, factor = torch.ones(4, 4), torch.tensor(2.0)
    numbers = {"strided": numbers.t()[:2], "integers": numbers.int()}.get(wrong, numbers)
    factor = {"two": factor.repeat(2), "dtype": factor.double()}.get(wrong, factor)
    with pytest.raises(RuntimeError, match="_scale: "):
        compiled._scale(numbers, factor)
    assert (numbers == 1).all()
