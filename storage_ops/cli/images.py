"""`--images`: how many images a sample of a model of transformers has, and their size."""

from __future__ import annotations

import argparse
import inspect
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Images(NamedTuple):
    """The images of one sample; a height and width of None are those of the config."""

    number: int
    height: int | None
    width: int | None


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare --images."""
    parser.add_argument(
        "--images",
        metavar="N[xHxW]",
        help="images in a sample, and their height and width in pixels, such as 2x448x448 (default "
        "of a vision model: 1, of the config's size; of a model of text and images: none)",
    )


def images_of(args: argparse.Namespace) -> Images | None:
    """Return what `--images` asks for; None if it is not given.

    Raises:
        ValueError: it is not spelled as a number, or as a number and a size.
    """
    if args.images is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*)x([1-9]\d*))?", args.images)
    if found is None:
        raise ValueError(
            f"--images is {args.images}. Pass a number, or a number, a height and a width, such "
            "as 2 or 2x448x448."
        )
    number, *size = found.groups()
    height, width = (None if part is None else int(part) for part in size)
    return Images(int(number), height, width)


def refuse(args: argparse.Namespace, why: str) -> None:
    """Raise if `--images` is given, where `why` says what has none.

    Raises:
        ValueError: the option is given.
    """
    if args.images is not None:
        raise ValueError(f"--images is {args.images}, but {why}. Leave out --images.")


def one_for_each(model: nn.Module, args: argparse.Namespace) -> Tensor:
    """Return the pixels of a batch of a vision model, which has one image in a sample.

    Raises:
        ValueError: `--images` asks for several, or neither it nor the config has a size.
    """
    images = images_of(args) or Images(1, None, None)
    kind = _kind(model)
    if images.number > 1:
        raise ValueError(f"--images is {args.images}, but a sample of {kind} is one image. Pass 1.")
    config: Any = model.config
    return _pixels(model, args.batch, config, images)


def with_images(model: nn.Module, ids: Tensor, args: argparse.Namespace) -> dict[str, Tensor]:
    """Return the inputs of a model of text and images, whose images are among the tokens.

    Token ids are real numbers, since the model looks for the places of images in them.

    Args:
        model: of transformers, on the meta device.
        ids: the token ids, of the shape that these inputs have.
        args: options of the command; `--images` is given.

    Raises:
        ValueError: the model takes no images, or takes them in a way that is not known, or they
            have more tokens than a sequence.
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
        refuse(args, f"{kind} has no image_token_id that says where images are")
    vision: Any = getattr(config, "vision_config", config)
    rows = len(ids) * images.number
    if "image_grid_thw" in takes:
        inputs, each = _in_patches(model, vision, images, rows)
    else:
        pixels = _pixels(model, rows, vision, images)
        inputs, each = {"pixel_values": pixels}, _tokens(model, pixels[:1], args)
    # A token of text ends each image, since models take neighbours for one image.
    needed = images.number * (each + 1)
    if needed > ids.shape[1]:
        raise ValueError(
            f"--seq is {ids.shape[1]}, but --images is {args.images} and each image has {each} "
            f"tokens. Pass at least {needed}."
        )
    text = int(token == 0)
    tokens = torch.full(tuple(ids.shape), text, dtype=torch.int64)
    tokens[:, :needed] = token
    tokens[:, each : needed : each + 1] = text
    for name in ("token_type_ids", "mm_token_type_ids"):  # 1 for the tokens of images
        if name in takes:
            inputs[name] = tokens.eq(token).long()
    return {"input_ids": tokens} | inputs


def _kind(model: nn.Module) -> str:
    """Return the name of the class of a model, which may be sharded."""
    from storage_ops.checkpoint.layers.config_policy import class_of

    return class_of(model).__name__


def _config(model: nn.Module) -> Any:
    return model.config


def _pixels(model: nn.Module, rows: int, config: Any, images: Images) -> Tensor:
    """Return images of one size, in the dtype of the model, to which trainers convert them."""
    import torch

    size: Any = getattr(config, "image_size", None)
    if images.height is not None:
        size = images.height, images.width
    if size is None:
        raise ValueError(
            f"--images has no size, and neither has the config of {_kind(model)}. Pass a "
            f"height and a width, such as {images.number}x224x224."
        )
    height, width = (size, size) if isinstance(size, int) else size
    shape = rows, getattr(config, "num_channels", 3), height, width
    return torch.empty(shape, dtype=_dtype(model), device="meta")


def _in_patches(
    model: nn.Module, config: Any, images: Images, rows: int
) -> tuple[dict[str, Tensor], int]:
    """Return images as rows of patches, with the numbers of patches, and the tokens of each."""
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
            f"--images has the size {images.height}x{images.width}. Pass multiples of {unit}, to "
            f"which processors of {_kind(model)} resize."
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
    """Return the number of tokens that an image becomes, as the model computes it."""
    import torch
    from torch.utils._pytree import tree_leaves

    try:
        with torch.no_grad():
            found = model.get_image_features(pixels)
    except Exception as error:  # the model's own code may raise anything
        raise ValueError(
            f"--images is {args.images}, but {_kind(model)} makes no tokens of pixels "
            f"alone: {' '.join(str(error).split())}. Pass a model of pixels alone or of patches "
            "with image_grid_thw, or call storage_ops.memory.will_it_fit in Python."
        ) from error
    features = tree_leaves(getattr(found, "pooler_output", found))
    width: int = _config(model).get_text_config().hidden_size
    return sum(t.numel() for t in features if isinstance(t, torch.Tensor)) // width


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
