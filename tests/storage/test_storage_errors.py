"""Wrong input raises an error that names argument, value and expectation, and changes nothing."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import storage_ops as so


def unchanged(*tensors):
    return [(t._version, t.clone()) for t in tensors]


def assert_unchanged(tensors, before):
    for t, (version, value) in zip(tensors, before, strict=True):
        assert t._version == version and torch.equal(t, value)


def test_source_too_small(path):
    dst, src = torch.ones(8), torch.ones(4)
    before = unchanged(dst, src)
    with pytest.raises(RuntimeError, match=r"`src` has 16 bytes of storage. Expected at least 32"):
        so.share_storage(dst, src)
    assert_unchanged((dst, src), before)


def test_source_too_small_for_the_rest_of_a_discarded_storage(path):
    base, src = torch.ones(100), torch.ones(4)
    head = base[:4]
    so.discard_storage(base)
    with pytest.raises(RuntimeError, match="Expected at least 400"):
        so.share_storage(head, src)
    assert so.is_discarded(base)


def test_source_too_small_after_a_foreign_resize(path):
    dst, src = torch.ones(8), torch.ones(4)
    dst.untyped_storage().resize_(0)
    assert so.is_discarded(dst)
    with pytest.raises(RuntimeError, match="Expected at least 32"):
        so.share_storage(dst, src)


def test_a_refused_destination_that_numpy_reads_does_not_change_the_source(path):
    dst, src = torch.ones(4), torch.zeros(8)
    array = dst.numpy()
    with pytest.raises(RuntimeError, match="`dst` has bytes that torch cannot resize"):
        so.share_storage(dst, src)
    assert src.untyped_storage().resizable() and array.sum() == 4


@pytest.mark.parametrize("subclass", [False, True])
@pytest.mark.parametrize(
    "options, message",
    [
        ({"guard": 5}, "`guard` is 5. Expected a string or None"),
        ({"guard": b"gone"}, "`guard` is b'gone'. Expected"),
        ({"streams": [1]}, "`streams` has 1. Expected a list of torch.Stream"),
        ({"streams": [None]}, "`streams` has None. Expected"),
        ({"streams": 3}, "`streams` has 3. Expected"),
    ],
)
def test_options_of_another_type(path, options, message, subclass):
    t = TwoTensor(torch.ones(4), torch.ones(4)) if subclass else torch.ones(4)
    with pytest.raises(TypeError, match=message):
        so.discard_storage(t, **options)
    assert not so.is_discarded(t)
    so.discard_storage(t, streams=iter([torch.Stream(device="cpu")]))
    assert so.is_discarded(t)


def test_discarded_source(path):
    dst, src = torch.ones(4), torch.ones(4)
    before = unchanged(dst)
    so.discard_storage(src)
    for view in (src, src[:0], src.view(2, 2)):
        with pytest.raises(
            RuntimeError, match=r"`src` is discarded\. Expected a tensor with bytes"
        ):
            so.share_storage(dst, view)
    assert_unchanged((dst,), before)


def test_sharing_back_would_close_a_cycle(path):
    first, second, third = torch.ones(4), torch.zeros(4), torch.full((4,), 2.0)
    so.share_storage(second, third)
    so.share_storage(first, second)
    for dst, src in [(second, first), (third, second), (third, first)]:
        with pytest.raises(RuntimeError, match="close a reference cycle"):
            so.share_storage(dst, src)
    assert torch.equal(first, torch.full((4,), 2.0))


def test_sharing_back_after_new_bytes_is_allowed(path):
    first, second = torch.ones(4), torch.zeros(4)
    so.share_storage(first, second)
    so.discard_storage(second)
    so.share_storage(second, first)
    assert torch.equal(second, torch.zeros(4))
    so.share_storage(torch.ones(4), first)  # once an endless loop between the two
    with pytest.raises(RuntimeError, match="close a reference cycle"):
        so.share_storage(first, second)


def test_different_devices(path):
    with pytest.raises(RuntimeError, match=r"`src` is on .*. Expected the device of `dst`"):
        so.share_storage(torch.ones(4), torch.ones(4, device="meta"))


BASE = torch.arange(40.0)
PLACES = {
    "strides": (BASE[:9].view(3, 3).t(), r"strides \[1, 3\] and storage offset 0"),
    "offset": (BASE[9:18].view(3, 3), r"strides \[3, 1\] and storage offset 9"),
    "expanded": (BASE[:3].expand(3, 3), r"strides \[0, 1\] and storage offset 0"),
    "later": (BASE[9:], "elements 9 to 39 of its storage. Expected all of elements 0 to 8"),
    "fewer": (BASE[:8], "elements 0 to 7 of its storage. Expected all of elements 0 to 8"),
    "gaps": (BASE[::2], "elements 0 to 38 of its storage, with gaps. Expected all of elements"),
    "rows": (BASE.view(4, 10)[:, :5], "elements 0 to 34 of its storage, with gaps. Expected"),
    "nothing": (BASE[:0], "no elements. Expected those that `dst` reads"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_elements_that_the_source_does_not_have(path, kind):
    src, message = PLACES[kind]
    dst = torch.zeros(3, 3)
    before = unchanged(dst, src)
    with pytest.raises(RuntimeError, match=f"^share_storage: `src` has {message}"):
        so.share_storage(dst, src)
    assert_unchanged((dst, src), before)
    so.discard_storage(dst)
    with pytest.raises(RuntimeError, match=message):
        so.share_storage(dst, src)
    assert so.is_discarded(dst)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("where", ["fake", "meta", "functionalize", "estimate"])
def test_elements_that_the_source_does_not_have_without_bytes(where, kind):
    geometry = (PLACES[kind][0].shape, PLACES[kind][0].stride(), PLACES[kind][0].storage_offset())

    def step():
        device = "meta" if where == "meta" else "cpu"
        dst, src = torch.ones(3, 3, device=device), torch.ones(40, device=device)
        with pytest.raises(RuntimeError, match=PLACES[kind][1]):
            so.share_storage(dst, src.as_strided(*geometry))
        so.share_storage(dst, src)
        return dst

    with FakeTensorMode() if where == "fake" else contextlib.nullcontext():
        {
            "functionalize": torch.func.functionalize(step),
            "estimate": lambda: so.memory.estimate(step),
        }.get(where, step)()


@pytest.mark.parametrize(
    "src",
    [
        torch.randn(40),
        torch.randn(4, 10).t(),
        torch.randn(9, 1, 4).permute(2, 1, 0),
        torch.randn(40).unfold(0, 5, 3),  # overlapping windows
        torch.randn(1, 3, 3),
        torch.randn(9, 1).expand(9, 7),
    ],
)
def test_a_source_of_another_shape_with_all_elements(path, src):
    dst, whole = torch.zeros(3, 3), torch.empty(0).set_(src.untyped_storage())
    so.share_storage(dst, src)
    assert torch.equal(dst.view(-1), whole[:9])


def test_strides_of_a_single_element_do_not_matter(path):
    dst, src = torch.zeros(1, 3), torch.randn(1, 3).as_strided((1, 3), (7, 1))
    so.share_storage(dst, src)
    assert torch.equal(dst, src)


def odd_tensors():
    dense = torch.ones(3, 3)
    lazy = torch._lazy_clone(torch.ones(9)).view(3, 3)
    return {
        "sparse": (dense.to_sparse(), "Expected a strided tensor"),
        "sparse csr": (dense.to_sparse_csr(), "Expected a strided tensor"),
        "mkldnn": (dense.to_mkldnn(), "Expected a strided tensor"),
        "quantized": (torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8), "is quantized"),
        "lazy": (lazy, "copy-on-write"),
    }


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["sparse", "sparse csr", "mkldnn", "quantized", "lazy"])
def test_layouts_without_plain_bytes(path, kind):
    odd, message = odd_tensors()[kind]
    with pytest.raises(RuntimeError, match=message):
        so.discard_storage(odd)
    with pytest.raises(RuntimeError, match=message):
        so.share_storage(torch.ones(9), odd)
    with pytest.raises(RuntimeError, match=message):
        so.share_storage(odd, torch.ones(9))


def test_fake_tensor_outside_its_mode(path):
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(4))
        so.discard_storage(fake)  # a simulation inside the mode
    for call in (
        lambda: so.discard_storage(fake),
        lambda: so.share_storage(torch.ones(4), fake),
        lambda: so.share_storage(fake, torch.ones(4)),
    ):
        with pytest.raises(RuntimeError, match="is a FakeTensor, which has no bytes"):
            call()


@pytest.mark.parametrize("value", [None, 3, "h", [torch.ones(2)]])
def test_not_a_tensor(path, value):
    name = type(value).__name__
    with pytest.raises(TypeError, match=f"`t` is {name}. Expected a torch.Tensor"):
        so.discard_storage(value)
    with pytest.raises(TypeError, match=f"`src` is {name}"):
        so.share_storage(torch.ones(2), value)
    with pytest.raises(TypeError, match=f"`dst` is {name}"):
        so.share_storage(value, torch.ones(2))
