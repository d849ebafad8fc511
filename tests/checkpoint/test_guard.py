"""`storage_key` identifies the storage of a tensor."""

import pytest
import torch
from torch import func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import storage_ops as so
from storage_ops.checkpoint.saved.guard import storage_key, watch

from ..storage.test_storage_subclasses import Closed, Marked, Secretive, masked


def test_views_have_the_key_of_their_base():
    t = torch.randn(4, 3, requires_grad=True)
    views = [t[1:], t.t(), t.detach(), t.view(-1)[:0], torch.nn.Parameter(t.detach())]
    assert storage_key(t) is not None and {storage_key(v) for v in views} == {storage_key(t)}
    assert storage_key(t.detach().clone()) != storage_key(t)
    z = torch.randn(3, dtype=torch.cfloat)
    assert storage_key(z.conj()) == storage_key(z.conj().imag) == storage_key(z)


def test_a_discard_does_not_change_the_key():
    for t in (torch.ones(3), torch.ones(3).as_subclass(Marked)):
        key = storage_key(t)
        so.discard_storage(t)
        assert key is not None and storage_key(t) == key
    t = torch.ones(3)
    key = storage_key(t)
    watch(t, "gone")
    assert storage_key(t) == key


@pytest.mark.parametrize("value", [None, 3, "h", [torch.ones(1)], torch.Tensor])
def test_only_tensors_have_a_key(value):
    assert storage_key(value) is None


def test_a_wrapper_has_the_key_of_the_tensor_that_it_wraps():
    a, b = torch.ones(2), torch.ones(2)
    assert storage_key(TwoTensor(a, b)) == storage_key(a)
    assert storage_key(TwoTensor(Secretive(a), b)) == storage_key(b)
    assert storage_key(a.as_subclass(Marked)) == storage_key(a)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_without_a_storage_have_no_key():
    parts, dense = [torch.ones(2), torch.ones(3)], torch.eye(3)
    for value in (
        Secretive(torch.ones(2)),
        Secretive(torch.ones(0)),
        Closed(torch.ones(2)),
        masked(torch.ones(2)),
        TwoTensor(Secretive(torch.ones(2)), Secretive(torch.ones(2))),
        torch.nested.nested_tensor(parts),
        torch.nested.nested_tensor(parts, layout=torch.jagged),
        dense.to_sparse(),
        dense.to_sparse_csr(),
        dense.to_mkldnn(),
    ):
        assert storage_key(value) is None, type(value)


def test_tensors_that_torch_func_wraps_have_no_key():
    def f(x):
        keys.append(storage_key(x * 2))
        outside.append(storage_key(plain))
        return x.sum()

    plain, keys, outside = torch.ones(2), [], []
    func.grad(f)(torch.ones(2))
    func.vmap(f)(torch.ones(2, 2))
    func.jacfwd(f)(torch.ones(2))
    assert keys == [None] * 3 and outside == [storage_key(plain)] * 3


def test_fake_tensors_have_keys_even_if_their_size_is_unknown():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        t = mode.from_tensor(torch.ones(5), static_shapes=False)
        assert storage_key(t) is not None and storage_key(t[1:]) == storage_key(t)
        assert not mode.shape_env.guards
    meta = torch.ones(3, device="meta")
    assert storage_key(meta) == storage_key(meta[1:])
