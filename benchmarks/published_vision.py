"""Estimated peaks of training steps of vision models against peaks that others published.

All figures are `torch.cuda.max_memory_allocated()` of a training run with inputs of a fixed size.

| source | where its figures are |
|---|---|
| MMAction2 0.24 | `gpu_mem(M)` for Kinetics-400 in `configs/recognition/*/README.md` |
| MMSegmentation | "Mem (GB)" for crops of 512x1024 in `configs/fcn/README.md` |
| torchvision | "max mem" of `fcn_resnet50` without AMP, in pull request 4994 of pytorch/vision |
| Lightly | `docs/source/getting_started/benchmarks/cifar10_benchmark.py`, 200 epochs |
| DINO | "max mem" of vanilla training on 8 GPUs, in issue 69 of facebookresearch/dino |

The runs are from 2020 to 2023. In their versions of torch, `zero_grad` sets gradients to zero, so
they exist in the forward. Models are in `_vision_models.py` and `_vision_transformers.py`.
Estimates are for an A100, because `simulate_step` has no V100 and no A6000.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks import _vision_models as models
from benchmarks import _vision_transformers as transformers
from benchmarks._one_rank import one_of
from storage_ops.memory import simulate_step

GIB = 1 << 10  # in MiB
UNKNOWN = "not known"
CUDNN = "not known; workspaces of cuDNN do not count without TF32"
ROUNDED = "published is rounded to 0.1 GB; the rest is not known"
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Shape = tuple[int, ...]


class Cell(NamedTuple):
    """A published case.

    Attributes:
        source, what, gpu, published: the row of the table, in MiB.
        model: returns the model.
        images: the shape of each tensor of images.
        labels: the shape of the labels. None: there are none.
        ranks: GPUs of DistributedDataParallel.
        optimizer: returns the optimizer of parameters.
        is_old: whether cuBLAS allocated its workspaces itself, and convolutions had no TF32.
        why: the reason for a difference.
    """

    source: str
    what: str
    gpu: str
    published: float
    model: Callable[[], nn.Module]
    images: tuple[Shape, ...]
    labels: Shape | None = None
    ranks: int = 8
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = SGD
    is_old: bool = True
    why: str = ""


def _video(what: str, published: float, model: Any, frames: Shape, why: str = "") -> Cell:
    """Return a case of MMAction2 with clips of this shape, before the size of a frame."""
    images = ((*frames, 224, 224),)
    return Cell("MMAction2", what, "V100", published, model, images, frames[:1], why=why)


def _pixels(what: str, published: float, depths: Any) -> Cell:
    """Return a case of MMSegmentation with two crops of Cityscapes."""
    model = partial(models.Segmentation, depths, is_mmseg=True)
    shapes = ((2, 3, 512, 1024),), (2, 512, 1024)
    return Cell("MMSegmentation", what, "V100", published, model, *shapes, ranks=4, why=CUDNN)


def _views(model: Any, batch: int, published: float) -> Cell:
    """Return a case of Lightly with two views of each image."""
    what = f"{model.__name__}, ResNet-18, batch {batch}"
    images = ((batch, 3, 32, 32),) * 2
    how = {"ranks": 1, "is_old": False, "why": ROUNDED}
    return Cell("Lightly", what, "RTX A6000", published * GIB, model, images, None, **how)


def _first_epoch(parameters: list[nn.Parameter]) -> Optimizer:
    """Return the optimizer of DINO in its first epoch, in which it skips the output layer."""
    return torch.optim.AdamW(p for p in parameters if len(p) != transformers.OUTPUTS)


TSN, SLOWFAST, TIMESFORMER = models.FrameModel, models.SlowFast, transformers.TimeSformer
# MMAction2 has many rows with the same figure: here is one of each model and clip length.
CELLS = [
    _video("TSN, 3 frames, batch 32", 8344, partial(TSN, 3), (32, 3, 3)),
    _video("TSN, 8 frames, batch 32", 21558, partial(TSN, 8), (32, 8, 3)),
    _video("TSM, 8 frames, batch 8", 7079, partial(TSN, 8, True), (8, 8, 3)),
    _video("TSM, 16 frames, batch 6", 10404, partial(TSN, 16, True), (6, 16, 3)),
    _video("SlowOnly, 4 frames, batch 8", 3168, models.SlowOnly, (8, 1, 3, 4)),
    _video("SlowOnly, 8 frames, batch 8", 5820, models.SlowOnly, (8, 1, 3, 8)),
    _video("I3D, 32 frames, batch 8", 5170, models.I3D, (8, 1, 3, 32)),
    _video("SlowFast, 4 and 32 frames, batch 8", 6203, partial(SLOWFAST, 8, 8, 5), (8, 1, 3, 32),
           CUDNN),
    _video("SlowFast, 8 and 32 frames, batch 8", 9062, partial(SLOWFAST, 4, 4, 7), (8, 1, 3, 32),
           CUDNN),
    _video("TimeSformer, space only, batch 8", 12750, partial(TIMESFORMER, False), (8, 1, 3, 8),
           UNKNOWN),
    _video("TimeSformer, divided, batch 8", 17874, partial(TIMESFORMER, True), (8, 1, 3, 8),
           UNKNOWN),
    _pixels("FCN, ResNet-50, batch 2", 5.7 * GIB, models.RESNET50),
    _pixels("FCN, ResNet-101, batch 2", 9.2 * GIB, models.RESNET101),
    Cell("torchvision", "FCN, ResNet-50, batch 4", "not said", 4723, models.Segmentation,
         ((4, 3, 480, 480),), (4, 480, 480), why=CUDNN),
    *(_views(models.SimCLR, batch, gib) for batch, gib in ((128, 1.5), (512, 4.9))),
    *(_views(models.SimSiam, batch, gib) for batch, gib in ((128, 1.6), (512, 5.0))),
    Cell("DINO", "ViT-S/16, 8 local crops, batch 64", "not said", 13871, transformers.DINO,
         ((64, 3, 224, 224),) * 2 + ((64, 3, 96, 96),) * 8, optimizer=_first_epoch, why=UNKNOWN),
]  # fmt: skip


@contextlib.contextmanager
def _without_tf32(is_off: bool) -> Iterator[None]:
    """Turn TF32 of convolutions off, or on, in a with block."""
    convolutions: Any = torch.backends.cudnn.conv
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee" if is_off else "tf32"
    try:
        yield
    finally:
        convolutions.fp32_precision = before


def peak(cell: Cell) -> int:
    """Return the estimated peak in bytes."""
    # DistributedDataParallel takes no meta tensors. Unwritten pages use no memory.
    batch: list[Tensor] = [torch.empty(shape) for shape in cell.images]
    if cell.labels is not None:
        batch.append(torch.empty(cell.labels, dtype=torch.int64))
    with one_of(cell.ranks), _without_tf32(cell.is_old):
        with torch.device("meta"):
            model = cell.model()
        model = model.to_empty(device="cpu").train()
        if cell.ranks > 1:
            model = DistributedDataParallel(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        step = simulate_step(
            model,
            tuple(batch),
            loss=lambda loss: loss,
            optimizer=cell.optimizer(trained),
            device="a100",
            accumulate=True,
        )
    workspaces = step.by_owner.get("workspaces of cuBLAS", 0) if cell.is_old else 0
    return step.peak_bytes - workspaces
