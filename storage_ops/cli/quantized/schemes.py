"""How the weights of a frozen model are stored, by a name or by a `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from storage_ops.cli.quantized.options import NAMES

FOUR_BITS = "nf4", "nf4-double", "fp4", "fp4-double"


@dataclass(frozen=True)
class Scheme:
    """How weights are stored and used.

    Attributes:
        name: "nf4" or "fp4" (bitsandbytes), either with "-double" if its statistics are quantized
            too; "int8" (bitsandbytes), "fp8" (transformers' blocks with scales), "mxfp4", "gptq" or
            "awq".
        compute: dtype in which 4-bit layers multiply.
        storage: dtype of the tensors with packed 4-bit weights.
        outliers: threshold of int8 above which columns of the input stay 16-bit; 0 for none.
        block: rows and columns with a common fp8 scale. None: one scale for the weight.
        scale: dtype of the scales of fp8.
        bits: bits of a weight of GPTQ or AWQ.
        group: inputs with a common scale of GPTQ or AWQ. Less than 1: all inputs of a layer.
        skipped: modules that keep their weights; None: transformers' choice.
    """

    name: str
    compute: torch.dtype = torch.bfloat16
    storage: torch.dtype = torch.uint8
    outliers: float = 6.0
    block: tuple[int, int] | None = (128, 128)
    scale: torch.dtype = torch.float32
    bits: int = 4
    group: int = 128
    skipped: tuple[str, ...] | None = None


def scheme_of(option: str | None, config: object, dtype: torch.dtype) -> Scheme | None:
    """Return how the weights of a model are stored, or None if they are not quantized.

    Args:
        option: the value of `--quantize`. None: use the config.
        config: the config's `quantization_config`, or None.
        dtype: the dtype of the model, which `--quantize` also uses for products.

    Raises:
        ValueError: the config has a method, or a value, that is not simulated.
    """
    if option is not None:
        return None if option == "none" else Scheme(option, compute=dtype)
    if config is None:
        return None
    facts = dict(config) if isinstance(config, Mapping) else {}
    method = facts.get("quant_method", "bitsandbytes" if _has_bits(facts) else None)
    make = _METHODS.get(str(getattr(method, "value", method)))
    if make is None:
        raise ValueError(
            f"--hf-config has a quantization_config of {method}, which is not simulated. Expected "
            f"{', '.join(_METHODS)}. Pass --quantize with one of {', '.join(NAMES)}."
        )
    return make(facts)


def _has_bits(facts: Mapping[str, Any]) -> bool:
    return bool(facts.get("load_in_4bit") or facts.get("load_in_8bit"))


def _of_bitsandbytes(facts: Mapping[str, Any]) -> Scheme:
    skipped = _skipped(facts, "llm_int8_skip_modules")
    if facts.get("load_in_8bit"):
        if facts.get("llm_int8_has_fp16_weight"):
            raise ValueError(
                "--hf-config has llm_int8_has_fp16_weight, which keeps 16-bit weights. Expected "
                "false, or --quantize none."
            )
        outliers = float(facts.get("llm_int8_threshold", 6.0))
        return Scheme("int8", outliers=outliers, skipped=skipped)
    double = "-double" if facts.get("bnb_4bit_use_double_quant") else ""
    name = f"{facts.get('bnb_4bit_quant_type', 'fp4')}{double}"
    if name not in FOUR_BITS:
        raise ValueError(
            f"--hf-config has bnb_4bit_quant_type {facts['bnb_4bit_quant_type']}. Expected nf4 or "
            "fp4."
        )
    return Scheme(
        name,
        compute=_dtype(facts, "bnb_4bit_compute_dtype", "float32"),
        storage=_dtype(facts, "bnb_4bit_quant_storage", "uint8"),
        skipped=skipped,
    )


def _of_fp8(facts: Mapping[str, Any]) -> Scheme | None:
    if facts.get("dequantize"):
        return None
    understood = (("activation_scheme", "dynamic"), ("expert_dtype", "fp8"),
                  ("modules_to_convert", None))  # fmt: skip
    for key, plain in understood:
        if facts.get(key, plain) != plain:
            raise ValueError(
                f"--hf-config has {key} {facts[key]}, which is not simulated. Expected {plain}, or "
                "--quantize."
            )
    block = facts.get("weight_block_size", (128, 128))
    scale = torch.float8_e8m0fnu if facts.get("scale_fmt") == "ue8m0" else torch.float32
    skipped = _skipped(facts, "modules_to_not_convert", "ignored_layers")
    return Scheme("fp8", block=block and (block[0], block[1]), scale=scale, skipped=skipped)


def _of_mxfp4(facts: Mapping[str, Any]) -> Scheme | None:
    if facts.get("dequantize"):
        return None
    return Scheme("mxfp4", skipped=_skipped(facts, "modules_to_not_convert"))


def _of_gptq(facts: Mapping[str, Any]) -> Scheme:
    return _of_packed("gptq", facts, facts.get("checkpoint_format", facts.get("format", "gptq")))


def _of_awq(facts: Mapping[str, Any]) -> Scheme:
    return _of_packed("awq", facts, facts.get("version", facts.get("format", "gemm")))


_PACKED = {"gptq": (("gptq", "gptq_v2"), (2, 3, 4, 8)), "awq": (("gemm",), (4,))}


def _of_packed(name: str, facts: Mapping[str, Any], layout: object) -> Scheme:
    """Return the scheme for integers that are packed in a method's usual layout."""
    layouts, sizes = _PACKED[name]
    if str(getattr(layout, "value", layout)).lower() not in layouts:
        raise ValueError(
            f"--hf-config has a quantization_config of {name} in the format {layout}, which is not "
            f"simulated. Expected {' or '.join(layouts)}."
        )
    bits, group = facts.get("bits", 4), facts.get("group_size", 128)
    if bits not in sizes:
        raise ValueError(
            f"--hf-config has a quantization_config of {name} with bits {bits}. Expected one of "
            f"{', '.join(map(str, sizes))}."
        )
    skipped = _skipped(facts, "modules_to_not_convert")
    return Scheme(name, bits=bits, group=group, skipped=skipped)


_METHODS = {
    "bitsandbytes": _of_bitsandbytes, "fp8": _of_fp8, "mxfp4": _of_mxfp4, "gptq": _of_gptq,
    "awq": _of_awq,
}  # fmt: skip


def _skipped(facts: Mapping[str, Any], *keys: str) -> tuple[str, ...] | None:
    names = next((facts[key] for key in keys if facts.get(key) is not None), None)
    return None if names is None else tuple(names)


def _dtype(facts: Mapping[str, Any], key: str, default: str) -> torch.dtype:
    name = str(facts.get(key) or default).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--hf-config has {key} {name}. Expected a dtype of torch.")
    return dtype
