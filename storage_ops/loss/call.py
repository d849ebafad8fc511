"""The arguments of the op, by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from storage_ops.loss.planning.planner import keeping

_Call = TypeVar("_Call")


@functools.cache
def _tensor_fields(arguments: type[Any]) -> tuple[str, ...]:
    """Return the names of the fields of a NamedTuple that are tensors, or None."""
    hints = get_type_hints(arguments)
    return tuple(name for name, hint in hints.items() if Tensor in (hint, *get_args(hint)))


def tensors_of(call: object) -> tuple[Tensor | None, ...]:
    """Return the arguments of an op that are tensors, or None; `call`: a NamedTuple of them."""
    kind: Any = type(call)
    return tuple(getattr(call, name) for name in _tensor_fields(kind))


def with_tensors(call: _Call, tensors: Sequence[Tensor | None] | None = None) -> _Call:
    """Return a call with other tensors; without any, it keeps no memory."""
    kind: Any = type(call)
    names = _tensor_fields(kind)
    given = (None,) * len(names) if tensors is None else tensors
    changed: _Call = kind._replace(call, **dict(zip(names, given, strict=True)))
    return changed


class Call(NamedTuple):
    """The arguments of `storage_ops::linear_cross_entropy`, in the order of its schema.

    Those of the public function, but for what is not in its place there: `bias` is `linear_bias`,
    `class_weight` is `weight`, `softcap` is 0 for None, `max_valid` -1 for "sync", and `plan` and
    `group` are the plan's key and the group's name, or "".

    Attributes:
        in_forward: the gradients are made in the forward, for a loss that is a mean or a sum.
        grad_mask: whether input, weight and bias need gradients.
        wants: whether nll, lse, entropy and argmax are asked for.
        selected_ids: those of the tokens that are scored, after the shift.
    """

    input: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    class_weight: Tensor | None = None
    token_weight: Tensor | None = None
    accumulate_into: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    shift: int = 0
    max_valid: int | None = None
    accumulate_dtype: torch.dtype | None = None
    memory_budget: int | None = None
    plan: str = ""
    group: str = ""
    in_forward: bool = True
    grad_mask: tuple[bool, ...] = (True, True, False)
    wants: tuple[bool, ...] = (False, False, False, False)
    valid_classes: int | None = None
    input_grad: str = "replicate"
    check_ranks: bool = False
    divisor: Tensor | None = None
    logits_dtype: torch.dtype | None = None
    selected_ids: Tensor | None = None
    top_k: int = 0

    @property
    def keeps(self) -> bool:
        """Whether the last tile may stay until the backward."""
        return keeping(self.plan, False) != self.plan

    @property
    def divides(self) -> bool:
        """Whether the loss is the tokens' sum divided by something."""
        return self.reduction == "mean" or (self.reduction == "sum" and self.divisor is not None)

    @property
    def adds_losses(self) -> bool:
        """Whether ranks add up the loss of their targets, and no token's target logit is sent."""
        summed = self.reduction != "none" and not self.wants[0]
        return bool(self.group) and summed and not self.target.is_floating_point()

    def for_backward(self) -> tuple[Any, ...]:
        """The arguments as ops of the backward take them that have no accumulate_into."""
        return self[:_INTO] + self[_INTO + 1 :]

    @staticmethod
    def of_backward(args: Sequence[Any]) -> Call:
        """The inverse of `for_backward`."""
        given: tuple[Any, ...] = (*args[:_INTO], None, *args[_INTO:])
        return Call(*given)


_INTO = Call._fields.index("accumulate_into")


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything but matrix products: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def count_of(sizes: Iterable[int]) -> int:
    """Return the product of sizes, which may be symbolic.

    `torch.Size.numel` makes constants of symbolic sizes, as `len` of a tensor does in an export.
    Each size would compile a graph.
    """
    return math.prod(sizes)
