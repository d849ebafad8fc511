"""Match the ops of a recompute with the ops of the forward, some of whose results a policy saved.

The forward logs every op, and a mark for every tensor that autograd saves. The recompute compares
its ops with the log, one after the other. The recompute may run fewer ops: the forward may fill a
cache, or create a mask that only the first call creates. After the first difference, a saved result
is used only if its call is the only one in the rest of the log that matches. Other ops run again.

Without a policy, `OpLog` notes the ops, and describes the first op of a recompute that differs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS

from storage_ops.checkpoint.saved import guard
from storage_ops.checkpoint.saved.saved import explain_offsets, fail, shape_of
from storage_ops.foundation.op_names import Op, readable
from storage_ops.foundation.ops import Args, Kwargs, OpFacts

_PLAIN = frozenset((int, float, bool, str))
_SAVED_TENSOR, _END = object(), object()
_ADVICE = (
    "A region must do the same work both times. A cache that grows, such as that of keys and "
    "values, makes it do more: switch the cache off (use_cache=False). Move work that only the "
    "first call does, such as making a table, out of the region."
)
Call = list[Any]


# Attribute of a leaf that replaces another tensor. Its value is the origin of that tensor.
ORIGIN = "_storage_ops_origin"

# Names of the nodes of view ops, without "Backward0".
VIEWS = frozenset((
    "Alias", "AsStrided", "Conj", "Diagonal", "Expand", "NegView", "Permute", "ReshapeAlias",
    "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "T", "Transpose", "Unbind", "Unfold",
    "Unsqueeze", "View", "ViewAsComplex", "ViewAsReal",
))  # fmt: skip


def origin_of(t: Tensor) -> str | int:
    """Return the name of the node that computed a tensor's bytes, or a number for a leaf.

    A view and its copy from saved-tensor hooks, which is not a view, have the same origin.
    """
    root = t if t._base is None else t._base
    node: Any = root.grad_fn
    while node is not None:
        name: str = node.name()
        if type(node).__name__ == "AccumulateGrad":
            root = node.variable
            break
        if name.partition("Backward")[0] not in VIEWS:
            return name
        node = node.next_functions[0][0]
    # The class is tested first, because isinstance is slow with a Parameter's metaclass.
    if type(root) is not Tensor and isinstance(root, nn.Parameter):
        return id(root)
    return root.requires_grad and vars(root).get(ORIGIN, True)


def describe_call(args: Args, kwargs: Kwargs) -> Call:
    """Return the numbers among an op's arguments, and each tensor's shape, dtype and origin."""
    description: Call = []
    _describe(args, description)
    if kwargs:
        _describe(kwargs.values(), description)
    return description


def _describe(values: Iterable[object], description: Call) -> None:
    for value in values:
        if isinstance(value, Tensor):
            description.append((shape_of(value), value.dtype, origin_of(value)))
        elif type(value) in _PLAIN:
            description.append(value if value == value else "nan")
        elif isinstance(value, (list, tuple)):
            _describe(value, description)
        elif isinstance(value, dict):
            _describe(value.values(), description)


def _has_symbol(call: Call) -> bool:
    """Return True if a described tensor has a symbolic size, such as a jagged nested tensor."""
    sizes = (size for part in call if type(part) is tuple for size in part[0])
    return any(isinstance(size, torch.SymInt) for size in sizes)


class Log:
    """The ops of one forward, in order.

    Attributes:
        is_complete: whether the forward has ended.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []  # the facts of an op, or a mark
        # Maps the position of a call to its arguments, for ops with a saved result.
        self._calls: dict[int, Call] = {}
        self._names: set[str] = set()  # of ops with a saved result
        self.is_complete = False

    def add(self, facts: OpFacts) -> int:
        """Add an op that begins. Return its position."""
        self._events.append(facts)
        return len(self._events) - 1

    def add_saved_tensor(self, t: Tensor) -> None:
        """Add a mark: autograd saves a tensor."""
        self._events.append(_SAVED_TENSOR)

    def describe(self, position: int, name: str, args: Args, kwargs: Kwargs, wanted: bool) -> None:
        """Note the arguments of a call, if a result of its op is saved.

        Args:
            position: of the call in the log.
            name: of the op.
            args, kwargs: the arguments.
            wanted: whether the policy saves the result of this call.
        """
        if wanted:
            self._names.add(name)
        if wanted or name in self._names:
            self._calls[position] = describe_call(args, kwargs)

    def finish(self) -> None:
        """Add a mark: the forward has ended."""
        self._events.append(_END)
        self.is_complete = True

    def name_at(self, position: int) -> str:
        """Return the name of the op at a position."""
        return str(self._events[position].name)

    def counts(self) -> Counter[str]:
        """Return how often each op ran."""
        return Counter(event.name for event in self._events if isinstance(event, OpFacts))


class Cursor:
    """The position of a recompute in the log of its forward.

    Attributes:
        difference: a sentence about the first op that differs; empty if no op differs.
    """

    def __init__(self, log: Log, region: str) -> None:
        self._events, self._calls, self._names = log._events, log._calls, log._names
        self._region = region
        self._position = 0  # the next position
        self._in_step = True
        self._last_used = -1  # the last position whose result was used
        self.difference = ""

    def find(self, facts: OpFacts, args: Args, kwargs: Kwargs) -> int | None:
        """Return the position of a call in the log if a result may be saved there, else None.

        Raises:
            RuntimeError: the recompute runs other ops than the forward.
        """
        position = self._position
        if self._in_step and self._events[position] is facts:
            before = self._calls.get(position)
            if before is None or before == (call := describe_call(args, kwargs)):
                self._position = position + 1
                return position
            if _has_symbol(before) and _has_symbol(call):
                fail(
                    f"the jagged tensors that {readable(facts.name)} of {self._region} is called "
                    f"with differ when it is recomputed. {explain_offsets(self._region)}"
                )
        if self._in_step:
            self._lose_step(facts.name)
        if facts.name not in self._names:
            return None
        call = describe_call(args, kwargs)
        matches = [
            i
            for i in range(self._position, len(self._events))
            if self._events[i] is facts and self._calls.get(i, call) == call
        ]
        if not matches:
            self._fail(HAS_NO_RESULT, facts.name)
        if len(matches) > 1 or matches[0] not in self._calls:
            return None
        self._position, self._in_step = matches[0] + 1, True
        return matches[0]

    def use(self, position: int) -> None:
        """Note that the recompute uses the saved result of a call instead of running the op."""
        self._last_used = position

    def see_saved_tensor(self, t: Tensor) -> None:
        """Note that autograd saves a tensor of the recompute.

        Raises:
            RuntimeError: the recompute runs other ops than the forward.
        """
        if self._in_step:
            if self._events[self._position] is _SAVED_TENSOR:
                self._position += 1
            else:
                self._lose_step("")

    def _lose_step(self, name: str) -> None:
        """Note the first difference. Raise if the last saved result may be of another call."""
        self._in_step = False
        if not self.difference:
            self.difference = self._describe_difference(name)
        used, self._last_used = self._last_used, -1
        # The recompute ran the events of this range. If one of them occurs nowhere later in the
        # log, the position of the recompute is certain, and the result belongs to its call.
        if used >= 0 and not any(map(self._is_last_of_its_kind, range(used, self._position))):
            self._fail(MAY_BE_OF_ANOTHER_CALL, self._events[used].name)

    def _is_last_of_its_kind(self, position: int) -> bool:
        event, call = self._events[position], self._calls.get(position)
        for i in range(position + 1, len(self._events)):
            other = self._calls.get(i)
            if self._events[i] is event and (call is None or other is None or call == other):
                return False
        return True

    def _describe_difference(self, name: str) -> str:
        before = sum(isinstance(e, OpFacts) for e in self._events[: self._position])
        later = (e.name for e in self._events[self._position :] if isinstance(e, OpFacts))
        return describe_difference(before, next(later, None), name)

    def _fail(self, why: str, name: str) -> NoReturn:
        raise RuntimeError(describe_failure(self._region, self.difference, why, name))


def describe_difference(before: int, expected: str | None, name: str) -> str:
    """Return a sentence about the first op of a recompute that differs from the forward.

    Args:
        before: the number of ops before this op.
        expected: the name of the op that the forward ran; None if the forward had ended.
        name: the name of the op that the recompute ran; empty if it ran no op.
    """
    ran = readable(name)
    if expected is None:
        return f"the forward ran {before} ops, and the recompute then ran {ran or 'others'}"
    if expected == name:
        return f"op {before}, {ran}, had other arguments in forward"
    first = f"op {before} was {readable(expected)} in forward"
    return f"{first} and {ran or 'did not run'} when it was recomputed"


# Values of `why` in `describe_failure`.
HAS_NO_RESULT, MAY_BE_OF_ANOTHER_CALL = "has no result", "may be of another call"


def describe_failure(region: str, difference: str, why: str, name: str) -> str:
    """Return the error message for a recompute that runs other ops than its forward.

    Args:
        region: the name of the region.
        difference: the result of `describe_difference`.
        why: why the recompute cannot go on: `HAS_NO_RESULT` or `MAY_BE_OF_ANOTHER_CALL`.
        name: the op without a saved result that belongs to its call.
    """
    reason = {
        HAS_NO_RESULT: f"No saved result of {readable(name)} belongs to this call.",
        MAY_BE_OF_ANOTHER_CALL: (
            f"A saved result of {readable(name)} that was used before may belong to another call."
        ),
    }[why]
    return (
        f"selective checkpoint: {region} does other work when it is recomputed than in "
        f"forward. Difference: {difference}. {reason} {_ADVICE}"
    )


class OpLog(TorchDispatchMode):
    """Mode that notes the name of every op, and the line that ran it.

    Attributes:
        ops: pairs of an op's name and "file:line".
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[str, str]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code runs unchanged under the mode."""
        return True

    def __torch_dispatch__(
        self, op: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if op not in SAC_IGNORED_OPS:  # for example, the detach of a saved tensor
            self.ops.append((str(op), guard.where()))
        return op(*args, **(kwargs or {}))

    def difference(self, recompute: OpLog) -> str:
        """Return a sentence about the first op of a recompute that differs, for an error.

        If the ops are the same, the sentence says that their arguments differ.
        """
        pairs = itertools.zip_longest(self.ops, recompute.ops, fillvalue=("none", "no line"))
        for index, ((name, line), (other, other_line)) in enumerate(pairs):
            if name != other:
                return (
                    f" Difference: op {index} was {name} at {line} in forward and {other} at "
                    f"{other_line} when it was recomputed."
                )
        return f" The {len(self.ops)} ops were the same, with other arguments."
