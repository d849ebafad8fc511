"""Bytes that other code may use: each way in which torch creates a storage, and who frees it."""

import mmap
from statistics import median
from time import perf_counter

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import storage_ops as so

SIZE = 1 << 10


def values():
    return torch.arange(float(SIZE))


def saved(folder, **options):
    torch.save(values(), folder / "values.pt")
    return torch.load(folder / "values.pt", **options)


def mapped(folder, shared):
    (folder / "values").write_bytes(values().numpy().tobytes())
    return torch.from_file(str(folder / "values"), shared=shared, size=SIZE)


def anonymous_map():
    pages = mmap.mmap(-1, 4 * SIZE)
    pages.write(values().numpy().tobytes())
    return torch.frombuffer(pages, dtype=torch.float32)


def shown(show):
    t = values()
    t.kept = show(t)
    return t


EXTERNAL = {
    "from_numpy": lambda folder: torch.from_numpy(values().numpy().copy()),
    "as_tensor": lambda folder: torch.as_tensor(values().numpy().copy()),
    "frombuffer": lambda folder: torch.frombuffer(
        bytearray(values().numpy().tobytes()), dtype=torch.float32
    ),
    "mmap": lambda folder: anonymous_map(),
    "from_dlpack": lambda folder: torch.from_dlpack(values().numpy().copy()),
    "from_dlpack of torch": lambda folder: torch.from_dlpack(values()),
    "share_memory_": lambda folder: values().share_memory_(),
    "from_file": lambda folder: mapped(folder, shared=True),
    "from_file, private": lambda folder: mapped(folder, shared=False),
    "load": lambda folder: saved(folder),
    "load, mapped": lambda folder: saved(folder, mmap=True),
    "data pointer": lambda folder: torch.empty(0).set_(
        torch._C._construct_storage_from_data_pointer(POINTED.data_ptr(), POINTED.device, 4 * SIZE),
        0,
        (SIZE,),
    ),
    "numpy()": lambda folder: shown(lambda t: t.numpy()),
    "asarray": lambda folder: shown(np.asarray),
    "numpy() of a view": lambda folder: shown(lambda t: t[3:].numpy()),
}
POINTED = values()
OWN = {
    "factory": lambda: values(),
    "tensor of an array": lambda: torch.tensor(values().numpy()),
    "untyped storage": lambda: torch.empty(0).set_(values().untyped_storage(), 0, (SIZE,)),
    "storage.clone": lambda: torch.empty(0).set_(values().untyped_storage().clone(), 0, (SIZE,)),
    "from_buffer": lambda: torch.empty(0).set_(
        torch.UntypedStorage.from_buffer(
            values().numpy().tobytes(), byte_order="native", dtype=torch.float32
        ),
        0,
        (SIZE,),
    ),
    "deepcopy": lambda: values().clone().__deepcopy__({}),
    "sparse": lambda: values().to_sparse().to_dense(),
    "clone of a map": lambda: anonymous_map().clone(),
}


@pytest.mark.parametrize("kind", EXTERNAL)
def test_bytes_that_other_code_may_use_are_not_freed(path, kind, tmp_path):
    t = EXTERNAL[kind](tmp_path)
    with pytest.raises(RuntimeError, match="discard_storage: `t` has bytes that torch cannot"):
        so.discard_storage(t)
    with pytest.raises(RuntimeError, match="share_storage: `dst` has bytes that torch cannot"):
        so.share_storage(t, torch.zeros(2 * SIZE))
    assert not so.is_discarded(t) and torch.equal(t, values())
    received = torch.zeros(SIZE)
    so.share_storage(received, t)  # a source keeps its bytes
    with pytest.raises(RuntimeError, match="cannot resize"):
        so.discard_storage(t)
    assert torch.equal(received, values()) and torch.equal(t, values())


@pytest.mark.parametrize("kind", EXTERNAL)
def test_an_option_frees_bytes_of_other_code(path, kind, tmp_path):
    t = EXTERNAL[kind](tmp_path)
    if path == "copy":
        with pytest.raises(RuntimeError, match="allow_external=True needs a native library"):
            so.discard_storage(t, allow_external=True)
        with pytest.raises(RuntimeError, match="allow_external=True needs a native library"):
            so.share_storage(t, torch.zeros(2 * SIZE), allow_external=True)
        assert torch.equal(t, values())
        return
    so.discard_storage(t, allow_external=True)
    assert so.is_discarded(t)
    src = values() * 2
    so.share_storage(t, src)  # no bytes are left to lose
    assert torch.equal(t, src) and t.data_ptr() == src.data_ptr()
    other = EXTERNAL[kind](tmp_path)
    so.share_storage(other, src, allow_external=True)
    assert torch.equal(other, src) and other.data_ptr() == src.data_ptr()


@pytest.mark.parametrize("kind", OWN)
def test_bytes_that_only_torch_uses_are_freed(path, kind):
    t = OWN[kind]()
    so.discard_storage(t)
    assert so.is_discarded(t)
    so.share_storage(t, values())
    assert torch.equal(t, values())


def test_an_array_of_shared_bytes_keeps_them(path, zero_copy):
    """The storage that numpy reads keeps the bytes, even if the other one is freed."""
    dst, src = torch.zeros(SIZE), values()
    so.share_storage(dst, src)
    array = src.numpy()
    so.discard_storage(dst)
    if path == "binding":
        with pytest.raises(RuntimeError, match="`t` has bytes that torch cannot resize"):
            so.discard_storage(src)
    assert (array == values().numpy()).all()


def test_shared_bytes_that_move_to_shared_memory(path):
    first, second, third = torch.zeros(SIZE), values(), torch.zeros(SIZE)
    so.share_storage(first, second)
    second.share_memory_()  # gives its storage other bytes
    second[0] = 7
    with pytest.raises(RuntimeError, match="`t` has bytes that torch cannot resize"):
        so.discard_storage(second)
    so.share_storage(third, second)
    assert torch.equal(third, second) and torch.equal(first, values())
    so.discard_storage(first)
    so.share_storage(first, second)
    assert torch.equal(first, second)


@pytest.mark.parametrize("shows", [False, True])
def test_an_output_that_wraps_bytes_that_numpy_shows_is_kept(path, shows):
    def consumer(h):
        y = h * h
        if shows:
            arrays.append(h.b.detach().numpy())
        return y

    arrays = []
    x = TwoTensor(values(), values() + 1).requires_grad_()
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(torch.sin, x)
    with ckpt.consumer():
        y = consumer(h)
    ckpt.discard_output_and_register_recompute()
    assert so.is_discarded(h) is not shows
    if shows:
        assert (arrays[0] == x.b.detach().sin().numpy()).all()
    y.sum().backward()
    for part in ("a", "b"):
        at = getattr(x, part).detach()
        assert torch.allclose(getattr(x.grad, part), (2 * at).sin(), atol=1e-5)


def test_an_output_of_a_region_that_torch_did_not_allocate_is_kept():
    class FromElsewhere(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.detach().numpy() * 2)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    x = torch.randn(SIZE, requires_grad=True)
    so.output_discard(FromElsewhere.apply, lambda h: h * h)(x).sum().backward()
    torch.testing.assert_close(x.grad, 8 * x)


def test_a_share_costs_the_same_at_any_length_of_the_chain(path):
    chain, seconds = [torch.full((4,), 3.0)], []
    for _ in range(30_000 if path == "binding" else 2_000):
        chain.append(torch.zeros(4))
        start = perf_counter()
        so.share_storage(chain[-1], chain[-2])
        seconds.append(perf_counter() - start)
    assert median(seconds[-200:]) < 10 * median(seconds[100:300])
    with pytest.raises(RuntimeError, match="close a reference cycle"):
        so.share_storage(chain[0], chain[-1])
    last = chain[-1]
    del chain
    assert last.sum() == 12
