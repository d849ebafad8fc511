"""Sums over tiles and parts of a product are in full precision with any dtype and settings."""

import threading
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from storage_ops import _autograd
from storage_ops.loss.engine.sums import bias_gradient
from storage_ops.loss.planning import cost
from storage_ops.matmul import aten
from storage_ops.matmul.full_sums import full_sums

MATMUL = torch.backends.cuda.matmul
NAMES = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (900, 300), (3, cost.PLAIN + 5)])
def test_the_bias_gradient_is_summed_in_the_dtype_of_its_result(dtype, shape):
    dz = torch.randn(shape[0], shape[1] + 3, dtype=torch.float64).to(dtype)[:, : shape[1]]
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.randn(shape[1], dtype=wide)
    right, size = out.double() + dz.double().sum(0), out.double().abs() + dz.double().abs().sum(0)
    bias_gradient(dz, out)
    assert ((out.double() - right).abs() <= 4 * torch.finfo(wide).eps * size).all()


class OnGpu(torch.Tensor):
    """A tensor that reports a GPU as its device."""

    device, is_cuda = torch.device("cuda"), True


@pytest.fixture
def settings():
    before = {name: getattr(MATMUL, name) for name in NAMES}
    yield before
    for name, value in before.items():
        setattr(MATMUL, name, value)


@pytest.mark.parametrize("allowed", [(True, True, False), (False, True, True)])
def test_products_on_a_gpu_are_summed_in_full_precision(settings, allowed):
    for name, value in zip(NAMES, allowed, strict=True):
        setattr(MATMUL, name, value)
    seen = []

    def kernel(t):
        seen.append([getattr(MATMUL, name) for name in NAMES])
        if len(seen) == 2:
            raise KeyboardInterrupt
        _autograd.exact(kernel)(t)

    with pytest.raises(KeyboardInterrupt):
        _autograd.exact(kernel)(torch.empty(2).as_subclass(OnGpu))
    assert seen == [[False] * 3] * 2
    assert tuple(getattr(MATMUL, name) for name in NAMES) == allowed


def test_a_forbidden_split_stays_forbidden(settings):
    name = NAMES[0]
    setattr(MATMUL, name, (False, False))
    with full_sums:
        pass
    assert getattr(MATMUL, f"{name}_split_k") is False
    setattr(MATMUL, name, True)


def test_an_interrupt_during_a_change_of_settings_leaves_none_changed(settings, monkeypatch):
    for name in NAMES[:2]:
        setattr(MATMUL, name, True)
    change, calls = type(MATMUL).__setattr__, []

    def interrupted(self, name, value):
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        change(self, name, value)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(MATMUL), "__setattr__", interrupted)
        full_sums.__enter__()
    assert all(getattr(MATMUL, name) for name in NAMES[:2])
    with full_sums:  # the count is as before
        assert not getattr(MATMUL, NAMES[0])
    assert getattr(MATMUL, NAMES[0])


def test_settings_of_several_threads(settings):
    setattr(MATMUL, NAMES[0], True)
    inside, leave = threading.Barrier(2), threading.Event()

    def other():
        with full_sums:
            inside.wait()
            leave.wait()

    thread = threading.Thread(target=other)
    with full_sums:
        thread.start()
        inside.wait()
    assert not getattr(MATMUL, NAMES[0])  # the other thread still multiplies
    leave.set()
    thread.join()
    assert getattr(MATMUL, NAMES[0])


def exact(self, left, right, dtype, *, beta=1, alpha=1, out):
    return out.copy_(self + left.float() @ right.float())


def rounds_the_product(self, left, right, dtype, *, beta=1, alpha=1, out):
    return out.copy_(self + left @ right)


def rounds_the_matrix(self, left, right, dtype, *, beta=1, alpha=1, out):
    return out.copy_(self.to(left.dtype) + left.float() @ right.float())


def adds_nothing(self, left, right, dtype, *, beta=1, alpha=1, out):
    return out.copy_(left.float() @ right.float())


def raises_an_error(self, left, right, dtype, *, beta=1, alpha=1, out):
    raise RuntimeError("self and mat2 must have the same dtype")


KERNELS = {rounds_the_product: False, rounds_the_matrix: False, adds_nothing: False,
           raises_an_error: False, exact: True}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_a_trial_shows_whether_a_kernel_adds_to_a_wider_matrix(monkeypatch, kernel, dtype):
    monkeypatch.setattr(aten, "_adds_wide", {})
    out = torch.empty(3, 3)
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl("addmm.dtype_out", kernel, "CPU")
        assert aten.adds_wide(out, dtype) == KERNELS[kernel]
        assert aten.adds_wide(out, dtype) == KERNELS[kernel]
    finally:
        library._destroy()


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_a_trial_of_fake_tensors_reads_no_value(monkeypatch, device):
    monkeypatch.setattr(aten, "_adds_wide", {})
    with FakeTensorMode():
        adds = aten.adds_wide(torch.empty(3, 3, device=device), torch.bfloat16)
    # A torch without CUDA has no such product of tensors that report a GPU.
    known = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    assert adds == (known and (device != "cuda" or torch.backends.cuda.is_built()))
    assert aten.adds_wide(torch.empty(3, 3, device="meta"), torch.bfloat16) == known
    # The result for fake tensors does not apply to others.
    assert not any(key[:2] == (torch.device("cpu"), torch.bfloat16) and not key[2]
                   for key in aten._adds_wide)  # fmt: skip


def test_no_trial_runs_while_a_graph_is_captured(monkeypatch):
    out = torch.empty(3, 3).as_subclass(OnGpu)
    monkeypatch.setattr(aten, "_adds_wide", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not aten.adds_wide(out, torch.bfloat16)
    assert not aten._adds_wide  # a later call tries it
    aten._adds_wide[out.device, torch.bfloat16, False] = True
    assert aten.adds_wide(out, torch.bfloat16)
