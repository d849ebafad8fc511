"""Count references to an output, other than those of its region, its consumers and its caller.

`RefCounts` has three numbers: the tensors that share the storage, the places in C++ that reference
the output, and the references in Python. If the numbers do not tell who references the output, the
variables of the running functions are searched. The objects of the process are never searched.
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
from storage_ops.foundation.functions import names_of_globals
from storage_ops.foundation.values import CONTAINERS, items_of

if TYPE_CHECKING:
    from storage_ops.checkpoint.region.region import Region
    from storage_ops.checkpoint.saved.outputs import DiscardableOutput


def _count(key: int) -> int:
    counted: Any = torch._C._storage_Use_Count
    return int(counted(key))


def _count_of_one() -> int:
    only = torch.empty(1)
    return _count(only.untyped_storage()._cdata)


def _count_cpp_references() -> int:
    """Return how many references C++ adds to the Python object of a tensor that it references.

    This is one in some versions of torch, and zero in others.
    """
    leaf = torch.ones(1, requires_grad=True)
    before = sys.getrefcount(leaf)
    product = leaf * leaf  # saves `leaf`
    return sys.getrefcount(leaf) - before if product.requires_grad else 0


_COUNT_OF_ONE = _count_of_one()  # the storage's own Python object may count too
_CPP_REFERENCES = _count_cpp_references()
# References that counting itself adds. `_measure` sets them, because they depend on the Python.
_OWN_REFERENCES = _PAIR_REFERENCES = 0


def is_shared_by_at_most(key: int, tensors: int) -> bool:
    """Return True if at most `tensors` tensors share a live storage."""
    return _count(key) - _COUNT_OF_ONE + 1 <= tensors


class RefCounts(NamedTuple):
    """References to an output.

    Attributes:
        tensors: the number of tensors that share its storage, without consumers' saved tensors.
        places: the number of places in C++ that reference the output. All references in Python
            together count as one.
        names: the number of references in Python to the output itself.
    """

    tensors: int
    places: int
    names: int

    @staticmethod
    def counted(key: int, output: Callable[[], Tensor | None], uses: int = 0) -> RefCounts:
        """Return the counts of a live storage and of the tensor that a region returned.

        Args:
            key: the number that identifies the storage.
            output: returns the tensor, or None if it was freed.
            uses: the number of saved tensors of consumers that share the storage.
        """
        output_object = output()
        if output_object is None:
            return RefCounts(_count(key) - _COUNT_OF_ONE + 1 - uses, 0, 0)
        places: int = output_object._use_count()  # type: ignore[attr-defined]
        # Not in a function of its own: under Dynamo, passing the tensor adds a reference.
        names = (
            sys.getrefcount(output_object)
            - _OWN_REFERENCES
            - (_CPP_REFERENCES if places > 1 else 0)
        )
        return RefCounts(_count(key) - _COUNT_OF_ONE + 1 - uses, places, names)

    @staticmethod
    def of(region: Region, entry: DiscardableOutput) -> RefCounts:
        """Return the present counts of a region's output."""
        return RefCounts.counted(entry.key, entry.output, region.outputs.uses.get(entry.key, 0))


def is_referenced(
    now: RefCounts,
    before: RefCounts,
    entry: DiscardableOutput,
    variables: bool,
    with_graph: bool = False,
) -> bool:
    """Return True if an output has more references than before.

    Args:
        now, before: the counts.
        entry: the output.
        variables: whether to leave out references by variables of running functions.
        with_graph: whether the tensor of a variable still counts if the graph references it too.
    """
    if now == before:
        return False
    more = [n - b for n, b in zip(now, before, strict=True)]
    if max(more) <= 0 or not variables:
        return max(more) > 0
    output, first = entry.output(), entry.first_counts
    tensors = places = names = 0
    pairs = _in_variables(entry.key)
    for (t, count), others in zip(pairs, _other_references(pairs), strict=True):
        if t is output:
            names = count
        elif others <= 0 and not (with_graph and _is_saved(t)):
            tensors += 1
            places += t._base is output
    total = (now.tensors - first.tensors, now.places - first.places, now.names)
    explained = (tensors, places, names)
    return any(min(m, t - e) > 0 for m, t, e in zip(more, total, explained, strict=True))


def _other_references(pairs: list[tuple[Tensor, int]]) -> list[int]:
    """Return how many references in Python each tensor has, other than those of variables.

    Args:
        pairs: tensors, and the number of variables that reference each.
    """
    others = []
    for t, count in pairs:
        by_cpp = _CPP_REFERENCES if t._use_count() > 1 else 0  # type: ignore[attr-defined]
        others.append(sys.getrefcount(t) - count - _PAIR_REFERENCES - by_cpp)
    return others


def _is_saved(t: Tensor) -> bool:
    return t._use_count() > 1  # type: ignore[attr-defined, no-any-return]


def _in_variables(key: int) -> list[tuple[Tensor, int]]:
    """Return the tensors on a storage that variables reference, and the number of references.

    The variables are those of the running functions. If the value of a variable is a short
    container or an object with attributes, the tensors in the value count too.
    """
    by_id: dict[int, tuple[Tensor, int]] = {}
    seen: set[int] = set()
    for value in variables():
        for t in _inside(value, seen):
            if isinstance(t, Tensor) and storage_key(t) == key:
                by_id[id(t)] = (t, by_id[id(t)][1] + 1 if id(t) in by_id else 1)
    return list(by_id.values())


def variables() -> Iterator[Any]:
    """Yield the values of the variables of all running functions, except those of libraries."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(LIBRARIES):
            yield from _variables(frame)
        frame = frame.f_back


_ASKS_FOR_LOCALS = {"locals", "vars", "dir", "eval", "exec"}


def _variables(frame: FrameType) -> list[Any]:
    code, values = frame.f_code, frame.f_locals
    own = {*code.co_varnames, *code.co_cellvars}  # other variables belong to enclosing functions
    of_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    variables = [value for name, value in values.items() if name in own or not of_function]
    # Before Python 3.13, `f_locals` is a copy that the frame keeps, with references to the values.
    # Clear the copy, unless the function itself may have asked for it.
    asks_for_locals = _ASKS_FOR_LOCALS.intersection(names_of_globals(code))
    if of_function and type(values) is dict and not asks_for_locals:
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
    """Return how many references counting adds, measured on a tensor with one reference."""
    only = torch.empty(1)
    counted = RefCounts.counted(only.untyped_storage()._cdata, weakref.ref(only))
    return counted.names - 1, _other_references([(only, 1)])[0]


_OWN_REFERENCES, _PAIR_REFERENCES = _measure()
