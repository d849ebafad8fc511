"""The emulated row kernel passes the tests of the CUDA and of the CPU kernel."""

import pytest

from ..borrow import borrowed
from ..cuda import test_row_kernel as on_gpu
from ..loss import test_row_kernel_fuzz as fuzz

NEEDS_A_GPU = frozenset(
    {
        "test_the_cuda_library_is_loaded",
        "test_rows_on_a_side_stream_run_on_that_stream",
    }
)
FOR_THE_CPU = frozenset(
    {
        "test_a_target_out_of_range_changes_nothing",  # a GPU cannot raise
        "test_vector_exponential_is_within_2_ulp",  # a GPU's exponential is less exact
    }
)

pytestmark = pytest.mark.in_turn
globals().update(borrowed(on_gpu, without=NEEDS_A_GPU))
globals().update(borrowed(fuzz, without=FOR_THE_CPU))


@pytest.fixture(scope="module", autouse=True)
def in_place_of_the_kernels(compiled):
    """Call the emulated kernel in both borrowed test files."""
    calls = compiled.calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_gpu, "GPU", on_gpu.Place("cpu", compiled))
        patch.setattr(fuzz, "OPS", compiled)
        yield
    assert compiled.calls > calls
