"""The simulated peaks of every row of CPU kernels agree with measured peaks."""

import pytest
import torch
import torch.nn.functional as F
from torch import fft, nn

from storage_ops.foundation import ops
from storage_ops.memory import measure

from .cpu_peaks import check, measured_peak, simulated_levels, simulated_peak
from .operand_cases import OPERANDS

aten = torch.ops.aten
ROWS, WIDTH = 512, 256


def numbers(dtype, *shape):
    return 1 - torch.rand(shape or (ROWS, WIDTH), dtype=dtype)  # `prod` needs numbers above zero


def indices():
    return torch.randint(ROWS, (ROWS, WIDTH))


def classes():
    return torch.randint(WIDTH, (2, ROWS // 2))


def zeros(dtype):
    return torch.zeros(2 * ROWS, WIDTH, dtype=dtype)


def normalized(x):
    return F.batch_norm(x, torch.zeros(16), torch.ones(16), training=True)


def image(x):
    return x.float().view(-1, 16, 32)


def orthogonal(x):
    return torch.linalg.householder_product(x.detach().float(), x.detach()[0].float())


def logit_losses(x, reduction, **kwargs):
    return F.binary_cross_entropy_with_logits(x, x.detach(), reduction=reduction, **kwargs)


def reduced(how):
    return lambda x: zeros(x.dtype).scatter_reduce(0, indices(), x, how)


# Functions of a tensor of numbers, by the row that they test.
CASES = {
    "tag::pointwise": [
        lambda x: (x > 0.5) * x, lambda x: x + x.detach().double(), lambda x: indices() / 3 + x,
        lambda x: indices() > x, lambda x: torch.zeros_like(x).add_(x.detach().double()),
        lambda x: torch.zeros(ROWS, WIDTH, dtype=torch.float64).add_(x),
        lambda x: indices().sin() + x,
    ],
    "aten::where": [lambda x: torch.where(x > 0.5, x, x.detach().double())],
    "aten::masked_fill": [
        lambda x: x.masked_fill(x > 0.5, 0.0), lambda x: torch.fmax(x, x.detach()),
        lambda x: x.masked_fill(x > 0.5, x.detach()[0, 0]),
    ],
    "aten::masked_fill_": [lambda x: (x * 2).masked_fill_(x > 0.5, 0.0)],
    "aten::masked_scatter": [lambda x: x.masked_scatter(x > 2, x.detach())],
    "aten::masked_scatter_": [lambda x: torch.zeros_like(x).masked_scatter_(x > 2, x.detach())],
    "aten::abs": [lambda x: torch.complex(x.float(), x.float()).abs()],
    "aten::angle": [lambda x: torch.complex(x.float(), x.float()).angle()],
    "aten::sum": [
        lambda x: (x > 0.5).sum(-1) * x[:, 0], lambda x: x.sum(0, dtype=torch.float64),
        lambda x: (x > 0.5).sum(), lambda x: x.amax(-1),
    ],
    "aten::nansum": [lambda x: x.nansum(-1, dtype=torch.float64)],
    "aten::mean": [
        lambda x: x.mean(-1, dtype=torch.float64), lambda x: x.mean(), lambda x: x.mean(-1),
    ],
    "aten::mse_loss.default": [lambda x: F.mse_loss(x, x.detach())],
    "aten::smooth_l1_loss.default": [lambda x: F.smooth_l1_loss(x, x.detach() * 0)],
    "aten::huber_loss.default": [
        lambda x: F.huber_loss(x, x.detach()), lambda x: F.huber_loss(x, x.detach() / 2, "sum"),
    ],
    "aten::soft_margin_loss.default": [lambda x: F.soft_margin_loss(x, x.detach())],
    "aten::binary_cross_entropy.default": [
        lambda x: F.binary_cross_entropy(x, x.detach()),
        lambda x: F.binary_cross_entropy(x, x.detach(), reduction="sum"),
    ],
    "aten::binary_cross_entropy_with_logits.default": [
        lambda x: logit_losses(x, "none"), lambda x: logit_losses(x, "mean"),
        lambda x: logit_losses(x, "sum", pos_weight=x.detach()),
    ],
    "aten::prod": [
        lambda x: x.detach().prod(-1, dtype=torch.float64), lambda x: x.prod(), lambda x: x.prod(1),
        lambda x: torch.prod(x, dim=0, keepdim=True), lambda x: x.view(-1, 4).prod(-1),
        lambda x: x.prod(-1, dtype=torch.float64), lambda x: torch.prod(x, dtype=torch.float64),
    ],
    "aten::linalg_vector_norm": [lambda x: x.detach().norm(dim=-1, dtype=torch.float64)],
    "aten::cumsum": [lambda x: (x > 0.5).cumsum(0), lambda x: x.cumsum(0, dtype=torch.float64)],
    "aten::cumprod": [
        lambda x: (x > 0.5).cumprod(0), lambda x: x.cumprod(-1), lambda x: torch.cumprod(x, dim=0),
        lambda x: x.cumprod(0, dtype=torch.float64),
    ],
    "aten::gather": [lambda x: x.gather(0, indices())],
    "aten::scatter": [
        lambda x: zeros(x.dtype).scatter(0, indices(), x), lambda x: x.median(-1)[0],
        lambda x: x.topk(8)[0], lambda x: x.cummax(-1)[0],
    ],
    "aten::scatter_": [lambda x: zeros(x.dtype).scatter_(0, indices(), x)],
    "aten::scatter_add": [lambda x: zeros(x.dtype).scatter_add(0, indices(), x)],
    "aten::scatter_add_": [lambda x: zeros(x.dtype).scatter_add_(0, indices(), x)],
    "aten::scatter_reduce": [reduced("mean"), reduced("amax"), reduced("prod")],
    "aten::scatter_reduce_": [
        lambda x: zeros(x.dtype).scatter_reduce_(0, indices(), x.detach(), "mean")
    ],
    "aten::kthvalue": [lambda x: x.kthvalue(3, -1)[0], lambda x: x.kthvalue(3, 0)[0]],
    "aten::sort": [lambda x: x.view(-1).sort()[0], lambda x: x.sort(0)[0], lambda x: x.argsort(1)],
    "aten::_unique2": [
        lambda x: classes().unique(), lambda x: classes().unique(return_inverse=True)[0],
        lambda x: classes().unique(return_counts=True)[0],
    ],
    "aten::unique_consecutive": [lambda x: indices().view(-1).unique_consecutive()],
    "aten::all": [lambda x: x.all(), lambda x: x.all(-1), lambda x: (x > 0.5).all()],
    "aten::any": [lambda x: x.any(), lambda x: x.any(0)],
    "aten::count_nonzero": [
        lambda x: x.count_nonzero(-1), lambda x: x.count_nonzero((0, 1)),
        lambda x: x.count_nonzero(),
    ],
    "aten::median.default": [lambda x: x.detach().median(), lambda x: x.median()],
    "aten::nanmedian.default": [lambda x: x.nanmedian()],
    "aten::_fft_r2c": [lambda x: fft.rfft(x.float()).abs(), lambda x: fft.rfft(image(x), dim=1)],
    "aten::_fft_c2c": [lambda x: fft.fft(image(x) + 0j, dim=1), lambda x: fft.fft2(image(x))],
    "aten::_fft_c2r": [
        lambda x: fft.irfft(image(x)),
        # Fake results of torch 2.10 have other strides, so its simulated backward copies less.
        *([] if torch.__version__ < "2.13" else [lambda x: fft.irfft(image(x), dim=1)]),
        lambda x: fft.irfft2(image(x)), lambda x: fft.hfft2(image(x)),
        lambda x: fft.irfftn(image(x)),
    ],
    "aten::native_group_norm_backward": [lambda x: F.group_norm(x.view(-1, 16, 4), 4)],
    "aten::batch_norm_backward": [
        lambda x: aten._batch_norm_with_update(image(x), *[torch.ones(16)] * 4, 0.1, 1e-5)[0]
    ],
    "aten::linalg_matrix_exp": [lambda x: torch.matrix_exp(x.view(-1, 16, 16))],
    "aten::linalg_householder_product": [
        lambda x: orthogonal(x), lambda x: orthogonal(x[:, :64]),
    ],
    "aten::linalg_qr": [
        lambda x: torch.linalg.qr(x.float())[0],
        lambda x: torch.linalg.qr(x.detach().float().view(2048, -1), "r")[1],
        lambda x: torch.linalg.qr(x.float().detach() + 0j)[0],
        lambda x: torch.linalg.qr(x.float().view(2048, -1))[0],
        lambda x: torch.linalg.qr(x.float().view(-1, 8).detach())[0],
    ],
    "aten::renorm": [lambda x: x.renorm(2, 0, 1.0)],
    "aten::native_batch_norm_backward": [
        lambda x: normalized(x.float().view(-1, 16, 8, 8)),
        lambda x: normalized(x.float().view(-1, 8, 8, 16).permute(0, 3, 1, 2)),
        lambda x: normalized(x.float().view(-1, 8, 16).transpose(1, 2)),
    ],
    "aten::roll": [lambda x: x.roll((1, 2), (0, 1)), lambda x: x.t().roll(3)],
    "aten::_softmax": [lambda x: x.t().softmax(-1), lambda x: x.t().softmax(0)],
    "aten::_log_softmax": [lambda x: x.t().log_softmax(-1)],
    "aten::_softmax_backward_data": [lambda x: x.softmax(0).sum(), lambda x: x.softmax(0).t()],
    "aten::_log_softmax_backward_data": [lambda x: x.log_softmax(0).t().relu().sum()],
    "aten::nll_loss_forward": [
        lambda x: F.nll_loss(x.t(), indices()[0]),
        lambda x: F.nll_loss(x.t(), indices()[0], reduction="none"),
        lambda x: F.nll_loss(x.log_softmax(0).t(), indices()[0]),
    ],
    "aten::nll_loss2d_forward": [
        lambda x: F.nll_loss(x.view(2, -1, WIDTH).transpose(1, 2), classes()),
        lambda x: F.cross_entropy(x.view(2, -1, WIDTH).transpose(1, 2), classes()),
    ],
    "aten::_euclidean_dist": [lambda x: torch.cdist(x.float(), x.float()[:100])],
    **OPERANDS,
}  # fmt: skip
ELSEWHERE = {  # tested with the layers that call these ops
    "aten::mm", "aten::addmm", "aten::convolution.default", "aten::convolution_backward.default",
    "aten::_ctc_loss_backward", "aten::mkldnn_rnn_layer.default",
    "aten::mkldnn_rnn_layer_backward.default",
    "aten::_scaled_dot_product_flash_attention_for_cpu.default",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default",
}  # fmt: skip


def test_every_row_has_a_case():
    rows = {name for name, row in ops.described().items() if "scratch_on_cpu" in row}
    assert rows == CASES.keys() | ELSEWHERE


# Ops in which real tensors allocate memory on any device, and fake tensors do not.
GAPS = {
    "clamp": lambda x: x.clamp(x.detach() * 0.5, x.detach()),
    "largest": lambda x: x.max(),
    "smallest": lambda x: torch.min(x),
    "isinf": lambda x: x.isinf(),
    "softmax of masked rows": lambda x: torch.ops.aten._safe_softmax(x.detach(), -1),
    "columns of patches": lambda x: F.unfold(x.view(4, 2, -1, WIDTH), 3),
    "distant patches": lambda x: F.unfold(x.view(4, 2, -1, WIDTH), 2, stride=4),
    "image of patches": lambda x: F.fold(x.view(8, -1, 1024), 66, 4, stride=2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*CASES, *GAPS])
def test_peaks_of_a_row(name, dtype):
    for fn in CASES[name] if name in CASES else [GAPS[name]]:
        x = numbers(dtype).requires_grad_()

        def run(fn=fn, x=x):
            value = fn(x)
            if value.requires_grad:
                torch.autograd.grad(value, x, torch.ones_like(value))
            return value

        check(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("tokens", [64, 200, 800])
def test_peaks_of_fused_attention(tokens, is_transposed, dtype):
    q, k, v = (
        torch.randn(2, tokens, 4, 16, dtype=dtype).transpose(1, 2) if is_transposed
        else torch.randn(2, 4, tokens, 16, dtype=dtype)
        for _ in range(3)
    )  # fmt: skip
    trained = dtype != torch.bfloat16  # buffers of 16-bit products in the backward do not count
    leaves = [t.requires_grad_(trained) for t in (q, k, v)]

    def run():
        out = F.scaled_dot_product_attention(q, k, v)
        if trained:
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        return out

    assert simulated_peak(run) == pytest.approx(measured_peak(run), rel=0.01)


CONVOLUTIONS = {
    "to 8 channels": (lambda: nn.Conv2d(32, 8, 3, padding=1), (4, 32, 32, 32)),
    "of 24 channels": (lambda: nn.Conv2d(24, 24, 3, padding=1), (4, 24, 32, 32)),
    "transposed": (lambda: nn.ConvTranspose2d(32, 16, 3), (4, 32, 32, 32)),
    "transposed by strides": (lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1), (4, 64, 16, 16)),
    "to 3 channels": (lambda: nn.Conv2d(32, 3, 3, padding=1), (4, 32, 32, 32)),
    "of 3 channels": (lambda: nn.Conv2d(3, 64, 3, stride=2), (64, 3, 32, 32)),
    "of 4 channels": (lambda: nn.Conv2d(4, 4, 3), (16, 4, 32, 32)),
    "of 12 channels": (lambda: nn.Conv2d(12, 3, 3), (4, 12, 32, 32)),
    "of 6 channels in one dimension": (lambda: nn.Conv1d(6, 20, 3), (4, 6, 512)),
    "with strides": (lambda: nn.Conv3d(16, 20, 3, stride=2), (2, 16, 16, 16, 16)),
    "of groups": (lambda: nn.Conv2d(32, 64, 3, groups=4), (4, 32, 32, 32)),
    "of small groups": (lambda: nn.Conv2d(24, 24, 3, groups=24), (4, 24, 32, 32)),
    "of channels in small images": (
        lambda: nn.Conv2d(512, 512, 3, padding=1, groups=512),
        (4, 512, 2, 2),
    ),
    "of channels, causal": (lambda: nn.Conv1d(64, 64, 4, padding=3, groups=64), (4, 64, 128)),
    "of channels, dilated": (lambda: nn.Conv2d(32, 32, 3, dilation=2, groups=32), (4, 32, 32, 32)),
    "transposed to 3 channels": (lambda: nn.ConvTranspose2d(64, 3, 3), (16, 64, 32, 32)),
    "transposed of 3 channels": (lambda: nn.ConvTranspose2d(3, 12, 3), (4, 3, 32, 32)),
    "transposed by strides to 3 channels": (
        lambda: nn.ConvTranspose2d(64, 3, 4, 2, 1),
        (128, 64, 16, 16),
    ),
    "transposed without bias": (lambda: nn.ConvTranspose2d(16, 16, 3, bias=False), (4, 16, 32, 32)),
    "transposed in groups": (lambda: nn.ConvTranspose2d(32, 32, 3, groups=4), (4, 32, 32, 32)),
    "of one element": (lambda: nn.Conv2d(32, 16, 1), (4, 32, 32, 32)),
    "transposed, with strides": (lambda: nn.ConvTranspose2d(32, 16, 1, 2), (4, 32, 32, 32)),
    "transposed, single": (lambda: nn.ConvTranspose2d(32, 16, 1), (4, 32, 32, 32)),
}
if torch.backends.cpu.get_cpu_capability() == "AVX2":  # not observed on AVX-512
    CONVOLUTIONS |= {
        "of groups of 3": (lambda: nn.Conv2d(24, 48, 3, groups=8), (16, 24, 32, 32)),
        "transposed in groups of 3": (
            lambda: nn.ConvTranspose2d(24, 48, 3, groups=8, bias=False),
            (16, 24, 32, 32),
        ),
        "dilated": (lambda: nn.Conv2d(16, 16, 3, dilation=2), (4, 16, 16, 16)),
        "dilated in one dimension": (lambda: nn.Conv1d(16, 16, 3, dilation=2), (4, 16, 256)),
        "higher than the image": (lambda: nn.Conv2d(64, 64, 3, padding=1), (4, 64, 2, 8)),
        "of padded volumes": (lambda: nn.Conv3d(16, 16, 3, padding=1), (2, 16, 8, 8, 8)),
    }


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="without oneDNN")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_peaks_of_convolutions(name):
    """The gradient of a sum is expanded from one number. Kernels copy it."""
    make, shape = CONVOLUTIONS[name]
    layer, x = make(), numbers(torch.float32, *shape).requires_grad_()
    check(lambda: layer(x))
    check(lambda: torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()]))


CHANNELS_LAST = {
    "plain": lambda: nn.Conv2d(32, 32, 3, padding=1),
    "of few channels": lambda: nn.Conv2d(32, 48, 2, stride=2),
    "of groups": lambda: nn.Conv2d(32, 32, 3, padding=1, groups=8),
    "of channels": lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32),
    "of channels, with strides": lambda: nn.Conv2d(32, 32, 3, 2, 1, groups=32),
    "of channels, wide": lambda: nn.Conv2d(32, 32, 7, padding=3, groups=32),
}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="without oneDNN")
@pytest.mark.parametrize("gradient", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("image", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", CHANNELS_LAST)
def test_peaks_of_convolutions_with_channels_last(name, image, gradient):
    """ConvNeXt permutes channels to the end and back, which only changes strides."""
    layer, x = CHANNELS_LAST[name](), numbers(torch.float32, 16, 32, 32, 32)
    x = x.to(memory_format=image).requires_grad_()
    dy = torch.randn_like(layer(x).detach()).contiguous(memory_format=gradient)
    check(lambda: layer(x))
    check(lambda: torch.autograd.grad(layer(x), [x, *layer.parameters()], dy))


RECURRENT = {
    "long": (lambda: nn.LSTM(24, 48), (30, 4, 24)),
    "two directions and layers": (
        lambda: nn.LSTM(50, 32, num_layers=2, bidirectional=True, batch_first=True), (6, 12, 50)
    ),
    "large batch": (lambda: nn.LSTM(100, 64, bias=False), (3, 150, 100)),
    "single step": (lambda: nn.LSTM(16, 256), (1, 8, 16)),
    "GRU": (lambda: nn.GRU(24, 48), (2, 8, 24)),
}  # fmt: skip


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="without oneDNN")
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_keep_the_measured_bytes(name):
    """The workspaces of all layers are alive at once. oneDNN chooses their size."""
    make, shape = RECURRENT[name]
    layer, x = make(), numbers(torch.float32, *shape).requires_grad_()
    with measure() as m:
        out = layer(x)
    assert simulated_levels(lambda: layer(x))[-1] == pytest.approx(m.kept_bytes, abs=4096)
    del out


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="without oneDNN")
@pytest.mark.skipif(
    torch.__version__.startswith("2.10."), reason="oneDNN 3.7 allocates other temporary memory"
)
@pytest.mark.parametrize("name", RECURRENT)
def test_peaks_of_recurrent_layers(name):
    """oneDNN keeps a workspace for the backward, which is empty in torch's fake kernel."""
    make, shape = RECURRENT[name]
    layer, x = make(), numbers(torch.float32, *shape).requires_grad_()
    # On other processors, products need other temporary memory, which rows do not describe.
    rel = 0.03 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 0.25
    check(lambda: layer(x), rel)
    check(lambda: torch.autograd.grad(layer(x)[0].sum(), [x, *layer.parameters()]), rel)
    check(lambda: torch.autograd.grad(layer(x)[1][0].sum(), [x, *layer.parameters()][:3]), rel)
    with torch.no_grad():
        check(lambda: layer(x), rel)


def transposed():
    return torch.rand(8, 64, 16).transpose(1, 2).requires_grad_()


def channels_last():
    return torch.rand(8, 4, 6, 16).permute(0, 3, 1, 2).requires_grad_()


def columns_first():
    return torch.rand(8, 4, 6, 16).transpose(1, 3).requires_grad_()


def contiguous():
    return torch.rand(8, 16, 4, 6).requires_grad_()


STRIDED = {
    "batch norm": normalized,
    "roll": lambda x: x.roll(1, 1),
    "roll of two dimensions": lambda x: x.roll((1, 2), (1, 2)),
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
}


@pytest.mark.parametrize("make", [transposed, channels_last, columns_first, contiguous])
@pytest.mark.parametrize("name", STRIDED)
def test_strides_of_results(name, make):
    if name == "channel shuffle" and make is transposed:
        return  # the function needs an image
    strides = []

    def run():
        x = make()
        value = STRIDED[name](x)
        gradient = torch.autograd.grad(value, x, torch.ones(value.shape))[0]
        strides.append((value.stride(), gradient.stride()))
        return value, value.transpose(1, 2).contiguous(), gradient.reshape(-1)

    check(run)
    assert strides[0] == strides[1]


def test_each_simulation_of_an_lstm_counts_one_gradient_of_both_biases():
    lstm, x = nn.LSTM(64, 64), torch.randn(16, 4, 64)
    runs = [simulated_levels(lambda: lstm(x)[0].square().mean().backward()) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
