"""Peaks of the loss against plans for a GPU, by the tests of those for the CPU."""

import pytest
import torch

from ..borrow import borrowed
from ..loss import test_planner
from ..loss.test_planner import plans  # noqa: F401 (a fixture of the tests)
from .gpu import pretended

LEFT_OUT = frozenset(
    {
        "test_the_smallest_budget_has_room_for_the_state_of_ignored_tokens",  # a GPU works on each
        "test_the_processor_is_asked_and_no_mode_of_fake_tensors",
    }
)

pytestmark = pytest.mark.slow
globals().update(borrowed(test_planner, LEFT_OUT))


@pytest.fixture(scope="module", autouse=True, params=[True, False], ids=["adds_wide", "multiplies"])
def as_on_a_gpu(request):
    """With the kernel of the CPU: it allocates nothing either, and is a hundred times as fast."""
    with pretended(torch.ops.storage_ops, request.param):
        yield
