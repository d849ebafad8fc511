import contextlib
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import storage_ops as so

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape).mul(100).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_discard_then_share_restores_every_view(path, dtype):
    t, src = numbers(6, 5, dtype=dtype), numbers(6, 5, dtype=dtype)
    views = [t[1:4], t.t(), t.view(-1)[7:], t.detach()]
    so.discard_storage(t)
    assert all(so.is_discarded(v) for v in [t, *views])
    assert t.shape == (6, 5) and t.stride() == (5, 1) and t.untyped_storage().nbytes() == 0
    so.share_storage(t, src)
    expected = [src[1:4], src.t(), src.view(-1)[7:], src]
    assert torch.equal(t, src)
    assert all(torch.equal(v, e) for v, e in zip(views, expected, strict=True))
    assert not so.is_discarded(t)


def test_share_is_zero_copy_and_writes_are_seen_on_both_sides(path, zero_copy):
    dst, src = numbers(8), numbers(8)
    so.share_storage(dst, src)
    assert (dst.data_ptr() == src.data_ptr()) == zero_copy
    if zero_copy:
        src[3] = 7.0
        dst[4] = 8.0
        assert dst[3] == 7.0 and src[4] == 8.0


def test_version_counters_do_not_change(path):
    dst, src = numbers(4), numbers(4)
    dst.add_(1)
    before = dst._version, src._version
    so.discard_storage(dst)
    so.share_storage(dst, src)
    assert (dst._version, src._version) == before


def test_autograd_uses_the_bytes_that_are_bound(path):
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    h = x * 2
    y = h @ w
    so.discard_storage(h)
    so.share_storage(h, (x * 2).detach())
    y.sum().backward()
    assert torch.equal(w.grad, (x * 2).t() @ torch.ones(3, 2))


def test_the_bytes_exist_until_both_sides_are_freed(path):
    dst, src = numbers(1000), numbers(1000)
    expected = src.clone()
    so.share_storage(dst, src)
    so.discard_storage(src)
    assert torch.equal(dst, expected) and so.is_discarded(src)
    so.share_storage(src, dst)
    so.discard_storage(dst)
    del dst
    assert torch.equal(src, expected)


def test_resizing_the_source_from_outside_does_not_change_the_other(path):
    dst, src = numbers(1000), numbers(1000)
    expected = src.clone()
    so.share_storage(dst, src)
    if path == "alias":  # torch refuses to resize an alias of foreign memory
        with pytest.raises(RuntimeError, match="resiz"):
            src.untyped_storage().resize_(0)
    else:
        src.untyped_storage().resize_(0)
    poison = [torch.full((1000,), 3.0) for _ in range(8)]
    assert torch.equal(dst, expected) and len(poison) == 8


def test_several_tensors_share_one_source(path):
    src = numbers(16)
    users = [numbers(16) for _ in range(5)]
    for user in users:
        so.share_storage(user, src)
    expected = src.clone()
    so.discard_storage(src)
    del src
    assert all(torch.equal(user, expected) for user in users)


def test_a_chain_of_shares(path):
    first, second, third = numbers(8), numbers(8), numbers(8)
    expected = third.clone()
    so.share_storage(second, third)
    so.share_storage(first, second)
    so.discard_storage(third)
    so.discard_storage(second)
    assert torch.equal(first, expected)


def test_a_share_and_a_discard_can_be_repeated(path):
    dst, src = numbers(8), numbers(8)
    for _ in range(3):
        so.share_storage(dst, src)
    assert torch.equal(dst, src)
    for _ in range(3):
        so.discard_storage(dst)
    assert so.is_discarded(dst)
    so.share_storage(src, src)
    so.share_storage(src, src[2:])
    assert src.numel() == 8


def test_slices_with_offsets_read_their_own_bytes(path):
    base, other = numbers(20), numbers(20)
    tail = base[5:9]
    so.discard_storage(tail)
    assert so.is_discarded(base)
    so.share_storage(tail, other[5:9])
    assert torch.equal(base, other) and torch.equal(tail, other[5:9])
    src = numbers(20)
    so.share_storage(tail[1:], src[3:])  # another shape with all elements that are read
    assert torch.equal(base, src)


def test_a_larger_source_is_bound_whole(path):
    dst, src = numbers(4), numbers(10)
    so.discard_storage(dst)
    so.share_storage(dst, src)
    assert torch.equal(dst, src[:4]) and dst.untyped_storage().nbytes() == 40


def test_bytes_of_another_dtype_are_bound_through_a_view(path, zero_copy):
    dst, src = torch.zeros(4, dtype=torch.int32), torch.randn(4)
    so.discard_storage(dst)
    so.share_storage(dst, src.view(torch.int32))
    assert torch.equal(dst.view(torch.float32), src)
    assert (dst.data_ptr() == src.data_ptr()) == zero_copy
    pairs, values = torch.zeros(4, 2), torch.randn(4, dtype=torch.cfloat)
    so.discard_storage(torch.view_as_complex(pairs))
    so.share_storage(pairs, torch.view_as_real(values))
    assert torch.equal(torch.view_as_complex(pairs), values)


@pytest.mark.parametrize("discarded", [False, True])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float64), (torch.int32, torch.float32),
               (torch.bfloat16, torch.float16), (torch.cfloat, torch.double),
               (torch.cfloat, torch.float32), (torch.float32, torch.cfloat)],
)  # fmt: skip
def test_another_dtype_is_refused(path, dtypes, discarded):
    dst, src = numbers(4, dtype=dtypes[0]), numbers(4, 4, dtype=dtypes[1])
    expected, version = src.clone(), dst._version
    if discarded:
        so.discard_storage(dst)
    message = f"share_storage: `src` is {dtypes[1]}. Expected {dtypes[0]}, the dtype of `dst`. To "
    message += f"bind the bytes as they are, pass src.view({dtypes[0]})."
    for call in (so.share_storage, torch.ops.storage_ops._check_storage):
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
            call(dst, src)
    assert so.is_discarded(dst) == discarded and dst._version == version
    assert torch.equal(src, expected)
    so.share_storage(src, src.view(torch.uint8))  # nothing happens with one storage


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.cfloat, torch.float32)])
@pytest.mark.parametrize("where", ["compiled", "fake", "meta", "functionalize", "vmap", "estimate"])
def test_another_dtype_is_refused_without_bytes(where, dtypes):
    def step(dst=None, src=None):
        device = "meta" if where == "meta" else "cpu"
        dst = torch.ones(4, dtype=dtypes[0], device=device) if dst is None else dst
        src = torch.ones(4, 2, dtype=dtypes[1], device=device) if src is None else src
        so.share_storage(dst, src)
        return dst.clone()

    torch._dynamo.reset()
    run = {
        "compiled": torch.compile(step, fullgraph=True, backend="aot_eager"),
        "functionalize": torch.func.functionalize(step),
        "vmap": lambda: torch.vmap(step)(
            torch.ones(3, dtype=dtypes[0]), torch.ones(3, 2).to(dtypes[1])
        ),
        "estimate": lambda: so.memory.estimate(step),
    }.get(where, step)
    with (
        FakeTensorMode() if where == "fake" else contextlib.nullcontext(),
        pytest.raises(Exception, match=rf"`src` is {dtypes[1]}. Expected {dtypes[0]}, the dtype"),
    ):
        run()


@pytest.mark.parametrize("run", [lambda step: torch.func.functionalize(step)(), so.memory.estimate])
def test_one_storage_of_two_dtypes_stays_unchanged(run):
    def step():
        t = torch.ones(4)
        so.share_storage(t, t.view(torch.int32))
        so.share_storage(t, t[1:])
        return t

    run(step)


def test_no_elements(path):
    empty, other = torch.empty(0, 3), torch.empty(0)
    so.discard_storage(empty)
    assert not so.is_discarded(empty)
    so.share_storage(empty, other)
    so.share_storage(empty, torch.ones(4))
    assert empty.shape == (0, 3)


def test_scalars_and_expanded_tensors(path):
    scalar, wide = torch.tensor(3.0), torch.tensor([2.0]).expand(5)
    so.discard_storage(scalar)
    so.share_storage(scalar, torch.tensor(4.0))
    assert scalar == 4.0
    so.discard_storage(wide)
    so.share_storage(wide, torch.tensor([6.0]))
    assert torch.equal(wide, torch.full((5,), 6.0))


def test_inference_tensors(path):
    with torch.inference_mode():
        t, src = torch.ones(4), torch.zeros(4)
        so.discard_storage(t)
        so.share_storage(t, src)
    assert torch.equal(t, torch.zeros(4))


def test_parameters_and_tensors_that_need_grad(path):
    p, src = torch.nn.Parameter(torch.ones(4)), torch.full((4,), 2.0)
    frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    for kind, t in {
        "a Parameter": p, "a Parameter,": frozen, "a view of a Parameter": p[1:],
        "a leaf tensor that requires grad": torch.ones(4, requires_grad=True),
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError, match=f"discard_storage: `t` is {kind}.*allow_leaf=True"):
            so.discard_storage(t)
        assert torch.equal(t, torch.ones_like(t))
    so.discard_storage(p, allow_leaf=True)
    so.share_storage(p, src)
    (p * 3).sum().backward()
    assert torch.equal(p, src) and torch.equal(p.grad, torch.full((4,), 3.0))


def test_dtensor_acts_on_its_local_tensor(path, tmp_path):
    from torch import distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        make = [DTensor.from_local(numbers(4), mesh, [Replicate()]) for _ in range(2)]
        t, src = make
        so.discard_storage(t)
        assert so.is_discarded(t) and so.is_discarded(t.to_local())
        so.share_storage(t, src)
        assert torch.equal(t.to_local(), src.to_local())
    finally:
        dist.destroy_process_group()


def test_the_guard_raises_the_message_and_is_removed(path):
    t = torch.ones(4)
    view = t[1:]
    so.discard_storage(t, guard="freed by the test")
    if path != "binding" or not so.info()["guard"]:
        with so.check_discarded(), pytest.raises(so.DiscardedTensorError, match="discarded"):
            t + 1
    else:
        reads = [
            lambda: t + 1,
            lambda: view.sum(),
            lambda: str(t),
            lambda: t.clone(),
            lambda: t.numpy(),
            lambda: t.data_ptr(),
            lambda: t.view(2, 2) @ torch.ones(2, 2),
            lambda: torch.ones(4).copy_(t),
            lambda: t.add_(1),
        ]
        for read in reads:
            with pytest.raises(RuntimeError, match="freed by the test"):
                read()
    assert t.shape == (4,) and view.storage_offset() == 1 and so.is_discarded(t)
    so.share_storage(t, torch.full((4,), 5.0))
    assert torch.equal(view, torch.full((3,), 5.0))
    so.discard_storage(t)
    assert so.is_discarded(t)


def test_without_a_guard_a_storage_may_be_resized_from_outside(path):
    t = torch.ones(4)
    so.discard_storage(t, guard=None)
    if path == "alias":
        so.share_storage(t, torch.zeros(4))
    else:
        t.untyped_storage().resize_(16)
    t.fill_(3)
    assert not so.is_discarded(t) and torch.equal(t, torch.full((4,), 3.0))


def test_check_discarded_allows_metadata_and_views(path):
    t = torch.ones(4)
    so.discard_storage(t)
    with so.check_discarded():
        assert t.view(2, 2).shape == (2, 2) and t.detach().stride() == (1,)
        so.share_storage(t, torch.zeros(4))
        assert (t + 1).sum() == 4


def test_a_function_is_compiled_after_check_discarded():
    torch._dynamo.reset()
    counter, x = CompileCounter(), torch.ones(4)
    compiled = torch.compile(lambda x: x.sin() + 1, backend=counter)
    with so.check_discarded() as check, check:
        compiled(x)
    assert counter.frame_count == 0
    compiled(x)
    assert counter.frame_count == 1


def test_check_discarded_detects_reads_by_torch_cond():
    def halved(x):
        return torch.cond(x.sum() > 0, lambda x: (x / 2,), lambda x: (-x,), (x,))[0]

    torch._dynamo.reset()
    t = torch.ones(4)
    with so.check_discarded():
        assert torch.equal(halved(t), t / 2)
        so.discard_storage(t)
        with pytest.raises(so.DiscardedTensorError, match="discarded"):
            halved(t)
    assert torch.equal(halved(torch.ones(4)), torch.full((4,), 0.5))
