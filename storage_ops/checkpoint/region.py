"""One call of a function whose saved tensors and outputs are recomputed in backward.

The call builds the ordinary autograd graph, with saved-tensor hooks that keep an index in place of
each saved tensor. In backward the function runs once more: what it saves fills those places, and
what it returns is bound back into the storages that were discarded. So gradients flow through the
graph of the first call, and every autograd contract is torch's own.

Only the graph keeps a region alive: its saved tensors, and the uses that consumers have saved. What
a region holds, its inputs above all, is let go as soon as the last of them has had its backward.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from storage_ops.checkpoint import guard
from storage_ops.checkpoint.execution import ExecutionState
from storage_ops.checkpoint.guard import storage_key
from storage_ops.checkpoint.reachable import Surroundings
from storage_ops.checkpoint.saved import Saved, compare, fail
from storage_ops.checkpoint.versions import Versions
from storage_ops.ops.storage import discard_storage, is_discarded, share_storage

ContextFn = Callable[[], tuple[contextlib.AbstractContextManager[Any], ...]]


@dataclass(frozen=True)
class Options:
    """What a region is told besides its function and arguments."""

    preserve_rng_state: bool = True
    determinism_check: str = "default"
    debug: bool = False
    context_fn: ContextFn | None = None


class _AsFarAsTheForward(BaseException):
    """Ends a repetition of what has not ended yet; code that catches errors lets it through."""


class _HoldInputs(torch.autograd.Function):
    """Keeps the inputs of a region as saved tensors of a node.

    So an enclosing saved-tensor hook (offload, another checkpoint) handles them like any other
    activation, and torch notices when one is modified in place before the backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


@dataclass
class Made:
    """An output that a region made: bytes that it may discard and make again.

    Attributes:
        index: its place among the flattened outputs.
        key: what identifies its storage.
        handle: an alias that keeps the storage, not the graph.
        output: the tensor that the caller was given, as long as somebody has it.
        version: how often it was modified in place when the region returned.
        storage_uses, tensor_uses: how many hold the storage and the tensor when nobody but the
            caller does.
    """

    index: int
    key: int
    handle: Tensor
    output: weakref.ref[Tensor]
    version: int
    storage_uses: int = 0
    tensor_uses: int = 0


# The live region that made a storage, for those that read it later.
_makers: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
_serials = itertools.count()
# Where the saved-tensor hooks of checkpoints are defined.
_CHECKPOINTS = ("torch.utils.checkpoint", __name__)


def maker_of(t: Any) -> Region | None:
    """The region that can make the bytes of a tensor again, if one can."""
    if not _makers:
        return None
    key = storage_key(t)
    return None if key is None else _makers.get(key)


class Region:
    """A call of `fn(*args, **kwargs)` that can be repeated in backward."""

    def __init__(
        self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], options: Options
    ) -> None:
        """Remember the call and what it depends on; `forward` runs it."""
        flat, self._spec = _flatten(args, kwargs)
        inputs = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        self.name = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.options = options
        self._serial = next(_serials)
        self._lock = threading.RLock()
        self._fn: Callable[..., Any] | None = fn
        self._flat = [None if isinstance(leaf, Tensor) else leaf for leaf in flat]
        self._inputs_at = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        self._input_needs_grad = [t.requires_grad for t in inputs]
        around = Surroundings.of(fn, flat)
        self._state = ExecutionState(around, options.preserve_rng_state)
        self._given, self._captured = inputs, around.tensors  # until the forward has run
        self._versions: Versions | None = None
        self._contexts = options.context_fn() if options.context_fn else ()
        self._input_keys = {storage_key(t) for t in inputs}
        # Regions whose discarded outputs this one reads.
        self._producers = {r for r in map(maker_of, inputs) if r is not None}
        self._held: Callable[[], Iterable[Tensor]] | None = _hold(inputs)
        self._saved: list[Saved] = []
        self._results: dict[int, Saved] = {}  # the outputs, where they are compared
        # For the backward in progress: its task, what is not read yet, and whether to keep it all.
        self._task: int | None = None
        self._recomputed: dict[int, Tensor] = {}
        self._reread = False
        self._never_read: set[int] = set()
        self._running = False  # the forward, whose own backward passes may read what it saves
        self.made: list[Made] = []  # can be discarded
        self._discarded: list[Made] = []  # wait for the recompute
        self.uses: dict[int, int] = {}  # storage -> how many saved tensors of consumers share it

    @staticmethod
    def is_saved_by_another() -> bool:
        """Whether an enclosing checkpoint, torch's or ours, saves nothing of a call anyway."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is not None and getattr(top[0], "__module__", "") in _CHECKPOINTS

    def forward(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the function on the arguments of this region; return what it returns."""
        assert self._fn is not None
        start = torch._C._autograd._get_sequence_nr()
        around = self._contexts[0] if self._contexts else contextlib.nullcontext()
        self._running = True
        with saved_tensors_hooks(self._pack, self._unpack), around:
            outputs = self._fn(*args, **kwargs)
        self._running = False
        self._never_read = set(range(len(self._saved)))
        leaves = _leaves(outputs)
        if self.options.determinism_check != "none":
            # Discarded outputs of other regions change as they are bound back.
            captured = [t for t in self._captured if maker_of(t) is None]
            self._versions = Versions(leaves, start, self._given, captured)
        self._given, self._captured = [], []
        for index, leaf in enumerate(leaves):
            if not _is_made_here(leaf, start):
                continue
            key = storage_key(leaf)
            if key is not None and key not in self._input_keys:
                made = Made(index, key, leaf.detach(), weakref.ref(leaf), leaf._version)
                self.made.append(made)
                self._results[index] = Saved(leaf, self._checksums)
        for made in self.made:
            made.storage_uses, made.tensor_uses = guard.uses(made.key, made.output())
            _makers[made.key] = self
        if self._contexts:
            self._keep_what_a_policy_saved()
        return outputs

    def _keep_what_a_policy_saved(self) -> None:
        """Leave alone outputs whose storage somebody else holds already."""
        outputs = [made.output() for made in self.made]
        roots = {id(t): t for o in outputs if o is not None for t in (o, o._base) if t is not None}
        for made in list(self.made):
            own = sum(storage_key(t) == made.key for t in roots.values())
            own += sum(other.key == made.key for other in self.made)
            if made.storage_uses > own:
                self.made.remove(made)
                _makers.pop(made.key, None)

    @property
    def _checksums(self) -> bool:
        return self.options.determinism_check == "checksum"

    def made_this(self, t: Any) -> bool:
        """Whether a tensor is an output that this region made, or a view of one."""
        return storage_key(t) in {made.key for made in self.made}

    def discard(self, keep: Iterable[Any] = ()) -> None:
        """Free the outputs that this region made; the recompute binds them back.

        Args:
            keep: tensors whose storages must not be freed.
        """
        kept = {storage_key(leaf) for leaf in keep}
        made = [entry for entry in self.made if entry.key not in kept]
        for entry in made:
            if entry.handle._version != entry.version:
                fail(
                    f"output {entry.index} of {self.name} was modified in place after the region; "
                    "the recompute could not restore it, nothing was freed"
                )
        message = (
            f"the output of the region {self.name} was discarded by OutputDiscardCheckpoint at "
            f"{guard.where()} and is read before the recompute; its consumers must run before the "
            "discard, inside of consumer() or with a hook tensor whose gradient comes before every "
            "other use in backward"
        )
        try:
            for entry in made:
                discard_storage(entry.handle, guard=message)
                self._discarded.append(entry)
        except RuntimeError:  # one storage cannot be freed: make those again that were
            self.restore()
            self.end_backward(retained=True)
            raise
        if self.options.debug:
            for entry in made:
                guard.watch(entry.output(), message)
        self.forget_outputs()

    def forget_outputs(self) -> None:
        """Let go of the outputs that were not discarded."""
        waiting = {made.key for made in self._discarded}
        for made in self.made:
            if made.key not in waiting:
                _makers.pop(made.key, None)
        self.made = []

    def trigger(self) -> Callable[[Any], None]:
        """A hook that restores the outputs; it keeps this region alive only if nobody else does."""
        alive = weakref.ref(self)
        held = None if self._saved else self

        def on_gradient(gradient: Any) -> None:
            nonlocal held
            region = alive()
            if region is not None:
                region.restore()
                if not torch._C._autograd._get_current_graph_task_keep_graph():
                    held = None

        return on_gradient

    def restore(self) -> None:
        """Bind discarded outputs back, if they are still missing."""
        if self._discarded:
            self.recompute()

    def recompute(self) -> None:
        """Repeat the forward, once per backward, and bind its outputs to the discarded ones."""
        with self._lock:
            task = torch._C._current_graph_task_id()
            if self._task == task != -1:
                return
            if self._fn is None:
                fail(
                    f"the region {self.name} is needed in a second backward pass, but the first "
                    "one freed it; use retain_graph=True"
                )
            for producer in self._producers:
                producer.restore()
            again = self._run_again()
            self._recomputed = dict(enumerate(again))
            self._task = None if task == -1 else task
            if task != -1:
                retained = torch._C._autograd._get_current_graph_task_keep_graph()
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(_end_backward, weakref.ref(self), retained))

    def _run_again(self) -> list[Tensor]:
        """Run the function once more; return what it saves, and bind what it returns.

        While the forward still runs, only as far as that has come.
        """
        if self._versions is not None:
            self._versions.check(self.name)
        saved: list[tuple[Saved, Tensor]] = []
        first = list(self._saved)
        assert self._held is not None
        inputs = zip(self._held(), self._input_needs_grad, strict=True)
        args, kwargs = self._arguments([t.detach().requires_grad_(need) for t, need in inputs])

        def pack(t: Tensor) -> Tensor:
            saved.append((Saved(t, self._checksums), t.detach()))
            if self._running and len(saved) >= len(first):
                raise _AsFarAsTheForward
            return saved[-1][1]

        around = self._contexts[1] if self._contexts else contextlib.nullcontext()
        assert self._fn is not None
        with (
            contextlib.suppress(_AsFarAsTheForward),
            self._state,
            torch.enable_grad(),
            saved_tensors_hooks(pack, _as_it_is),
            around,
        ):
            outputs = _leaves(self._fn(*args, **kwargs))
        if self.options.determinism_check != "none":
            compare(self.name, first, saved)
        if not self._running:
            self._bind(outputs)
        return [t for _, t in saved]

    def _bind(self, outputs: list[Any]) -> None:
        """Bind recomputed outputs to the discarded ones, if all of them fit."""
        for made in self._discarded:
            first = self._results[made.index]
            again = outputs[made.index] if made.index < len(outputs) else None
            if not isinstance(again, Tensor):
                fail(
                    f"output {made.index} of {self.name} was {first} in forward and is no tensor "
                    "when it is recomputed"
                )
            if not first.is_like(Saved(again, self._checksums)):
                fail(
                    f"output {made.index} of {self.name} was {first} in forward and is "
                    f"{Saved(again, self._checksums)} when it is recomputed"
                )
        for made in self._discarded:
            if is_discarded(made.handle):
                share_storage(made.handle, outputs[made.index].detach())
            if self.options.debug:
                guard.unwatch(made.output())
            _makers.pop(made.key, None)
        self._discarded = []

    def end_backward(self, retained: bool) -> None:
        """Let go of what one backward recomputed, and of everything when no other can follow."""
        self._task, self._reread, self._recomputed = None, False, {}
        if not retained and not self._never_read and not self._running:
            self._fn, self._held, self._flat, self._producers = None, None, [], set()

    def _arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        flat = list(self._flat)
        for position, t in zip(self._inputs_at, inputs, strict=True):
            flat[position] = t
        if self._spec is None:
            return tuple(flat), {}
        args, kwargs = tree_unflatten(flat, self._spec)
        return args, kwargs

    def _pack(self, t: Tensor) -> int:
        maker = maker_of(t)
        if maker is not None and maker._serial < self._serial:
            self._producers.add(maker)  # reached by a closure, not as an argument
        self._saved.append(Saved(t, self._checksums))
        return len(self._saved) - 1

    def _unpack(self, index: int) -> Tensor:
        # A place is emptied as it is read, so that a saved tensor dies with its node. A node that
        # reads twice makes the region run once more, and then nothing is emptied.
        self.recompute()
        if index not in self._recomputed:
            self._task, self._reread = None, True
            self.recompute()
        self._never_read.discard(index)
        value = self._recomputed[index] if self._reread else self._recomputed.pop(index)
        if self._task is None:  # read by hand, outside of a backward: nobody would clear the rest
            self.end_backward(retained=True)
        return value


def _hold(inputs: list[Tensor]) -> Callable[[], Iterable[Tensor]]:
    """Save the inputs as autograd saves tensors; return what reads them."""
    save = getattr(torch._C._autograd, "_make_saved_tensor", None)
    if save is None:  # torch 2.10 and 2.11: at the price of a node, alive as long as its result
        anchor = torch.empty(0, requires_grad=True)
        result: Any = _HoldInputs.apply(anchor, *inputs)  # type: ignore[no-untyped-call]
        return lambda: result.grad_fn.saved_tensors
    saved = [save(t, False) for t in inputs]
    return lambda: [s.unpack() for s in saved]


# Trees are slow to walk in Python, and most calls take and return plain tensors.
def _flatten(args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    if not kwargs and all(isinstance(a, Tensor) for a in args):
        return list(args), None
    return tree_flatten((args, kwargs))


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else tree_leaves(value)


def _end_backward(region: weakref.ref[Region], retained: bool) -> None:
    alive = region()
    if alive is not None:
        alive.end_backward(retained)


def _as_it_is(packed: Tensor) -> Tensor:
    return packed


def _is_made_here(output: Any, start: int) -> bool:
    """Whether the bytes of an output were made by the region that began at sequence number `start`.

    A parameter, or a view of a tensor from outside, must not be freed.
    """
    if not isinstance(output, Tensor) or output.layout != torch.strided:
        return False
    base = output if output._base is None else output._base
    node = base.grad_fn
    return node is not None and node._sequence_nr() >= start
