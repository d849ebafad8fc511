"""The whole loss as on a GPU, by the tests of the loss there and on the CPU."""

import pytest
import torch

from ..borrow import borrowed
from ..cuda import test_loss as on_gpu
from ..loss import test_linear_cross_entropy, test_loss_options
from ..loss.test_loss_picked import (
    test_of_equal_logits_the_lowest_class_comes_first,
    test_the_gradient_of_the_targets_log_probability_is_that_of_nll,
)
from ..loss.test_loss_wide import test_logits_are_not_rounded
from .gpu import pretended

# Here both sides of their comparison would be the same; the pairs of options are in the last file.
SAME_TWICE = frozenset({"test_every_option_alone", "test_every_pair_of_options"})
globals().update(borrowed(on_gpu, SAME_TWICE))
globals().update(borrowed(test_linear_cross_entropy))
globals().update(borrowed(test_loss_options))
__all__ = [
    "test_logits_are_not_rounded",
    "test_of_equal_logits_the_lowest_class_comes_first",
    "test_the_gradient_of_the_targets_log_probability_is_that_of_nll",
]


@pytest.fixture(scope="module", autouse=True, params=[True, False], ids=["adds_wide", "multiplies"])
def as_on_a_gpu(request, compiled):
    """Memory that nothing was written to is nan."""
    calls = compiled.calls
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pretended(compiled, request.param), pytest.MonkeyPatch.context() as patch:
            patch.setattr(on_gpu, "raises", lambda device: False)
            yield
    finally:
        torch.use_deterministic_algorithms(False)
    assert compiled.calls > calls
