"""What linear_kl_div asks of its arguments. Every message names argument, value and rule."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from storage_ops.divergence.call import DivergenceCall
from storage_ops.loss.checks import FLOATS, INDICES, check_head, check_layout
from storage_ops.loss.names import REDUCTIONS

Divergence = Literal["forward", "reverse", "jsd", "tvd", "cosine"]
Tail = Literal["bucket", "renormalize"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
TAILS: tuple[Tail, ...] = get_args(Tail)
_NUMBERS = (numbers.Real, torch.SymInt, torch.SymFloat)


def _wrong(kind: type[Exception], argument: str, found: object, expected: str) -> Exception:
    return kind(f"linear_kl_div: {argument} {found}; expected {expected}")


def check_types(given: Mapping[str, object], teacher_topk: object) -> None:
    """Raise a TypeError for what is no tensor, or for a stored teacher that is no pair of them."""
    for name, value in given.items():
        required = name in ("input", "linear_weight")
        if not (isinstance(value, Tensor) or (value is None and not required)):
            kind = "None" if value is None else f"a {type(value).__name__}"
            raise _wrong(TypeError, f"{name} is", kind, "a torch.Tensor")
        if isinstance(value, Tensor):
            check_layout("linear_kl_div", name, value)
        if hasattr(value, "device_mesh"):
            rule = "its part on this rank, of a head that is sharded with process_group"
            raise _wrong(TypeError, f"{name} is", "a DTensor", rule)
    pair = isinstance(teacher_topk, (tuple, list)) and len(teacher_topk) == 2
    if teacher_topk is None or (pair and all(isinstance(t, Tensor) for t in teacher_topk)):  # type: ignore[attr-defined]
        for t in teacher_topk or ():  # type: ignore[attr-defined]
            check_layout("linear_kl_div", "teacher_topk", t)
        return
    rule = "a pair of tensors: log-probabilities and class indices"
    raise _wrong(TypeError, "teacher_topk is", f"a {type(teacher_topk).__name__}", rule)


def check_options(
    divergence: str, beta: Any, temperature: Any, reduction: str, shift: bool, teacher_tail: str,
    max_valid: Any, valid_classes: Any, softcap: Any, teacher_softcap: Any, process_group: Any,
    target_weight: Any, scale_by_temperature: Any,
) -> None:  # fmt: skip
    """Raise a TypeError or ValueError for options that have no meaning."""
    for name, text, allowed in (
        ("divergence", divergence, DIVERGENCES),
        ("reduction", reduction, REDUCTIONS),
        ("teacher_tail", teacher_tail, TAILS),
    ):
        if text not in allowed:
            raise _wrong(ValueError, f"{name} is", repr(text), f"one of {allowed}")
    given = (("beta", beta), ("temperature", temperature), ("target_weight", target_weight))
    for name, value in given:
        if isinstance(value, (bool, Tensor)) or not isinstance(value, _NUMBERS):
            raise _wrong(TypeError, f"{name} is", repr(value), "a number")
    least = torch.finfo(torch.float32).tiny
    for name, value in (("softcap", softcap), ("teacher_softcap", teacher_softcap)):
        if value is None:
            continue
        if isinstance(value, (bool, Tensor)) or not isinstance(value, _NUMBERS):
            raise _wrong(TypeError, f"{name} is", repr(value), "a number or None")
        if not least <= float(value) <= 1 / least:
            raise _wrong(ValueError, f"{name} is", value, "a positive number or None")
    if process_group is not None and not hasattr(process_group, "group_name"):
        rule = "a process group of torch.distributed, or None"
        raise _wrong(TypeError, "process_group is", repr(process_group), rule)
    if process_group is not None and valid_classes is not None:
        rule = "None with a process_group: leave the padding out of the last rank's weights"
        raise _wrong(ValueError, "valid_classes is", valid_classes, rule)
    if not 0 <= beta <= 1:
        raise _wrong(ValueError, "beta is", beta, "a number from 0 to 1")
    if not 0 <= target_weight < float("inf"):
        raise _wrong(ValueError, "target_weight is", target_weight, "a number of at least 0")
    if not 0 < temperature < float("inf"):
        raise _wrong(ValueError, "temperature is", temperature, "a positive number")
    if divergence == "cosine" and temperature != 1:
        rule = "1 with divergence='cosine', which does not depend on it"
        raise _wrong(ValueError, "temperature is", temperature, rule)
    for name, value in (("shift", shift), ("scale_by_temperature", scale_by_temperature)):
        if not isinstance(value, bool):
            raise _wrong(TypeError, f"{name} is", repr(value), "True or False")
    counts = (int, torch.SymInt)
    if max_valid not in (None, "sync") and not (isinstance(max_valid, counts) and max_valid >= 0):
        raise _wrong(ValueError, "max_valid is", repr(max_valid), "None, 'sync' or a count >= 0")
    whole = isinstance(valid_classes, int) and not isinstance(valid_classes, bool)
    if valid_classes is not None and not (whole and valid_classes > 0):
        raise _wrong(ValueError, "valid_classes is", repr(valid_classes), "None or a count >= 1")


def check_call(call: DivergenceCall) -> None:
    """Raise a TypeError or ValueError for tensors that do not fit together."""
    input, weight = call.input, call.weight
    if input.dtype not in FLOATS:
        raise _wrong(TypeError, "input is", input.dtype, f"a floating dtype of {FLOATS}")
    if call.shift and input.dim() < 2:
        raise _wrong(ValueError, "input has shape", tuple(input.shape), "(..., T, D) with shift")
    _check_head({"input": input, "linear_weight": weight})
    tokens, vocab = tuple(input.shape[:-1]), weight.shape[0]
    valid = call.valid_classes
    if vocab == 0 or (valid is not None and valid > vocab):
        rule = f"at least {valid or 1} classes"
        raise _wrong(ValueError, "linear_weight has shape", tuple(weight.shape), rule)
    _check_teacher(call, tokens, vocab)
    for name, t, wanted in (
        ("linear_weight", weight, input.dtype),
        ("linear_bias", call.bias, input.dtype),
        ("teacher_weight", call.teacher_weight, _dtype(call.teacher_input)),
        ("teacher_bias", call.teacher_bias, _dtype(call.teacher_input)),
    ):
        if t is not None and t.dtype != wanted:
            rule = f"{wanted}, as {'teacher_' * name.startswith('teacher')}input is"
            raise _wrong(TypeError, f"{name} is", t.dtype, rule)
    for name, t, shape in (
        ("linear_bias", call.bias, (vocab,)),
        ("token_weight", call.token_weight, tokens),
    ):
        if t is not None and tuple(t.shape) != shape:
            raise _wrong(ValueError, f"{name} has shape", tuple(t.shape), str(shape))
    if call.target is not None:
        _check_target(call, call.target, tokens)
    weights = call.token_weight
    if weights is not None and weights.requires_grad and torch.is_grad_enabled():
        rule = "a tensor that needs none: its gradient is not computed; detach it"
        raise _wrong(ValueError, "token_weight", "requires grad", rule)
    for name, t in (
        ("linear_weight", weight), ("teacher_input", call.teacher_input),
        ("teacher_weight", call.teacher_weight), ("linear_bias", call.bias),
        ("teacher_bias", call.teacher_bias), ("token_weight", weights),
        ("teacher_topk", call.log_probs), ("teacher_topk", call.ids), ("target", call.target),
    ):  # fmt: skip
        if t is not None and t.device != input.device:
            raise _wrong(ValueError, f"{name} is on", t.device, f"{input.device}, as input")


def _check_head(given: Mapping[str, Tensor]) -> None:
    for name, t in given.items():
        if t.dim() != 2 and name.endswith("weight"):
            raise _wrong(ValueError, f"{name} has shape", tuple(t.shape), "(V, D)")
    check_head("linear_kl_div", given)


def _check_target(call: DivergenceCall, target: Tensor, tokens: tuple[int, ...]) -> None:
    if target.dtype not in INDICES:
        raise _wrong(TypeError, "target is", target.dtype, "int64, int32 or uint8 class indices")
    if tuple(target.shape) != tokens:
        raise _wrong(ValueError, "target has shape", tuple(target.shape), str(tokens))
    if call.group:
        rule = "None with a process_group: add linear_cross_entropy with the same"
        raise _wrong(ValueError, "target", "is given", rule)


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _check_teacher(call: DivergenceCall, tokens: tuple[int, ...], vocab: int) -> None:
    x, weight, bias = call.teacher_input, call.teacher_weight, call.teacher_bias
    if call.ids is not None and call.log_probs is not None:
        if call.group or call.teacher_softcap:
            name = "process_group" if call.group else "teacher_softcap"
            rule = "None with teacher_topk"
            raise _wrong(ValueError, name, "is given beside a stored teacher", rule)
        if call.divergence == "cosine":
            rule = "another one with teacher_topk: the cosine needs logits of all classes"
            raise _wrong(ValueError, "divergence is", repr(call.divergence), rule)
        if x is not None or weight is not None or bias is not None:
            rule = "None for teacher_input, teacher_weight and teacher_bias, or no teacher_topk"
            raise _wrong(ValueError, "teacher_topk", "is given beside a teacher's tensors", rule)
        if call.ids.dtype not in INDICES or not call.log_probs.is_floating_point():
            found = f"{call.log_probs.dtype} and {call.ids.dtype}"
            rule = "floating log-probabilities, and int64, int32 or uint8 class indices"
            raise _wrong(TypeError, "teacher_topk is", found, rule)
        shapes = tuple(call.log_probs.shape), tuple(call.ids.shape)
        if shapes[0] != shapes[1] or shapes[0][:-1] != tokens or not 0 < shapes[0][-1] <= vocab:
            rule = f"{(*tokens, 'K')} for both, with K from 1 to {vocab}"
            raise _wrong(ValueError, "teacher_topk has shapes", shapes, rule)
        return
    if x is None or weight is None:
        name = "teacher_input" if x is None else "teacher_weight"
        raise _wrong(TypeError, f"{name} is", "None", "a torch.Tensor, or teacher_topk")
    if x.dtype not in FLOATS:
        raise _wrong(TypeError, "teacher_input is", x.dtype, f"a floating dtype of {FLOATS}")
    if tuple(x.shape[:-1]) != tokens or x.dim() < 1:
        rule = f"{(*tokens, 'D')} with the tokens of input"
        raise _wrong(ValueError, "teacher_input has shape", tuple(x.shape), rule)
    _check_head({"teacher_input": x, "teacher_weight": weight})
    valid = call.valid_classes
    if (weight.shape[0] != vocab) if valid is None else weight.shape[0] < valid:
        rule = f"{vocab} classes, as linear_weight, or valid_classes that both have"
        raise _wrong(ValueError, "teacher_weight has shape", tuple(weight.shape), rule)
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        rule = str((weight.shape[0],))
        raise _wrong(ValueError, "teacher_bias has shape", tuple(bias.shape), rule)
