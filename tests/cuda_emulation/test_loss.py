"""The whole loss as on a GPU passes the tests of the loss for GPU and CPU."""

import pytest
import torch
import torch.distributed as dist

import storage_ops as so

from ..borrow import borrowed
from ..cuda import test_loss as on_gpu
from ..loss import test_linear_cross_entropy, test_loss_options
from ..loss.test_loss_picked import (
    test_the_gradient_of_the_targets_log_probability_is_that_of_nll,
    test_topk_orders_equal_logits_by_class,
)
from ..loss.test_loss_wide import test_logits_are_not_rounded
from .gpu import pretended

pytestmark = pytest.mark.slow

# Both sides of their comparison would be the same here. Pairs of options are in the last file.
SAME_TWICE = frozenset({"test_every_option_alone", "test_every_pair_of_options"})
globals().update(borrowed(on_gpu, SAME_TWICE))
globals().update(borrowed(test_linear_cross_entropy))
globals().update(borrowed(test_loss_options))
__all__ = [
    "test_logits_are_not_rounded",
    "test_the_gradient_of_the_targets_log_probability_is_that_of_nll",
    "test_topk_orders_equal_logits_by_class",
]


@pytest.fixture(scope="module", autouse=True, params=[True, False], ids=["adds_wide", "multiplies"])
def as_on_a_gpu(request, compiled):
    """Run the loss as on a GPU, with nan in unwritten memory."""
    calls = compiled.calls
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pretended(compiled, request.param), pytest.MonkeyPatch.context() as patch:
            patch.setattr(on_gpu, "raises", lambda device: False)
            yield
    finally:
        torch.use_deterministic_algorithms(False)
    assert compiled.calls > calls


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_with_slices_a_target_out_of_range_makes_the_loss_nan(tmp_path):
    """The loss is nan although the target is in no rank's slice."""
    x, w, target = torch.randn(9, 8), torch.randn(20, 8), torch.randint(20, (9,))
    dist.init_process_group("gloo", f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        group = {"process_group": dist.group.WORLD}
        right = torch.nn.functional.cross_entropy(x @ w.T, target)
        torch.testing.assert_close(so.linear_cross_entropy(x, w, target, **group), right)
        for wrong in (-1, 20, 2**40):
            target[4] = wrong
            assert so.linear_cross_entropy(x, w, target, **group).isnan()
    finally:
        dist.destroy_process_group()
