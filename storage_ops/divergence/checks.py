"""Check the arguments of linear_kl_div. Every message names argument, value and rule."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from storage_ops.divergence.call import DivergenceCall
from storage_ops.loss.call import (
    LEAST,
    MAX_VALID,
    MOST,
    REDUCTION,
    TOLERANCE,
    VALID_CLASSES,
    Rule,
    is_number,
    one_of,
    true_or_false,
)
from storage_ops.loss.checks import (
    FLOATS,
    INDICES,
    check_devices,
    check_group,
    check_head,
    check_layout,
    check_needs_none,
    check_rules,
    check_shapes,
    check_tensors,
    wrong,
)

Divergence = Literal["forward", "reverse", "jsd", "tvd", "cosine"]
Tail = Literal["bucket", "renormalize"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
TAILS: tuple[Tail, ...] = get_args(Tail)
OP = "linear_kl_div"
_wrong = functools.partial(wrong, op=OP)
_LEAST = torch.finfo(torch.float32).tiny


def _is_cap(value: object) -> bool:
    return value is None or is_number(value)


def _in_range(cap: Any) -> bool:
    return cap is None or _LEAST <= cap <= 1 / _LEAST


RULES = (
    one_of("divergence", DIVERGENCES),
    REDUCTION,
    one_of("teacher_tail", TAILS),
    Rule("beta", is_number, "a number", TypeError),
    Rule("beta", lambda beta: 0 <= beta <= 1, "a number from 0 to 1"),
    Rule("temperature", is_number, "a number", TypeError),
    Rule("temperature", lambda t: LEAST <= t <= MOST, f"a number from {LEAST} to {MOST:.0e}"),
    Rule("target_weight", is_number, "a number", TypeError),
    Rule("target_weight", lambda w: 0 <= w <= MOST, f"a number from 0 to {MOST:.0e}"),
    Rule("softcap", _is_cap, "a number or None", TypeError),
    Rule("softcap", _in_range, "a positive number or None"),
    Rule("teacher_softcap", _is_cap, "a number or None", TypeError),
    Rule("teacher_softcap", _in_range, "a positive number or None"),
    true_or_false("shift"),
    true_or_false("scale_by_temperature"),
    MAX_VALID,
    VALID_CLASSES,
    *TOLERANCE,
)


def check_types(tensors: Mapping[str, object], teacher_topk: object) -> None:
    """Raise a TypeError for an argument that is no tensor, or a stored teacher that is no pair."""
    check_tensors(OP, tensors, ("input", "linear_weight"))
    for name, value in tensors.items():
        if hasattr(value, "device_mesh"):
            rule = "the tensor of this rank. Pass process_group for a sharded head"
            raise _wrong(TypeError, f"{name} is", "a DTensor", rule)
    if teacher_topk is None:
        return
    pair = isinstance(teacher_topk, (tuple, list)) and len(teacher_topk) == 2
    if not pair or not all(isinstance(t, Tensor) for t in teacher_topk):  # type: ignore[attr-defined]
        rule = "a pair of tensors: log-probabilities and class indices"
        raise _wrong(TypeError, "teacher_topk is", f"a {type(teacher_topk).__name__}", rule)
    for t in teacher_topk:  # type: ignore[attr-defined]
        check_layout(OP, "teacher_topk", t)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise a TypeError or ValueError for options whose values are not allowed."""
    check_rules(OP, RULES, options)
    check_group(OP, options["process_group"])
    if options["process_group"] is not None and options["valid_classes"] is not None:
        rule = "None with a process_group. Leave the padding out of the last rank's weights"
        raise _wrong(ValueError, "valid_classes is", options["valid_classes"], rule)
    if options["divergence"] == "cosine" and options["temperature"] != 1:
        rule = "1 with divergence='cosine', which does not depend on it"
        raise _wrong(ValueError, "temperature is", options["temperature"], rule)


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
    for name, t, shape in (
        ("linear_weight", weight, input.dtype),
        ("linear_bias", call.bias, input.dtype),
        ("teacher_weight", call.teacher_weight, _dtype(call.teacher_input)),
        ("teacher_bias", call.teacher_bias, _dtype(call.teacher_input)),
    ):
        if t is not None and t.dtype != shape:
            rule = f"{shape}, as {'teacher_' * name.startswith('teacher')}input is"
            raise _wrong(TypeError, f"{name} is", t.dtype, rule)
    check_shapes(
        OP, ("linear_bias", call.bias, (vocab,)), ("token_weight", call.token_weight, tokens)
    )
    if call.target is not None:
        _check_target(call, call.target, tokens)
    check_needs_none(OP, ("token_weight", call.token_weight))
    check_devices(
        OP, input, ("linear_weight", weight), ("teacher_input", call.teacher_input),
        ("teacher_weight", call.teacher_weight), ("linear_bias", call.bias),
        ("teacher_bias", call.teacher_bias), ("token_weight", call.token_weight),
        ("teacher_topk", call.log_probs), ("teacher_topk", call.ids), ("target", call.target),
    )  # fmt: skip


def _check_head(arguments: Mapping[str, Tensor]) -> None:
    for name, t in arguments.items():
        if t.dim() != 2 and name.endswith("weight"):
            raise _wrong(ValueError, f"{name} has shape", tuple(t.shape), "(V, D)")
    check_head(OP, arguments)


def _check_target(call: DivergenceCall, target: Tensor, tokens: tuple[int, ...]) -> None:
    if target.dtype not in INDICES:
        raise _wrong(TypeError, "target is", target.dtype, "int64, int32 or uint8 class indices")
    check_shapes(OP, ("target", target, tokens))
    if call.group:
        rule = "None with a process_group. Add the linear_cross_entropy of the same process_group"
        raise _wrong(ValueError, "target", "is given", rule)


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _check_teacher(call: DivergenceCall, tokens: tuple[int, ...], vocab: int) -> None:
    x, weight, bias = call.teacher_input, call.teacher_weight, call.teacher_bias
    if call.ids is not None and call.log_probs is not None:
        if call.group or call.teacher_softcap:
            name = "process_group" if call.group else "teacher_softcap"
            rule = "None with teacher_topk"
            raise _wrong(ValueError, name, "is given together with a stored teacher", rule)
        if call.divergence == "cosine":
            rule = "another divergence with teacher_topk. The cosine needs logits of all classes"
            raise _wrong(ValueError, "divergence is", repr(call.divergence), rule)
        if x is not None or weight is not None or bias is not None:
            rule = "None for teacher_input, teacher_weight and teacher_bias, or no teacher_topk"
            raise _wrong(
                ValueError, "teacher_topk", "is given together with a teacher's tensors", rule
            )
        if call.ids.dtype not in INDICES or not call.log_probs.is_floating_point():
            dtypes = f"{call.log_probs.dtype} and {call.ids.dtype}"
            rule = "floating log-probabilities, and int64, int32 or uint8 class indices"
            raise _wrong(TypeError, "teacher_topk is", dtypes, rule)
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
    check_shapes(OP, ("teacher_bias", bias, (weight.shape[0],)))
