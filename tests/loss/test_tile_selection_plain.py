"""The sums of tiles in plain torch pass the tests of the native ones."""

from types import SimpleNamespace

import pytest

from storage_ops.loss import reference

from ..borrow import borrowed
from . import test_tile_selection as native

PLAIN = SimpleNamespace(
    _tile_sums=reference.tile_sums,
    _gather_gradient=reference.gather_gradient,
    _put_rows=reference.put_rows,
)
globals().update(borrowed(native, frozenset({"test_out_of_range_is_refused"})))


@pytest.fixture(scope="module", autouse=True)
def in_place_of_the_native_kernel():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "OPS", PLAIN)
        yield
