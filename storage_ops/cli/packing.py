"""`--packing`: put all sequences of a batch into one row. Position ids mark their beginnings."""

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
    """Set the attention function of a model for packed rows, and print a note about it."""
    attention = "torch's attention with a mask of all pairs of tokens, one for each kind of layer"
    if args.packing == "flash":
        _replace_attention(model)
        attention = "flash attention of varying lengths, which takes no mask"
    output.note(
        f"--packing {args.packing}: all sequences are in one row, and a sequence begins where the "
        f"position ids start again from 0. Layers use {attention}."
    )


def packed(
    model: nn.Module, batch: dict[str, Tensor], args: argparse.Namespace
) -> dict[str, Tensor]:
    """Return the batch with all its tokens in one row.

    Position ids have real values, because transformers reads the sequences' beginnings from them.

    Raises:
        ValueError: the model has other inputs than tokens, or its loss takes no packed row.
    """
    kind = class_of(model).__name__
    has_positions = "position_ids" in inspect.signature(model.forward).parameters
    has_only_tokens = batch.keys() == {"input_ids", "labels"}
    has_token_labels = has_only_tokens and batch["labels"].shape == batch["input_ids"].shape
    if not (has_positions and has_token_labels):
        raise ValueError(
            f"--packing is {args.packing}, but the inputs of {kind} are {', '.join(batch)}. Pass "
            "a model that takes token ids and position_ids, with a label for each token."
        )
    if args.reference is not None:
        raise ValueError(
            f"--packing is {args.packing}, but the loss of --reference takes one sequence in a "
            "row. Leave out one of these options."
        )
    sequences, tokens = batch["input_ids"].shape
    positions = torch.arange(tokens).repeat(sequences)[None]
    ids = batch["input_ids"].reshape(1, -1)
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def _replace_attention(model: Any) -> None:
    """Let a model use a function that needs as much memory as flash attention, but no package.

    Torch's attention to the whole row, without a mask, saves the same tensors as flash attention of
    varying lengths. Only its time differs.
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
    """Return torch's attention to the whole row, in the layout that transformers expects."""
    attended = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return attended.transpose(1, 2).contiguous(), None
