"""Count the references to an output besides its region, consumers' saved tensors and its caller.

Three numbers are counted: tensors that share the storage, places in C++ that reference the output,
and references in Python. If the numbers leave a question open, the variables of the running
functions answer it, never a search among all objects.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from storage_ops.checkpoint.saved.guard import LIBRARIES, storage_key
from storage_ops.foundation.walk import CONTAINERS, items_of, names_of_globals

if TYPE_CHECKING:
    from storage_ops.checkpoint.region.region import Region
    from storage_ops.checkpoint.saved.outputs import DiscardableOutput


def _count(key: int) -> int:
    counted: Any = torch._C._storage_Use_Count
    return int(counted(key))


def _count_of_one() -> int:
    only = torch.empty(1)
    return _count(only.untyped_storage()._cdata)


def _held_by_cpp() -> int:
    """Return how often C++ holds the Python object of a tensor that it holds.

    That is once in some versions of torch, and never in others.
    """
    leaf = torch.ones(1, requires_grad=True)
    before = sys.getrefcount(leaf)
    product = leaf * leaf  # saves it
    return sys.getrefcount(leaf) - before if product.requires_grad else 0


_ONE = _count_of_one()  # the storage's own Python object may count as well
_BY_CPP = _held_by_cpp()
_OWN_NAMES = _OF_A_PAIR = 0  # what asking adds; measured at the end, for it depends on Python


def is_shared_by_at_most(key: int, tensors: int) -> bool:
    """Return True if at most `tensors` tensors share a live storage."""
    return _count(key) - _ONE + 1 <= tensors


class RefCounts(NamedTuple):
    """References to an output.

    Attributes:
        tensors: tensors that share its storage, without the saved tensors of consumers.
        places: places in C++ that reference the output; all Python references together are one.
        names: references in Python to the output itself.
    """

    tensors: int
    places: int
    names: int

    @staticmethod
    def counted(key: int, output: Callable[[], Tensor | None], uses: int = 0) -> RefCounts:
        """Return the counts of a live storage and of the tensor that a region returned."""
        output_object = output()
        if output_object is None:
            return RefCounts(_count(key) - _ONE + 1 - uses, 0, 0)
        places: int = output_object._use_count()  # type: ignore[attr-defined]
        # Counted here: passing a tensor on takes one more reference where dynamo sees every call.
        names = sys.getrefcount(output_object) - _OWN_NAMES - (_BY_CPP if places > 1 else 0)
        return RefCounts(_count(key) - _ONE + 1 - uses, places, names)

    @staticmethod
    def of(region: Region, entry: DiscardableOutput) -> RefCounts:
        """Return the counts of an output now."""
        return RefCounts.counted(entry.key, entry.output, region.uses.get(entry.key, 0))


def is_referenced(
    now: RefCounts,
    before: RefCounts,
    entry: DiscardableOutput,
    variables: bool,
    saved_too: bool = False,
) -> bool:
    """Return True if an output has more references than before that are not variables.

    Args:
        now, before: the counts.
        entry: the output.
        variables: whether variables of running functions do not count.
        saved_too: whether a tensor of a variable counts when the graph holds it as well.
    """
    if now == before:
        return False
    more = [n - b for n, b in zip(now, before, strict=True)]
    if max(more) <= 0 or not variables:
        return max(more) > 0
    output, first = entry.output(), entry.first_counts
    tensors = places = names = 0
    found = _in_variables(entry.key)
    for (t, times), others in zip(found, _others(found), strict=True):
        if t is output:
            names = times
        elif others <= 0 and not (saved_too and _is_saved(t)):
            tensors += 1
            places += t._base is output
    total = (now.tensors - first.tensors, now.places - first.places, now.names)
    explained = (tensors, places, names)
    return any(min(m, t - e) > 0 for m, t, e in zip(more, total, explained, strict=True))


def _others(found: list[tuple[Tensor, int]]) -> list[int]:
    """Return how many places in Python hold each tensor besides the variables that were found."""
    others = []
    for t, times in found:
        by_cpp = _BY_CPP if t._use_count() > 1 else 0  # type: ignore[attr-defined]
        others.append(sys.getrefcount(t) - times - _OF_A_PAIR - by_cpp)
    return others


def _is_saved(t: Tensor) -> bool:
    return t._use_count() > 1  # type: ignore[attr-defined, no-any-return]


def _in_variables(key: int) -> list[tuple[Tensor, int]]:
    """Return the tensors of a storage that variables of running functions name, and how often.

    Tensors in a short container, or in an object with attributes, that a variable names count as
    well.
    """
    by_id: dict[int, tuple[Tensor, int]] = {}
    seen: set[int] = set()
    for value in variables():
        for t in _inside(value, seen):
            if isinstance(t, Tensor) and storage_key(t) == key:
                by_id[id(t)] = (t, by_id[id(t)][1] + 1 if id(t) in by_id else 1)
    return list(by_id.values())


def variables() -> Iterator[Any]:
    """Yield the values of the variables of all functions that run, libraries left out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(LIBRARIES):
            yield from _variables(frame)
        frame = frame.f_back


_ASKS_FOR_LOCALS = {"locals", "vars", "dir", "eval", "exec"}


def _variables(frame: FrameType) -> list[Any]:
    code, values = frame.f_code, frame.f_locals
    own = {*code.co_varnames, *code.co_cellvars}  # the others are counted where they are its own
    of_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    variables = [value for name, value in values.items() if name in own or not of_function]
    # Before Python 3.13 a copy, which the frame keeps, and all in it. It is the function's own if
    # that asks for it.
    asks = _ASKS_FOR_LOCALS.intersection(names_of_globals(code))
    if of_function and type(values) is dict and not asks:
        values.clear()
    return variables


def _inside(value: object, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        if type(value) in CONTAINERS or isinstance(value, tuple):
            yield from items_of(value)
        elif not isinstance(value, (type, FunctionType, ModuleType, nn.Module)):
            yield from getattr(value, "__dict__", {}).values()


def _measure() -> tuple[int, int]:
    """Return the counts for a tensor that has one name, this one."""
    only = torch.empty(1)
    counted = RefCounts.counted(only.untyped_storage()._cdata, weakref.ref(only))
    return counted.names - 1, _others([(only, 1)])[0]


_OWN_NAMES, _OF_A_PAIR = _measure()
