"""`--images`: the number and size of the images in a sample, for models of transformers."""

from __future__ import annotations

import argparse
import inspect
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Images(NamedTuple):
    """The images of one sample. A height and width of None mean the size in the config."""

    number: int
    height: int | None
    width: int | None


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare --images."""
    parser.add_argument(
        "--images",
        metavar="N[xHxW]",
        help="images in a sample, and their height and width in pixels, such as 2x448x448 "
        "(default: 1 of the config's size for a vision model, none for a model of text and images)",
    )


def images_of(args: argparse.Namespace) -> Images | None:
    """Return the value of `--images`, or None without the option.

    Raises:
        ValueError: the value is not a number, or a number and a size.
    """
    if args.images is None:
        return None
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*)x([1-9]\d*))?", args.images)
    if match is None:
        raise ValueError(
            f"--images is {args.images}. Pass a number of images such as 2, or a number, a height "
            "and a width such as 2x448x448."
        )
    number, *size = match.groups()
    height, width = (None if part is None else int(part) for part in size)
    return Images(int(number), height, width)


def refuse(args: argparse.Namespace, why: str) -> None:
    """Raise an error if `--images` is given.

    Args:
        args: options of the command.
        why: the part of the message that says which model takes no images.

    Raises:
        ValueError: the option is given.
    """
    if args.images is not None:
        raise ValueError(f"--images is {args.images}, but {why}. Leave out --images.")


def one_for_each(model: nn.Module, args: argparse.Namespace) -> Tensor:
    """Return the pixels of a batch of a vision model, with one image in each sample.

    Raises:
        ValueError: `--images` has several images, or neither it nor the config has a size.
    """
    images = images_of(args) or Images(1, None, None)
    kind = _kind(model)
    if images.number > 1:
        raise ValueError(f"--images is {args.images}, but a sample of {kind} is one image. Pass 1.")
    config: Any = model.config
    return _pixels(model, args.batch, config, images)


def with_images(model: nn.Module, ids: Tensor, args: argparse.Namespace) -> dict[str, Tensor]:
    """Return the inputs of a model of text and images. The tokens of images are in its sequences.

    Token ids have real values, because the model searches them for the positions of images.

    Args:
        model: a transformers model on the meta device.
        ids: token ids without values. The inputs have their shape.
        args: options of the command, with `--images`.

    Raises:
        ValueError: the model takes no images, or takes them in an unknown way, or the images have
            more tokens than a sequence.
    """
    import torch

    images = images_of(args)
    assert images is not None
    kind, config = _kind(model), _config(model)
    takes = inspect.signature(model.forward).parameters
    token: Any = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if "pixel_values" not in takes:
        refuse(args, f"{kind} takes no images")
    if token is None or not hasattr(model, "get_image_features"):
        refuse(args, f"{kind} has no image_token_id that marks the positions of images")
    vision: Any = getattr(config, "vision_config", config)
    rows = len(ids) * images.number
    if "image_grid_thw" in takes:
        inputs, per_image = _in_patches(model, vision, images, rows)
    else:
        pixels = _pixels(model, rows, vision, images)
        inputs, per_image = {"pixel_values": pixels}, _tokens(model, pixels[:1], args)
    # A token of text follows each image, because models take adjacent image tokens for one image.
    needed = images.number * (per_image + 1)
    if needed > ids.shape[1]:
        raise ValueError(
            f"--seq is {ids.shape[1]}, but --images is {args.images} and an image has {per_image} "
            f"tokens. Pass at least {needed}."
        )
    text = int(token == 0)
    tokens = torch.full(tuple(ids.shape), text, dtype=torch.int64)
    tokens[:, :needed] = token
    tokens[:, per_image : needed : per_image + 1] = text
    for name in ("token_type_ids", "mm_token_type_ids"):  # 1 for the tokens of images
        if name in takes:
            inputs[name] = tokens.eq(token).long()
    return {"input_ids": tokens} | inputs


def _kind(model: nn.Module) -> str:
    """Return the name of a model's class, also after FSDP2 has replaced the class."""
    from storage_ops.checkpoint.layers.config_policy import class_of

    return class_of(model).__name__


def _config(model: nn.Module) -> Any:
    return model.config


def _pixels(model: nn.Module, rows: int, config: Any, images: Images) -> Tensor:
    """Return images of one size in the model's dtype: trainers convert them to it."""
    import torch

    size: Any = getattr(config, "image_size", None)
    if images.height is not None:
        size = images.height, images.width
    if size is None:
        raise ValueError(
            f"--images has no size, and the config of {_kind(model)} has no image_size. Pass a "
            f"height and a width, such as {images.number}x224x224."
        )
    height, width = (size, size) if isinstance(size, int) else size
    shape = rows, getattr(config, "num_channels", 3), height, width
    return torch.empty(shape, dtype=_dtype(model), device="meta")


def _in_patches(
    model: nn.Module, config: Any, images: Images, rows: int
) -> tuple[dict[str, Tensor], int]:
    """Return images as rows of patches, with their grid of patches, and the tokens of an image."""
    import torch

    if images.height is None or images.width is None:
        raise ValueError(
            f"--images is {images.number}, but {_kind(model)} takes images of any size. "
            f"Pass a height and a width, too, such as {images.number}x448x448."
        )
    merged = getattr(config, "spatial_merge_size", 2)
    unit = config.patch_size * merged
    if images.height % unit or images.width % unit:
        raise ValueError(
            f"--images has the size {images.height}x{images.width}. Pass multiples of {unit}: "
            f"the processor of {_kind(model)} resizes images to them."
        )
    rows_of_patches, columns = (n // config.patch_size for n in (images.height, images.width))
    grid = torch.tensor([[1, rows_of_patches, columns]])
    patches = int(grid.prod())
    channels = getattr(config, "in_channels", getattr(config, "num_channels", 3))
    width = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    pixels = torch.empty(rows * patches, width, dtype=_dtype(model), device="meta")
    inputs = {"pixel_values": pixels, "image_grid_thw": grid.repeat(rows, 1)}
    return inputs, int(patches // merged**2)


def _tokens(model: Any, pixels: Tensor, args: argparse.Namespace) -> int:
    """Return the number of tokens of an image, by running the model's vision tower."""
    import torch
    from torch.utils._pytree import tree_leaves

    try:
        with torch.no_grad():
            output = model.get_image_features(pixels)
    except Exception as error:  # the model's own code may raise anything
        raise ValueError(
            f"--images is {args.images}, but {_kind(model)} does not compute tokens from pixels "
            f"alone: {' '.join(str(error).split())}. Pass a model that takes only pixels, or "
            "patches with image_grid_thw, or call storage_ops.memory.will_it_fit in Python."
        ) from error
    features = tree_leaves(getattr(output, "pooler_output", output))
    width: int = _config(model).get_text_config().hidden_size
    return sum(t.numel() for t in features if isinstance(t, torch.Tensor)) // width


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
