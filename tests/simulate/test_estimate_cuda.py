"""Temporary memory of CUDA kernels agrees with allocations on an H200 (torch 2.11, cuDNN 9)."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from storage_ops.loss.planning.devices import GPUS, standing_for, threads_of
from storage_ops.memory import estimate

MIB = 1 << 20
aten = torch.ops.aten
ROUNDING = 1.0  # MiB by which the allocator rounds


def scratch(fn):
    """Return the peak beyond inputs and results, in MiB."""
    e = estimate(fn)
    return (e.peak_bytes - e.kept_bytes) / MIB


def empty(*size, dtype=torch.bfloat16, last=False):
    t = torch.empty(size, dtype=dtype, device="meta")
    return t.to(memory_format=torch.channels_last) if last else t


# Image, weight, stride, dtype, channels last, and MiB of the forward and of the weight's gradient.
CONVOLUTIONS = {
    "3x3 bf16": ((8, 64, 256, 256), (64, 64, 3, 3), 1, torch.bfloat16, False, 128.07, 129.90),
    "3x3 channels last": ((8, 64, 256, 256), (64, 64, 3, 3), 1, torch.bfloat16, True, 0.0, 1.83),
    "3x3 fp32": ((8, 64, 256, 256), (64, 64, 3, 3), 1, torch.float32, False, 256.14, 258.11),
    "3x3 fp16": ((8, 128, 128, 128), (128, 128, 3, 3), 1, torch.float16, False, 64.28, 71.59),
    "320 channels": ((8, 320, 64, 64), (320, 320, 3, 3), 1, torch.bfloat16, False, 41.76, 45.51),
    "640 channels": ((2, 640, 32, 32), (640, 640, 3, 3), 1, torch.bfloat16, False, 12.03, 12.03),
    "stride 2": ((8, 64, 128, 128), (128, 64, 3, 3), 2, torch.bfloat16, False, 23.89, 27.55),
    "100 channels": ((8, 100, 64, 64), (100, 100, 3, 3), 1, torch.bfloat16, True, 13.19, 18.76),
    "3 channels": ((16, 3, 512, 512), (64, 3, 3, 3), 1, torch.bfloat16, True, 64.01, 68.54),
    "patches": ((8, 3, 256, 256), (1024, 3, 16, 16), 16, torch.bfloat16, False, 16.0, 16.0),
    "1x1": ((8, 256, 56, 56), (64, 256, 1, 1), 1, torch.bfloat16, False, 0.0, 0.50),
    "depthwise": ((8, 96, 56, 56), (96, 1, 7, 7), 1, torch.bfloat16, False, 0.0, 0.0),
    "grouped fp32": ((8, 256, 56, 56), (256, 8, 3, 3), 1, torch.float32, False, 49.07, 50.20),
}
PARTIAL = 8.0  # tolerance in MiB for the partial sums of a weight's gradient


@pytest.mark.parametrize(
    ("image", "weight", "stride", "dtype", "last", "forward", "sums"),
    CONVOLUTIONS.values(),
    ids=CONVOLUTIONS,
)
def test_convolutions(image, weight, stride, dtype, last, forward, sums):
    x, w = empty(*image, dtype=dtype, last=last), empty(*weight, dtype=dtype, last=last)
    groups = image[1] // weight[1]
    same = weight[2] // 2 if weight[2] % 2 and stride == 1 else 0
    y = F.conv2d(x, w, None, stride, same, 1, groups)
    how = [stride, stride], [same, same], [1, 1], False, [0, 0], groups
    assert scratch(lambda: aten.convolution(x, w, None, *how)) == pytest.approx(
        forward, abs=ROUNDING
    )
    measured = scratch(
        lambda: aten.convolution_backward(y, x, w, [weight[0]], *how, [False, True, False])
    )
    assert sums - PARTIAL <= measured <= sums + PARTIAL
    if forward:
        assert measured >= forward - ROUNDING


def test_a_convolution_of_images_in_another_layout_copies_them():
    x, w = empty(8, 64, 128, 128), empty(64, 64, 3, 3, last=True)
    assert scratch(lambda: F.conv2d(x, w, padding=1)) == pytest.approx(16, abs=ROUNDING)


def test_convolutions_without_tf32_copy_images_with_channels_last(monkeypatch):
    """Such images are copied to the other layout. Other temporary memory is unknown."""
    sizes = (8, 64, 256, 256), (64, 64, 3, 3)
    for said in ("ieee", "none"):
        settings = SimpleNamespace(fp32_precision=said)
        monkeypatch.setattr(torch.backends.cudnn, "conv", settings)
        for last, expected in ((False, 0.0), (True, 256.14)):
            x, w = (empty(*size, dtype=torch.float32, last=last) for size in sizes)
            measured = scratch(lambda x=x, w=w: F.conv2d(x, w, padding=1))
            assert measured == pytest.approx(expected, abs=ROUNDING)


def test_convolutions_without_cudnn_take_no_scratch_memory():
    x, w = empty(8, 64, 128, 128), empty(64, 64, 3, 3)
    how = [64], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    with torch.backends.cudnn.flags(enabled=False):
        assert scratch(lambda: F.conv2d(x, w, padding=1)) == 0
        assert scratch(lambda: aten.convolution_backward(x, x, w, *how)) == 0


# Shape, summed dimensions, dtype, and MiB of partial sums.
SUMS = {
    "128 columns": ((131072, 128), [0], torch.bfloat16, 128.0),
    "128 columns fp32": ((262144, 128), [0], torch.float32, 132.0),
    "64 columns": ((524288, 64), [0], torch.bfloat16, 33.0),
    "few of 64 columns": ((131072, 64), [0], torch.bfloat16, 16.0),
    "320 columns fp32": ((32768, 320), [0], torch.float32, 80.0),
    "640 columns": ((2048, 640), [0], torch.bfloat16, 10.0),
    "few rows": ((512, 1280), [0], torch.bfloat16, 0.0),
    "2048 columns": ((16384, 2048), [0], torch.bfloat16, 132.0),
    "65 columns": ((32768, 65), [0], torch.bfloat16, 1.02),
    "two dims": ((8, 784, 512), [0, 1], torch.bfloat16, 24.5),
    "768 columns fp32": ((1568, 768), [0], torch.float32, 9.38),
    "6144 columns": ((8192, 6144), [0], torch.bfloat16, 132.0),
    "32 columns": ((221184, 32), [0], torch.bfloat16, 3.38),
    "over columns": ((8192, 4096), [1], torch.bfloat16, 0.0),
    "four rows": ((4, 4096), [0], torch.bfloat16, 0.0),
    "no rows": ((0, 64), [0], torch.bfloat16, 0.0),
}


@pytest.mark.parametrize(("size", "dims", "dtype", "expected"), SUMS.values(), ids=SUMS)
def test_sums_over_rows(size, dims, dtype, expected):
    t = empty(*size, dtype=dtype)
    assert scratch(lambda: t.sum(dims)) == pytest.approx(expected, abs=ROUNDING if expected else 0)


def test_sums_over_images_with_channels_last():
    y = empty(8, 128, 128, 128, last=True)
    assert scratch(lambda: y.sum([0, 2, 3])) == 128


@pytest.mark.parametrize("name", ["sum", "mean", "std", "var"])
@pytest.mark.parametrize("size", [(), (0,), (1,), (3, 0)])
def test_sums_of_empty_tensors_take_no_scratch_memory(name, size):
    t = empty(*size, dtype=torch.float32)
    assert scratch(lambda: getattr(t, name)(0)) == 0


def test_convolutions_of_empty_tensors_take_no_scratch_memory():
    for images, channels in ((0, 64), (2, 0)):
        x, w = empty(images, channels, 64, 64), empty(128, channels, 3, 3)
        assert scratch(lambda x=x, w=w: F.conv2d(x, w)) == 0


def test_a_standard_deviation_takes_four_numbers_per_partial_sum():
    t = empty(8192, 6144, dtype=torch.float32)
    assert scratch(lambda: t.std(0)) == 528


def test_sums_follow_the_gpu_that_is_simulated():
    assert threads_of(torch.device("cpu")) == 132 * 2048
    with standing_for(GPUS["a100"]):
        assert threads_of(torch.device("cpu")) == 108 * 2048


def flash(q, k, lse, grad):
    more = lse, lse, q.shape[2], k.shape[2], 0.0, False, lse, lse
    return aten._scaled_dot_product_flash_attention_backward(grad, q, k, k, q, lse, *more)


def cudnn(q, k, lse, grad):
    more = lse, lse, None, None, None, q.shape[2], k.shape[2], 0.0, False
    return aten._scaled_dot_product_cudnn_attention_backward(grad, q, k, k, q, lse, *more)


def efficient(q, k, lse, grad):
    more = lse, lse, 0.0, [True, True, True, False]
    return aten._scaled_dot_product_efficient_attention_backward(grad, q, k, k, None, q, lse, *more)


# Kernel, shape of queries, heads and tokens of keys, and MiB.
ATTENTION = {
    "flash": (flash, (8, 16, 257, 64), 16, 257, 12.19),
    "cuDNN": (cudnn, (8, 16, 257, 64), 16, 257, 8.16),
    "efficient": (efficient, (8, 16, 257, 64), 16, 257, 10.13),
    "cuDNN, long": (cudnn, (4, 16, 2048, 128), 16, 2048, 64.5),
    "flash, grouped": (flash, (2, 8, 1000, 128), 2, 1000, 15.88),
    "cuDNN, grouped": (cudnn, (2, 8, 1000, 128), 2, 1000, 15.69),
    "cuDNN, cross": (cudnn, (2, 10, 4096, 64), 10, 77, 20.31),
    "flash, size 40": (flash, (2, 8, 4096, 40), 8, 4096, 16.25),
    "efficient, size 80": (efficient, (2, 8, 1024, 80), 8, 1024, 8.06),
    "efficient, size 128": (efficient, (16, 16, 1025, 128), 16, 1025, 145.1),
}


@pytest.mark.parametrize(
    ("kernel", "queries", "heads", "tokens", "expected"), ATTENTION.values(), ids=ATTENTION
)
def test_gradients_of_attention(kernel, queries, heads, tokens, expected):
    q, k = empty(*queries), empty(queries[0], heads, tokens, queries[3])
    lse, grad = empty(*queries[:3], dtype=torch.float32), empty(*queries)
    measured = scratch(lambda: kernel(q, k, lse, grad))
    assert measured == pytest.approx(expected, abs=ROUNDING)


def test_attention_without_a_fused_kernel_has_scores():
    """These calls have heads that share keys in float32, as observed, or are in float64."""
    grad = empty(2, 8, 1000, 128, dtype=torch.float32)
    q, k = (empty(2, n, 1000, 128, dtype=torch.float32).requires_grad_() for n in (8, 2))

    def attend():
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    e = estimate(lambda: torch.autograd.grad(attend(), (q, k), grad))
    assert (e.peak_bytes - e.input_bytes) / MIB == pytest.approx(283.2, rel=0.02)
    e = estimate(attend)
    assert (e.kept_bytes - e.input_bytes) / MIB == pytest.approx(92.3, rel=0.02)
    wide = empty(2, 8, 1000, 128, dtype=torch.float64).requires_grad_()
    e = estimate(lambda: F.scaled_dot_product_attention(wide, wide, wide))
    assert e.kept_bytes - e.input_bytes > 8 * 2 * 8 * 1000 * 1000
    mask = torch.empty(2, 8, 1000, 1000, dtype=torch.bool, device="meta")
    masked = estimate(lambda: F.scaled_dot_product_attention(wide, wide, wide, mask))
    assert masked.peak_bytes - e.peak_bytes >= 8 * mask.numel()


def test_attention_without_heads_takes_no_scratch_memory():
    q = empty(2, 0, 64, 32, dtype=torch.float64)
    e = estimate(lambda: F.scaled_dot_product_attention(q, q, q, enable_gqa=True))
    assert e.peak_bytes < 16 << 10


@pytest.mark.parametrize(("tokens", "expected"), [(8192, 70.8), (2048, 0.0)])
def test_the_gradient_of_an_embedding(tokens, expected):
    weight = empty(32768, 2048).requires_grad_()
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    grad = empty(tokens, 2048)
    measured = scratch(lambda: aten.embedding_dense_backward(grad, ids, len(weight), -1, False))
    assert measured == pytest.approx(expected, abs=ROUNDING)


def test_boolean_masks_become_additive_masks():
    q = empty(2, 4, 1024, 64).requires_grad_()
    mask = torch.empty(2, 1, 1024, 1024, dtype=torch.bool, device="meta")
    plain = estimate(lambda: F.scaled_dot_product_attention(q, q, q))
    masked = estimate(lambda: F.scaled_dot_product_attention(q, q, q, mask))
    assert masked.kept_bytes - plain.kept_bytes == mask.numel() * (1 + 2)
