"""Records the effect of a module's call on the ledger, from a separate run of the call.

Forward and backward run with their own ledger. A *recording* is a list of allocations and releases,
by *slot*. A slot is a block of the call. It is allocated inside, or shared with other code: inputs,
outputs, their gradients and those of parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from storage_ops.foundation.ledger import Block, Ledger
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.foundation.tensor_spec import TensorSpec
from storage_ops.simulate.kernels.fake_tensor_gaps import is_dense, memory_format_of
from storage_ops.simulate.layers.casts import autocast_off, casts_uncached, check_casts
from storage_ops.simulate.layers.graph_ends import (
    Edges,
    enter,
    gradients_taken,
    leave,
    next_node,
    reads_history,
    run_backward,
)
from storage_ops.simulate.layers.key_value_caches import StandIns
from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.module_kinds import SIMPLE, NotComparable

INSIDE, INPUT, OUTPUT, GRAD_OUT, GRAD_IN, PARAMETER = (
    "inside", "input", "output", "gradient of output", "gradient of input", "parameter"
)  # fmt: skip


@dataclass(frozen=True)
class BlockSlot:
    """A block of a recording.

    Attributes:
        role: the owner of the block.
        number: the number of the input, output or parameter.
        block: the block in the first call.
        call: the name, below the module's name, of the innermost call that allocated the block and
            returned before it was freed, or None.
    """

    role: str
    number: int
    block: Block
    call: str | None = None


@dataclass(frozen=True)
class View:
    """A tensor that leaves the call, as a view of the storage of a slot.

    Attributes:
        is_cached: whether a cache keeps it. In the call's own graph it gets no gradient.
        has_base: whether it is a gradient that is a view of another tensor. Autograd does not add
            to it in place.
    """

    slot: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    needs_grad: bool
    is_cached: bool = False
    has_base: bool = False

    @staticmethod
    def of(t: Tensor, slot: int, is_cached: bool = False) -> View:
        """Return the view for a tensor."""
        shape, offset = tuple(t.shape), int(t.storage_offset())
        return View(slot, shape, t.stride(), offset, t.dtype, t.requires_grad, is_cached)

    def fits(self, gradient: Tensor | None) -> bool:
        """Return True if a gradient of the view is like that of the recording."""
        if gradient is None or self.is_cached:
            return gradient is None and self.is_cached
        return self.has_strides_of(gradient)

    def has_strides_of(self, t: Tensor) -> bool:
        """Return True if a tensor of the view's shape has its elements in the same order."""
        pairs = zip(self.shape, self.stride, t.stride(), strict=True)
        return all(size == 1 or own == other for size, own, other in pairs)

    def storage(self, simulation: Simulation, nbytes: int, device: torch.device) -> Tensor:
        """Return a tensor with a new storage for this view, or the whole tensor if it fills it."""
        # A view that an autograd node returned could not be written to in place.
        fills = is_dense(self.shape, self.stride)
        if fills and self.offset == 0 and math.prod(self.shape) * self.dtype.itemsize == nbytes:
            make, like = torch.empty_strided, {"dtype": self.dtype, "device": device}
            fake: Tensor = simulation.unseen(make, self.shape, self.stride, **like)
        else:
            fake = simulation.unseen(torch.empty, nbytes, dtype=torch.uint8, device=device)
        return fake

    def on(self, simulation: Simulation, t: Tensor) -> Tensor:
        """Return this view of the storage of a tensor."""
        where = (tuple(t.shape), t.stride(), t.storage_offset(), t.dtype)
        if where == (self.shape, self.stride, self.offset, self.dtype):
            return t
        return self.with_new_history(simulation, t)

    def with_new_history(self, simulation: Simulation, t: Tensor) -> Tensor:
        """Return this view of the storage of a tensor, as a tensor with a new history."""
        return simulation.viewed(t, self.shape, self.stride, self.offset, self.dtype)


def distinct_views(
    simulation: Simulation, views: list[View], bases: dict[int, Tensor]
) -> list[Tensor]:
    """Return views of storages, by slot.

    All are different tensors, because each has its own history.
    """
    tensors: list[Tensor] = []
    for view in views:
        t = view.on(simulation, bases[view.slot])
        is_taken = any(t is other for other in tensors)
        tensors.append(view.with_new_history(simulation, t) if is_taken else t)
    return tensors


@dataclass
class Part:
    """A part of the backward of a call. It ends when gradients of inputs leave the call.

    Attributes:
        events: numbers of slots, each with True if it is allocated, or False if it is freed. A
            gradient of an input is freed when the call itself does not need it any more.
        gradients: numbers of inputs, each with the View of a gradient that leaves; or None.
    """

    events: list[tuple[int, bool]]
    gradients: list[tuple[int, View | None]]


@dataclass
class Recording:
    """The effect of a call on the ledger.

    Attributes:
        slots: the blocks of the call.
        forward: numbers of slots, each with True if it is allocated, or False if it is freed.
        outputs: for each leaf of the result, and of the changes of caches: a View, the number of
            the input tensor that it is, or ("value", leaf).
        form: the tree structure of the result and of the changes.
        held: slots of inputs and outputs that its autograd nodes keep until backward.
        backward: the parts of the backward, at least one if the call has a backward.
        parameters: views of the parameters' gradients, or None.
        sent: bytes sent to other ranks in forward and in backward, by collective.
        written: the numbers of outputs whose gradients autograd adds to in place.
    """

    slots: list[BlockSlot]
    forward: list[tuple[int, bool]]
    outputs: list[Any]
    form: Any
    held: set[int]
    backward: list[Part] = field(default_factory=list)
    parameters: list[View | None] = field(default_factory=list)
    sent: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    written: frozenset[int] = frozenset()

    @property
    def needs_grad(self) -> bool:
        """Return True if the call has a backward."""
        return any(isinstance(o, View) and o.needs_grad for o in self.outputs)

    def is_of(self, gradients: Iterable[Tensor | None]) -> bool:
        """Return True if the backward was recorded with gradients like these of its outputs."""
        views = (o for o in self.outputs if isinstance(o, View) and o.needs_grad)
        pairs = zip(gradients, views, strict=True)
        return all(view.fits(t) for t, view in pairs)

    def storage_of(self, number: int, simulation: Simulation, device: torch.device) -> Tensor:
        """Return a tensor with a new storage like that of a slot, by the first view of the slot."""
        leaving = (view for part in self.backward for _, view in part.gradients)
        views = (*self.outputs, *leaving, *self.parameters)
        first = next(v for v in views if isinstance(v, View) and v.slot == number)
        return first.storage(simulation, self.slots[number].block.asked, device)


def record(
    simulation: Simulation, module: nn.Module, name: str, call: Callable[..., Any], args: Args,
    kwargs: Kwargs, caches: StandIns, accumulate: bool,
) -> Recording:  # fmt: skip
    """Run a call separately and record its effect on the ledger.

    Args:
        caches: the caches among its arguments. They are empty afterwards.
        accumulate: whether gradients of its parameters exist, and it adds to them. Otherwise it
            creates all of them.

    Raises:
        NotComparable: the call has other effects, such as keeping a tensor.
    """
    before = [(p, p.grad) for p in module.parameters()]
    if not accumulate:
        for p, _ in before:
            p.grad = None
    outer, sent = simulation.ledger, simulation.sent
    simulation.ledger = side = Ledger(outer.round_up, outer)
    simulation.parts.append(side)
    simulation.sent = Counter()
    try:
        return _Recorder(simulation, side, module, name).run(call, args, kwargs, caches)
    finally:
        simulation.ledger, simulation.sent = outer, sent
        for p, gradient in before:
            p.grad = gradient


class _Recorder:
    """Runs one call separately, with its own ledger."""

    def __init__(self, simulation: Simulation, side: Ledger, module: nn.Module, name: str) -> None:
        self._simulation, self._side = simulation, side
        self._module, self._name = module, name
        self._roles: dict[Block, tuple[str, int]] = {}
        self._numbers: dict[Block, int] = {}  # the numbers of slots
        # The numbers of events when the gradients of the outputs existed, and when parts ended.
        self._ends = [0]
        self._left: list[list[tuple[int, View | None]]] = []  # gradients of inputs, by part
        self._unwritten: set[Block | None] = set()  # those to which nothing was added before

    def run(
        self, call: Callable[..., Any], args: Args, kwargs: Kwargs, caches: StandIns
    ) -> Recording:
        """Run the call and record its effect."""
        events = self._side.events
        has_gradient = [p.grad is not None for p in self._module.parameters()]
        inputs, needing, args, kwargs = self._inputs(args, kwargs)
        entries = {t.grad_fn for t in inputs}
        versions = [t._version for t in inputs]
        start, since = len(events), next_node()
        with self._side.call(self._name), casts_uncached():
            result = call(*args, **kwargs)
        stop, sent = len(events), self._simulation.sent.copy()
        check_casts(events[start:stop], self._module.parameters())
        if versions != [t._version for t in inputs] or self._side.discarded & self._roles.keys():
            raise NotComparable
        count = len(tree_leaves(result))
        leaves, form = tree_flatten((result, [cache.take_changes() for cache in caches]))
        outputs = [self._output(leaf, inputs, i >= count) for i, leaf in enumerate(leaves)]
        pairs = zip(leaves[:count], outputs[:count], strict=True)
        leaving = [t for t, v in pairs if isinstance(v, View) and v.needs_grad]
        if reads_history(leaving, entries, self._module.parameters(), since):
            raise NotComparable
        if not all(t.is_contiguous(memory_format=memory_format_of(t)) for t in leaving):
            raise NotComparable  # their gradients usually have other strides
        last = leave(leaving, self._gradients_of(leaving)) if leaving else None
        entry = inputs[needing[0]].grad_fn if needing else None
        # From here on only autograd nodes keep inputs and outputs.
        del inputs, args, kwargs, result, leaves, pairs, leaving, entries
        dropped = {block for _, block, is_allocation in events[stop:] if not is_allocation}
        parameters: list[View | None] = []
        if last is not None:
            take = partial(self._take, needing)
            with autocast_off(), gradients_taken(last, entry, self._end_part, take):
                run_backward(last)
            self._end_part()
            if len(events) > self._ends[-1] or not self._left:
                self._left.append([])
                self._end_part()
            for i, p in enumerate(self._module.parameters()):
                if has_gradient[i]:
                    parameters.append(None)
                else:
                    parameters.append(self._leaving(p.grad, PARAMETER, i))
                    p.grad = None
        last = entry = None
        self._check_nothing_is_kept(dropped)
        if self._unwritten & self._side.added_to:
            # Autograd would not have added in place if nodes outside had kept the gradient.
            raise NotComparable
        theirs = {
            block for _, block, is_allocation in events[stop : self._ends[0]] if is_allocation
        } - self._roles.keys()
        forward = self._numbered(events[start:stop], theirs)
        backward = [
            Part(self._numbered(events[begin:end], theirs), left)
            for (begin, end), left in zip(pairwise(self._ends), self._left, strict=True)
        ]
        kept_slots = {
            self._number(block)
            for block, (role, _) in self._roles.items()
            if role in (INPUT, OUTPUT) and block not in dropped
        }
        slots = [self._slot(block) for block in self._numbers]
        roles = (self._roles.get(block, ("", 0)) for block in self._side.added_to)
        return Recording(
            slots, forward, outputs, form, kept_slots, backward, parameters,
            (sent, self._simulation.sent - sent), frozenset(n for r, n in roles if r == GRAD_OUT),
        )  # fmt: skip

    def _inputs(self, args: Args, kwargs: Kwargs) -> tuple[list[Tensor], list[int], Any, Any]:
        """Return copies of inputs, numbers of those that need gradients, and the arguments."""
        leaves, form = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        copies = self._copies([leaves[i] for i in places])
        needing = [k for k, i in enumerate(places) if leaves[i].requires_grad]
        if needing:
            anchor = self._simulation.unseen(torch.empty, 0, device=copies[0].device)
            entered = enter([copies[k] for k in needing], anchor)
            for k, t in zip(needing, entered, strict=True):
                copies[k] = t
        for i, t in zip(places, copies, strict=True):
            leaves[i] = t
        return copies, needing, *tree_unflatten(leaves, form)

    def _copies(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return copies of tensors with the same values and new storages."""
        bases: dict[int, Tensor] = {}
        views: dict[int, View] = {}  # by tensor, because one that is passed twice must stay one
        for number, t in enumerate(tensors):
            storage = t.untyped_storage()
            view = views.setdefault(id(t), View.of(t, storage._cdata))
            if view.slot not in bases:
                base = view.storage(self._simulation, storage.nbytes(), t.device)
                bases[view.slot] = base
                self._side.see(base, "input")
                block = self._side.block_of(base)
                if block is not None:
                    self._roles[block] = (INPUT, number)
        copies = dict(
            zip(views, distinct_views(self._simulation, [*views.values()], bases), strict=True)
        )
        for t in tensors:
            self._simulation.imitate(copies[id(t)], t)
        return [copies[id(t)] for t in tensors]

    def _output(self, leaf: object, inputs: list[Tensor], is_cached: bool) -> Any:
        """Return the entry of a leaf for `Recording.outputs`."""
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, SIMPLE):
                raise NotComparable
            return ("value", leaf)
        for number, t in enumerate(inputs):
            if leaf is t:
                return number
        block = self._side.block_of(leaf) if leaf.layout == torch.strided else None
        if block is None or self._roles.get(block, (OUTPUT, 0))[0] != OUTPUT:
            raise NotComparable
        self._roles[block] = (OUTPUT, 0)
        return View.of(leaf, self._number(block), is_cached)

    def _gradients_of(self, leaving: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Return a function that creates the gradients of outputs and records when they exist."""
        specs = [TensorSpec.of(t) for t in leaving]

        def make() -> list[Tensor]:
            gradients = [spec.make() for spec in specs]
            for k, t in enumerate(gradients):
                block = self._side.block_of(t)
                if block is not None:
                    self._roles[block] = (GRAD_OUT, k)
            self._ends = [len(self._side.events)]
            return gradients

        return make

    def _leaving(self, t: Tensor | None, role: str, number: int) -> View | None:
        """Return the place of a gradient that leaves the call."""
        if t is None:
            return None
        block = self._side.block_of(t) if t.layout == torch.strided else None
        if block is None or self._roles.get(block, (role, number))[0] not in (role, GRAD_OUT):
            raise NotComparable
        self._roles.setdefault(block, (role, number))
        return View.of(t, self._number(block))

    def _take(self, needing: list[int], edges: Edges) -> None:
        """Note the gradients of inputs that a node has computed."""
        left = []
        for k, t in edges:
            view = self._leaving(t, GRAD_IN, needing[k])
            if view is not None and t is not None:
                view = replace(view, has_base=t._is_view())
                block = self._side.block_of(t)
                if block not in self._side.added_to:
                    self._unwritten.add(block)
            left.append((needing[k], view))
        self._left.append(left)

    def _end_part(self) -> None:
        """End a part of the backward, if gradients have left since the last part."""
        if len(self._ends) <= len(self._left):
            self._ends.append(len(self._side.events))

    def _check_nothing_is_kept(self, dropped: set[Block]) -> None:
        alive: set[Block] = set()
        for _, block, taken in self._side.events:
            (alive.add if taken else alive.remove)(block)
        if alive or any(self._roles.get(b, ("", 0))[0] not in (INPUT, OUTPUT) for b in dropped):
            raise NotComparable

    def _numbered(
        self, events: Iterable[tuple[Any, Block, bool]], theirs: set[Block]
    ) -> list[tuple[int, bool]]:
        return [(self._number(b), taken) for _, b, taken in events if b not in theirs]

    def _number(self, block: Block) -> int:
        return self._numbers.setdefault(block, len(self._numbers))

    def _slot(self, block: Block) -> BlockSlot:
        role, number = self._roles.get(block, (INSIDE, 0))
        call = None
        if block.call is not None and block.call.end is not None:
            freed = next(i for i, e in enumerate(self._side.events) if e[1] is block and not e[2])
            if freed >= block.call.end:
                call = block.call.name[len(self._name) :]
        return BlockSlot(role, number, block, call)
