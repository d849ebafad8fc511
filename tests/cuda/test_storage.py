"""Storage ops on a GPU."""

import gc

import pytest
import torch
from torch.library import opcheck

import storage_ops as so

from ..conftest import PATHS
from ..test_opcheck import CASES
from .devices import DTYPES, each_device, moved, side_stream, synchronize

KINDS = [*DTYPES, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]
NBYTES = 4 << 20
# Ops that opcheck does not test here: stream numbers differ on a GPU, one op takes no tensor, one
# needs a group of ranks (test_two_gpus).
ELSEWHERE = {"_record_stream", "_product_kind", "_check_ranks"}


def block(device, fill=0.0):
    return torch.full((NBYTES // 4,), fill, device=device)


@each_device
@pytest.mark.parametrize("dtype", KINDS)
def test_views_of_every_dtype_see_the_bytes_again(path, device, dtype):
    src = (10 * torch.randn(6, 8)).to(dtype).to(device)
    dst = torch.zeros_like(src)
    views = [dst[1:], dst.t(), dst.view(-1)[5::7], dst.detach(), dst.view(torch.uint8)]
    right = [src[1:], src.t(), src.view(-1)[5::7], src, src.view(torch.uint8)]
    version = dst._version
    so.discard_storage(dst)
    assert all(so.is_discarded(v) for v in views) and dst.shape == (6, 8)
    so.share_storage(dst, src)
    for view, expected in zip(views, right, strict=True):
        assert torch.equal(view, expected)
    assert dst._version == version and dst.device == src.device
    assert path == "copy" or dst.data_ptr() == src.data_ptr()


@each_device
def test_a_discard_frees_bytes_and_shared_bytes_live_until_their_last_user(path, zero_copy, device):
    with so.memory.measure(device):  # so that releases of tensors allocated here count later
        dst, src = block(device), block(device, 1.0)
    with so.memory.measure(device) as m:
        so.discard_storage(dst)
    assert m.kept_bytes == -NBYTES and m.peak_bytes == 0
    with so.memory.measure(device) as m:
        so.share_storage(dst, src)
    assert m.kept_bytes == m.peak_bytes == (0 if zero_copy else NBYTES)
    del src
    gc.collect()
    assert torch.equal(dst, block(device, 1.0))
    with so.memory.measure(device) as m:
        so.discard_storage(dst)
    assert m.kept_bytes == -NBYTES


@each_device
def test_either_tensor_of_a_share_can_be_freed_first(path, device):
    for discard_first in (True, False):
        dst, src = block(device), block(device, 3.0)
        so.share_storage(dst, src)
        so.discard_storage(dst if discard_first else src)
        other = src if discard_first else dst
        poison = block(device, 5.0)
        synchronize(device)
        assert (other == 3).all() and (poison == 5).all()


@each_device
def test_bad_arguments_change_nothing(path, device):
    dst, small = torch.ones(64, device=device), torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="src"):
        so.share_storage(dst, small)
    gone = torch.ones(64, device=device)
    so.discard_storage(gone)
    with pytest.raises(RuntimeError, match="src"):
        so.share_storage(dst, gone)
    elsewhere = torch.ones(64, device="meta" if device == "cpu" else "cpu")
    with pytest.raises(RuntimeError, match="device"):
        so.share_storage(dst, elsewhere)
    with pytest.raises(RuntimeError, match="`t` has layout"):
        so.discard_storage(torch.eye(3, device=device).to_sparse())
    assert torch.equal(dst, torch.ones(64, device=device))


@each_device
@pytest.mark.skipif(not so.info()["guard"], reason="no guard for this torch")
def test_reading_after_the_discard_is_an_error_and_the_device_still_works(device):
    t = torch.ones(64, device=device)
    view = t[3:]
    so.discard_storage(t, guard="gone")
    reads = [
        lambda: t + 1,
        lambda: view.sum(),
        lambda: t.cpu().clone(),
        lambda: t @ t,
        lambda: str(t),
    ]
    for read in reads:
        with pytest.raises(RuntimeError, match="gone"):
            read()
    synchronize(device)
    so.share_storage(t, torch.full((64,), 2.0, device=device))
    assert view.sum().item() == 122


@each_device
def test_debug_mode_detects_reads_without_a_guard(path, device):
    t = torch.ones(64, device=device)
    so.discard_storage(t, guard=None)
    with so.check_discarded(), pytest.raises(so.DiscardedTensorError, match="add"):
        t + 1
    synchronize(device)


@each_device
def test_autograd_sees_shared_bytes(path, device):
    x = torch.randn(64, device=device, requires_grad=True)
    h = x.exp()  # exp saves its result
    y = h.sum()
    copied = h.detach().clone()
    so.discard_storage(h)
    so.share_storage(h, copied)
    y.backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


@each_device
def test_bytes_that_a_side_stream_computed(path, device):
    for _ in range(5):
        dst = block(device)
        so.discard_storage(dst)
        with side_stream(device):
            so.share_storage(dst, block(device, 2.0) * 3)
        total = (dst * 1.0).sum()
        so.discard_storage(dst)
        assert total.item() == 6 * (NBYTES // 4)


@pytest.mark.cuda
def test_memory_used_on_another_stream_is_not_reused_early(path):
    side = torch.cuda.Stream()
    for _ in range(20):
        t, src = torch.zeros(1 << 22, device="cuda"), torch.ones(1 << 22, device="cuda")
        so.share_storage(t, src)
        del src
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            total = t.sum()
        so.discard_storage(t, streams=[side])
        poison = torch.full((1 << 22,), 5.0, device="cuda")
        torch.cuda.synchronize()
        assert total == 1 << 22 and poison[0] == 5


@pytest.mark.cuda
def test_pinned_memory(path):
    dst, src = torch.zeros(1 << 16, pin_memory=True), torch.ones(1 << 16).pin_memory()
    with pytest.raises(RuntimeError, match="pin_memory"):
        so.discard_storage(src)
    so.discard_storage(dst)
    so.share_storage(dst, src)
    assert torch.equal(dst.to("cuda", non_blocking=True).cpu(), src)
    assert path == "copy" or dst.is_pinned()


@each_device
def test_a_thousand_calls_keep_memory_flat(path, device):
    def calls(count):
        for _ in range(count):
            so.discard_storage(dst)
            so.share_storage(dst, src)

    with so.memory.measure(device):
        dst, src = torch.zeros(1 << 14, device=device), torch.ones(1 << 14, device=device)
        calls(10)
    with so.memory.measure(device) as m:
        calls(1000)
    assert m.kept_bytes == 0 and m.peak_bytes <= src.nbytes


@each_device
def test_measure_counts_exactly(device):
    with so.memory.measure(device) as m:
        kept = torch.empty(1 << 20, device=device)
        temporary = torch.empty(1 << 20, device=device)
        del temporary
    assert m.peak_bytes == 2 * kept.nbytes and m.kept_bytes == kept.nbytes
    assert max(s.nbytes for s in m.timeline) == m.peak_bytes


@pytest.mark.cuda
@pytest.mark.parametrize("name", sorted(CASES.keys() - ELSEWHERE))
def test_every_op_of_the_table_passes_opcheck(name):
    if name == "_alias_bytes" and "alias" not in PATHS:
        pytest.skip("this torch has no alias path")
    for args in CASES[name]:
        low = any(isinstance(t, torch.Tensor) and t.element_size() == 2 for t in args)
        tolerance = {"atol": 1e-2, "rtol": 1e-2} if low else {}
        opcheck(getattr(torch.ops.storage_ops, name).default, moved(args, "cuda"), **tolerance)
