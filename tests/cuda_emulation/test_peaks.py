"""Peaks of the loss as on a GPU pass the tests of plans for the CPU."""

import pytest
import torch

from ..borrow import borrowed
from ..loss import test_planner
from ..loss.test_planner import plans  # noqa: F401 (a fixture)
from .gpu import pretended

LEFT_OUT = frozenset(
    {
        "test_the_smallest_budget_has_room_for_the_state_of_ignored_tokens",  # a GPU computes them
        "test_facts_of_the_processor_are_read_outside_of_dispatch_modes",
    }
)

pytestmark = pytest.mark.slow
globals().update(borrowed(test_planner, LEFT_OUT))


@pytest.fixture(scope="module", autouse=True, params=[True, False], ids=["adds_wide", "multiplies"])
def as_on_a_gpu(request):
    """Use the CPU kernel, which also allocates nothing, and is a hundred times as fast."""
    with pretended(torch.ops.storage_ops, request.param):
        yield
