"""Replaces a model's layers by quantized ones, as transformers' `from_pretrained` does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from storage_ops.cli.quantized.experts import projections_of, quantize_experts
from storage_ops.cli.quantized.layers import (
    Linear4bit,
    Linear8bit,
    Linear8bitFloat,
    QuantizedLinear,
)
from storage_ops.cli.quantized.packed import AwqLinear, GptqLinear
from storage_ops.cli.quantized.schemes import Scheme

_KINDS: dict[str, type[QuantizedLinear]] = {
    "int8": Linear8bit, "fp8": Linear8bitFloat, "gptq": GptqLinear, "awq": AwqLinear,
}  # fmt: skip


def quantize(model: Any, scheme: Scheme) -> None:
    """Quantize the weights of a model of transformers on the meta device, and freeze them.

    The output layer, tied weights and modules that the scheme skips keep their weights.

    Raises:
        ValueError: the model has no weights for the scheme.
    """
    from transformers.quantizers.base import HfQuantizer

    # transformers' rule, and modules that the config lists, which turn the rule off.
    skipped = HfQuantizer.get_modules_to_not_convert(
        model, None if scheme.skipped is None else list(scheme.skipped), model._keep_in_fp32_modules
    )
    count = 0
    for name, module in list(model.named_modules()):
        if not _is_converted(name, skipped):
            continue
        if _takes_linear(module, scheme):
            model.set_submodule(name, linear_of(module, scheme))
        elif _takes_experts(name, module, scheme):
            quantize_experts(module, scheme)
        else:
            continue
        count += 1
    if not count:
        kind = "experts of GPT-OSS" if scheme.name == "mxfp4" else "linear layers to quantize"
        raise ValueError(
            f"--quantize is {scheme.name}, but {type(model).__name__} has no {kind}. Pass another "
            "scheme."
        )


def unquantized_experts(model: nn.Module) -> str | None:
    """Return the class of the model's first experts with floating-point weights, or None."""
    for module in model.modules():
        names = projections_of(module)
        if names and module._parameters[names[0]].dtype.itemsize > 1:  # type: ignore[union-attr]
            return type(module).__name__
    return None


def _takes_linear(module: nn.Module, scheme: Scheme) -> bool:
    if scheme.name == "mxfp4":
        return False
    is_conv1d = type(module).__name__ == "Conv1D" and scheme.name not in ("fp8", "awq")
    return type(module) is nn.Linear or is_conv1d


def _takes_experts(name: str, module: nn.Module, scheme: Scheme) -> bool:
    if not projections_of(module):
        return False
    is_of_gpt_oss = type(module).__name__ == "GptOssExperts"
    return is_of_gpt_oss if scheme.name == "mxfp4" else scheme.name == "fp8"


def _is_converted(name: str, skipped: Sequence[str]) -> bool:
    """Return False if a pattern names a module, a module around it, or the end of its name."""
    parts = name.split(".")
    outer = [".".join(parts[: end + 1]) for end in range(len(parts))]
    return not any(
        name.endswith(pattern) or any(re.fullmatch(pattern.rstrip("."), path) for path in outer)
        for pattern in skipped
    )


def linear_of(plain: nn.Module, scheme: Scheme) -> QuantizedLinear:
    """Return the quantized layer for a linear layer, or for transformers' Conv1D."""
    weight: Any = plain.weight
    is_linear = isinstance(plain, nn.Linear)
    rows, columns = weight.shape if is_linear else weight.shape[::-1]
    bias: Any = plain.bias
    return _KINDS.get(scheme.name, Linear4bit)(rows, columns, bias, weight.dtype, scheme)
