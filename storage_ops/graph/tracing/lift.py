"""Turns tensors that a traced function closes over into inputs of its graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

from storage_ops.foundation.values import is_leaf
from storage_ops.graph.tracing.slots import Closure, Slot, gradient_slot, plain_parts

# This op makes a tensor literal in the traced code, which is a constant of the graph.
_LITERALS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
# These ops hide from a trace that the op inside them may work in place.
_REPLAYS = (run_and_save_rng_state, run_with_rng_state)
_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data


class Lift(TorchDispatchMode):
    """Replaces every real tensor that an op reads by an input of the graph.

    The function itself runs on the real tensors. Autograd sees the real parameters. Stand-ins
    replace them only below autograd, where ops are recorded. So all features of autograd work as in
    eager mode, and the function need not receive its own parameters.

    Attributes:
        inputs: the slots of the lifted tensors, in the order of the graph's inputs.
        nodes: the nodes of the lifted inputs.
        leaves: each leaf that requires grad and its gradient before the trace, by the leaf's id.
        backward_ran: whether a backward pass was recorded.
        read: ids of leaves whose gradient was read, or was missing when the code looked for it. A
            gradient from before the step would change such a step.
    """

    supports_higher_order_operators = True

    def __init__(self, fake_mode: FakeTensorMode, closure: Closure) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = fake_mode
        self._slots: dict[int, Slot] = {}
        self._slots_by_place: dict[Any, Slot] = {}
        self._fakes: dict[int, Tensor] = {}
        self._by_place: dict[Any, Tensor] = {}
        self._held: list[Tensor] = []
        self.inputs: list[Slot] = []
        self.nodes: list[fx.Node] = []
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.backward_ran = False
        self.read: set[int] = set()
        self._watched: dict[int, tuple[Tensor, int]] = {}
        self._versions: list[tuple[Tensor, int, bool]] = []
        for t in closure.tensors:
            self.name(t, closure.slots[id(t)])

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "profiler":  # labels that optimizers put on their methods
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        if func in _REPLAYS:
            raise RuntimeError(
                f"trace_step: `fn` runs a graph that repeats random numbers by {func.name()}. "
                "Trace the function that the graph was made of."
            )
        flat, spec = tree_flatten((args, kwargs or {}))
        self.record_used(flat)
        self.backward_ran = self.backward_ran or torch._C._current_graph_task_id() != -1
        if any(isinstance(t, Tensor) and is_traceable_wrapper_subclass(t) for t in flat):
            return NotImplemented  # the subclass calls this again for its inner tensors
        if func not in _LITERALS:
            flat = [self.lift(t) for t in flat]
        args, kwargs = tree_unflatten(flat, spec)
        return func(*args, **kwargs)

    def lift(self, value: object) -> Any:
        """Return the stand-in of a real tensor, and any other value unchanged."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if is_traceable_wrapper_subclass(value):
            return value
        if id(value) not in self._fakes:
            # Two tensors with the same storage and layout, such as a parameter and its .data, are
            # one input.
            place = _place_of(value)
            if place is None or place not in self._by_place:
                self._by_place[place] = self._add_input(value)
            self._fakes[id(value)] = self._by_place[place]
            self._held.append(value)  # keeps the value alive, so that its id stays valid
            if not value.is_inference():
                self._versions.append((value, value._version, is_leaf(value)))
        return self._fakes[id(value)]

    def name(self, t: Tensor, slot: Slot) -> None:
        """Set the slot from which each call reads a tensor."""
        for part, part_slot in plain_parts(t, slot):
            self._slots.setdefault(id(part), part_slot)
            self._slots_by_place.setdefault(_place_of(part), part_slot)
            self._held.append(part)

    def slot_of(self, t: Tensor) -> Slot:
        """Return the slot from which each call reads a tensor."""
        slot = self._slots.get(id(t))
        if slot is None and _place_of(t) is not None:
            slot = self._slots_by_place.get(_place_of(t))
        return slot or Slot(_describe(t), lambda: t)

    def restore(self) -> None:
        """Undo the effects of in-place ops on autograd graphs and versions of the real tensors."""
        for t, version, was_leaf in self._versions:
            if was_leaf and not is_leaf(t):
                t.detach_()
            torch._C._autograd._unsafe_set_version_counter((t,), (version,))

    def _add_input(self, value: Tensor) -> Tensor:
        mode = get_proxy_mode()
        assert mode is not None
        tracer: Any = mode.tracer
        with _disable_current_modes():
            plain = value.detach()
            if type(plain) is not Tensor:  # a sparse tensor cannot be viewed as another class
                plain = plain.as_subclass(Tensor)
            fake: Tensor = self._fake_mode.from_tensor(plain, static_shapes=True)
        graph: fx.Graph = tracer.graph
        last = None
        for node in graph.nodes:
            if node.op != "placeholder":
                break
            last = node
        before = next(iter(graph.nodes), graph._root) if last is None else last.next
        with graph.inserting_before(before):
            proxy = tracer.create_proxy("placeholder", f"lifted_{len(self.inputs)}", (), {})
        with _disable_current_modes():
            track_tensor_tree(fake, proxy, constant=None, tracer=tracer)
        self.inputs.append(self.slot_of(value))
        self.nodes.append(proxy.node)
        return fake

    def record_used(self, values: Iterable[Any]) -> None:
        """Record the used values: leaves, and watched gradients."""
        for t in values:
            if id(t) in self._watched:
                self.read.add(self._watched[id(t)][1])
            if not isinstance(t, Tensor) or is_traced(t, self._fake_mode):
                continue
            if t.requires_grad and is_leaf(t):
                self.note(t)

    def note(self, t: Tensor) -> None:
        """Record the gradient of a leaf, unless it is known."""
        if id(t) not in self.leaves:
            with torch._C.DisableTorchFunction():
                self.leaves[id(t)] = (t, t.grad)

    def watch(self, grad: Tensor, t: Tensor) -> None:
        """Count a later use of `grad`, which fn has read, as a read of the gradient of `t`."""
        self._watched[id(grad)] = (grad, id(t))


def _place_of(t: Tensor) -> Any:
    if t.layout != torch.strided:
        return None
    storage = t.untyped_storage()
    return (storage._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype)


def _describe(t: Tensor) -> str:
    kind = "parameter" if isinstance(t, nn.Parameter) else "tensor"
    return f"a {kind} of shape {tuple(t.shape)} that fn uses"


class Gradients(TorchFunctionMode):
    """Follows reads and writes of `.grad` while fn is traced.

    A step that drops gradients must drop them even if none exist during the trace. Code may read a
    gradient before a backward pass, to add to it or to drop it. Then a gradient is created.

    Attributes:
        created: the gradient that was created for a leaf, by the leaf's id.
        dropped: ids of the leaves whose gradient fn has set or deleted, so that gradients from
            before the step are lost.
    """

    def __init__(self, lift: Lift, closure: Closure, arguments: Iterable[Tensor]) -> None:
        super().__init__()
        self._lift = lift
        self.created: dict[int, Tensor] = {}
        self.dropped: set[int] = set()
        for t in (*closure.tensors, *arguments):
            if is_leaf(t) and t.requires_grad:
                lift.note(t)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (_GRAD.__set__, _GRAD.__delete__):
            self._lift.note(args[0])
            self.dropped.add(id(args[0]))
        elif func == _GRAD.__get__:
            # Torch reads gradients before it drops them.
            drops = sys._getframe(1).f_code.co_name == "zero_grad"
            self._look(args[0], drops)
        elif func == _DATA.__set__:
            self._check_data(*args)
        return func(*args, **(kwargs or {}))

    def _look(self, t: Tensor, drops: bool) -> None:
        if not is_leaf(t) or not t.requires_grad or id(t) in self.dropped:
            return
        self._lift.note(t)
        if t.grad is not None:
            if not self.is_untouched(t, t.grad):
                self._lift.watch(t.grad, t)
        elif drops or not self._lift.backward_ran:
            with _disable_current_modes():
                t.grad = torch.zeros_like(t)
            self.created[id(t)] = t.grad
            self._lift.name(t.grad, gradient_slot(self._lift.slot_of(t)))
        else:
            self._lift.read.add(id(t))

    def _check_data(self, t: Tensor, value: Tensor) -> None:
        """Raise an error if a tensor that exists at each call gets the memory of another one."""
        if value is not t and (_place_of(t) is None or _place_of(t) != _place_of(value)):
            raise RuntimeError(
                f"trace_step: `fn` sets .data of {self._lift.slot_of(t).name}, whose memory a "
                "graph cannot replace. Overwrite the values instead: .copy_(...) under "
                "torch.no_grad()."
            )

    def is_untouched(self, t: Tensor, grad: Tensor | None) -> bool:
        """Return True if `grad` is the gradient that `t` had before fn.

        In-place additions do not change this.
        """
        return grad is self.created.get(id(t), self._lift.leaves[id(t)][1])

    def restore(self) -> None:
        """Restore the gradients of all tensors from before the trace."""
        for t, grad in self._lift.leaves.values():
            t.grad = grad


def is_traced(value: object, fake_mode: FakeTensorMode) -> bool:
    """Return True if a value is a tensor or a number of the trace, or a subclass around one."""
    if isinstance(value, FakeTensor):
        return value.fake_mode is fake_mode
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        return any(
            is_traced(getattr(value, name), fake_mode) for name in value.__tensor_flatten__()[0]
        )
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
