"""Floating-point operations of one call of an op: those of torch's counter, and what it lacks.

torch has no formula for attention on a CPU or of other packages, and its formulas refuse keys with
fewer heads than queries, and read lengths of sequences, which simulated tensors do not have. So
attention is counted here. Nor has it one for products of groups, as of the experts of a layer.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from storage_ops.foundation.op_names import HIGHER_ORDER, name_of, packet_of

_QKV = (("query", "key", "value"), ("q", "k", "v"))  # what ops of attention call these
# Products that torch's counter does not know: the places of both factors, and how many there are.
_PRODUCTS = {
    "aten::_grouped_mm": (0, 1, 1), "aten::_scaled_grouped_mm": (0, 1, 1),
    "aten::_scaled_grouped_mm_v2": (0, 1, 1), "aten::_scaled_mm_v2": (0, 1, 1),
    "aten::_int_mm": (0, 1, 1), "aten::_addmm_activation": (1, 2, 1), "aten::addbmm": (1, 2, 1),
    "aten::mv": (0, 1, 1), "aten::addmv": (1, 2, 1), "aten::dot": (0, 1, 1),
    "transformers::grouped_mm_fallback": (0, 1, 1),
    "transformers::grouped_mm_fallback_backward": (0, 1, 2),
}  # fmt: skip
_LINEAR = ("aten::linear", "aten::mkldnn_linear")  # the weight is transposed
_MOST_KEYS = ("max_k", "max_seqlen_k")  # of a sequence, where all lie in one dimension


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Operations of a call of `op`, from shapes alone; 0 if there is no formula for it.

    Matrix products, convolutions and attention are counted, a multiplication and an addition as
    two. Attention counts as if nothing was masked and all sequences were of the greatest length, in
    forward as two products along queries and keys, in backward as five.
    """
    from torch.utils.flop_counter import flop_registry

    name = packet_of(name_of(op))
    places = _arguments_of_attention(op, name)
    if places is not None:
        return _of_attention(name, {n: _given(n, k, args, kwargs) for n, k in places.items()})
    if name in _LINEAR:
        return int(2 * args[0].numel() * args[1].shape[0])
    if name in _PRODUCTS:
        left, right, number = _PRODUCTS[name]
        return number * _of_product(args[left], args[right])
    formula: Any = flop_registry.get(getattr(op, "overloadpacket", op))
    if formula is None:
        return 0
    shaped = [a for a in args if not isinstance(a, torch.dtype)]  # the formula of addmm takes none
    return int(formula(*shaped, **kwargs, out_val=out))


def _of_product(left: Tensor, right: Tensor) -> int:
    """Of matrices, or of groups of them in rows, columns or matrices of one tensor."""
    if left.dim() == 3 and right.dim() == 2:  # each matrix with some of the columns
        return 2 * right.numel() * int(left.shape[1])
    return 2 * left.numel() * (1 if right.dim() == 1 else int(right.shape[-1]))


@functools.cache
def _arguments_of_attention(op: Any, name: str) -> dict[str, int] | None:
    """Names of an op's arguments and their places, if it is one of attention."""
    if "attention" not in name and "attn" not in name:
        return None
    schema = getattr(op, "_schema", None)  # flex_attention has none
    names = _QKV[0] if schema is None else [argument.name for argument in schema.arguments]
    found = {name: place for place, name in enumerate(names)}
    return found if any(all(name in found for name in qkv) for qkv in _QKV) else None


def _given(name: str, place: int, args: Any, kwargs: Any) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _of_attention(name: str, given: dict[str, Any]) -> int:
    q, k, v = (given[name] for name in (_QKV[0] if _QKV[0][0] in given else _QKV[1]))
    if "scaled_dot_product" in name or name.startswith(HIGHER_ORDER):
        keys = k.shape[-2]
    else:  # heads are behind the sequence
        most = [given[name] for name in _MOST_KEYS if given.get(name) is not None]
        keys = min([k.shape[max(-3, -k.dim())], *most])
    # Backward computes the scores again, and gradients of both factors of both products.
    of_q, of_v = (3, 2) if name.endswith("backward") else (1, 1)
    return int(2 * math.prod(q.shape[:-1]) * keys * (of_q * q.shape[-1] + of_v * v.shape[-1]))
