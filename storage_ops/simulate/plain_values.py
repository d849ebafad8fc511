"""Watches how the forward of a layer uses the layer's numbers and strings.

Layers of one class often store their own number in the model. `Watch` replaces such a value by a
`WatchedValue` while one layer runs, and records every question and its answer. A layer with another
value behaves the same if its value gives the same answers.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

HIDDEN = (int, float, str)  # exact types of the values that may be watched
_OPERANDS = (bool, int, float, str, type(None))
_DEEP = 32  # the most nested operations in one expression
Spot = tuple[Any, Any]  # a dictionary or a list, and the key of an item
# A position among the values of a layer, a constant, or a function with the expressions of its
# arguments.
Expression = tuple[Any, ...]
Answers = Mapping[Expression, object]  # the answers are hashable
_POSITION, _CONSTANT = "position", "constant"
# Functions that scale or shift the values of a tensor. Their memory depends on no number.
_SCALING = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        "add", "add_", "sub", "sub_", "rsub", "__rsub__", "mul", "mul_", "div", "div_",
        "true_divide", "__rdiv__", "bernoulli_",
    )
    if hasattr(owner, name)
}  # fmt: skip


class NotKnown(Exception):
    """The code used a watched value in a way without a known result for other values."""


class Watch:
    """Replaces numbers and strings of a layer by watched values inside a with block.

    Attributes:
        answers: the answers about the values to the code in the block.
        is_refused: whether the code used a value in an unknown way.
    """

    def __init__(self, spots: Mapping[int, Spot], may_know: Callable[[Tensor], bool]) -> None:
        """Start to watch.

        Args:
            spots: the place of each value, by its position among the layer's values.
            may_know: returns whether a simulation may know the values of a tensor.
        """
        self.answers: dict[Expression, object] = {}
        self.is_refused = False
        self.is_over = False  # a value that code kept then behaves like the plain one
        self._spots, self._may_know = spots, may_know
        self._plain: list[tuple[Any, Any, Any]] = []
        self._watched_values: list[weakref.ref[WatchedValue]] = []

    def __enter__(self) -> Watch:
        for position, (holder, key) in self._spots.items():
            self._plain.append((holder, key, holder[key]))
            holder[key] = self._watched(holder[key], (_POSITION, position))
        return self

    def __exit__(self, *exception: object) -> None:
        for holder, key, value in reversed(self._plain):
            holder[key] = value
        self._plain.clear()
        self.is_over = True

    @property
    def is_kept(self) -> bool:
        """Return True if a watched value exists after the block, so that later code may read it."""
        return any(reference() is not None for reference in self._watched_values)

    def refuse(self) -> None:
        """Stop watching, unless the block has ended.

        Raises:
            NotKnown: the block has not ended.
        """
        if not self.is_over:
            self.is_refused = True
            raise NotKnown

    def compute(
        self, function: Callable[..., object], operands: Sequence[object], answers: bool
    ) -> object:
        """Return the result of a function of watched and other values, which may be watched, too.

        Args:
            function: a pure function.
            operands: its arguments, at least one of them watched.
            answers: whether the code gets the plain result, which is then recorded.
        """
        if self.is_over:
            return function(*(plain_of(o) for o in operands))
        expression: Expression = (function, *(self._expression(o) for o in operands))
        if _depth(expression) > _DEEP:
            self.refuse()
        try:
            value: Any = function(*(plain_of(o) for o in operands))
        except Exception as error:
            self.answers[expression] = type(error)
            raise
        if not answers and type(value) in HIDDEN:
            return self._watched(value, expression)
        self.answers[expression] = value
        return value

    def give(self, value: WatchedValue, scaled: Sequence[Tensor] | None) -> None:
        """Record that a function of torch gets the plain value.

        `scaled`: the tensors whose values it only scales, if so. If they are unknown, the value
        determines no size, and only its type is recorded.
        """
        if self.is_over:
            return
        if scaled is None or any(not t.is_floating_point() or self._may_know(t) for t in scaled):
            self.answers[value.expression] = value.plain
        else:
            self.answers[type, value.expression] = type(value.plain)

    def _expression(self, operand: object) -> Expression:
        if type(operand) is WatchedValue:
            return operand.expression
        if type(operand) not in _OPERANDS:
            self.refuse()
        return _CONSTANT, type(operand), operand

    def _watched(self, value: object, expression: Expression) -> WatchedValue:
        watched = WatchedValue(value, expression, self)
        self._watched_values.append(weakref.ref(watched))
        return watched


class WatchedValue:
    """Represents a number or a string.

    Functions of torch get the plain value by `__torch_function__`, and other C code by `__index__`
    and similar methods. This is recorded. C code that uses neither fails.
    """

    __slots__ = ("__weakref__", "expression", "plain", "watch")

    def __init__(self, plain: object, expression: Expression, watch: Watch) -> None:
        self.plain, self.expression, self.watch = plain, expression, watch

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() reads it
        return type(self.plain)

    def __getattr__(self, name: str) -> object:
        value: object = getattr(self.plain, name)
        self.watch.refuse()
        return value

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for value in leaves:
            if type(value) is WatchedValue:
                value.watch.give(value, tensors if func in _SCALING else None)
        args, kwargs = tree_map(plain_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __hash__(self) -> int:  # a dictionary might keep the value
        self.watch.refuse()
        return hash(self.plain)


def _method(function: Callable[..., object], answers: bool, is_reflected: bool = False) -> Any:
    def method(self: WatchedValue, *others: object) -> object:
        if any(isinstance(other, Tensor) for other in others):
            return NotImplemented  # the tensor calls a function of torch
        operands = (*others, self) if is_reflected else (self, *others)
        return self.watch.compute(function, operands, answers)

    return method


_ASKED: dict[str, Callable[..., object]] = {
    "bool": bool, "int": int, "float": float, "str": str, "index": operator.index, "len": len,
    "repr": repr, "format": format, "round": round, "contains": operator.contains,
    "getitem": operator.getitem,
}  # fmt: skip
_COMPUTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and",
             "or", "xor")  # fmt: skip
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(WatchedValue, f"__{_name}__", _method(getattr(operator, _name), True))
for _name, _function in _ASKED.items():
    setattr(WatchedValue, f"__{_name}__", _method(_function, True))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(WatchedValue, f"__{_name}__", _method(getattr(operator, _name), False))
for _name in _COMPUTED:
    _function = getattr(operator, f"__{_name}__")
    setattr(WatchedValue, f"__{_name}__", _method(_function, False))
    setattr(WatchedValue, f"__r{_name}__", _method(_function, False, is_reflected=True))


def plain_of(operand: object) -> object:
    """Return the plain value behind a watched one. Other values are returned themselves."""
    return operand.plain if type(operand) is WatchedValue else operand


def _depth(expression: Expression) -> int:
    return 1 + max((_depth(part) for part in expression if type(part) is tuple), default=0)


def evaluated(expression: Expression, values: Sequence[object]) -> object:
    """Return the result of an expression for the values of another layer."""
    function, *operands = expression
    if function == _POSITION:
        return values[operands[0]]
    if function == _CONSTANT:
        return operands[1]
    return function(*(evaluated(operand, values) for operand in operands))


def learned(expression: Expression, values: Sequence[object]) -> object:
    """Return the answer for the values of another layer, or the class of an exception."""
    try:
        return evaluated(expression, values)
    except Exception as error:
        return type(error)


def would_answer(answers: Answers, values: Sequence[object]) -> bool:
    """Return True if the values of a layer give these answers of another layer."""
    return all(learned(expression, values) == answer for expression, answer in answers.items())


def exactly(values: Sequence[object], positions: Sequence[int]) -> dict[Expression, object]:
    """Return the answers that only equal values at these positions give."""
    return {(_POSITION, position): values[position] for position in positions}
