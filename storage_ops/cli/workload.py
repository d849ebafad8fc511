"""Create the training step that a command simulates: a model, a batch and a loss."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from storage_ops.cli import hf_model, model_function, recipe
from storage_ops.cli.quantized import options

_PACKAGE = Path(__file__).parents[1]
# Fields of configs for the longest sequence. Some models without learned positions raise an error
# for longer sequences too.
_LENGTH_LIMITS = "n_positions", "max_position_embeddings", "max_seq_len", "max_sequence_length"

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModelError(ValueError):
    """An error that the code of a model raised, with its line and its original message."""


class Workload(NamedTuple):
    """A model on the meta device, a batch, and a loss function. None: the output has the loss."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] | None = None


def workload(args: argparse.Namespace) -> Workload:
    """Return the step that --hf-config or --model names.

    Raises:
        ImportError: transformers is not installed.
        ValueError: an option or the config is wrong.
    """
    for name in ("batch", "seq", "decoder_seq"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}. Expected 1 or more.")
    # This logger prints the traceback of an op's error. The command reports it in one line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    if args.model is not None:
        options.refuse_with_function(args)
        recipe.refuse_with_function(args)
        step = Workload(*model_function.call(args))
        _move_to_meta(step.model)
        return step
    model, batch = hf_model.model_and_batch(args)
    _move_to_meta(model)
    step = _of_transformers(args, model, batch)
    if args.reference is None:
        return step
    from storage_ops.cli import reference

    reference.with_reference(step.model, args)
    return step._replace(loss=reference.loss_of)


def _move_to_meta(model: nn.Module) -> None:
    """Move all parameters of a model to the meta device if some are on it.

    `torch.Tensor(size)` creates a tensor on the CPU even inside `torch.device("meta")`.
    """
    from torch import nn

    if not any(p.is_meta for p in model.parameters()):
        return
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if not p.is_meta:
                setattr(module, name, nn.Parameter(p.to("meta"), p.requires_grad))


@contextlib.contextmanager
def model_errors(args: argparse.Namespace, model: nn.Module) -> Iterator[None]:
    """Add the line and a possible cause to errors that the model's code raises in a with block.

    Raises:
        ModelError: the code of the model, or torch code that it calls, raised an error.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if _PACKAGE in Path(frame.f_code.co_filename).parents:
            raise  # errors of this package need no explanation
        from storage_ops.checkpoint.layers.config_policy import class_of
        from storage_ops.simulate.values.assume import users_line

        config = getattr(model, "config", None)
        expected = "a model that runs a training step with this batch"
        for name in _LENGTH_LIMITS:
            limit = getattr(config, name, None)
            if args.seq is not None and isinstance(limit, int) and limit < args.seq:
                expected = f"--seq of at most {limit}, the config's {name}, and not {args.seq}"
                break
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ModelError(
            f"A step of {class_of(model).__name__} raised {message} at "
            f"{users_line(error.__traceback__)}. Expected {expected}."
        ) from error


def resized(step: Workload, args: argparse.Namespace, size: str, number: int) -> Workload:
    """Return the step with another value of `size`: "batch" or "seq"."""
    model, _, loss = step
    changed = argparse.Namespace(**vars(args) | {size: number})
    if args.model is not None:
        return Workload(model, *model_function.call(changed)[1:])
    from storage_ops.cli import hf_batch

    return _of_transformers(args, model, hf_batch.batch_for(model, changed))._replace(loss=loss)


def _of_transformers(args: argparse.Namespace, model: nn.Module, batch: Any) -> Workload:
    """Return the step of a transformers model. With autocast, its tensors are fake CPU tensors."""
    from storage_ops.simulate.step import loss_of

    # The sum of the output is asked for here, and is no oversight to warn of.
    loss = loss_of if args.labels == "none" else None
    if args.autocast is None:
        return Workload(model, batch, loss)
    from storage_ops.simulate.fakes import FakesOfCPU

    fakes = FakesOfCPU()
    if next(model.parameters()).is_meta:
        fakes.module(model)
    return Workload(model, fakes.batch(batch), loss)


def largest_to_try(args: argparse.Namespace, step: Workload) -> int | None:
    """Return the largest size that --find may try, or None without a limit.

    Raises:
        ValueError: --find is seq, but a transformers model takes no tokens.
    """
    if args.model is not None or args.find == "batch":
        return None
    from storage_ops.cli import hf_batch

    if not {"input_ids", "decoder_input_ids"} & step.batch.keys():
        raise ValueError(
            "--find is seq, but the model takes no tokens. Pass --find batch or --find device."
        )
    limit = hf_batch.positions(step.model)[1]
    return None if math.isinf(limit) else int(limit)
