"""`--autocast`: forward and loss in torch.autocast, as in trainers with mixed precision."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from storage_ops.loss.planning.plan import dtype_name

if TYPE_CHECKING:
    import torch

_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare --autocast."""
    parser.add_argument(
        "--autocast",
        metavar="DTYPE",
        help="bf16 or fp16: forward and loss run in torch.autocast, and --dtype is fp32 by default",
    )


def block(args: argparse.Namespace) -> AbstractContextManager[Any]:
    """Return the `torch.autocast` block in which a simulation runs forward and loss.

    Raises:
        ValueError: autocast does not support the dtype.
    """
    if args.autocast is None:
        return contextlib.nullcontext()
    import torch

    # Not by `dtype_name`, whose errors name dtypes that autocast does not support.
    name = _DTYPES.get(args.autocast)
    if name is None:
        raise ValueError(f"--autocast is {args.autocast}. Expected bf16 or fp16.")
    # The simulation uses fake CPU tensors in place of GPU tensors.
    return torch.autocast("cpu", getattr(torch, name))


@contextlib.contextmanager
def without_bytes(args: argparse.Namespace) -> Iterator[None]:
    """Create tensors without memory in a with block, on a device that autocast supports."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if args.autocast is None:
        with torch.device("meta"):
            yield
    else:
        with FakeTensorMode(), torch.device("cpu"):
            yield


def dtype_of_parameters(args: argparse.Namespace, default: str) -> torch.dtype:
    """Return --dtype. The default is `default`, or fp32 with autocast."""
    import torch

    name = dtype_name(args.dtype or (default if args.autocast is None else "fp32"))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make a dtype torch's default in a with block."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
