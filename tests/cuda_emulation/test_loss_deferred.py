"""Logits in the memory of the weight's gradient pass the tests of a CPU, as on a GPU."""

import pytest
import torch

from ..borrow import borrowed
from ..loss import test_loss_deferred
from ..loss.test_loss_deferred import formed, schedules  # noqa: F401 (fixtures)
from .gpu import pretended

pytestmark = pytest.mark.slow
# Emulated kernels read memory, which simulated tensors do not have.
globals().update(borrowed(test_loss_deferred, frozenset({"test_a_simulation_counts_the_memory"})))


@pytest.fixture(scope="module", autouse=True, params=[True, False], ids=["adds_wide", "multiplies"])
def as_on_a_gpu(request, compiled):
    """Run the loss as on a GPU, with nan in unwritten memory."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pretended(compiled, request.param), pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_loss_deferred, "DEVICE", "h100")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
