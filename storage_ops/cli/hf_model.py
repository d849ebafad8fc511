"""A model of transformers by its config file, without bytes, and a batch for it."""

from __future__ import annotations

import argparse
import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage_ops.cli import audio, autocast, images, output, ranks, recipe
from storage_ops.cli.quantized import options
from storage_ops.optional import required

if TYPE_CHECKING:
    from torch import nn

BUDGET = "80GiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say which step of which model."""
    which = parser.add_argument_group("the model").add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--hf-config",
        type=Path,
        help="config.json of a model of transformers, or the folder that it is in",
    )
    which.add_argument(
        "--model",
        metavar="FILE.py:FUNCTION",
        help="a function that returns (model, batch) or (model, batch, loss)",
    )
    step = parser.add_argument_group("the training step")
    step.add_argument("--batch", type=int, help="sequences in a batch (default: 1)")
    step.add_argument(
        "--seq", type=int, help="tokens in a sequence; without --audio, also samples of audio"
    )
    step.add_argument(
        "--decoder-seq", type=int, help="tokens of a decoder beside an encoder (default: --seq)"
    )
    images.add_arguments(step)
    audio.add_arguments(step)
    step.add_argument(
        "--labels",
        choices=("tokens", "sequences", "none"),
        help="what labels are for (default: by the class in architectures)",
    )
    step.add_argument(
        "--accumulate", action="store_true", help="one step of the optimizer is for several batches"
    )
    step.add_argument(
        "--dtype",
        help="dtype of the parameters (default: bf16; with --model, what the function makes)",
    )
    autocast.add_arguments(step)
    recipe.add_arguments(step)
    step.add_argument(
        "--optimizer",
        default="adamw",
        help="none, a class of torch.optim, or one of bitsandbytes such as adamw8bit, lion or "
        "paged-adamw8bit (default: adamw)",
    )
    options.add_arguments(parser.add_argument_group("quantized weights and adapters"))
    devices = parser.add_argument_group("the devices")
    devices.add_argument(
        "--budget",
        default=BUDGET,
        help=f"usable memory of a device, such as 70GiB (default: {BUDGET})",
    )
    ranks.add_arguments(devices)
    output.add_device(devices)


def command(name: str, args: argparse.Namespace) -> list[str]:
    """Return the words of a command line for the same step of the same model.

    Options are those of `add_arguments`, without the ones that have their defaults.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["python", "-m", "storage_ops", name]
    for action in parser._actions:
        value = getattr(args, action.dest, action.default)
        if value != action.default:
            words.append(action.option_strings[0])
            words += [] if value is True else [str(value)]
    return words


def model_and_batch(args: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model on the meta device, in training mode, and a batch for it.

    Raises:
        ImportError: transformers is not there. ValueError: an option, or the config, is wrong.
    """
    import torch

    dtype = autocast.dtype_of_parameters(args, "bf16")
    transformers = required("transformers", "--hf-config")
    try:
        path = args.hf_config / "config.json" if args.hf_config.is_dir() else args.hf_config
        read = json.loads(path.read_text())
        if not isinstance(read, dict):
            raise ValueError(f"It is a {type(read).__name__} of JSON, not an object.")
        # Its reader knows the words that transformers writes for numbers such as infinity.
        read = transformers.PretrainedConfig.get_config_dict(str(path))[0]
        config: Any = transformers.AutoConfig.for_model(**read)
        # A step of training fills no cache of keys and values.
        config.use_cache = False
        names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
        cls: Any = getattr(transformers, names[0], transformers.AutoModelForCausalLM)
        # As from_pretrained: parameters are made in the dtype, and what is computed for buffers is
        # in float32.
        with torch.device("meta"), autocast.default_dtype(dtype):
            made = cls.from_config(config) if "Auto" in cls.__name__ else cls(config)
    except Exception as error:  # a config's own code may raise anything
        raise ValueError(
            f"--hf-config is {args.hf_config}, which transformers cannot read: {_why(error)}. "
            "Expected the config.json of a model of transformers."
        ) from error
    from storage_ops.cli import hf_batch, packing
    from storage_ops.cli.quantized.adapters import adapted

    model: nn.Module = made.train()
    batch = hf_batch.batch_for(model, args)
    if unused := hf_batch.left_out(model, batch):
        advice = " without --images" if unused == "pixel_values" else ""
        output.note(f"{type(model).__name__} also takes {unused}, which are not counted{advice}.")
    if args.packing is not None:
        packing.prepare(model, args)
    return adapted(model, args), batch


def _why(error: Exception) -> str:
    """Return what is wrong with a config in one line, without the list of all types and classes."""
    why, _, types = str(error).partition(". Should contain one of ")
    why = why.partition("\nModel type should be one of ")[0]
    wrong = why.rpartition(" ")[2]
    if like := difflib.get_close_matches(wrong, types.split(", "), 1):
        why += f", like {like[0]}"
    if not isinstance(error, (OSError, ValueError)):
        why = f"{type(error).__name__}: {why}"
    return " ".join(why.split())
