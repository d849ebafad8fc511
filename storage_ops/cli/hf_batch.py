"""A batch without bytes for a transformers model: inputs by its config, labels by its task."""

from __future__ import annotations

import argparse
import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from storage_ops.checkpoint.layers.config_policy import class_of
from storage_ops.cli import audio, images, recipe

# Tables in transformers.models.auto.modeling_auto, by the kind of labels that their models take.
_TOKENS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT",
    "TOKEN_CLASSIFICATION", "PRETRAINING",
)  # fmt: skip
_SEQUENCES = "SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"
_ANSWERS = ("QUESTION_ANSWERING",)
# Fields of configs that count learned positions. GPT-2's own name comes first, because its config
# has "max_position_embeddings" too, as an alias.
_POSITIONS = "n_positions", "max_position_embeddings", "max_target_positions"


def batch_for(model: nn.Module, args: argparse.Namespace) -> dict[str, Tensor]:
    """Return the keyword arguments of a training step of `model`, on the meta device.

    Token ids have the shape (--batch, --seq). Pixel values and audio features have the dtype of the
    model. --images and --audio override the sizes in the config. The model's task decides whether
    each token or each sequence has a label. If the model takes only token ids, they are the labels
    too.

    Raises:
        ValueError: the model takes inputs or has a task that the command does not know, a size is
            missing, or --seq is longer than the model's learned positions.
    """
    args = argparse.Namespace(**vars(args) | {"batch": recipe.sequences(args)})
    model = getattr(model, "get_base_model", lambda: model)()  # without PEFT's wrappers
    config: Any = model.config
    takes = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    batch: dict[str, Tensor] = {}
    if main != "input_ids" and "pixel_values" not in takes:
        images.refuse(args, f"{_kind(model)} takes no images")
    has_audio = main in ("input_features", "input_values")
    if not has_audio:
        has_both = {"input_features", "input_values"} & takes.keys()
        why = "takes audio among tokens, which is not counted" if has_both else "takes no audio"
        audio.refuse(args, f"{_kind(model)} {why}")
    if main == "pixel_values":
        batch[main] = images.one_for_each(model, args)
    elif main == "input_features" and hasattr(config, "input_feat_per_channel"):
        frames = audio.frames(_kind(model), args, model)
        batch[main] = _values(model, args.batch, frames, config.input_feat_per_channel)
    elif main == "input_features":
        frames = 2 * _field(model, "max_source_positions")
        audio.check_padded(_kind(model), args, frames)
        batch[main] = _values(model, args.batch, _field(model, "num_mel_bins"), frames)
    elif main == "input_values" and hasattr(config, "num_mel_bins"):
        frames = _field(model, "max_length")
        audio.check_padded(_kind(model), args, frames)
        batch[main] = _values(model, args.batch, frames, config.num_mel_bins)
    elif main == "input_values":
        samples = audio.samples(_kind(model), args, "decoder_input_ids" in takes)
        batch[main] = _values(model, args.batch, samples)
    elif main == "input_ids":
        batch[main] = _ids(args.batch, _tokens(model, args))
        if args.images is not None:
            batch = images.with_images(model, batch[main], args)
    else:
        raise ValueError(
            f"--hf-config is of a {_kind(model)}, which takes {main}. Expected a model of "
            "token ids, images or audio features. Call storage_ops.memory.will_it_fit in Python."
        )
    if "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = _ids(args.batch, _decoder_tokens(model, args))
    elif args.decoder_seq is not None:
        raise ValueError(
            f"--decoder-seq is {args.decoder_seq}, but {_kind(model)} has no decoder_input_ids. "
            "Leave out --decoder-seq."
        )
    labels = _labels(model, args)
    if labels.keys() == {"labels"} and batch.keys() == {"input_ids"}:
        ids = batch["input_ids"]
        labels = {"labels": ids} if labels["labels"].shape == ids.shape else labels
    if args.packing is not None:
        from storage_ops.cli.packing import packed

        return packed(model, batch | labels, args)
    return batch | labels


def _kind(model: nn.Module) -> str:
    """Return the name of a model's class, also after FSDP2 has replaced the class."""
    return class_of(model).__name__


def left_out(model: nn.Module, batch: dict[str, Tensor]) -> str | None:
    """Return the input of images or audio that the model takes and the batch lacks, or None."""
    takes = inspect.signature(model.forward).parameters
    names = ("pixel_values", "input_features")
    return next((name for name in names if name in takes and name not in batch), None)


def _values(model: nn.Module, *shape: int) -> Tensor:
    """Return pixels or features in the model's dtype: trainers convert them to it."""
    return torch.empty(shape, dtype=next(model.parameters()).dtype, device="meta")


def _ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _field(model: nn.Module, name: str) -> int:
    """Return a field of the config that sets a size of the model's inputs."""
    size = getattr(model.config, name, None)
    if not isinstance(size, int):
        raise ValueError(
            f"--hf-config is of a {_kind(model)}, and its {name} is {size!r}. Expected a size of "
            "the model's inputs. Call storage_ops.memory.will_it_fit in Python with a batch."
        )
    return size


def _tokens(model: nn.Module, args: argparse.Namespace) -> int:
    """Return --seq, after checking that the model has enough positions."""
    if args.seq is None:
        raise ValueError(
            f"--seq is missing, but {_kind(model)} takes token ids. Pass the number of tokens in a "
            "sequence."
        )
    name, most = positions(model)
    if args.seq > most:
        raise ValueError(
            f"--seq is {args.seq}. Expected at most {most:.0f}, the config's {name}: the model "
            "learns an embedding for each position."
        )
    return int(args.seq)


def positions(model: nn.Module) -> tuple[str, float]:
    """Return the field of the config that counts learned positions, and their number.

    The field counts only if an embedding has a row for each position. If the model learns no
    positions, the number is infinite.
    """
    rows = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    limits = [("", math.inf)]
    for name in _POSITIONS:
        number = getattr(model.config, name, None)
        # BART, OPT and similar models have two more rows, for padding.
        if isinstance(number, int) and {number, number + 2} & rows:
            limits.append((name, number))
    return min(limits, key=lambda limit: limit[1])


def _decoder_tokens(model: nn.Module, args: argparse.Namespace) -> int:
    """Return --decoder-seq, or --seq without it, after checking it as `_tokens` does."""
    seq = args.seq if args.decoder_seq is None else args.decoder_seq
    return _tokens(model, argparse.Namespace(**vars(args) | {"seq": seq}))


def _labels(model: nn.Module, args: argparse.Namespace) -> dict[str, Tensor]:
    """Return the labels that --labels names, or those for the task of the model's class."""
    name = _kind(model)
    has_decoder = "decoder_input_ids" in inspect.signature(model.forward).parameters
    tokens = _decoder_tokens if has_decoder else _tokens
    if args.labels == "none":
        return {}
    by_class = args.labels is None
    if by_class and _has_task(name, _ANSWERS):
        return {key: _ids(args.batch) for key in ("start_positions", "end_positions")}
    if args.labels == "sequences" or (by_class and _has_task(name, _SEQUENCES)):
        return {"labels": _ids(args.batch)}
    if args.labels == "tokens" or (by_class and _has_task(name, _TOKENS)):
        return {"labels": _ids(args.batch, tokens(model, args))}
    raise ValueError(
        f"--hf-config is of a {name}, whose labels the command does not know. Expected a language "
        "model or a classifier. Pass --labels tokens, sequences or none, or call "
        "storage_ops.memory.will_it_fit in Python with a loss function."
    )


def _has_task(name: str, tasks: tuple[str, ...]) -> bool:
    """Return True if transformers lists the class under one of these tasks."""
    from transformers.models.auto import modeling_auto

    tables = (getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in tasks)
    return any(
        name in (value if isinstance(value, tuple) else (value,))
        for table in tables
        for value in table.values()
    )
