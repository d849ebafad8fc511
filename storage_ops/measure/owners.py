"""Names the owners of memory, and finds the owner of each allocation in a profile.

`Marks` adds calls of modules and gradients to the profile. `history` reads them.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from storage_ops._subclass import check_module
from storage_ops.checkpoint.layers.config_policy import is_compiled
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.foundation.values import is_leaf
from storage_ops.measure.calls import around_calls
from storage_ops.quantities import readable

if TYPE_CHECKING:
    from storage_ops.tables import Grid

PARAMETERS, BUFFERS, BATCH = "parameters", "buffers", "batch"
GRADIENTS, STATE, TEMPORARIES = "gradients", "optimizer state", "temporaries"
INPUTS, BUCKETS, WORKSPACES = "inputs", "gradient buckets", "workspaces of cuBLAS"

_ROWS = 16  # most owners in a table

# Names of events in the profile. The first two are torch's own.
_STEP, _BACKWARD = "Optimizer.step#", "autograd::engine::evaluate_function"
_CALL, _GRADIENT = "storage_ops call ", "storage_ops gradient "


def activations_of(name: str) -> str:
    """Return the owner of a module's activations, by the module's name. "" is the model itself."""
    return f"activations of {name}" if name else "activations"


def by_kind(by_owner: Mapping[str, int]) -> dict[str, int]:
    """Sum bytes over similar owners: "layers.0.mlp" and "layers.1.mlp" become "layers.*.mlp"."""
    kinds: Counter[str] = Counter()
    for owner, nbytes in by_owner.items():
        kinds[kind_of(owner)] += nbytes
    return dict(kinds.most_common())


def owners_table(
    title: str, by_owner: Mapping[str, int], caption: str = "", share: str = "of peak"
) -> Grid:
    """Return a table of kinds of owners, with their bytes and their share of all bytes.

    The last row has the bytes of all owners after the first ones. `share`: the header of shares.
    """
    from storage_ops.tables import Grid

    rows = list(by_kind(by_owner).items())
    rest = sum(nbytes for _, nbytes in rows[_ROWS:])
    rows = rows[:_ROWS] + ([("all others", rest)] if rest else [])
    total = max(sum(by_owner.values()), 1)
    return Grid(
        title,
        ("owner", "bytes", share),
        [(owner, readable(nbytes), f"{nbytes / total:.1%}") for owner, nbytes in rows],
        caption,
        words=("owner",),
        optional=(share,),
    )


def owners_in_words(by_owner: Mapping[str, int]) -> str:
    """Return owners and bytes as text, first the owners that recompute does not change."""
    first = (PARAMETERS, GRADIENTS, STATE)
    activations = sum(n for owner, n in by_owner.items() if owner.startswith("activations"))
    shown = {owner: by_owner.get(owner, 0) for owner in first} | {"activations": activations}
    rest = sum(by_owner.values()) - sum(shown.values())
    parts = [f"{owner} {readable(n)}" for owner, n in shown.items() if n]
    return ", ".join(parts + ([f"everything else {readable(rest)}"] if rest else []))


def kind_of(owner: str) -> str:
    """Return an owner without the numbers of layers, such as "activations of layers.*.mlp"."""
    return re.sub(r"(?<![^. ])\d+(?![^.])", "*", owner)


class Marks(contextlib.ExitStack):
    """Adds the calls of a model's modules, and its gradients, to a profile. None adds nothing.

    Raises:
        TypeError, ValueError: the model is no module, or has parts that are compiled.
    """

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        if model is not None:
            check_module(model)
        for name, module in model.named_modules() if model is not None else ():
            if is_compiled(module):
                raise ValueError(
                    f"`model` has a compiled module, {name or 'itself'}. Expected none, because a "
                    "compiled model is not called module by module."
                )
        self._model = model

    def __enter__(self) -> Marks:
        super().__enter__()
        if self._model is not None:
            self.enter_context(around_calls(self._model, _marked))
            for p in self._model.parameters():
                if p.requires_grad and is_leaf(p):
                    self.callback(p.register_post_accumulate_grad_hook(_mark).remove)
        return self


def _marked(
    module: nn.Module, name: str, call: Callable[..., Any], args: Args, kwargs: Kwargs
) -> Any:
    with record_function(_CALL + name):
        return call(*args, **kwargs)


def _mark(p: Tensor) -> None:
    if p.grad is not None and p.grad.layout == torch.strided:
        with record_function(f"{_GRADIENT}{p.grad.untyped_storage().data_ptr()}"):
            pass


@dataclass
class Taken:
    """An allocation: its owner, its bytes, and the changes at its begin and end."""

    owner: str
    nbytes: int
    start: int
    end: int | None = None
    made_in: Any = None  # the event of the call, the optimizer's step or the autograd node


def history(
    roots: Iterable[Any], kind: str, index: int | None, entry_bytes: int | None = None
) -> tuple[list[tuple[int, int]], list[Taken]]:
    """Return the changes and allocations on a device in a profile, in order of time.

    Args:
        roots: roots of the profile's trees of events.
        kind, index: type and number of the device. Only a GPU has a number.
        entry_bytes: bytes that the allocator of a GPU had allocated before. The changes then follow
            the total in its events, because a profile lacks events of releases in autograd threads.

    Returns:
        (nanoseconds, bytes) of each change, with negative bytes for a release, and the allocations.
    """
    events = sorted(_relevant(roots), key=lambda found: found[0].start_time_ns)
    changes: list[tuple[int, int]] = []
    allocations: list[Taken] = []
    live: dict[int, Taken] = {}
    for event, inside in events:
        if event.name.startswith(_GRADIENT):
            block = live.get(int(event.name.removeprefix(_GRADIENT)))
            if block is not None:
                block.owner = GRADIENTS
            continue
        memory = event.extra_fields
        if memory.device.type != kind or index not in (None, memory.device.index):
            continue
        nbytes = memory.alloc_size
        if memory.ptr in live:  # released by this event, or before it without an event
            block = live.pop(memory.ptr)
            block.end = len(changes)
            _own(block, event.start_time_ns)
        if nbytes > 0:
            block = live[memory.ptr] = Taken("", nbytes, len(changes), made_in=inside)
            allocations.append(block)
        if entry_bytes is not None:
            nbytes = memory.total_allocated - entry_bytes
            entry_bytes = memory.total_allocated
        changes.append((event.start_time_ns, nbytes))
    for block in live.values():
        _own(block, None)
    return changes, allocations


def _own(block: Taken, freed: int | None) -> None:
    """Set the owner of an allocation. `freed` is the time of its release, or None."""
    made_in = block.made_in
    if block.owner or made_in is None:
        return
    name = made_in.name
    if name.startswith(_BACKWARD):
        block.owner = GRADIENTS if freed is None else TEMPORARIES
    elif freed is not None and freed <= made_in.end_time_ns:
        block.owner = TEMPORARIES
    else:
        block.owner = STATE if name.startswith(_STEP) else activations_of(name.removeprefix(_CALL))


def _relevant(roots: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the events of memory and gradients, each with the enclosing call, step or node.

    Simultaneous events come in the order in which they happened.
    """
    ahead: list[tuple[Any, Any]] = [(root, None) for root in roots][::-1]
    while ahead:
        event, inside = ahead.pop()
        if event.name == "[memory]" or event.name.startswith(_GRADIENT):
            yield event, inside
        elif event.name.startswith((_CALL, _STEP, _BACKWARD)):
            inside = event
        ahead += [(child, inside) for child in event.children][::-1]
