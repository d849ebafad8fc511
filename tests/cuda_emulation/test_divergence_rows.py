"""The emulated row kernel of divergences passes the tests of the CPU kernel."""

import pytest

from ..borrow import borrowed
from ..divergence import test_divergence_rows

FOR_THE_CPU = frozenset({"test_the_vector_logarithm"})  # a GPU's exponential is less exact
globals().update(borrowed(test_divergence_rows, without=FOR_THE_CPU))


@pytest.fixture(scope="module", autouse=True)
def in_place_of_the_kernel(compiled):
    calls = compiled.calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_divergence_rows, "OPS", compiled)
        yield
    assert compiled.calls > calls
