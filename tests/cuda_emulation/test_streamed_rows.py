"""The emulated streamed form of the row kernel passes the tests for a GPU."""

import pytest
import torch

from storage_ops.loss.planning.schedule import GRADIENT, UPDATE

from ..borrow import borrowed
from ..cuda import test_streamed_rows as on_gpu
from ..cuda.test_row_kernel import STREAMED, Place, Rows

pytestmark = pytest.mark.in_turn

# No cluster of the emulated GPU has memory for these rows.
FOR_A_GPU = frozenset({"test_long_rows"})
globals().update(borrowed(on_gpu, without=FOR_A_GPU))


@pytest.fixture(scope="module", autouse=True)
def in_place_of_the_kernel(compiled):
    calls = compiled.calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_gpu, "PLACE", Place("cpu", compiled))
        yield
    assert compiled.calls > calls


@pytest.mark.parametrize(
    "columns, dtype, cluster",
    [(2560, torch.bfloat16, 1), (2561, torch.bfloat16, 2), (5121, torch.float16, 4),
     (10241, torch.bfloat16, 8), (10240, torch.float32, 8), (20481, torch.bfloat16, 0),
     (1000, torch.float64, 0)],
)  # fmt: skip
def test_a_row_has_as_many_blocks_as_it_needs(compiled, columns, dtype, cluster):
    """`cluster` is 0 if the kernel must fall back to the direct form."""
    p = Rows(dtype, columns, rows=2)
    p.run(Place("cpu", compiled), (0, columns, UPDATE | GRADIENT | STREAMED))
    assert (compiled.library.emulation_dynamic_bytes() > 0) == (cluster > 0)
    assert compiled.library.emulation_cluster() == max(cluster, 1)


@pytest.mark.parametrize("phases", [UPDATE, GRADIENT, UPDATE | GRADIENT])
@pytest.mark.parametrize("offset, scale", [(0, 0.5), (1, 1.0), (0, -1.0)])
def test_calls_that_cannot_be_streamed_take_the_direct_form(compiled, phases, offset, scale):
    p = Rows(torch.float32, 400, logit_scale=scale)
    p.run(Place("cpu", compiled), (offset, 400, phases | STREAMED))
    streams = phases == UPDATE | GRADIENT and offset == 0 and scale > 0
    assert (compiled.library.emulation_dynamic_bytes() > 0) == streams


def test_the_direct_form_is_the_default(compiled):
    Rows(torch.bfloat16, 2000).run(Place("cpu", compiled), (0, 2000, UPDATE | GRADIENT))
    assert compiled.library.emulation_dynamic_bytes() == 0
