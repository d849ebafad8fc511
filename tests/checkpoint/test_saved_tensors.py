"""C++ code and Python describe and compare the tensors that a region saves in the same way."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import storage_ops as so
from storage_ops.checkpoint.saved import saved_tensors
from storage_ops.checkpoint.saved.saved import Saved

from .paths import both_paths

path = both_paths(saved_tensors)


def test_info_names_the_code_in_use(path):
    for checksums in (False, True):
        saved = saved_tensors.saved_tensors(checksums, logs_ops=False)
        assert isinstance(saved, saved_tensors.SavedTensors) == (path == "Python")
        saved = saved_tensors.saved_tensors(checksums, logs_ops=True)
        assert isinstance(saved, saved_tensors.SavedTensors)
    assert path == "Python" or so.info()["saved_tensors"] == "C++"


def tensors():
    parameter = nn.Parameter(torch.randn(3, 4))
    part = torch.arange(24.0).view(2, 3, 4)
    changed = torch.zeros(2)
    changed.add_(1)
    return {
        "parameter": parameter,
        "view of a parameter": parameter.t(),
        "result": parameter * 2,
        "view of a result": (parameter * 2)[1:],
        "leaf": torch.randn(2, requires_grad=True),
        "strided": part[:, 1:, ::2],
        "expanded": torch.ones(1).expand(3),
        "number": torch.tensor(3),
        "empty": torch.empty(0, 2),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "complex": torch.randn(2, dtype=torch.complex64).conj(),
        "negated": torch.randn(2, dtype=torch.complex64).conj().imag,
        "long": torch.randn((1 << 20) + 3),
        "meta": torch.empty(2, device="meta"),
        "written": changed,
        "sparse": torch.eye(2).to_sparse(),
        "subclass": torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("name", tensors())
def test_descriptions_are_equal(path, name, checksums):
    t = tensors()[name]
    first = saved_tensors.saved_tensors(checksums, False)
    first.hook(lambda t: None, False)(t)
    recomputed = first.recompute(False)
    recomputed.hook()(t)
    recomputed.drop_graphs()
    expected = Saved(t, checksums)
    for (description,) in (recomputed.before(), recomputed.after()):
        assert all(getattr(description, at) == getattr(expected, at) for at in Saved.__slots__)
        assert (description.checksum is None) != checksums
        assert str(description) == str(expected)
    saved_tensors.check(recomputed, "a region", str)
    if path != "Python":
        assert recomputed.fits() == (name not in {"sparse", "subclass", "nested"})
    taken = recomputed.take(0)
    assert taken.grad_fn is None and not recomputed.has(0) and len(recomputed) == 0
    assert type(taken) is type(t) and taken._version == t._version
    if t.grad_fn is None:
        assert taken is t


CHANGES = {
    "shape": (lambda x: x, lambda x: x[1:], r"\(3, 4\) torch.float32 on cpu in forward and is"),
    "strides": (lambda x: x, lambda x: x.t().contiguous().t(), r"with strides \(1, 3\)"),
    "dtype": (lambda x: x, lambda x: x.double(), "torch.float64 on cpu when it"),
    "device": (lambda x: x, lambda x: x.to("meta"), "torch.float32 on meta when it"),
}


OTHER_BYTES = {
    "one bit": lambda t: t.view(torch.int32)[1].bitwise_xor_(1),
    "an exchange": lambda t: t.copy_(t.flip(0)),
    "a sign of zero": lambda t: t[:1].copy_(-t[:1]),
}


def saved_twice(before, after, checksums):
    """Return the recompute of a region that saves some tensors, and then others."""
    first = saved_tensors.saved_tensors(checksums, False)
    for t in before:
        first.hook(lambda t: None, False)(t)
    recomputed = first.recompute(False)
    for t in after:
        recomputed.hook()(t)
    return recomputed


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("change", OTHER_BYTES)
def test_other_bytes_are_named_if_checksums_are_compared(path, change, device):
    t = torch.cat((torch.zeros(1), torch.randn(4)))
    other = t.clone()
    OTHER_BYTES[change](other.data)  # without a new version
    equal = torch.ones(2, device=device)
    for again in (t.clone(), other):
        for checksums in (False, True):
            recomputed = saved_twice([equal, t], [equal, again], checksums)
            fits = again is not other or not checksums
            assert path == "Python" or recomputed.fits() == fits
            if fits:
                saved_tensors.check(recomputed, "a region", str)
            else:
                with pytest.raises(RuntimeError, match=r"tensor 1 .* with checksum \w{16} in"):
                    saved_tensors.check(recomputed, "a region", str)


def test_no_mode_sees_checksums_and_they_leave_gradients_alone(path):
    """The library computes them below modes and policies; a policy never takes their ops."""
    seen = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    x = torch.randn(5, 6, requires_grad=True)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6))
    (right,) = torch.autograd.grad(plain(x).sum(1).sum(), x)
    for options in ({}, {"ops_to_save": ["aten.sum", "aten.add", "aten.mul"]}):
        layer = so.CheckpointWrapper(copy.deepcopy(plain), determinism_check="checksum", **options)
        for _ in range(4):  # until the library runs the whole region
            (grad,) = torch.autograd.grad(layer(x).sum(1).sum(), x)
            assert torch.equal(grad, right)
        if path != "Python":
            with Ops():
                layer(x).sum().backward()
            assert not [op for op in seen if "bitwise" in op or "arange" in op]


@pytest.mark.parametrize("change", CHANGES)
def test_a_difference_is_named(path, change):
    before, after, message = CHANGES[change]
    first = saved_tensors.saved_tensors(False, False)
    first.hook(lambda t: None, False)(before(torch.randn(3, 4)))
    recomputed = first.recompute(False)
    recomputed.hook()(after(torch.randn(3, 4)))
    with pytest.raises(RuntimeError, match=message):
        saved_tensors.check(recomputed, "a region", lambda: "")


def test_a_write_after_a_tensor_was_saved_is_named(path):
    first = saved_tensors.saved_tensors(False, False)
    t = torch.ones(2)
    first.hook(lambda t: None, False)(t)
    recomputed = first.recompute(False)
    recomputed.hook()(t)
    t.add_(1)
    with pytest.raises(RuntimeError, match="modified in place after autograd had saved it"):
        saved_tensors.check(recomputed, "a region", str)
    recomputed = first.recompute(False)
    recomputed.hook()(t)
    with pytest.raises(RuntimeError, match="modified in place between"):
        saved_tensors.check(recomputed, "a region", str)


def test_another_parameter_of_the_same_shape_is_named(path):
    one, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    for view in (lambda p: p, lambda p: p.t()):
        first = saved_tensors.saved_tensors(False, False)
        first.hook(lambda t: None, False)(view(one))
        recomputed = first.recompute(False)
        recomputed.hook()(view(other))
        with pytest.raises(RuntimeError, match="is another parameter of shape"):
            saved_tensors.check(recomputed, "a region", str)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        h = nn.functional.dropout(nn.functional.silu(self.up(x)), 0.3)
        return x + self.down(h).relu_()


@pytest.mark.in_turn
@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"ops_to_save": ["aten.addmm"]}])
def test_gradients_are_those_of_eager(path, options):
    blocks = [nn.Sequential(Block(), Block()) for _ in range(2)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    for block in blocks[1]:
        so.CheckpointWrapper(block, **options)
    x = torch.randn(5, 6, requires_grad=True)
    grads = []
    for model in blocks:
        torch.manual_seed(3)
        y = model(x).sum()
        leaves = (x, *model.parameters())
        torch.autograd.grad(y, leaves, retain_graph=True)
        (first,) = torch.autograd.grad(y, [x], create_graph=True)
        grads.append(torch.autograd.grad(y + first.square().sum(), leaves))
    assert all(map(torch.equal, *grads))


def test_saved_tensors_can_be_read_twice_and_from_python(path):
    layer = so.CheckpointWrapper(Block())
    y = layer(torch.randn(5, 6, requires_grad=True))
    node = y.grad_fn.next_functions[1][0]
    first, second = node._saved_result, node._saved_result
    assert torch.equal(first, second)
    y.sum().backward()
    with pytest.raises(RuntimeError, match=r"second backward pass|second time"):
        y.sum().backward()


def test_modes_see_a_detach_and_may_raise(path):
    """An error of a mode around the backward reaches the caller unchanged."""

    class Stops(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops.aten.detach.default:
                raise KeyboardInterrupt
            return op(*args, **(kwargs or {}))

    first = saved_tensors.saved_tensors(False, False)
    t = torch.ones(2, requires_grad=True) * 2
    first.hook(lambda t: None, False)(t)
    recomputed = first.recompute(False)
    recomputed.hook()(t)
    with Stops(), pytest.raises(KeyboardInterrupt):
        recomputed.drop_graphs()
    assert len(recomputed) == 0


def test_saved_tensors_are_freed_with_their_nodes(path):
    """A region holds no tensor after its backward, without the garbage collector."""
    layer = so.CheckpointWrapper(Block())
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(5, 6, requires_grad=True)
        inputs = x * 2
        alive = weakref.ref(inputs), weakref.ref(inputs.untyped_storage())
        y = layer(inputs)
        del inputs
        assert alive[0]() is not None
        y.sum().backward()
        del y
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


def test_an_index_out_of_range_is_an_error(path):
    first = saved_tensors.saved_tensors(False, False)
    recomputed = first.recompute(False)
    assert not recomputed.has(0) and recomputed.take_in_task(0) is None
    with pytest.raises((IndexError, KeyError)):
        recomputed.take(0)
    if path != "Python":
        with pytest.raises(TypeError):
            type(recomputed)()
