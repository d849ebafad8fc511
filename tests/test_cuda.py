"""The ops and wrappers on a GPU. Skipped without one; STORAGE_OPS_REQUIRE_CUDA=1 forbids that."""

import pytest
import torch
from torch.nn import functional as F

import storage_ops as so
from storage_ops.ops import reference

pytestmark = pytest.mark.cuda


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def test_the_cuda_library_is_loaded():
    assert any("libstorage_ops_cu" in name for name in so.info()["loaded"]), so.info()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has("storage_ops::_cross_entropy_rows", "CUDA")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 7, 1000, 50257])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("bias", [False, True])
def test_row_kernel_against_the_reference(dtype, columns, index, bias):
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    logits, target = numbers(33, columns, dtype=dtype), torch.randint(columns, (33,)).to(index)
    target[::5] = -100
    target, scale = target.cuda(), numbers(33, dtype=arithmetic)
    offset = numbers(columns, dtype=dtype) if bias else None
    results = []
    for kernel in (torch.ops.storage_ops._cross_entropy_rows, reference.cross_entropy_rows):
        work, nll = logits.clone(), torch.full((33,), float("nan"), device="cuda", dtype=arithmetic)
        kernel(work, target, offset, scale, nll, -100, True)
        results.append((work.double(), nll.double()))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 1e-2)
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_targets_out_of_range_make_nan_and_touch_nothing(wrong):
    fence = torch.full((3, 64), 7.0, device="cuda")
    logits, target = fence[1:2, :50], torch.tensor([wrong], device="cuda")
    nll = torch.zeros(1, device="cuda")
    scale = torch.ones((), device="cuda")
    torch.ops.storage_ops._cross_entropy_rows(logits, target, None, scale, nll, -100, True)
    torch.cuda.synchronize()
    assert nll.isnan().all() and logits.isnan().all()
    assert (fence[0] == 7).all() and (fence[2] == 7).all() and (fence[1, 50:] == 7).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_cross_entropy(dtype, reduction):
    x, w = numbers(512, 256, dtype=dtype), numbers(5003, 256, dtype=dtype)
    target = torch.randint(5003, (512,), device="cuda")
    grads = []
    for double in (False, True):
        leaves = [(t.double() if double else t).detach().requires_grad_() for t in (x, w)]
        loss = (reference if double else so).linear_cross_entropy(
            *leaves, target, reduction=reduction
        )
        loss.sum().backward()
        grads.append([loss.detach().double(), *(t.grad.double() for t in leaves)])
    for ours, right in zip(*grads, strict=True):
        error = (ours - right).norm() / right.norm()
        assert error < (1.5e-2 if dtype == torch.bfloat16 else 1e-4)


def test_cuda_graph_capture_of_the_loss():
    x, w = numbers(64, 32), numbers(500, 32).requires_grad_()
    target = torch.randint(500, (64,), device="cuda")

    def step():
        return torch.autograd.grad(so.linear_cross_entropy(x, w, target), w)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        right = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert torch.equal(captured, right)


def test_discard_frees_and_share_binds_without_a_copy(path):
    dst, src = numbers(1 << 20), numbers(1 << 20)
    before = torch.cuda.memory_allocated()
    so.discard_storage(dst)
    assert torch.cuda.memory_allocated() == before - (4 << 20)
    so.share_storage(dst, src)
    assert torch.equal(dst, src)
    if path != "copy":
        assert dst.data_ptr() == src.data_ptr()


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


def test_pinned_memory(path):
    dst, src = torch.zeros(1 << 16).pin_memory(), torch.ones(1 << 16).pin_memory()
    so.discard_storage(dst)
    so.share_storage(dst, src)
    assert torch.equal(dst.to("cuda", non_blocking=True).cpu(), src)
    assert path == "copy" or dst.is_pinned()


def test_reading_after_discard_is_an_error_not_a_poisoned_context():
    t = numbers(8)
    so.discard_storage(t, guard="gone")
    with pytest.raises(RuntimeError, match="gone"):
        t + 1
    torch.cuda.synchronize()
    assert numbers(4).sum().isfinite()


def test_output_discard_with_dropout_equals_eager(path):
    up, down = torch.nn.Linear(64, 256).cuda(), torch.nn.Linear(256, 64).cuda()
    x = numbers(32, 64).requires_grad_()
    producer = lambda x: F.dropout(F.gelu(up(x)), 0.3)  # noqa: E731
    results = []
    for way in (lambda x: down(producer(x)), so.output_discard(producer, down)):
        torch.manual_seed(1)
        results.append(torch.autograd.grad(way(x).square().sum(), (x, up.weight, down.weight)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_measure():
    with so.memory.measure("cuda") as m:
        kept = torch.empty(1 << 20, device="cuda")
        temporary = torch.empty(1 << 20, device="cuda")
        del temporary
    assert m.peak_bytes == 2 * kept.nbytes and m.kept_bytes == kept.nbytes
    assert max(s.nbytes for s in m.timeline) == m.peak_bytes
