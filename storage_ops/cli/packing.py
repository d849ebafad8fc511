"""`--packing`: all sequences of a batch in one row, told apart by their positions."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from storage_ops.checkpoint.layers.config_policy import class_of
from storage_ops.cli import output
from storage_ops.optional import required

_NAME = "storage_ops_packed"


def prepare(model: nn.Module, args: argparse.Namespace) -> None:
    """Set how a model attends to a packed row, and say what is assumed."""
    how = "torch's attention with a mask of all pairs of tokens, made once for each kind of layer"
    if args.packing == "flash":
        _attend_as_flash(model)
        how = "flash attention of varying lengths, which takes no mask"
    output.note(
        f"--packing {args.packing}: one row of all sequences, which begin where position ids begin "
        f"again, and {how}."
    )


def packed(
    model: nn.Module, batch: dict[str, Tensor], args: argparse.Namespace
) -> dict[str, Tensor]:
    """Return the batch with one row of all tokens.

    Position ids are real numbers, since transformers finds the sequences in them.

    Raises:
        ValueError: the model has other inputs than tokens, or its loss takes no packed row.
    """
    kind = class_of(model).__name__
    takes = "position_ids" in inspect.signature(model.forward).parameters
    is_of_tokens = batch.keys() == {"input_ids", "labels"}
    if not (takes and is_of_tokens and batch["labels"].shape == batch["input_ids"].shape):
        raise ValueError(
            f"--packing is {args.packing}, but the inputs of {kind} are {', '.join(batch)}. Pass "
            "a model of tokens and their position_ids, with a label for each."
        )
    if args.reference is not None:
        raise ValueError(
            f"--packing is {args.packing}, but the loss of --reference takes one sequence in a "
            "row. Leave out one of them."
        )
    sequences, tokens = batch["input_ids"].shape
    positions = torch.arange(tokens).repeat(sequences)[None]
    ids = batch["input_ids"].reshape(1, -1)
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def _attend_as_flash(model: Any) -> None:
    """Let a model attend by a function with the memory of flash attention, which needs no package.

    Torch's attention to the whole row keeps the same tensors without a mask. Only its time differs.
    """
    transformers = required("transformers", "--packing")
    transformers.AttentionInterface.register(_NAME, _whole_row)
    transformers.AttentionMaskInterface.register(_NAME, _no_mask)
    model.set_attn_implementation(_NAME)


def _no_mask(*args: object, **kwargs: object) -> None:
    """Return no mask."""


def _whole_row(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, dropout: float = 0.0,
    scaling: float | None = None, **options: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the attention of one row, in the layout that models of transformers expect."""
    attended = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return attended.transpose(1, 2).contiguous(), None
