"""One call of a function whose saved tensors and outputs are recomputed in backward.

The call builds the ordinary autograd graph, with saved-tensor hooks that keep an index in place of
each saved tensor. In backward the function runs once more: what it saves fills those places, and
what it returns is bound back into the storages that were discarded. So gradients flow through the
graph of the first call, and every autograd contract is torch's own.

Only the autograd graph keeps a region alive, by the tensors that the region and its consumers have
saved. After the backward of the last of them, the region frees its inputs and other objects.
"""

from __future__ import annotations

import itertools
import weakref
from _thread import RLock  # `threading.RLock` is a function of Python around it
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from storage_ops.checkpoint.region.backward_pass import current_pass, end_backward, is_retained
from storage_ops.checkpoint.region.call_in import call_in
from storage_ops.checkpoint.region.errors import explain_difference, explain_lost_memory
from storage_ops.checkpoint.region.inputs import Inputs, leaves_of
from storage_ops.checkpoint.region.options import Options, contexts_of
from storage_ops.checkpoint.region.outputs import Outputs
from storage_ops.checkpoint.region.rows import SavedBytes
from storage_ops.checkpoint.saved import saved_tensors
from storage_ops.checkpoint.saved.guard import storage_key
from storage_ops.checkpoint.saved.matching import OpLog
from storage_ops.checkpoint.saved.outputs import producer_of, producer_of_storage, producers
from storage_ops.checkpoint.saved.saved import check_unread, explain_transform, fail
from storage_ops.checkpoint.saved.saved_tensors import (
    RecomputedTensors,
    SavedTensors,
    StopRecompute,
)
from storage_ops.checkpoint.state.execution import ExecutionState
from storage_ops.checkpoint.state.snapshot import Snapshot, state_before
from storage_ops.foundation import collectives, fsdp
from storage_ops.foundation.eager import eager
from storage_ops.storage.storage import wait_for

serials = itertools.count()  # numbers of regions, in the order of their calls
# This node saves its input, and noise that its kernel writes only afterwards.
_SAVES_BEFORE_WRITING = "RreluWithNoiseBackward0"
# The modules in which the saved-tensor hooks of checkpoints are defined.
_CHECKPOINTS = ("torch.utils.checkpoint", saved_tensors.__name__)


class Region:
    """A call of `fn(*args, **kwargs)` that can be repeated in backward.

    Attributes:
        outputs: the outputs that it allocated, some of which may be discarded.
        producers: the regions whose discarded outputs this one reads.
        allocated: the bytes that the forward saves, if the options ask for them.
        is_frozen: whether no output needs a gradient.
        communicates: whether the forward runs collectives, so that all ranks must recompute.
        end: the number of the first autograd node after the forward.
    """

    # Captured tensors that need a gradient, as weak references: a region must not keep them.
    _versions: Sequence[tuple[weakref.ref[Tensor], int]] = ()
    _parameters: Sequence[weakref.ref[Tensor]] = ()  # captured ones that FSDP may shard
    _log: OpLog | None = None
    allocated: SavedBytes | None = None
    # Of the running backward: its task, the recomputed tensors, and whether they are all kept.
    _task: Any = None
    _recomputed: RecomputedTensors | None = None
    _reread = False
    communicates = False
    _running = False  # the forward; a backward inside it may read saved tensors
    is_frozen = False
    end = 0

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        name: str = "",
    ) -> None:
        """Remember the call and its surroundings; `forward` runs it."""
        self.name = name or getattr(fn, "__qualname__", type(fn).__qualname__)
        self.options = options
        self._serial = next(serials)
        self._fn: Callable[..., Any] | None = fn
        contexts = contexts_of(options.context_fn) if options.context_fn else ()
        self._inputs: Inputs | None = Inputs(args, kwargs)
        self._state: ExecutionState | Snapshot | None
        # The captured tensors are kept until the forward has run.
        self._state, self._captured = state_before(
            fn, self._inputs.plain, self._inputs.tensors, options.preserve_rng_state
        )
        if options.debug:
            self._log = OpLog()
        if options.counts_saved:
            self.allocated = SavedBytes()
        self.set_up(contexts, saved_tensors.saved_tensors(options.checksums, options.debug))
        if producers:
            self.producers.update(r for t in self._inputs.tensors if (r := producer_of(t)))

    def set_up(self, contexts: tuple[Any, ...], saved: SavedTensors) -> None:
        """Set the other attributes.

        Args:
            contexts: the context managers of the options, for the forward and for the recompute.
            saved: describes the tensors that the forward saves.
        """
        self._contexts, self._saved = contexts, saved
        self._stops = self.options.early_stop
        self._lock = RLock()
        self.producers: set[Region] = set()
        self.outputs = Outputs(self.name, self.options)

    @staticmethod
    def is_saved_by_another() -> bool:
        """Return True if an enclosing checkpoint, torch's or ours, saves nothing of a call."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is not None and getattr(top[0], "__module__", "") in _CHECKPOINTS

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on the arguments of this region; return what it returns."""
        assert self._fn is not None and self._state is not None and self._inputs is not None
        start = torch._C._autograd._get_sequence_nr()
        issued = collectives.number_issued()
        pack = self._saved.hook(self._note_saved, self.allocated is not None)
        unpack = self._saved.unpack_hook(self._unpack)
        contexts = (saved_tensors.hooks(pack, unpack), *self._contexts[:1])
        if self._contexts and self._state.writes_unseen:  # the library could not see the writes
            contexts += (saved_tensors.left_to_python(),)
        if self._log is not None:
            contexts += (self._log,)
        self._running = True
        try:
            result = [call_in(contexts, self._fn, args, kwargs)]
        except RuntimeError as error:
            explain_transform(self.name, error)
            raise
        self.finish()
        self._saved.finish()
        return self.returned(result, start, issued)

    def returned(self, result: list[Any], start: int, issued: int) -> Any:
        """Note what the function has returned; return it.

        Args:
            result: a list with it alone. It is removed, because references to it are counted.
            start: the number of the first autograd node of the forward.
            issued: the number of collectives before the forward.
        """
        assert self._inputs is not None
        outputs = result.pop()
        leaves = leaves_of(outputs)
        if self._captured and self.options.determinism_check != "none":
            # Discarded outputs of other regions get a new version when they are bound back.
            captured = [t for t in self._captured if t.requires_grad and producer_of(t) is None]
            self._versions = [(weakref.ref(t), t._version) for t in captured]
        if self._captured and fsdp.is_used():
            self._parameters = [weakref.ref(t) for t in self._captured if fsdp.is_parameter(t)]
        if self.options.discards:
            self.is_frozen = not any(isinstance(t, Tensor) and t.requires_grad for t in leaves)
            first = None if self.is_frozen else start
            attributes = getattr(outputs, "__dict__", {})
            self.outputs.find(self, leaves, attributes, self._inputs.tensors, first)
            if self.allocated is not None:
                self.allocated.finish(self._inputs.tensors, self.outputs.discardable)
        if collectives.number_issued() != issued:
            self.note_communication(leaves)
        self._captured = []
        self._inputs.forget()
        self.end = torch._C._autograd._get_sequence_nr()
        return outputs

    def finish(self) -> None:
        """Note that the forward has ended."""
        assert self._state is not None
        self._running = False
        self._state.finish()

    def note_communication(self, outputs: list[Any]) -> None:
        """Note that the forward has run collectives, so that each rank recomputes them.

        Args:
            outputs: the leaves of what the region returned.
        """
        self.communicates = True
        collectives.call_before_backward(outputs, self.trigger())

    def discard(self, keep: Iterable[Any] = ()) -> None:
        """Free the outputs that this region allocated; the recompute binds them back.

        Args:
            keep: tensors whose storages must not be freed.
        """
        free = self.outputs.free_to_discard(keep)
        try:
            self.outputs.discard(free)
        except RuntimeError:  # a storage cannot be freed: restore the others
            self.restore()
            self.end_backward(retained=True)
            raise
        self.outputs.forget()

    @eager
    def trigger(self) -> Callable[[Any], None]:
        """Return a hook that restores the outputs.

        The hook keeps this region alive only if no saved tensor does.
        """
        alive = weakref.ref(self)
        held = None if self._saved else self

        def on_gradient(gradient: object) -> None:
            nonlocal held
            region = alive()
            if region is not None:
                if region.communicates and region._fn is not None:
                    region.recompute()
                region.restore()
                if not is_retained():
                    held = None

        return on_gradient

    def restore(self, for_another: bool = False) -> None:
        """Bind discarded outputs back, if they are still missing."""
        if self.outputs.discarded:
            self.recompute(for_another)

    def _freed_before(self) -> list[Region]:
        """Return the regions whose outputs a repetition of this one misses, in their order."""
        regions: set[Region] = set()
        stack = [self]
        while stack:
            missing = {r for r in stack.pop().producers if r.outputs.discarded} - regions
            regions |= missing
            stack += missing
        return sorted(regions, key=lambda region: region._serial)

    def recompute(self, for_another: bool = False) -> None:
        """Repeat the forward, once per backward, and bind its outputs to the discarded ones.

        Args:
            for_another: whether the recompute of another region needs the outputs. Then the
                backward of this region is not next.
        """
        if torch.compiler.is_compiling():  # compiled autograd, in a hook
            from storage_ops._without_graph import run_backward  # imports Dynamo

            run_backward(self.recompute, for_another)
        else:
            self._recompute(for_another)

    def _recompute(self, for_another: bool = False) -> RecomputedTensors:
        with self._lock:
            task = current_pass()
            if self._recomputed is not None and self._task is not None and self._task == task:
                return self._recomputed
            if self._fn is None:
                fail(
                    f"the region {self.name} is needed in a second backward pass, but the first "
                    "one freed it. Pass retain_graph=True to the first."
                )
            if self.producers:
                for producer in self._freed_before():
                    producer.restore(for_another=True)
            again = self._run_again(isinstance(task, int) and not for_another)
            self._recomputed = again
            self._task = task
            if isinstance(task, int):
                again.begin(-1 if self._reread else task)
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(end_backward, weakref.ref(self), is_retained()))
            return again

    def _run_again(self, is_next: bool) -> RecomputedTensors:
        """Run the function once more, return the tensors it saves, and bind its outputs.

        The function stops where nothing more is needed, if that saves time. Without outputs to
        bind, that is the last saved tensor. While the forward still runs, it is the last tensor
        that this has saved.

        Args:
            is_next: whether the backward of this region is the next one of a running backward pass.
        """
        assert self._fn is not None and self._state is not None and self._inputs is not None
        checks = self.options.determinism_check != "none"
        modified: list[Tensor] = []
        if checks and not self._running:
            modified = self._state.modified(self.name)
            if self._versions:
                modified += self._modified()
        start = torch._C._autograd._get_sequence_nr()
        whole = self.outputs.discarded or self.communicates or modified
        stops = self._running or (self._stops and not whole)
        args, kwargs = self._inputs.again(self.name)
        again = self._saved.recompute(bool(stops))
        log = OpLog() if self._log else None
        contexts: tuple[Any, ...] = ()
        if fsdp.is_used():
            contexts = (self._gathered(args, kwargs, is_next),)
        contexts += (
            *self._state.contexts(self.name, checks),
            saved_tensors.hooks(again.hook(), again.read),
            *self._contexts[1:],
        )
        if log is not None:
            contexts += (log,)
        outputs: list[Any] = []
        try:
            outputs = leaves_of(call_in(contexts, self._fn, args, kwargs))
            for leaf in outputs:
                wait_for(leaf)
        except StopRecompute:
            pass
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not again.stopped_at():  # TorchScript turns every exception into a RuntimeError
                explain_lost_memory(self.name, self._fn, error)
                raise
        finally:
            try:
                self._state.put_back()
                self._inputs.forget_new_hooks()
            finally:
                # Not in the pack hook, where modes of `around` would see the detach.
                again.drop_graphs()
        if not again.is_whole():
            self._state.check_dual_level(self.name)
        differs = checks and not again.fits()
        if differs or modified:
            inputs = [t for t in leaves_of((args, kwargs)) if isinstance(t, Tensor)]
            if differs:
                saved_tensors.check(again, self.name, lambda: self._difference(log, stops), inputs)
            if modified:
                check_unread(self.name, modified, outputs, start, inputs)
        if self.outputs.discarded and not self._running:
            self.outputs.bind(outputs)
        return again

    def _gathered(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_next: bool) -> Any:
        assert self._state is not None
        captured = [t for ref in self._parameters if (t := ref()) is not None]
        parameters = [t for t in leaves_of((args, kwargs)) if fsdp.is_parameter(t)]
        return fsdp.gathered([*self._state.exchanged(), *captured, *parameters], is_next)

    def _modified(self) -> list[Tensor]:
        seen = ((ref(), version) for ref, version in self._versions)
        return [t for t, version in seen if t is not None and t._version != version]

    def _difference(self, log: OpLog | None, stops: bool) -> str:
        """Return the difference that the logs of ops show, for an error."""
        if self._log is None or log is None:
            return explain_difference(self._contexts, self.options.debug)
        if stops:
            del self._log.ops[len(log.ops) :]
        return self._log.difference(log)

    @eager
    def end_backward(self, retained: bool) -> None:
        """Free the tensors of one recompute, and the region if no other backward can follow."""
        self._task, self._reread, self._recomputed = None, False, None
        if not retained and self._saved.is_released() and not self._running:
            self._fn, self._inputs, self._state, self.producers = None, None, None, set()
            self._contexts = ()

    @eager
    def _note_saved(self, t: Tensor) -> None:
        key = storage_key(t)
        producer = producer_of_storage(key)
        if producer is not None and producer._serial < self._serial:
            self.producers.add(producer)  # captured, not an argument
        elif self.allocated is not None:
            self.allocated.add(t, key)

    @eager
    def _unpack(self, index: int) -> Tensor:
        """Return a tensor that the forward has saved; recompute it where it is not there."""
        if torch.compiler.is_compiling():  # compiled autograd
            from storage_ops._without_graph import run_backward  # imports Dynamo

            read: Tensor = run_backward(self._unpack, index)
            return read
        # A tensor is released when it is read, so that it is freed with its node. If a node reads
        # it twice, the region runs once more, and then keeps all tensors.
        again = self._recomputed
        if (
            again is None
            or self._task is None
            or self._task != current_pass()
            or not again.has(index)
        ):
            again = self._recompute()
        unwritten = index == again.stopped_at() - 2 and self._is_unwritten()
        if unwritten or not again.has(index):
            self._task, self._reread = None, True
            self._stops = self._stops and not unwritten
            again = self._recompute()
        if self._task is not None and not is_retained():
            self._saved.release(index)
        value = again.read(index) if self._reread else again.take(index)
        if self._task is None:  # read outside of a backward, after which no callback runs
            self.end_backward(retained=True)
        elif not len(again) and not isinstance(self._task, int):  # nor in a group
            self.end_backward(is_retained())
        return value

    def _is_unwritten(self) -> bool:
        """Return True if the recompute stopped before an op had written a tensor that it saves."""
        node = torch._C._current_autograd_node()
        if node is None or node.name() != _SAVES_BEFORE_WRITING:
            return False
        if self._running:
            fail(
                f"{self.name} runs a backward pass of its own right after torch.rrelu in training, "
                "whose noise cannot be repeated alone. Run another op between them."
            )
        return True
