"""Check the arguments of linear cross-entropy. Every message names argument, value and rule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from storage_ops.loss.call import (
    MODERATE,
    RULES,
    Result,
    Rule,
    arithmetic,
    has_64_bits,
    is_integer,
    is_moderate,
    is_number,
)
from storage_ops.loss.engine.ranks import is_group
from storage_ops.quantities import parse_bytes

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int64, torch.int32, torch.uint8)
OP = "linear_cross_entropy"
_NONE_NEEDED = "a tensor that needs none, because its gradient is not computed. Detach it"


def wrong(
    kind: type[Exception], argument: str, value: object, expected: str, op: str = OP
) -> Exception:  # fmt: skip
    """Return an error that names an argument, its value, and what was expected.

    Args:
        kind: the class of the error.
        argument: the name, and the verb, such as "softcap is". `value` may have the verb instead.
        value: the value.
        expected: other values that are allowed.
        op: the function whose argument it is.
    """
    name, _, verb = argument.partition(" ")
    return kind(f"{op}: `{name}` {verb}{' ' * bool(verb)}{value}. Expected {expected}.")


def check_rules(op: str, rules: Sequence[Rule], options: Mapping[str, Any]) -> None:
    """Raise the error of the first rule that is broken."""
    for option, fits, expected, kind in rules:
        value = options[option]
        if not fits(value):
            shown = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise wrong(kind, f"{option} is", shown, expected, op)


def check_tensors(op: str, tensors: Mapping[str, object], required: Collection[str]) -> None:
    """Raise a TypeError for an argument that is no dense tensor, or is None but required."""
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            check_layout(op, name, value)
        elif value is not None or name in required:
            kind = "None" if value is None else f"a {type(value).__name__}"
            rule = "its weight, " * isinstance(value, torch.nn.Linear) + "a torch.Tensor"
            raise wrong(TypeError, f"{name} is", kind, rule, op)


def check_shapes(op: str, *rows: tuple[str, Tensor | None, tuple[int, ...]]) -> None:
    """Raise a ValueError for the first tensor that does not have the shape next to it."""
    for name, t, shape in rows:
        if t is not None and tuple(t.shape) != shape:
            raise wrong(ValueError, f"{name} has shape", tuple(t.shape), str(shape), op)


def check_devices(op: str, input: Tensor, *rows: tuple[str, Tensor | None]) -> None:
    """Raise a ValueError unless all tensors are on the device of the input."""
    for name, t in rows:
        if t is not None and t.device != input.device:
            raise wrong(ValueError, f"{name} is on", t.device, f"{input.device}, as input", op)


def check_needs_none(op: str, *rows: tuple[str, Tensor | None]) -> None:
    """Raise a ValueError for a tensor that requires a gradient but gets none."""
    for name, t in rows:
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise wrong(ValueError, name, "requires grad", _NONE_NEEDED, op)


def check_group(op: str, process_group: Any) -> None:
    """Raise a TypeError unless the argument is a process group or None."""
    if process_group is not None and not is_group(process_group):
        rule = "a process group of torch.distributed, or None"
        raise wrong(TypeError, "process_group is", repr(process_group), rule, op)


def check_layout(op: str, name: str, t: Tensor) -> None:
    """Raise a TypeError for a sparse or nested tensor, which no kernel takes."""
    if t.is_nested:
        layout, rule = "a nested tensor", "a dense one, such as the values() of a jagged tensor"
    elif t.layout != torch.strided:
        layout, rule = f"a tensor of layout {t.layout}", "a dense one, such as its to_dense()"
    else:
        return
    raise TypeError(f"{op}: `{name}` is {layout}. Expected {rule}.")


def class_indices(t: Tensor) -> Tensor:
    """Return class indices as int64, and any other tensor unchanged.

    Kernels take no uint8, which `F.cross_entropy` takes. Comparing int32 with an ignore_index of
    more bits would wrap around.
    """
    return t.to(torch.int64) if t.dtype in INDICES else t


def check_torch_options(options: object) -> None:
    """Raise a TypeError for options that torch's function does not have, if torch has it."""
    kind = getattr(torch.nn, "LinearCrossEntropyOptions", type(None))
    if not (options is None or isinstance(options, kind)):
        rule = "torch.nn.LinearCrossEntropyOptions (torch >= 2.13), or None"
        raise wrong(TypeError, "options is", repr(options), rule)


def budget_of(memory_budget: Any, op: str) -> Any:
    """Return a memory_budget as a number for the op's schema. Symbols and None stay unchanged."""
    fits = is_integer(memory_budget) and has_64_bits(memory_budget)
    if memory_budget is not None and not fits:
        memory_budget = parse_bytes(memory_budget, f"{op}: `memory_budget`")
    if isinstance(memory_budget, int):
        memory_budget = min(memory_budget, torch.iinfo(torch.int64).max)
    return memory_budget


def names_of(returns: Sequence[Result], allowed: Sequence[Result]) -> tuple[Result, ...]:
    """Return `returns` as a tuple. Raise a ValueError if it has a name that is not allowed."""
    names = tuple(returns) if isinstance(returns, (list, tuple)) else ()  # a set has no order
    if not names or any(name not in allowed for name in names):
        raise wrong(ValueError, "returns is", repr(returns), f"a sequence of some of {allowed}")
    return names


def group_of(mesh: Any, name: str) -> Any:
    """Return the process group of a one-dimensional mesh, and any other object unchanged."""
    if mesh is None or is_group(mesh) or not hasattr(mesh, "get_group"):
        return mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"{name}: `process_group` is a mesh of {mesh.ndim} dimensions. Expected one dimension, "
            "such as mesh['tp'], or a process group."
        )
    return mesh.get_group()


def check_arguments(
    input: Tensor, linear_weight: Tensor, target: Tensor, options: Mapping[str, Any]
) -> None:
    """Raise a TypeError or ValueError for arguments that do not fit together.

    `options`: all keyword arguments of `linear_cross_entropy` except `options`.
    """
    check_rules(OP, RULES, options)
    _check_options(input, options)
    linear_bias, weight = options["linear_bias"], options["weight"]
    token_weight, accumulate_into = options["token_weight"], options["accumulate_into"]
    ignore_index, returns, process_group = (
        options[name] for name in ("ignore_index", "returns", "process_group")
    )
    scatters = options["input_grad"] == "reduce_scatter"
    if scatters and target.is_floating_point():
        rule = "class indices with input_grad='reduce_scatter'"
        raise wrong(TypeError, "target is", target.dtype, rule)
    check_group(OP, process_group)
    if process_group is not None and target.is_floating_point() and "correct" in returns:
        rule = "class indices as target for 'correct' with a process_group"
        raise wrong(ValueError, "returns is", repr(returns), rule)
    if input.dtype not in FLOATS:
        raise wrong(TypeError, "input is", input.dtype, f"a floating dtype of {FLOATS}")
    check_head(OP, {"input": input, "linear_weight": linear_weight})
    check_ignore_index(ignore_index)
    vocab = linear_weight.shape[0]
    if vocab == 0:
        raise wrong(
            ValueError, "linear_weight has shape", tuple(linear_weight.shape), "at least one class"
        )
    tokens = _tokens_of(input, target) if scatters else tuple(input.shape[:-1])
    _check_target(tokens, target, vocab, ignore_index)
    if options["gradient_tolerance"] and target.is_floating_point():
        raise wrong(TypeError, "target is", target.dtype, "class indices with a gradient_tolerance")
    selected_ids, classes = options["selected_ids"], vocab if process_group is None else None
    _check_picks(selected_ids, options["top_k"], returns, tokens, classes)
    check_shapes(
        OP,
        ("linear_bias", linear_bias, (vocab,)),
        ("weight", weight, (vocab,)),
        ("token_weight", token_weight, tokens),
        ("accumulate_into", accumulate_into, tuple(linear_weight.shape)),
    )
    if linear_weight.dtype != input.dtype:
        rule = f"{input.dtype}, as input is. Convert one of them"
        if torch.float64 not in (input.dtype, linear_weight.dtype):
            rule += ", or call the loss in torch.autocast"
        raise wrong(TypeError, "linear_weight is", linear_weight.dtype, rule)
    wide = arithmetic(input.dtype)
    if linear_bias is not None and linear_bias.dtype not in (input.dtype, wide):
        rule = f"{input.dtype}, as input is" + f", or {wide}" * (wide != input.dtype)
        raise wrong(TypeError, "linear_bias is", linear_bias.dtype, rule)
    for name, t in (("weight", weight), ("token_weight", token_weight)):
        if t is not None and not t.is_floating_point():
            masks = ", or bool" * (name == "token_weight")
            raise wrong(TypeError, f"{name} is", t.dtype, f"a floating dtype{masks}")
    check_needs_none(OP, ("weight", weight), ("token_weight", token_weight))
    if accumulate_into is not None:
        _check_sum(accumulate_into, linear_weight)
    check_devices(
        OP, input, ("linear_weight", linear_weight), ("target", target),
        ("linear_bias", linear_bias), ("weight", weight), ("token_weight", token_weight),
        ("accumulate_into", accumulate_into), ("selected_ids", selected_ids),
    )  # fmt: skip


def check_head(op: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless a head's weight (V, ..., D) fits hidden states (..., D).

    Args:
        op: the function that is checked, for the error.
        tensors: hidden states and weight, in this order, by their names.
    """
    (states, input), (head, weight) = tensors.items()
    shape, form = tuple(weight.shape), "(V, D)" if weight.dim() < 3 else "(V, d_1, ..., D)"
    if input.dim() >= 1 and weight.dim() >= 2 and shape[-1] == input.shape[-1]:
        return
    hint = ""
    if input.dim() >= 1 and weight.dim() >= 2 and shape[0] == input.shape[-1]:
        hints = [
            f"`{states}` looks like logits: pass the hidden states, the input of the linear layer.",
            f"`{head}` looks transposed, as if it were (D, V): pass {head}.T.",
        ]
        # Few models have fewer classes than hidden units, so the weight is probably transposed.
        hint = " " + " Or ".join(hints if shape[0] >= shape[-1] else reversed(hints))
    raise ValueError(
        f"{op}: `{head}` has shape {shape}. Expected {form} with D the last size of `{states}`, "
        f"which has shape {tuple(input.shape)}.{hint}"
    )


def check_ignore_index(ignore_index: int) -> None:
    """Raise a TypeError or ValueError unless a target may have this value."""
    if not is_integer(ignore_index):
        raise wrong(TypeError, "ignore_index is", repr(ignore_index), "an int, or None")
    if not has_64_bits(ignore_index):
        raise wrong(ValueError, "ignore_index is", ignore_index, "a value in the range of int64")


def _check_options(input: Tensor, options: Mapping[str, Any]) -> None:
    """Check the options that depend on the input, or on each other."""
    softcap, divisor, wide = options["softcap"], options["divisor"], arithmetic(input.dtype)
    least = torch.finfo(wide).tiny
    if softcap is not None and not least <= softcap <= 1 / least:
        rule = f"None or a positive number from {least:.3} to {1 / least:.3}"
        raise wrong(ValueError, "softcap is", softcap, rule)
    if options["shift"] and input.dim() < 2:
        raise wrong(ValueError, "input has shape", tuple(input.shape), "(..., T, D) with shift")
    sums = (None, wide) if input.dtype == wide else (None, wide, input.dtype)
    for name in ("accumulate_dtype", "logits_dtype"):
        if all(options[name] is not allowed for allowed in sums):
            raise wrong(ValueError, f"{name} is", options[name], f"one of {sums}")
    if divisor is not None:
        check_divisor(divisor, options["reduction"])
    if options["gradient_tolerance"]:
        _check_tolerance(options)
    elif options["max_classes"] is not None:
        rule = "None without a gradient_tolerance"
        raise wrong(ValueError, "max_classes is", options["max_classes"], rule)


# Gradients of these results do not shrink with a class's probability.
_NOT_BOUNDED = ("entropy", "selected", "topk")


def _check_tolerance(options: Mapping[str, Any]) -> None:
    """Check the options of a call with gradient_tolerance."""
    rule = "0 with a gradient_tolerance: every class has a part of each token's target"
    if options["label_smoothing"]:
        raise wrong(ValueError, "label_smoothing is", options["label_smoothing"], rule)
    unbounded = [name for name in options["returns"] if name in _NOT_BOUNDED]
    if unbounded:
        rule = (
            f"none of {_NOT_BOUNDED} with a gradient_tolerance, which does not bound the error of "
            "their gradients. Compute them in a call under torch.no_grad()"
        )
        raise wrong(ValueError, "returns is", repr(options["returns"]), rule)


def check_divisor(divisor: float | Tensor, reduction: str) -> None:
    """Raise a TypeError or ValueError unless the divisor is allowed with this reduction."""
    if reduction != "sum":
        rule = "'sum' with a divisor"
        raise wrong(ValueError, "reduction is", repr(reduction), rule)
    if not isinstance(divisor, Tensor):
        if not is_number(divisor):
            raise wrong(TypeError, "divisor is", repr(divisor), "a number, or a tensor")
        if not is_moderate(divisor):
            raise wrong(ValueError, "divisor is", repr(divisor), MODERATE)
        return
    if divisor.dim() or divisor.is_complex():
        dtype_and_shape = f"of {divisor.dtype} has shape {tuple(divisor.shape)}"
        raise wrong(ValueError, "divisor", dtype_and_shape, "a real number of shape ()")
    check_needs_none(OP, ("divisor", divisor))


def _tokens_of(input: Tensor, target: Tensor) -> tuple[int, ...]:
    """Return the shape of all tokens, of which the input has a part in one dimension."""
    part, whole = tuple(input.shape[:-1]), tuple(target.shape)
    same_rank = len(part) == len(whole) > 0
    others = [d for d, n in enumerate(part) if n != whole[d]] if same_rank else []
    if not same_rank or len(others) > 1 or any(whole[d] % (part[d] or 1) for d in others):
        rule = (
            f"the shape of all tokens with input_grad='reduce_scatter': {part}, with one size "
            "times the number of ranks"
        )
        raise wrong(ValueError, "target has shape", whole, rule)
    return whole


def _check_target(tokens: tuple[int, ...], target: Tensor, vocab: int, ignore_index: int) -> None:
    if target.is_floating_point():
        if tuple(target.shape) != (*tokens, vocab):
            rule = f"{(*tokens, vocab)}, one probability per class, for a floating dtype"
            raise wrong(ValueError, "target has shape", tuple(target.shape), rule)
        if ignore_index >= 0:
            rule = "None with probabilities as targets. Give a token_weight of 0 to ignore a token"
            raise wrong(ValueError, "ignore_index is", ignore_index, rule)
        return
    if target.dtype not in INDICES:
        rule = "int64, int32 or uint8 class indices, or floating point probabilities"
        raise wrong(TypeError, "target is", target.dtype, rule)
    if tuple(target.shape) != tokens:
        rule = f"the shape of input without its last dimension, {tokens}"
        raise wrong(ValueError, "target has shape", tuple(target.shape), rule)


def _check_picks(
    selected_ids: Tensor | None,
    top_k: int | None,
    returns: Sequence[str],
    tokens: tuple[int, ...],
    vocab: int | None,
) -> None:
    for name, argument, value in (
        ("selected", "selected_ids", selected_ids),
        ("topk", "top_k", top_k),
    ):
        if (name in returns) != (value is not None):
            shown = "None" if value is None else "given"
            rule = f"a value for it exactly if {name!r} is in returns"
            raise wrong(ValueError, argument, f"is {shown} and returns is {returns}", rule)
    if selected_ids is not None:
        if selected_ids.dtype not in INDICES:
            raise wrong(TypeError, "selected_ids is", selected_ids.dtype, "int64, int32 or uint8")
        fits = selected_ids.dim() == len(tokens) + 1 and tuple(selected_ids.shape[:-1]) == tokens
        if not fits or selected_ids.shape[-1] == 0:
            rule = f"(*{tokens}, K), K >= 1 classes for every token"
            raise wrong(ValueError, "selected_ids has shape", tuple(selected_ids.shape), rule)
    if top_k is not None:
        if not is_integer(top_k):
            raise wrong(TypeError, "top_k is", repr(top_k), "an int, or None")
        if top_k < 1 or (vocab is not None and top_k > vocab):
            raise wrong(ValueError, "top_k is", top_k, f"1 to {vocab or 'the number of classes'}")


def _check_sum(into: Tensor, linear_weight: Tensor) -> None:
    wide = arithmetic(linear_weight.dtype)
    if into.dtype != wide:
        raise wrong(TypeError, "accumulate_into is", into.dtype, str(wide))
    rows, size = into.shape
    if (size > 1 and into.stride(1) != 1) or (rows > 1 and into.stride(0) < size):
        rule = "rows that are contiguous and do not overlap"
        raise wrong(ValueError, "accumulate_into has strides", tuple(into.stride()), rule)
    if into.requires_grad:
        raise wrong(ValueError, "accumulate_into", "requires grad", "a buffer that does not")
    if torch.is_grad_enabled() and not linear_weight.requires_grad:
        rule = "a weight that does, because its gradient goes to accumulate_into"
        raise wrong(ValueError, "linear_weight", "does not require grad", rule)
