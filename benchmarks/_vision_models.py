"""Models of published vision runs: convolutional networks for videos, images and pixels.

Each returns its loss, as the published training code computes it. Structures are those of
MMAction2 0.24, MMSegmentation, torchvision and Lightly. Layers are torch's.

Until torch 1.11, autograd saved the input of a softmax beside its output (pull request 65242 of
pytorch). `kept` does the same where these inputs are large.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS: dict[int, tuple[Any, Any]] = {
    2: (nn.Conv2d, nn.BatchNorm2d),
    3: (nn.Conv3d, nn.BatchNorm3d),
}
RESNET50, RESNET101 = (3, 4, 6, 3), (3, 4, 23, 3)


class _Kept(torch.autograd.Function):
    """Save a tensor until its backward, without effect on the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def kept(x: Tensor) -> Tensor:
    """Return the float32 input of a softmax, which exists until its backward."""
    result: Tensor = _Kept.apply(x.float())
    return result


def convolution(
    inputs: int,
    outputs: int,
    kernel: tuple[int, ...],
    stride: int | tuple[int, ...] = 1,
    dilation: int = 1,
    has_relu: bool = True,
) -> nn.Sequential:
    """Return a convolution without a bias, a batch norm, and a ReLU in place."""
    layer, norm = LAYERS[len(kernel)]
    padding = tuple(size // 2 * dilation for size in kernel)
    layers = [layer(inputs, outputs, kernel, stride, padding, dilation, bias=False), norm(outputs)]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if has_relu else []))


class Bottleneck(nn.Module):
    """The residual block of a ResNet-50.

    Args:
        inputs, width: channels of the input, and of the 3x3 convolution.
        stride, dilation: of the 3x3 convolution.
        frames: kernel size in time of the first convolution of a video. None: an image.
        before: a function of the input of the first convolution.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int = 1,
        dilation: int = 1,
        frames: int | None = None,
        before: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        one = () if frames is None else (1,)  # in time
        first = (1, 1) if frames is None else (frames, 1, 1)
        strides = (*one, stride, stride)
        self.before = before
        self.layers = nn.Sequential(
            convolution(inputs, width, first),
            convolution(width, width, (*one, 3, 3), strides, dilation),
            convolution(width, 4 * width, (*one, 1, 1), has_relu=False),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            kernel = (*one, 1, 1)
            self.shortcut = convolution(inputs, 4 * width, kernel, strides, has_relu=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map features to features."""
        y = self.layers(x if self.before is None else self.before(x))
        result: Tensor = self.relu(y + self.shortcut(x))
        return result


def stages(
    depths: Sequence[int] = RESNET50,
    base: int = 64,
    strides: Sequence[int] = (1, 2, 2, 2),
    dilations: Sequence[tuple[int, int]] = ((1, 1),) * 4,
    frames: Sequence[Sequence[int | None]] | None = None,
    beside: Sequence[int] = (0, 0, 0, 0),
    before: Callable[[Tensor], Tensor] | None = None,
) -> nn.ModuleList:
    """Return the four stages of a ResNet.

    Args:
        depths: blocks of each stage.
        base: width of the first stage.
        strides: of each stage.
        dilations: of the first block of each stage, and of its other blocks.
        frames: kernel sizes in time of a stage's blocks, in turn. None: images.
        beside: further channels at the input of each stage.
        before: a function of the input of each block.
    """
    result, inputs = nn.ModuleList(), base
    for index, depth in enumerate(depths):
        width, blocks = base << index, []
        for block in range(depth):
            is_first = block == 0
            size = None if frames is None else frames[index][block % len(frames[index])]
            blocks.append(
                Bottleneck(
                    inputs + (beside[index] if is_first else 0),
                    width,
                    strides[index] if is_first else 1,
                    dilations[index][0 if is_first else 1],
                    size,
                    before,
                )
            )
            inputs = 4 * width
        result.append(nn.Sequential(*blocks))
    return result


def shift_in_time(x: Tensor, frames: int) -> Tensor:
    """Move an eighth of the channels a frame back and an eighth a frame ahead, as in TSM."""
    clips = x.view(-1, frames, x.shape[1], x.shape[2] * x.shape[3])
    back, ahead, still = clips.split((n := x.shape[1] // 8, n, x.shape[1] - 2 * n), 2)
    back = torch.cat((back[:, 1:], (back - back)[:, :1]), 1)
    ahead = torch.cat(((ahead - ahead)[:, :1], ahead[:, :-1]), 1)
    return torch.cat((back, ahead, still), 2).view(x.shape)


class FrameModel(nn.Module):
    """TSN, which averages features of frames. TSM also shifts channels between frames."""

    def __init__(self, frames: int, is_shifted: bool = False) -> None:
        super().__init__()
        before = (lambda x: shift_in_time(x, frames)) if is_shifted else None
        self.stem = nn.Sequential(convolution(3, 64, (7, 7), 2), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.Sequential(*stages(before=before))
        self.drop, self.out = nn.Dropout(0.5 if is_shifted else 0.4), nn.Linear(2048, 400)
        self.frames = frames

    def forward(self, clips: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of clips of this many frames."""
        x = F.adaptive_avg_pool2d(self.stages(self.stem(clips.flatten(0, 1))), 1)
        x = x.unflatten(0, (-1, self.frames)).mean(1)
        return F.cross_entropy(self.out(self.drop(x).flatten(1)), labels)


def video_stem(base: int, frames: int, stride: int = 1, pool_stride: int = 1) -> nn.Sequential:
    """Return the first convolution of a video, and its pooling."""
    first = convolution(3, base, (frames, 7, 7), (stride, 2, 2))
    return nn.Sequential(first, nn.MaxPool3d((1, 3, 3), (pool_stride, 2, 2), (0, 1, 1)))


class SlowOnly(nn.Module):
    """The slow path of SlowFast alone."""

    def __init__(self) -> None:
        super().__init__()
        layers = stages(frames=((1,), (1,), (3,), (3,)))
        self.layers = nn.Sequential(video_stem(64, 1), *layers)
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(2048, 400)

    def forward(self, clips: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of clips, whose channels are before their frames."""
        x = F.adaptive_avg_pool3d(self.layers(clips.flatten(0, 1)), 1)
        return F.cross_entropy(self.out(self.drop(x).flatten(1)), labels)


class I3D(SlowOnly):
    """I3D, in which every second block convolves in time, and two layers skip frames."""

    def __init__(self) -> None:
        super().__init__()
        first, *others = stages(frames=((3,), (3, 1), (3, 1), (1, 3)))
        stem = video_stem(64, 5, 2, 2)
        self.layers = nn.Sequential(stem, first, nn.MaxPool3d((2, 1, 1)), *others)


class SlowFast(nn.Module):
    """Two paths of the same clip. The slow one sees few frames, the fast one has few channels.

    Args:
        skip: which frames the slow path sees, such as every eighth.
        speed: how many more frames the fast path sees.
        fused: kernel size in time of the convolutions from the fast path to the slow one.
    """

    def __init__(self, skip: int, speed: int, fused: int) -> None:
        super().__init__()
        self.skips = skip, skip // speed
        beside = (16, 64, 128, 256)
        self.stems = nn.ModuleList([video_stem(64, 1), video_stem(8, 5)])
        self.slow = stages(frames=((1,), (1,), (3,), (3,)), beside=beside)
        self.fast = stages(base=8, frames=((3,),) * 4)
        self.fusions = nn.ModuleList(
            nn.Conv3d(n // 2, n, (fused, 1, 1), (speed, 1, 1), (fused // 2, 0, 0), bias=False)
            for n in beside
        )
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(2304, 400)

    def forward(self, clips: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of clips, whose channels are before their frames."""
        clips = clips.flatten(0, 1)
        # Until September 2020, and so in the measured runs, the paths saw slices.
        slow, fast = (
            stem(clips[:, :, ::skip]) for stem, skip in zip(self.stems, self.skips, strict=True)
        )
        for fusion, slow_stage, fast_stage in zip(self.fusions, self.slow, self.fast, strict=True):
            slow = slow_stage(torch.cat((slow, fusion(fast)), 1))
            fast = fast_stage(fast)
        pooled = [F.adaptive_avg_pool3d(path, 1) for path in (slow, fast)]
        return F.cross_entropy(self.out(self.drop(torch.cat(pooled, 1)).flatten(1)), labels)


class Segmentation(nn.Module):
    """A fully convolutional network on a dilated ResNet, with an auxiliary head.

    Args:
        depths: of the ResNet.
        is_mmseg: whether layers are those of MMSegmentation, or else those of torchvision.
    """

    def __init__(self, depths: Sequence[int] = RESNET50, is_mmseg: bool = False) -> None:
        super().__init__()
        stem = [convolution(3, 64, (7, 7), 2)]
        if is_mmseg:
            stem = [convolution(3, 32, (3, 3), 2), convolution(32, 32, (3, 3))]
            stem.append(convolution(32, 64, (3, 3)))
        self.stem = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1))
        dilations = ((1, 1), (1, 1), (1, 2), (2, 4))
        self.stages = stages(depths, strides=(1, 2, 1, 1), dilations=dilations)
        self.head, self.beside = convolution(2048, 512, (3, 3)), convolution(1024, 256, (3, 3))
        self.concatenated: nn.Module | None = None
        if is_mmseg:
            self.head.append(convolution(512, 512, (3, 3)))
            self.concatenated = convolution(2560, 512, (3, 3))
        drop, classes = (nn.Dropout2d, 19) if is_mmseg else (nn.Dropout, 21)
        self.out, self.out_beside = (
            nn.Sequential(drop(0.1), nn.Conv2d(width, classes, 1)) for width in (512, 256)
        )
        self.is_mmseg = is_mmseg
        self.outputs: object = None

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of both losses."""
        x, features = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        x, beside = self.head(features[3]), self.beside(features[2])
        if self.concatenated is not None:
            x = self.concatenated(torch.cat((features[3], x), 1))
        outputs = [
            F.interpolate(y, images.shape[-2:], mode="bilinear", align_corners=False)
            for y in (self.out(x), self.out_beside(beside))
        ]
        if not self.is_mmseg:
            self.outputs = outputs  # a variable of the training loop, which computes the loss
        loss, other = (F.cross_entropy(kept(y), labels, ignore_index=255) for y in outputs)
        return loss + (0.4 if self.is_mmseg else 0.5) * other


class BasicBlock(nn.Module):
    """The residual block of Lightly's ResNet-18, whose ReLUs are not in place."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, width, (3, 3), stride, has_relu=False)
        self.second = convolution(width, width, (3, 3), has_relu=False)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != width:
            self.shortcut = convolution(inputs, width, (1, 1), stride, has_relu=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map features to features."""
        y = self.second(F.relu(self.first(x)))
        y += self.shortcut(x)
        return F.relu(y)


class Lightly(nn.Module):
    """A ResNet-18 for images of 32x32, with the features of CIFAR-10 for its nearest neighbours."""

    def __init__(self) -> None:
        super().__init__()
        layers, inputs = [convolution(3, 64, (3, 3), has_relu=False)], 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers += [BasicBlock(inputs, width, stride), BasicBlock(width, width, 1)]
            inputs = width
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.register_buffer("bank", torch.empty(512, 50000))


def projection(*widths: int) -> nn.Sequential:
    """Return linear layers with a batch norm and a ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths[:-1]):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(*widths[-2:]))


class SimCLR(Lightly):
    """Lightly's SimCLR, which compares each view with all other views of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = projection(512, 512, 128)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the loss of two views."""
        a, b = (F.normalize(self.head(self.layers(x)), dim=1) for x in (first, second))
        same_a, to_b, to_a, same_b = (x @ y.T / 0.5 for x, y in ((a, a), (a, b), (b, a), (b, b)))
        # A view is not compared with itself. A slice is as large as the masked selection.
        rows = [torch.cat((to_b, same_a[:, 1:]), 1), torch.cat((to_a, same_b[:, 1:]), 1)]
        labels = torch.arange(len(a), device=a.device).repeat(2)
        return F.cross_entropy(torch.cat(rows), labels)


class SimSiam(Lightly):
    """Lightly's SimSiam, which predicts each view from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(projection(512, 2048, 2048), nn.BatchNorm1d(2048))
        self.predictor = projection(2048, 512, 2048)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the loss of two views."""
        views = [self.head(self.layers(x)) for x in (first, second)]
        predicted = [self.predictor(x) for x in views]
        alike = [
            F.cosine_similarity(x.detach(), y).mean()
            for x, y in zip(views, reversed(predicted), strict=True)
        ]
        return -0.5 * (alike[0] + alike[1])
