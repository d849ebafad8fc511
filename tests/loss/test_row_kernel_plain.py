"""The row kernel in plain torch passes the tests of the native one."""

from types import SimpleNamespace

import pytest

from storage_ops.loss import reference as loss_reference

from ..borrow import borrowed
from . import test_row_kernel_fuzz as fuzz

PLAIN = SimpleNamespace(_cross_entropy_rows=loss_reference.cross_entropy_rows)
globals().update(borrowed(fuzz, frozenset({"test_vector_exponential_is_within_2_ulp"})))


@pytest.fixture(scope="module", autouse=True)
def in_place_of_the_native_kernel():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz, "OPS", PLAIN)
        yield
