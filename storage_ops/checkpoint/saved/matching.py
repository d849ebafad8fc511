"""Match the ops of a recompute with the ops of the forward, whose results a policy saved.

The forward logs every op, and a mark for every tensor that autograd saves. The recompute goes
through the log in step with the forward. A cache that the forward fills, or a mask that only the
first call makes, leaves ops out of the recompute. From the first difference on, only a saved
result that fits exactly one call of the log is used, and all other ops run again.

Without a policy, `OpLog` tells which ops ran, and where a recompute began to run others.
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


# Attribute of a leaf that stands for a tensor with a history: the name of the tensor's node.
ORIGIN = "_storage_ops_origin"


def describe_call(args: Args, kwargs: Kwargs) -> Call:
    """Describe the arguments of an op: numbers, and shape, dtype and origin of each tensor."""
    description: Call = []
    _describe(args, description)
    if kwargs:
        _describe(kwargs.values(), description)
    return description


def _describe(values: Iterable[object], found: Call) -> None:
    for value in values:
        if isinstance(value, Tensor):
            base = value._base
            root = value if base is None else base
            node = root.grad_fn
            if node is not None:
                origin: Any = node.name()
            # Asked by class first: isinstance with a Parameter's metaclass takes long.
            elif type(root) is not Tensor and isinstance(root, nn.Parameter):
                origin = id(root)
            else:
                origin = root.requires_grad and vars(root).get(ORIGIN, True)
            found.append((shape_of(value), value.dtype, origin))
        elif type(value) in _PLAIN:
            found.append(value if value == value else "nan")
        elif isinstance(value, (list, tuple)):
            _describe(value, found)
        elif isinstance(value, dict):
            _describe(value.values(), found)


def _has_symbol(call: Call) -> bool:
    """Return True if a size in a described call is a symbol, as of jagged nested tensors."""
    sizes = (size for part in call if type(part) is tuple for size in part[0])
    return any(isinstance(size, torch.SymInt) for size in sizes)


class Log:
    """The ops of one forward, in order.

    Attributes:
        is_complete: whether the forward has ended.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []  # the facts of an op, or a mark
        # By position: the arguments of the calls of ops of which results are saved.
        self._calls: dict[int, Call] = {}
        self._names: set[str] = set()
        self.is_complete = False

    def add(self, facts: OpFacts) -> int:
        """Note an op that begins. Return its position."""
        self._events.append(facts)
        return len(self._events) - 1

    def add_saved_tensor(self, t: Tensor) -> None:
        """Note that autograd saves a tensor."""
        self._events.append(_SAVED_TENSOR)

    def describe(self, position: int, name: str, args: Args, kwargs: Kwargs, wanted: bool) -> None:
        """Note the arguments of a call whose result is wanted, and of later calls of its op."""
        if wanted:
            self._names.add(name)
        if wanted or name in self._names:
            self._calls[position] = describe_call(args, kwargs)

    def finish(self) -> None:
        """Note that the forward has ended."""
        self._events.append(_END)
        self.is_complete = True

    def name_at(self, position: int) -> str:
        """Return the name of the op at a position."""
        return str(self._events[position].name)

    def counts(self) -> Counter[str]:
        """Return how often each op ran."""
        return Counter(event.name for event in self._events if isinstance(event, OpFacts))


class Cursor:
    """The place of a recompute in the log of its forward.

    Attributes:
        difference: a sentence on the first op that differs; empty if none does.
    """

    def __init__(self, log: Log, region: str) -> None:
        self._events, self._calls, self._names = log._events, log._calls, log._names
        self._region = region
        self._at = 0  # the next position
        self._in_step = True
        self._handed_out = -1  # the last position whose result was used
        self.difference = ""

    def find(self, facts: OpFacts, args: Args, kwargs: Kwargs) -> int | None:
        """Return the position of a call in the log, if a result may be saved there.

        Raises:
            RuntimeError: the recompute does other work than the forward.
        """
        at = self._at
        if self._in_step and self._events[at] is facts:
            call = self._calls.get(at)
            if call is None or call == (again := describe_call(args, kwargs)):
                self._at = at + 1
                return at
            if _has_symbol(call) and _has_symbol(again):
                fail(
                    f"the jagged tensors that {readable(facts.name)} of {self._region} is called "
                    f"with differ when it is recomputed. {explain_offsets(self._region)}"
                )
        if self._in_step:
            self._lose_step(facts.name)
        if facts.name not in self._names:
            return None
        call = describe_call(args, kwargs)
        fitting = [
            i
            for i in range(self._at, len(self._events))
            if self._events[i] is facts and self._calls.get(i, call) == call
        ]
        if not fitting:
            self._fail(HAS_NO_RESULT, facts.name)
        if len(fitting) > 1 or fitting[0] not in self._calls:
            return None
        self._at, self._in_step = fitting[0] + 1, True
        return fitting[0]

    def use(self, position: int) -> None:
        """Note that the recompute uses the result of a call in place of running it."""
        self._handed_out = position

    def see_saved_tensor(self, t: Tensor) -> None:
        """Note that autograd saves a tensor of the recompute.

        Raises:
            RuntimeError: the recompute does other work than the forward.
        """
        if self._in_step:
            if self._events[self._at] is _SAVED_TENSOR:
                self._at += 1
            else:
                self._lose_step("")

    def _lose_step(self, name: str) -> None:
        """Note the first difference; refuse to go on where a result that was used may be wrong."""
        self._in_step = False
        if not self.difference:
            self.difference = self._describe_difference(name)
        used, self._handed_out = self._handed_out, -1
        # What was left out lies after any event that does not come a second time.
        if used >= 0 and not any(map(self._is_last_of_its_kind, range(used, self._at))):
            self._fail(MAY_BE_OF_ANOTHER_CALL, self._events[used].name)

    def _is_last_of_its_kind(self, at: int) -> bool:
        event, call = self._events[at], self._calls.get(at)
        for i in range(at + 1, len(self._events)):
            other = self._calls.get(i)
            if self._events[i] is event and (call is None or other is None or call == other):
                return False
        return True

    def _describe_difference(self, name: str) -> str:
        before = sum(isinstance(e, OpFacts) for e in self._events[: self._at])
        later = (e.name for e in self._events[self._at :] if isinstance(e, OpFacts))
        return describe_difference(before, next(later, None), name)

    def _fail(self, why: str, name: str) -> NoReturn:
        raise RuntimeError(describe_failure(self._region, self.difference, why, name))


def describe_difference(before: int, expected: str | None, name: str) -> str:
    """Return a sentence on the first op of a recompute that differs from the forward.

    Args:
        before: the number of ops before it.
        expected: the name of the op that the forward ran; None if it ran no other.
        name: the name of the op that the recompute ran; empty if it ran none.
    """
    ran = readable(name)
    if expected is None:
        return f"the forward ran {before} ops, and the recompute then ran {ran or 'others'}"
    if expected == name:
        return f"op {before}, {ran}, had other arguments in forward"
    first = f"op {before} was {readable(expected)} in forward"
    return f"{first} and {ran or 'did not run'} when it was recomputed"


# Reasons of `describe_failure`.
HAS_NO_RESULT, MAY_BE_OF_ANOTHER_CALL = "has no result", "may be of another call"


def describe_failure(region: str, difference: str, why: str, name: str) -> str:
    """Return the error of a recompute that does other work than its forward.

    Args:
        region: the name of the region.
        difference: what `describe_difference` returned.
        why: why the recompute cannot go on, one of the reasons above.
        name: the op whose saved result is not that of a call.
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


def describe_modified(region: str, name: str) -> str:
    """Return the error for a saved result of an op that was modified after its region."""
    return (
        f"selective checkpoint: a result of {readable(name)} that was saved in {region} was "
        "modified in place after it. Modify a clone instead."
    )


class OpLog(TorchDispatchMode):
    """Notes the name of every op in a block, and the line that ran it.

    Attributes:
        ops: pairs of a name and "file:line".
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[str, str]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Code that is compiled already runs as it is."""
        return True

    def __torch_dispatch__(
        self, op: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if op not in SAC_IGNORED_OPS:  # such as the detach of what is saved
            self.ops.append((str(op), guard.where()))
        return op(*args, **(kwargs or {}))

    def difference(self, again: OpLog) -> str:
        """Describe where a repetition ran another op than this log has, for an error.

        If the ops are the same, say that their arguments differ.
        """
        pairs = itertools.zip_longest(self.ops, again.ops, fillvalue=("none", "no line"))
        for index, ((name, line), (other, other_line)) in enumerate(pairs):
            if name != other:
                return (
                    f" Difference: op {index} was {name} at {line} in forward and {other} at "
                    f"{other_line} when it was recomputed."
                )
        return f" The {len(self.ops)} ops were the same, with other arguments."
