"""The emulated sums of tiles pass the tests for the CPU."""

import pytest

from ..borrow import borrowed
from ..loss import test_tile_selection as native

pytestmark = pytest.mark.in_turn
globals().update(borrowed(native, frozenset({"test_out_of_range_is_refused"})))


@pytest.fixture(scope="module", autouse=True)
def in_place_of_the_kernels(compiled):
    calls = compiled.calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "OPS", compiled)
        yield
    assert compiled.calls > calls
