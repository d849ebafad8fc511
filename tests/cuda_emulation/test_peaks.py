"""Peaks of the loss against plans for a GPU, by the tests of those for the CPU."""

import pytest
import torch

from ..borrow import borrowed
from ..ops import test_planner
from ..ops.test_planner import plans  # noqa: F401 (a fixture of the tests)
from .gpu import pretended

# On a GPU the tokens of this one are worked on, which takes a minute one by one.
LEFT_OUT_ON_A_CPU = "test_the_smallest_budget_has_room_for_the_state_of_ignored_tokens"
globals().update(borrowed(test_planner, frozenset({LEFT_OUT_ON_A_CPU})))


@pytest.fixture(scope="module", autouse=True, params=[True, False], ids=["adds_wide", "multiplies"])
def as_on_a_gpu(request):
    """With the kernel of the CPU: it allocates nothing either, and is a hundred times as fast."""
    with pretended(torch.ops.storage_ops, request.param):
        yield
