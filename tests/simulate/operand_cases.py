"""Functions of a tensor of 512 x 256 numbers, by the row of operand copies that they test."""

import torch
import torch.nn.functional as F


def places(count):
    return torch.randint(256, (count,))


def pictures(x):
    return x.view(-1, 16, 16, 16)


def turned(x):
    """Return pictures whose strides are of no memory format."""
    return pictures(x.detach()).transpose(0, 1).contiguous().transpose(0, 1)


def padded(x, how, *sizes):
    return F.pad(x, sizes, mode=how)


def enlarged(x, how):
    return F.interpolate(x, scale_factor=2, mode=how)


def last(x):
    return x.contiguous(memory_format=torch.channels_last)


# The gradient of a sum is expanded from one number.
OPERANDS = {
    "aten::native_layer_norm": [lambda x: F.layer_norm(x.detach().t(), (512,))],
    "aten::native_layer_norm_backward": [
        lambda x: F.layer_norm(x, (256,)).sum(), lambda x: F.layer_norm(x.t(), (512,)),
    ],
    "aten::log_sigmoid_forward": [lambda x: F.logsigmoid(x.detach().t())],
    "aten::embedding_dense_backward": [lambda x: F.embedding(places(256), x).sum()],
    "aten::col2im": [lambda x: F.fold(x.detach().t(), (17, 33), 2)],
    "aten::grid_sampler_2d_backward": [
        lambda x: F.grid_sample(
            pictures(x.float()), torch.zeros(32, 16, 16, 2), align_corners=False).sum(),
    ],
    "aten::max_pool2d_with_indices": [lambda x: F.max_pool2d(turned(x), 2)],
    "aten::avg_pool2d": [lambda x: F.avg_pool2d(turned(x), 2)],
    "aten::_adaptive_avg_pool2d": [lambda x: F.adaptive_avg_pool2d(turned(x), 5)],
    "aten::adaptive_max_pool2d": [lambda x: F.adaptive_max_pool2d(turned(x), 5)],
    "aten::max_pool3d_with_indices": [lambda x: F.max_pool3d(turned(x), 2)],
    "aten::avg_pool3d": [lambda x: F.avg_pool3d(turned(x.float()), 2)],
    "aten::pixel_shuffle": [lambda x: F.pixel_shuffle(turned(x), 2)],
    "aten::pixel_unshuffle": [lambda x: F.pixel_shuffle(pictures(x), 2).sum()],
    "aten::channel_shuffle": [lambda x: F.channel_shuffle(turned(x), 4)],
    "aten::reflection_pad1d": [lambda x: padded(x.detach().t(), "reflect", 1, 1)],
    "aten::reflection_pad2d": [lambda x: padded(turned(x), "reflect", 1, 1, 1, 1)],
    "aten::replication_pad1d": [lambda x: padded(x.detach().t(), "replicate", 1, 1)],
    "aten::replication_pad2d": [lambda x: padded(turned(x), "replicate", 1, 1, 1, 1)],
    "aten::max_pool2d_with_indices_backward": [
        lambda x: F.max_pool2d(pictures(x), 2).sum(),
        lambda x: F.max_pool2d(last(pictures(x)), 2).sum(),
    ],
    "aten::avg_pool2d_backward": [
        lambda x: F.avg_pool2d(pictures(x), 2).sum(),
        lambda x: F.avg_pool2d(last(pictures(x)), 2).sum(),
    ],
    "aten::_adaptive_avg_pool2d_backward": [
        lambda x: F.adaptive_avg_pool2d(pictures(x), 8).sum(),
    ],
    "aten::upsample_nearest1d_backward": [lambda x: enlarged(x.view(-1, 16, 16), "nearest").sum()],
    "aten::upsample_nearest2d_backward": [lambda x: enlarged(pictures(x), "nearest").sum()],
    "aten::upsample_nearest3d_backward": [
        lambda x: enlarged(x.view(-1, 4, 16, 16, 16), "nearest").sum(),
    ],
    "aten::_upsample_nearest_exact2d_backward": [
        lambda x: enlarged(pictures(x), "nearest-exact").sum(),
    ],
    "aten::upsample_linear1d_backward": [lambda x: enlarged(x.view(-1, 16, 16), "linear").sum()],
    "aten::upsample_bilinear2d_backward": [lambda x: enlarged(pictures(x), "bilinear").sum()],
    "aten::upsample_bicubic2d_backward": [lambda x: enlarged(pictures(x), "bicubic").sum()],
    "aten::reflection_pad1d_backward": [
        lambda x: padded(x.view(-1, 16, 16), "reflect", 1, 1).sum(),
    ],
    "aten::reflection_pad2d_backward": [
        lambda x: padded(pictures(x), "reflect", 1, 1, 1, 1).sum(),
    ],
    "aten::replication_pad1d_backward": [
        lambda x: padded(x.view(-1, 16, 16), "replicate", 1, 1).sum(),
    ],
    "aten::replication_pad2d_backward": [
        lambda x: padded(pictures(x), "replicate", 1, 1, 1, 1).sum(),
    ],
    "aten::upsample_nearest2d": [
        lambda x: enlarged(pictures(x.detach()), "nearest"),
        lambda x: enlarged(last(pictures(x.detach())), "nearest"),
        lambda x: enlarged(x.detach().view(-1, 4, 64, 128), "nearest"),
    ],
    "aten::_upsample_nearest_exact2d": [lambda x: enlarged(pictures(x.detach()), "nearest-exact")],
    "aten::upsample_bilinear2d": [lambda x: enlarged(pictures(x.detach()), "bilinear")],
}  # fmt: skip
