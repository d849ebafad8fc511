"""Create a transformers model without bytes from its config file, and a batch for it."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage_ops.cli import audio, autocast, images, output, ranks, recipe
from storage_ops.cli.quantized import options
from storage_ops.optional import required

if TYPE_CHECKING:
    from torch import nn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options for the model, its training step and its devices."""
    model = parser.add_argument_group("the model").add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--hf-config",
        type=Path,
        metavar="FILE",
        help="the config.json of a transformers model, or its folder",
    )
    model.add_argument(
        "--model",
        metavar="FILE.py:FUNCTION",
        help="a function that returns (model, batch) or (model, batch, loss)",
    )
    step = parser.add_argument_group("the training step")
    step.add_argument("--batch", type=int, help="sequences in a batch (default: 1)")
    step.add_argument(
        "--seq",
        type=int,
        help="tokens in a sequence; for models of sampled audio without --audio: samples",
    )
    step.add_argument(
        "--decoder-seq",
        type=int,
        help="tokens in a sequence of the decoder, if there is an encoder too (default: --seq)",
    )
    images.add_arguments(step)
    audio.add_arguments(step)
    step.add_argument(
        "--labels",
        choices=("tokens", "sequences", "none"),
        help="one label per token, one per sequence, or none (default: by the class that the "
        "config names in architectures)",
    )
    step.add_argument(
        "--accumulate", action="store_true", help="the optimizer steps once for several batches"
    )
    step.add_argument(
        "--dtype",
        help="dtype of the parameters (default: bf16; with --model, the function decides)",
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
        help="usable memory of a device, such as 70GiB (default: the memory of --device, without "
        "0.5 GiB for the CUDA context)",
    )
    ranks.add_arguments(devices)
    output.add_device(devices)


def command(name: str, args: argparse.Namespace) -> list[str]:
    """Return a command line, as a list of words, for the same step of the same model.

    It has the options of `add_arguments` that differ from their defaults.
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
        ImportError: transformers is not installed.
        ValueError: an option or the config is wrong.
    """
    import torch

    dtype = autocast.dtype_of_parameters(args, "bf16")
    transformers = required("transformers", "--hf-config")
    try:
        path = args.hf_config / "config.json" if args.hf_config.is_dir() else args.hf_config
        fields = json.loads(path.read_text())
        if not isinstance(fields, dict):
            raise ValueError(f"It is {type(fields).__name__} in JSON, not an object.")
        # transformers writes numbers such as infinity in its own way, which only it can read.
        fields = transformers.PretrainedConfig.get_config_dict(str(path))[0]
        config: Any = transformers.AutoConfig.for_model(**fields)
        # A training step has no cache of keys and values.
        config.use_cache = False
        cls = _class_for(config, transformers)
        # from_pretrained creates parameters in the dtype in the same way. Buffers that a model
        # computes are in float32.
        with torch.device("meta"), autocast.default_dtype(dtype):
            created = cls.from_config(config) if "Auto" in cls.__name__ else cls(config)
    except Exception as error:  # a config's own code may raise anything
        given, hint = str(args.hf_config), ""
        may_be_of_the_hub = re.fullmatch(r"[\w-]+/[\w.-]+(?<!\.json)", given)
        if may_be_of_the_hub and not args.hf_config.exists():
            hint = f" For a model of the hub, first run `hf download {given} config.json`."
        raise ValueError(
            f"--hf-config is {args.hf_config}, which transformers cannot read: {_why(error)}. "
            f"Expected the config.json of a model of transformers.{hint}"
        ) from error
    from storage_ops.cli import hf_batch, packing
    from storage_ops.cli.quantized.adapters import adapted

    model: nn.Module = created.train()
    names = getattr(config, "architectures", None)
    if names and not hasattr(transformers, names[0]):
        output.note(
            f"--hf-config is of {names[0]}, which transformers does not have. "
            f"{type(model).__name__} is simulated instead."
        )
    batch = hf_batch.batch_for(model, args)
    if unused := hf_batch.left_out(model, batch):
        advice = " without --images" if unused == "pixel_values" else ""
        output.note(f"{type(model).__name__} also takes {unused}, which are not counted{advice}.")
    if args.packing is not None:
        packing.prepare(model, args)
    return adapted(model, args), batch


def _class_for(config: Any, transformers: Any) -> Any:
    """Return the class of transformers that a config names, or a causal language model's.

    Raises:
        ValueError: the config names something that is no model.
    """
    names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
    is_list = isinstance(names, (list, tuple)) and isinstance(names[0], str)
    named = getattr(transformers, names[0], None) if is_list else names
    if named is None:  # such as a class that lies beside the config
        return transformers.AutoModelForCausalLM
    bases = getattr(named, "__mro__", ())
    if transformers.PreTrainedModel not in bases and not hasattr(named, "from_config"):
        first = names[0] if is_list else names
        raise ValueError(f"`architectures` names {first!r}, which is not the class of a model.")
    return named


def _why(error: Exception) -> str:
    """Return the error's message in one line, without the list of all model types and classes."""
    why, _, types = str(error).partition(". Should contain one of ")
    why = why.partition("\nModel type should be one of ")[0]
    unknown_type = why.rpartition(" ")[2]
    if similar := difflib.get_close_matches(unknown_type, types.split(", "), 1):
        why += f" (did you mean {similar[0]}?)"
    if not isinstance(error, (OSError, ValueError)):
        why = f"{type(error).__name__}: {why}"
    return " ".join(why.split()).rstrip(".")
