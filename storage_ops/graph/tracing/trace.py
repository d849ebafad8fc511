"""Records a training step as one graph: forward, loss, backward and optimizer."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_leaves
from typing_extensions import ParamSpec, TypeVar

from storage_ops.checkpoint.region import torch_checkpoint
from storage_ops.checkpoint.state.left_behind import Namespaces
from storage_ops.foundation import regions
from storage_ops.foundation.eager import force_eager
from storage_ops.foundation.values import is_leaf
from storage_ops.graph.recompute.capture import check_capture
from storage_ops.graph.recompute.remat import forget_tags, recompute
from storage_ops.graph.recompute.rng import gpu_of_replays
from storage_ops.graph.schedule import Schedule, schedule
from storage_ops.graph.tracing import cleanup, data_parallel, fully_sharded, refusals
from storage_ops.graph.tracing.arguments import Arguments, Build, Layout, Packer, holders, reader
from storage_ops.graph.tracing.autocast import Autocast
from storage_ops.graph.tracing.lift import Gradients, Lift, is_traced
from storage_ops.graph.tracing.optimizers import Optimizers
from storage_ops.graph.tracing.overlaps import Overlaps
from storage_ops.graph.tracing.slots import Closure, Slot, closure_of

# Arguments and result of a step. An overload without brackets has the default types.
P = ParamSpec("P", default=...)
T = TypeVar("T", default=Any)


@dataclass(frozen=True)
class _Gradient:
    """The effect of a call on the gradient of one leaf.

    `build` is None if the trace left no gradient.
    """

    read: Callable[[list[Any]], Tensor]
    name: str
    build: Build | None
    dropped: bool
    used: bool


class TracedStep(Generic[P, T]):
    """A function recorded as one graph, by `trace_step`.

    Attributes:
        gm: the graph. Its inputs are the tensors among the arguments, then the tensors that the
            function closes over. Its outputs are those of the function, then new gradients and
            buffers.
    """

    __wrapped__: Callable[P, T]  # the function

    def __init__(self, fn: Callable[P, T], args: object, kwargs: object) -> None:
        if not callable(fn):
            raise TypeError(
                f"trace_step: `fn` is {fn!r}, a {type(fn).__name__}. Expected a function."
            )
        functools.update_wrapper(self, fn, updated=())
        roots = [("fn", fn), *holders(args, kwargs)]
        closure = closure_of(roots)
        self._training = [(name, m, m.training) for name, m in closure.modules]
        self._sharded: list[Any] = [m for _, m in closure.modules if fully_sharded.is_sharded(m)]
        self._optimizers = Optimizers(closure.optimizers)
        # This import loads sympy, which takes half a second.
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

        fake_mode = FakeTensorMode(shape_env=ShapeEnv())
        lift = Lift(fake_mode, closure)
        with _nothing_left_behind(roots, closure, fake_mode):
            self._arguments = Arguments(args, kwargs, closure, fake_mode)
            gradients = Gradients(lift, closure, self._arguments.tensors.values())
            packer = Packer(lift.lift)

            def flat(*_: Tensor) -> list[Any]:
                mode = get_proxy_mode()
                assert mode is not None
                regions.RegionRecorder.of(mode.tracer)  # marks every node from here on
                with lift, gradients, self._optimizers.watched(lift.name):
                    result = fn(*self._arguments.args, **self._arguments.kwargs)
                    self._result = packer.tree(result)
                    replaced = list(_replaced(closure, fake_mode))
                    lift.record_used(tree_leaves((result, [value for _, value in replaced])))
                    self._gradients = list(self._outgoing(gradients, lift, packer))
                    self._state = [(write, packer.tree(value)) for write, value in replaced]
                return packer.outputs

            try:
                symbolic = (
                    enable_python_dispatcher if self._arguments.dynamic else contextlib.nullcontext
                )
                with (
                    fake_mode,
                    data_parallel.traced(closure, fake_mode),
                    refusals.refused(closure),
                    torch_checkpoint.marked(),
                    _eager_submodules(),
                    _plain_lstm(closure),
                    symbolic(),
                ):
                    gm = make_fx(flat)(*self._arguments.stand_ins)
            except GuardOnDataDependentSymNode as error:
                raise RuntimeError(
                    f"trace_step: the value of a tensor decides what `fn` does{_place_of(error)}. "
                    "Use code that runs in the same way for all values, such as torch.where. Or "
                    "decide outside of `fn`."
                ) from error
            finally:
                gradients.restore()
                lift.restore()
        _check_constants(packer.constants, fake_mode)
        gm.graph.set_codegen(fx.graph.CodeGen())
        kept = cleanup.clean(gm, lift.nodes)
        self._inputs = [slot for slot, keep in zip(lift.inputs, kept, strict=True) if keep]
        self._layouts = [Layout.of(slot.read()) for slot in self._inputs]
        self._again = [
            (closure.slots[id(t)], slot)
            for t, slot in closure.again
            if (t.requires_grad and is_leaf(t)) or closure.slots[id(t)] in self._inputs
        ]
        layouts = [*map(Layout.of, self._arguments.stand_ins), *self._layouts]
        self._overlaps = Overlaps(gm.graph)
        self._alone = [
            layout.requires_grad or modified
            for layout, modified in zip(layouts, self._overlaps.modified, strict=True)
        ]
        self.gm: fx.GraphModule = recompute(gm, foreign=False)
        self._gpu = gpu_of_replays(self.gm.graph)
        self._autocast = Autocast(layout.device.type for layout in layouts)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the step. Arguments must be as in the trace, except for the values of tensors."""
        if torch.compiler.is_dynamo_compiling():
            from storage_ops._without_graph import run_step

            return run_step(self, *args, **kwargs)  # type: ignore[no-any-return]
        if get_proxy_mode() is not None:  # inside another trace, which makes one graph of both
            return self.__wrapped__(*args, **kwargs)
        leaves, plain = self._arguments.flatten(args, kwargs)
        for name, module, training in self._training:
            if module.training != training:
                raise ValueError(
                    f"traced step: {name}.training is {module.training}. Expected {training}, as "
                    "when traced."
                )
        self._optimizers.check()
        self._autocast.check()
        for sharded in self._sharded:
            sharded.reshard()  # after a forward outside of the step
        lifted = [slot.value() for slot in self._inputs]
        for slot, layout, t in zip(self._inputs, self._layouts, lifted, strict=True):
            layout.check(slot.name, t)
        self._check_ties([*plain, *lifted], len(plain))
        previous = self._before(leaves)
        gpu = contextlib.nullcontext() if self._gpu is None else torch.cuda.device(self._gpu)
        if self._gpu is not None and torch.cuda.is_current_stream_capturing():
            check_capture(self.gm.graph)
        with self._autocast.off(), torch.no_grad(), gpu:
            outputs = self.gm(*plain, *lifted)
        for gradient, before in previous:
            if gradient.build is None:
                continue
            t, grad = gradient.read(leaves), gradient.build(outputs)
            if before is None:
                t.grad = grad
            else:
                with torch.no_grad():
                    before.add_(grad)
        for write, build in self._state:
            write(build(outputs))
        result: T = self._result(outputs)
        return result

    @property
    def peak(self) -> Schedule:
        """Return the memory of the step over time, from the lifetimes of the graph's tensors."""
        return schedule(self.gm)

    def _check_ties(self, inputs: list[Tensor], arguments: int) -> None:
        """Raise an error if one tensor of the trace is now several tensors, or several are one.

        The arguments come first among the inputs.
        """
        for first, second in self._again:
            now = _read(first), _read(second)
            if now[0] is not now[1] and not any(t is _GONE for t in now):
                raise ValueError(
                    f"traced step: {first.name} and {second.name} are two tensors. Expected one, "
                    "as when traced. Trace the function again with two."
                )
        places: dict[int, int] = {}
        for place, t in enumerate(inputs):
            other = places.setdefault(id(t), place)
            if other != place and (self._alone[place] or self._alone[other]):
                names = self._names()
                raise ValueError(
                    f"traced step: {names[other]} and {names[place]} are one tensor, which "
                    "requires grad or is modified. Expected two, as when traced. Trace the "
                    "function again, or pass a copy."
                )
        if (found := self._overlaps.find(inputs, arguments)) is not None:
            names = self._names()
            raise ValueError(
                f"traced step: {names[found[0]]} and {names[found[1]]} share memory, and the step "
                "modifies one of them. Expected separate memory, as when traced. Trace the "
                "function again, or pass a copy."
            )

    def _names(self) -> list[str]:
        """Return the names of the graph's inputs in the user's program."""
        return [*self._arguments.names, *(slot.name for slot in self._inputs)]

    def _before(self, leaves: list[Any]) -> list[tuple[_Gradient, Tensor | None]]:
        """Drop the gradients that the step drops.

        Returns every leaf's gradient before the step, or None.
        """
        for gradient in self._gradients:
            if gradient.used and gradient.read(leaves).grad is not None:
                raise RuntimeError(
                    f"traced step: {gradient.name}.grad is set, and `fn` reads gradients. Expected "
                    "None, as when traced. Set it to None before the step, or inside `fn`."
                )
        previous: list[tuple[_Gradient, Tensor | None]] = []
        for gradient in self._gradients:
            t = gradient.read(leaves)
            if gradient.dropped:
                t.grad = None
            previous.append((gradient, t.grad))
        return previous

    def _outgoing(self, gradients: Gradients, lift: Lift, packer: Packer) -> Iterator[_Gradient]:
        arguments = {id(t): place for place, t in self._arguments.tensors.items()}
        for key, (t, _) in list(lift.leaves.items()):
            with torch._C.DisableTorchFunction():
                after = t.grad
            dropped, used = key in gradients.dropped, key in lift.read
            if after is None and not (dropped or used):
                continue
            if after is not None and gradients.is_untouched(t, after):
                continue
            build = None if after is None else packer.leaf(after)
            place, slot = arguments.get(key), lift.slot_of(t)
            yield _Gradient(reader(place, slot), slot.name, build, dropped, used)


def trace_step(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> TracedStep[P, T]:
    """Record a training step as one graph in which checkpointed regions are recomputed.

    `fn` runs once, on stand-ins without data, and changes no tensor. Other side effects, such as
    counting its calls, happen at that time only. `fn` may do everything that a training step does:
    forward, loss, any number of `loss.backward()` or `torch.autograd.grad`, gradient clipping,
    `optimizer.step()`. The modules and tensors that it closes over, or that objects among the
    arguments contain, become inputs of the graph. Each call reads them again.

    Regions are those of `torch.utils.checkpoint`, with or without selective checkpointing, and
    those of `OutputDiscardCheckpoint`. A tensor of a region that backward needs is recomputed just
    before its first use there, with the random numbers of the forward. Results, gradients and the
    final state of the random-number generators are those of eager mode.

    As with every trace, decisions of Python code are fixed: branches, sizes, numbers, and which
    weights are one tensor. Dimensions of an argument marked by `torch._dynamo.mark_dynamic` may
    have another size in each call.

    Args:
        fn: the step.
        args, kwargs: example arguments, which are pytrees. Tensors in them that require grad must
            be leaves. An object in them that contains tensors, such as a module, must be the same
            at each call.

    Returns:
        A callable with the signature and the results of `fn`. Its tensors carry no autograd graph.

    Raises:
        ValueError: an argument has a grad_fn. Or a module is data-parallel in a way that cannot be
            recorded, such as with a communication hook. Or `fn` uses torch's context_parallel, or
            Inductor's async tensor parallelism is on.
        RuntimeError: `fn` depends on the value of a tensor. Or a tensor of the step stays in an
            object, or is returned in an object that is not a pytree. Or `fn` sets `.data` of a
            tensor, or seeds or forks a generator of torch. Or `fn` changes an option of an
            optimizer, or a number in its state. Or `fn` reads the elements of a sparse tensor. Or a
            region modifies in place the output of another that discards it. In each case no tensor
            has changed.

    Example:
        >>> layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
        >>> def train(x):
        ...     loss = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum()
        ...     loss.backward()
        ...     return loss
        >>> step = storage_ops.graph.trace_step(train, x)
        >>> bool(step(x) == layer(x).sum()), layer.weight.grad.shape
        (True, torch.Size([8, 8]))
    """
    return TracedStep(fn, args, kwargs)


def _place_of(error: BaseException) -> str:
    """Return the innermost line of a traceback outside of torch and this package."""
    frames = traceback.extract_tb(error.__traceback__)
    packages = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    roots = tuple(f"{package}{os.sep}" for package in packages)
    lines = [f for f in frames if not f.filename.startswith(roots) and f.filename[:1] != "<"]
    if not lines:
        return ""
    called = next((f for f in frames[frames.index(lines[-1]) + 1 :] if f.filename[:1] != "<"), None)
    inside = f", in its call of {called.name}" if called is not None else ""
    return f" at {lines[-1].filename}:{lines[-1].lineno}{inside}"


@contextlib.contextmanager
def _eager_submodules() -> Iterator[None]:
    """Run compiled functions inside the traced function uncompiled, so that there is one graph."""
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), force_eager():
        yield


@contextlib.contextmanager
def _plain_lstm(closure: Closure) -> Iterator[None]:
    """Turn oneDNN's CPU LSTM off, because its backward needs a workspace that a trace lacks."""
    enabled = torch._C._get_mkldnn_enabled()
    if not any(isinstance(module, nn.LSTM) for _, module in closure.modules):
        yield
        return
    try:
        torch._C._set_mkldnn_enabled(False)
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextlib.contextmanager
def _nothing_left_behind(
    roots: list[tuple[str, Any]], closure: Closure, fake_mode: FakeTensorMode
) -> Iterator[None]:
    """Remove tensors of the trace from the user's objects.

    State that fn replaces (`_replaced`) may keep them. Any other remaining tensor is an error.
    """
    containers = [*closure.containers, *((name, m._buffers) for name, m in closure.modules)]
    before = [(name, holder, holder.copy()) for name, holder in containers]
    places: list[str] = []
    names = Namespaces((m for _, m in closure.modules), (value for _, value in roots))
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        for slot, old in closure.places:
            new = _read(slot)
            if _is_another(old, new, fake_mode):
                assert slot.write is not None
                slot.write(old)
                if not _is_state(old):
                    places.append(slot.name)
        for name, holder, _ in before:
            items = holder.items() if isinstance(holder, dict) else enumerate(holder)
            places += [f"{name}[{key!r}]" for key, value in items if is_traced(value, fake_mode)]
        kept = closure_of(roots)
        places += [kept.slots[id(t)].name for t in kept.tensors if is_traced(t, fake_mode)]
        if places or sys.exc_info()[0] is not None:
            for _, holder, copy in before:
                holder.clear()
                holder.update(copy) if isinstance(holder, dict) else holder.extend(copy)
        names.remove(lambda t: t.fake_mode is fake_mode)  # from caches that no closure contains
        torch.clear_autocast_cache()
        forget_tags()
    if places:
        raise RuntimeError(
            f"trace_step: `fn` keeps a tensor of the step in {', '.join(dict.fromkeys(places))}. "
            "Return the tensor instead, or have `fn` replace a tensor that exists before the step. "
            "If this is the state of an optimizer, let it take one step before."
        )


def _check_constants(values: list[Any], fake_mode: FakeTensorMode) -> None:
    for value in values:
        if any(is_traced(t, fake_mode) for t in closure_of([("result", value)]).tensors):
            raise RuntimeError(
                f"trace_step: `fn` returns a {type(value).__name__}, which holds a tensor of the "
                "step where it cannot be found. Return tensors in a pytree, such as a dict or a "
                "tuple."
            )


def _replaced(
    closure: Closure, fake_mode: FakeTensorMode
) -> Iterator[tuple[Callable[[Any], object], Any]]:
    """Yield the state that fn replaces: a function that sets it, and the new value."""
    for slot, old in closure.places:
        new = _read(slot)
        if _is_another(old, new, fake_mode) and _is_state(old):
            assert slot.write is not None
            if new is _GONE:
                raise RuntimeError(
                    f"trace_step: `fn` deletes {slot.name}, which holds a tensor. Keep it, or set "
                    "it to None."
                )
            yield slot.write, new


def _is_another(old: object, new: object, fake_mode: FakeTensorMode) -> bool:
    if new is old:
        return False
    return isinstance(old, Tensor) or any(is_traced(leaf, fake_mode) for leaf in tree_leaves(new))


def _is_state(value: object) -> bool:
    return any(
        isinstance(t, Tensor) and not isinstance(t, nn.Parameter) for t in tree_leaves(value)
    )


_GONE = object()


def _read(slot: Slot) -> Any:
    try:
        return slot.read()
    except (AttributeError, LookupError, ValueError):
        return _GONE
