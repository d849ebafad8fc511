"""The arguments of the loss: their types, the rules for their values, and the op's arguments.

* `Options` and the other typed dicts have the types of the keyword arguments, for the overloads
  that type checkers read. `tests/test_types.py` compares their names with those of the functions.
* `RULES` has rules that do not depend on tensors. `checks` has the others.
* `Call` has the arguments of the op by name, with their defaults.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from storage_ops.loss.planning.planner import Plan, keeping
from storage_ops.loss.planning.problem import REDUCTIONS, Reduction

_Call = TypeVar("_Call")

InputGrad = Literal["replicate", "partial", "reduce_scatter"]
TensorResult = Literal[
    "loss", "nll", "lse", "entropy", "argmax", "correct", "z_loss", "selected", "dropped"
]
Result = Literal[TensorResult, "topk"]  # "topk" is a pair of tensors

# Bounds of options that are numbers. The square of each is in the range of float32.
MOST = 1e18
LEAST = 1e-18  # of options that must be positive

INPUT_GRADS: tuple[InputGrad, ...] = get_args(InputGrad)
RESULTS: tuple[Result, ...] = get_args(Result)

# Longer tuples of names than the overloads have.
Several = tuple[TensorResult, TensorResult, Unpack[tuple[TensorResult, ...]]]


class Options(TypedDict, total=False):
    """Options that every loss on linear cross-entropy takes."""

    softcap: float | None
    max_valid: int | Literal["sync"] | None
    accumulate_dtype: torch.dtype | None
    memory_budget: int | float | str | None
    plan: Plan | None
    process_group: Any
    valid_classes: int | None
    input_grad: InputGrad
    check_ranks: bool
    logits_dtype: torch.dtype | None
    gradient_tolerance: float
    max_classes: float | None
    options: Any


class SumOptions(TypedDict, total=False):
    """Options for the losses of tokens and their sum."""

    reduction: Reduction
    label_smoothing: float
    z_loss: float
    logit_scale: float
    divisor: float | Tensor | None


class ModuleOptions(Options, SumOptions, total=False):
    """Options of `LinearCrossEntropyLoss`, except `returns`."""

    ignore_index: int | None
    shift: bool | int
    selected_ids: Tensor | None
    top_k: int | None


class CallOptions(ModuleOptions, total=False):
    """Keyword arguments of `linear_cross_entropy`, except `returns`."""

    linear_bias: Tensor | None
    weight: Tensor | None
    token_weight: Tensor | None
    accumulate_into: Tensor | None


class Rule(NamedTuple):
    """A rule for the value of an option, which does not depend on tensors.

    Attributes:
        option: its name.
        fits: returns True if a value obeys the rule.
        expected: the end of the error's text.
        kind: the type of the error.
    """

    option: str
    fits: Callable[[Any], bool]
    expected: str
    kind: type[Exception] = ValueError


def is_integer(value: object) -> bool:
    """Return True for an integer, including a symbolic one, but not for a bool."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return True for a real number that torch takes, including a symbolic one; not for a bool."""
    kinds = (numbers.Real, torch.SymInt, torch.SymFloat)
    return isinstance(value, kinds) and not isinstance(value, (bool, Fraction))


def is_moderate(value: Any) -> bool:
    """Return True for a number whose square float32 can hold. Not for nan and infinity."""
    return bool(abs(value) <= MOST)


def has_64_bits(value: object) -> bool:
    """Return False for an int that an op does not take. Symbolic integers have 64 bits."""
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def is_one_of(value: object, names: Sequence[str]) -> bool:
    """Return True for one of the names. An array has no truth value when compared with them."""
    return isinstance(value, str) and value in names


def one_of(option: str, names: Sequence[str]) -> Rule:
    """Return the rule of an option whose value is a name."""
    return Rule(option, lambda value: is_one_of(value, names), f"one of {names}")


def true_or_false(option: str) -> Rule:
    """Return the rule of an option that is switched on and off."""
    return Rule(option, lambda value: isinstance(value, bool), "True or False", TypeError)


# These rules hold for divergences, too.
REDUCTION = one_of("reduction", REDUCTIONS)
MAX_VALID = Rule(
    "max_valid",
    lambda n: (
        n is None or (n >= 0 and has_64_bits(n) if is_integer(n) else is_one_of(n, ("sync",)))
    ),
    "None, 'sync' or a count >= 0 of 64 bits",
)
VALID_CLASSES = Rule(
    "valid_classes",
    lambda n: n is None or (isinstance(n, int) and is_integer(n) and n > 0 and has_64_bits(n)),
    "None or a count >= 1 of 64 bits",
)

TOLERANCE = (
    Rule("gradient_tolerance", is_number, "a number", TypeError),
    Rule("gradient_tolerance", lambda share: 0 <= share < 1, "a probability from 0 to below 1"),
)

MODERATE = f"a number from {-MOST:.0e} to {MOST:.0e}"
_NO_TENSOR = "a number, because it gets no gradient. Multiply the input by a learned scale"
_NUMBERS = ("label_smoothing", "z_loss", "softcap", "logit_scale")

RULES = (
    *(Rule(n, lambda v: not isinstance(v, Tensor), _NO_TENSOR, TypeError) for n in _NUMBERS),
    Rule("label_smoothing", is_number, "a number", TypeError),
    Rule("label_smoothing", lambda e: 0 <= e <= 1, "a number from 0 to 1"),
    Rule("z_loss", is_number, "a number", TypeError),
    Rule("z_loss", is_moderate, MODERATE),
    Rule("softcap", lambda cap: cap is None or is_number(cap), "a number", TypeError),
    Rule("logit_scale", is_number, "a number", TypeError),
    Rule("logit_scale", is_moderate, MODERATE),
    REDUCTION,
    Rule(
        "shift",
        lambda k: isinstance(k, bool) or is_integer(k),
        "True, False or a number of tokens",
        TypeError,
    ),
    Rule("shift", lambda k: k >= 0 and has_64_bits(k), "a number of tokens >= 0 of 64 bits"),
    MAX_VALID,
    VALID_CLASSES,
    *TOLERANCE,
    Rule("max_classes", lambda share: share is None or is_number(share), "a number", TypeError),
    Rule("max_classes", lambda share: share is None or 0 < share <= 1, "None, or a share up to 1"),
    one_of("input_grad", INPUT_GRADS),
    true_or_false("check_ranks"),
    Rule(
        "plan",
        lambda plan: plan is None or hasattr(plan, "key"),
        "the result of storage_ops.plan, or None",
        TypeError,
    ),
)


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
    """Return a call with other tensors, or with none, which keeps no memory alive."""
    kind: Any = type(call)
    names = _tensor_fields(kind)
    values = (None,) * len(names) if tensors is None else tensors
    changed: _Call = kind._replace(call, **dict(zip(names, values, strict=True)))
    return changed


class Call(NamedTuple):
    """The arguments of `storage_ops::linear_cross_entropy`, in the order of its schema.

    They are those of the public function, with these exceptions. `bias` is `linear_bias`, and
    `class_weight` is `weight`. `softcap` is 0 for None, and `max_valid` -1 for "sync". `plan` and
    `group` are the plan's key and the group's name, or "".

    Attributes:
        in_forward: whether the forward computes the gradients, for a loss that is a mean or a sum.
        grad_mask: whether input, weight and bias need gradients.
        wants: whether nll, lse, entropy and argmax are requested.
        selected_ids: the selected classes of each scored token, after the shift.
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
    gradient_tolerance: float = 0.0
    max_classes: float | None = None
    want_dropped: bool = False

    @property
    def keeps(self) -> bool:
        """Return True if the last tile may stay in memory until the backward."""
        return keeping(self.plan, False) != self.plan

    @property
    def divides(self) -> bool:
        """Return True if the loss is the tokens' sum divided by a number."""
        return self.reduction == "mean" or (self.reduction == "sum" and self.divisor is not None)

    @property
    def adds_losses(self) -> bool:
        """Return True if ranks add up losses of targets instead of merging target logits."""
        summed = self.reduction != "none" and not self.wants[0]
        return bool(self.group) and summed and not self.target.is_floating_point()

    def for_backward(self) -> tuple[Any, ...]:
        """Return the arguments for the ops of the backward without accumulate_into."""
        return self[:_INTO] + self[_INTO + 1 :]

    @staticmethod
    def of_backward(args: Sequence[Any]) -> Call:
        """Return the call from arguments that `for_backward` returned."""
        call_args: tuple[Any, ...] = (*args[:_INTO], None, *args[_INTO:])
        return Call(*call_args)


_INTO = Call._fields.index("accumulate_into")


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of all arithmetic but matrix products: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def count_of(sizes: Iterable[int]) -> int:
    """Return the product of sizes, which may be symbolic.

    `torch.Size.numel` turns symbolic sizes into constants, and so does `len` of a tensor in an
    export. Each size would then compile a graph of its own.
    """
    return math.prod(sizes)
