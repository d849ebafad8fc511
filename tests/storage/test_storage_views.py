"""Views with lazy bits, tensors without their own bytes, and storages emptied by other code."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad

import storage_ops as so


def assert_unreadable(path, t):
    """Assert that a read raises, by torch's guard or else by the debug mode."""
    guarded = path == "binding" and so.info()["guard"]
    check = contextlib.nullcontext() if guarded else so.check_discarded()
    with check, pytest.raises(RuntimeError, match="discarded"):
        t + 1
    assert so.is_discarded(t)


def complex_numbers(n=5):
    return torch.randn(n, dtype=torch.cfloat)


LAZY = {
    "conjugate": lambda t: t.conj(),
    "negative": torch._neg_view,
    "conjugate negative": lambda t: torch._neg_view(t.conj()),
    "negative real": lambda t: t.conj().imag,
    "slice of a conjugate": lambda t: t.conj()[1:4],
    "hermitian": lambda t: t.view(1, -1).mH,
}


@pytest.mark.parametrize("kind", LAZY)
def test_ops_on_lazy_views_act_on_their_storage(path, zero_copy, kind):
    base, src = complex_numbers(), complex_numbers()
    view, right = LAZY[kind](base), LAZY[kind](src).clone()
    assert view.is_conj() or view.is_neg()
    before = base._version
    assert not so.is_discarded(view)
    so.discard_storage(view)
    assert base.untyped_storage().nbytes() == 0
    assert_unreadable(path, base)
    assert_unreadable(path, view)
    so.share_storage(view, src if view.is_complex() else torch.view_as_real(src))
    assert torch.equal(base, src) and torch.equal(view, right)
    assert (base.data_ptr() == src.data_ptr()) == zero_copy
    assert not so.is_discarded(view) and base._version == before


@pytest.mark.parametrize("kind", LAZY)
def test_the_bytes_of_a_lazy_source_are_bound(path, zero_copy, kind):
    dst, src = complex_numbers(), complex_numbers()
    view = LAZY[kind](src)
    so.share_storage(LAZY[kind](dst), view)
    assert torch.equal(dst, src)
    assert (dst.data_ptr() == src.data_ptr()) == zero_copy
    so.discard_storage(src)
    with pytest.raises(RuntimeError, match="`src` is discarded"):
        so.share_storage(LAZY[kind](dst), view)


WHOLE = {"plain": lambda t: t, **{k: LAZY[k] for k in list(LAZY)[:3]}}


@pytest.mark.parametrize("to", WHOLE)
@pytest.mark.parametrize("source", WHOLE)
def test_compiled_code_copies_instead_of_binding(to, source):
    def step(x):
        dst = x * 2
        so.discard_storage(WHOLE[to](dst))
        so.share_storage(WHOLE[to](dst), WHOLE[source](x * 3))
        return dst.clone()

    torch._dynamo.reset()
    x = complex_numbers()
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        assert torch.equal(run(x), x * 3)


def test_gradients_through_conjugate_views(path):
    x = torch.randn(4, dtype=torch.cfloat, requires_grad=True)
    h = x * (2 + 1j)
    y = (h.conj() * h).abs().sum() + h.view(2, 2).mH.sin().abs().sum()
    right = torch.autograd.grad(y, x, retain_graph=True)[0]
    view = h.conj()
    so.discard_storage(view)
    so.share_storage(view, (x * (2 + 1j)).detach())
    assert torch.equal(torch.autograd.grad(y, x)[0], right)


def zero(dtype):
    return torch._efficientzerotensor((3,), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.cfloat])
def test_zero_tensors_have_no_bytes_to_free_or_bind(path, dtype):
    t, other = zero(dtype), torch.ones(3, dtype=dtype)
    for odd in (t, t.conj(), t[1:]):
        assert not so.is_discarded(odd)
        with pytest.raises(RuntimeError, match="`t` has no bytes of its own, it is a zero tensor"):
            so.discard_storage(odd)
        with pytest.raises(RuntimeError, match="`dst` has no bytes of its own"):
            so.share_storage(odd, other)
        with pytest.raises(RuntimeError, match="`src` has no bytes of its own"):
            so.share_storage(other, odd)
    assert torch.equal(t + other, other) and torch.equal(other, torch.ones(3, dtype=dtype))
    with so.check_discarded():
        assert torch.equal(t * other, torch.zeros(3, dtype=dtype))


def test_forward_mode_duals_keep_their_tangents(path):
    primal, tangent, src = (torch.randn(3) for _ in range(3))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(primal, tangent)
        so.discard_storage(dual)
        assert_unreadable(path, primal)
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, tangent)
        so.share_storage(dual, src)
        value, slope = forward_ad.unpack_dual(dual.sin())
        torch.testing.assert_close(value, src.sin())
        torch.testing.assert_close(slope, src.cos() * tangent)


def test_inference_views(path):
    with torch.inference_mode():
        base, src = complex_numbers(), complex_numbers()
        view = base.conj()
    so.discard_storage(view)
    assert_unreadable(path, base)
    so.share_storage(view, src)
    assert torch.equal(base, src)


def test_meta_tensors_have_no_bytes_to_free(path):
    t, other = torch.ones(3, device="meta"), torch.ones(3, device="meta")
    so.discard_storage(t)
    so.share_storage(t, other)
    assert not so.is_discarded(t) and (t + 1).shape == (3,)
    with pytest.raises(RuntimeError, match=r"`src` is on meta\. Expected the device of `dst`, cpu"):
        so.share_storage(torch.ones(3), t)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_of_layout_strided_are_refused(path):
    parts = [torch.randn(2), torch.randn(3)]
    nested, plain = torch.nested.nested_tensor(parts), torch.ones(5)
    for call, name in (
        (lambda: so.discard_storage(nested), "t"),
        (lambda: so.share_storage(nested, plain), "dst"),
        (lambda: so.share_storage(plain, nested), "src"),
    ):
        with pytest.raises(
            RuntimeError, match=f"`{name}` is a nested tensor with layout torch.str"
        ):
            call()
    assert not so.is_discarded(nested)
    with so.check_discarded():
        assert torch.equal((nested + 1).unbind()[1], parts[1] + 1)
    nested.untyped_storage().resize_(0)
    assert so.is_discarded(nested)
    with (
        so.check_discarded(),
        pytest.raises(so.DiscardedTensorError, match="reads a nested tensor"),
    ):
        nested + 1


def test_a_storage_that_was_emptied_before_gets_a_guard(path):
    t, src = torch.randn(6), torch.randn(6)
    view, none = t.view(2, 3)[1:], t[:0]
    t.untyped_storage().resize_(0)
    for _ in range(2):
        so.discard_storage(t, guard="discarded in this test")
        assert_unreadable(path, t)
        assert_unreadable(path, view)
    if path == "binding" and so.info()["guard"]:
        with pytest.raises(RuntimeError, match="discarded in this test"):
            view.sum()
    so.share_storage(t, src)
    assert torch.equal(t, src) and torch.equal(view, src.view(2, 3)[1:]) and none.numel() == 0
    assert not any(map(so.is_discarded, (t, view, none)))


def test_a_guard_that_comes_after_the_discard(path):
    t = torch.ones(4)
    so.discard_storage(t, guard=None)
    t.untyped_storage().resize_(0) if path != "alias" else None
    so.discard_storage(t)
    assert_unreadable(path, t)
    so.share_storage(t, torch.zeros(4))
    assert torch.equal(t + 1, torch.ones(4))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2)])
def test_tensors_without_elements_stay_readable(path, shape):
    t = torch.empty(shape)
    for _ in range(2):
        so.discard_storage(t)
        assert (t + 1).shape == shape and not so.is_discarded(t)
    so.share_storage(t, torch.ones(4))
    assert (t + 1).shape == shape
    whole = torch.ones(4)
    view = whole[:0]
    whole.untyped_storage().resize_(0)
    so.discard_storage(view)  # no element is lost
    assert (view + 1).shape == (0,) and not so.is_discarded(view)


def test_a_storage_that_other_code_shrank(path):
    t, src = torch.ones(6), torch.randn(6)
    t.untyped_storage().resize_(8)
    assert so.is_discarded(t) and not so.is_discarded(t[:2])
    so.discard_storage(t)
    assert_unreadable(path, t)
    with pytest.raises(RuntimeError, match=r"`src` has 8 bytes of storage\. Expected at least 24"):
        so.share_storage(t, torch.ones(2))
    so.share_storage(t, src)
    assert torch.equal(t, src)
