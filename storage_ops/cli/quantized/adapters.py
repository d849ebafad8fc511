"""A model of transformers with quantized weights and PEFT adapters, by the options."""

from __future__ import annotations

import argparse
import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from storage_ops.cli import output
from storage_ops.cli.quantized.convert import quantize, unquantized_experts
from storage_ops.cli.quantized.experts import QuantizedExperts
from storage_ops.cli.quantized.layers import Linear4bit, Linear8bit
from storage_ops.cli.quantized.options import Lora, lora_of
from storage_ops.cli.quantized.schemes import scheme_of
from storage_ops.foundation.autocast import autocast_dtypes
from storage_ops.loss.planning.plan import dtype_name
from storage_ops.optional import required

_TASKS = (
    ("ForSequenceClassification", "SEQ_CLS"),
    ("ForTokenClassification", "TOKEN_CLS"),
    ("ForQuestionAnswering", "QUESTION_ANS"),
)  # PEFT trains the output layers of these


def adapted(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """Return a model of transformers after `--quantize` and `--lora`.

    Raises:
        ValueError: an option is wrong, or no parameter would be trained.
    """
    config: Any = model.config
    dtype = next(model.parameters()).dtype
    if args.autocast is not None:
        dtype = getattr(torch, dtype_name(args.autocast))
    scheme = scheme_of(args.quantize, getattr(config, "quantization_config", None), dtype)
    lora = lora_of(args)
    serves = getattr(args, "serve", False)  # an option of will-it-fit
    if scheme is not None and lora is None and not serves:
        whose = f"--quantize is {scheme.name}"
        if args.quantize is None:
            whose = f"--hf-config has a quantization_config of {scheme.name}"
        raise ValueError(
            f"{whose}, which freezes the weights. Pass --lora R too, or --quantize none."
        )
    if args.prepare_kbit_training and scheme is None:
        raise ValueError(
            "--prepare-kbit-training is given without --quantize. Pass --quantize too."
        )
    if scheme is not None:
        quantize(model, scheme)
        if serves:
            output.note(
                f"{scheme.name}: a layer takes for the next token what it takes in training. "
                "Kernels for few rows, which may take less, are not simulated."
            )
        if kind := unquantized_experts(model):
            output.note(
                f"{scheme.name} leaves the experts in {kind} as they are: it quantizes linear "
                "layers alone."
            )
    if lora is None:
        return model
    peft = required("peft", "--lora")
    if args.prepare_kbit_training:
        _prepare(model, peft)
    return with_lora(model, peft, lora)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Context manager that hides PEFT's warnings, which are about training and not about sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _prepare(model: Any, peft: Any) -> None:
    """Call PEFT's function for a quantized model, which it recognises by an attribute."""
    model.is_loaded_in_4bit = True
    with _without_warnings():
        options = {"use_reentrant": False}  # as torch recommends
        peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=options)
    del model.is_loaded_in_4bit  # otherwise PEFT would look for layers of bitsandbytes


def with_lora(model: nn.Module, peft: Any, lora: Lora) -> nn.Module:
    """Return a PEFT model that trains these adapters of `model`.

    Raises:
        ValueError: PEFT cannot adapt such modules.
    """
    task = next((task for end, task in _TASKS if type(model).__name__.endswith(end)), None)
    config = peft.LoraConfig(
        r=lora.rank, target_modules=lora.modules, lora_dropout=lora.dropout, task_type=task
    )
    try:
        with torch.device("meta"), _without_warnings():
            adapted_model: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        config_of: Any = model.config
        if lora.modules is None:
            raise ValueError(
                f"--lora is {lora.rank}, and PEFT has no default for {config_of.model_type}. "
                f"Expected modules, such as {lora.rank}:all-linear."
            ) from error
        raise ValueError(f"--lora has modules that PEFT refuses: {error}") from error
    for module in adapted_model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, QuantizedExperts):
            raise ValueError(
                f"--lora trains adapters of {type(base).__name__}, whose weights are quantized. "
                f"Expected other modules, such as {lora.rank}:q_proj,v_proj."
            )
        if isinstance(base, (Linear4bit, Linear8bit)):
            base.copies_output = isinstance(base, Linear4bit)
            kind: Any = type(module)
            module.__class__ = _as_on_bitsandbytes(kind)
    return adapted_model


@functools.lru_cache(maxsize=16)
def _as_on_bitsandbytes(cls: type[nn.Module]) -> type[nn.Module]:
    """Return PEFT's adapted layer in its form for bitsandbytes.

    That form leaves the dtype of its input to autocast. The plain form always converts it.
    """

    def casts(module: object) -> bool:
        return not autocast_dtypes()

    def ignore(module: object, value: bool) -> None:
        """Let PEFT set the attribute without an effect."""

    body: dict[str, Any] = {"__module__": cls.__module__}
    body["cast_input_dtype_enabled"] = property(casts, ignore)
    return type(cls.__name__, (cls,), body)
