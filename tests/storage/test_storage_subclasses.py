"""Tensor subclasses: the storage ops act on the wrapped tensors, or say that they cannot."""

import warnings

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

import storage_ops as so

from .test_storage_views import assert_unreadable


class Secretive(torch.Tensor):
    """Wraps a tensor without naming it, and runs every op on it."""

    @staticmethod
    def __new__(cls, inner):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Secretive, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


class Hollow(Secretive):
    """Runs the storage ops on the wrapper itself, which has no bytes."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace == "storage_ops":
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Closed(Secretive):
    """Supports only its own ops."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace == "storage_ops":
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class Marked(torch.Tensor):
    """Has its own bytes, and receives ops below autograd."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


class Fussy(torch.Tensor):
    """Refuses all functions of torch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} on a Fussy tensor")


def masked(t):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a prototype
        return torch.masked.masked_tensor(t, torch.ones_like(t, dtype=torch.bool))


def of(kind, *parts):
    """Return a tensor of a subclass over the first tensors of `parts`, and these."""
    if kind is TwoTensor:
        return TwoTensor(*parts), parts
    if kind in (Marked, Fussy):
        return parts[0].as_subclass(kind), parts[:1]
    return kind(parts[0]), parts[:1]


@pytest.mark.parametrize("kind", [TwoTensor, Secretive, Marked, Fussy, torch.nn.Buffer])
def test_wrapped_tensors_are_freed_and_bound(path, zero_copy, kind):
    t, inner = of(kind, torch.randn(4), torch.randn(4))
    values = torch.randn(4), torch.randn(4)
    src, sources = of(kind, *(v.clone() for v in values))
    assert not so.is_discarded(t)
    for _ in range(2):
        so.discard_storage(t)
        assert so.is_discarded(t)
        for part in inner:
            assert_unreadable(path, part)
    so.share_storage(t, src)
    assert not so.is_discarded(t)
    for part, source, value in zip(inner, sources, values, strict=False):
        assert torch.equal(part, value) and (part.data_ptr() == source.data_ptr()) == zero_copy


@pytest.mark.parametrize("kind", [Closed, masked])
def test_errors_name_a_subclass_that_refuses_the_ops(path, kind):
    inner, plain = torch.randn(4), torch.randn(4)
    values = inner.clone(), plain.clone()
    t = kind(inner)
    name = type(t).__name__
    for call, argument in (
        (lambda: so.discard_storage(t), "discard_storage: `t`"),
        (lambda: so.is_discarded(t), "is_discarded: `t`"),
        (lambda: so.share_storage(t, plain), "share_storage: `dst`"),
        (lambda: so.share_storage(plain, t), "share_storage: `src`"),
    ):
        with pytest.raises(RuntimeError, match=f"{argument} is a {name}, which does not let"):
            call()
    assert torch.equal(inner, values[0]) and torch.equal(plain, values[1])


def test_a_wrapper_is_not_confused_with_its_tensor(path):
    inner, plain = torch.ones(4), torch.zeros(4)
    t = Hollow(inner)
    with pytest.raises(RuntimeError, match="`t` has no bytes of its own"):
        so.discard_storage(t)
    with pytest.raises(RuntimeError, match="`dst` has no bytes of its own"):
        so.share_storage(t, plain)
    with pytest.raises(RuntimeError, match="`src` has no bytes of its own"):
        so.share_storage(plain, t)
    assert not so.is_discarded(t) and inner.sum() == 4 and plain.sum() == 0


@pytest.mark.parametrize("kind", [TwoTensor, Secretive, Closed, Marked])
def test_check_discarded_detects_reads_by_subclasses(path, kind):
    t, inner = of(kind, torch.randn(4), torch.randn(4))
    with so.check_discarded():
        assert (t + 1).shape == (4,)
    so.discard_storage(inner[-1])
    with so.check_discarded(), pytest.raises(so.DiscardedTensorError, match="reads a tensor of"):
        t + 1


def test_nothing_changes_if_one_of_the_tensors_is_refused(path):
    kept = torch.ones(4)
    array = kept.numpy()
    t = TwoTensor(torch.ones(4), kept)
    with pytest.raises(RuntimeError, match="cannot resize"):
        so.discard_storage(t)
    assert not so.is_discarded(t) and torch.equal(t.a, torch.ones(4)) and array.sum() == 4
    dst, src = TwoTensor(torch.zeros(4), torch.zeros(4)), TwoTensor(torch.ones(4), torch.ones(4))
    so.discard_storage(src.b)
    with pytest.raises(RuntimeError, match="`src` is discarded"):
        so.share_storage(dst, src)
    assert torch.equal(dst.a, torch.zeros(4)) and torch.equal(src.a, torch.ones(4))
    with pytest.raises(
        RuntimeError, match=r"`src` holds 1 tensors\. Expected 2, the number of tensors in `dst`"
    ):
        so.share_storage(dst, torch.ones(4))


def test_jagged_nested_tensors_keep_the_lengths_that_others_use(path, zero_copy):
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    h = x * 2
    y = h.sin()
    so.discard_storage(h)
    assert so.is_discarded(h) and not so.is_discarded(y) and not so.is_discarded(x)
    assert_unreadable(path, h._values)
    with so.check_discarded(), pytest.raises(so.DiscardedTensorError, match="nested tensor"):
        h + 1
    assert torch.equal(y.unbind()[1], (parts[1] * 2).sin())
    src = (x * 2).detach()
    so.share_storage(h, src)
    assert (h._values.data_ptr() == src._values.data_ptr()) == zero_copy
    grad = torch.autograd.grad(y.values().sum(), x)[0]
    torch.testing.assert_close(grad.unbind()[0], 2 * (parts[0] * 2).cos())


def test_streams_are_recorded_on_every_tensor(monkeypatch):
    seen = []
    monkeypatch.setattr(
        so.storage.storage, "_discard", lambda t, guard, streams, external: seen.append(streams)
    )
    streams = torch.Stream(device="cpu"), torch.Stream(device="cpu")
    so.discard_storage(TwoTensor(torch.ones(1), torch.ones(1)), streams=iter(streams))
    assert seen == [streams] * 2


def test_a_result_is_freed_only_after_its_collective(path, tmp_path):
    from torch import distributed as dist
    from torch.distributed import _functional_collectives as collectives

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        t = collectives.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        assert isinstance(t, collectives.AsyncCollectiveTensor) and not t.completed
        so.discard_storage(t)
        assert t.completed and so.is_discarded(t)
        so.share_storage(t, torch.full((4,), 2.0))
        assert torch.equal(t + 0, torch.full((4,), 2.0))
    finally:
        dist.destroy_process_group()
