"""The training step that a command is asked about: a model, a batch and a loss."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from storage_ops.cli import hf_model, model_function, recipe
from storage_ops.cli.quantized import options

if TYPE_CHECKING:
    from torch import Tensor, nn


class Workload(NamedTuple):
    """A model on the meta device, a batch for it, and its loss; None is the loss in its output."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] | None = None


def workload(args: argparse.Namespace) -> Workload:
    """Return the step that --hf-config or --model names.

    Raises:
        ImportError: transformers is not there. ValueError: an option, or the config, is wrong.
    """
    for name in ("batch", "seq", "decoder_seq"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}. Expected 1 or more.")
    if args.model is not None:
        options.refuse_with_function(args)
        recipe.refuse_with_function(args)
        return Workload(*model_function.call(args))
    model, batch = hf_model.model_and_batch(args)
    step = _of_transformers(args, model, batch)
    if args.reference is None:
        return step
    from storage_ops.cli import reference

    reference.with_reference(step.model, args)
    return step._replace(loss=reference.loss_of)


def resized(step: Workload, args: argparse.Namespace, size: str, number: int) -> Workload:
    """Return the step with another "batch" or "seq"."""
    model, _, loss = step
    changed = argparse.Namespace(**vars(args) | {size: number})
    if args.model is not None:
        return Workload(model, *model_function.call(changed)[1:])
    from storage_ops.cli import hf_batch

    made = _of_transformers(args, model, hf_batch.batch_for(model, changed))
    return made._replace(loss=loss)


def _of_transformers(args: argparse.Namespace, model: nn.Module, batch: Any) -> Workload:
    """Return the step of a model of transformers; with autocast on fake tensors of the CPU."""
    if args.autocast is None:
        return Workload(model, batch)
    from storage_ops.simulate.fakes import FakesOfCPU

    fakes = FakesOfCPU()
    if next(model.parameters()).is_meta:
        fakes.module(model)
    return Workload(model, fakes.batch(batch))


def longest(args: argparse.Namespace, step: Workload) -> int | None:
    """Return the largest number that --find can try; None if there is no limit.

    Raises:
        ValueError: a model of transformers takes no tokens, and --find is seq.
    """
    if args.model is not None or args.find == "batch":
        return None
    from storage_ops.cli import hf_batch

    if not {"input_ids", "decoder_input_ids"} & step.batch.keys():
        raise ValueError("--find is seq, but the model takes no tokens. Pass batch or device.")
    most = hf_batch.positions(step.model)[1]
    return None if math.isinf(most) else int(most)
