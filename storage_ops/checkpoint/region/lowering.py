"""Record regions as marks in a graph, where calls are traced and cannot be recomputed.

Under torch.compile a region becomes one of torch's checkpoints. Partitioners save what passes
directly from one checkpoint to the next. They tell checkpoints apart by a number on the nodes
(`ac_graph_id`). All regions that discard have the same number, so that a chain of regions is
recomputed as one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.utils import checkpoint as torch_checkpoint

from storage_ops.checkpoint.region.options import contexts_of
from storage_ops.checkpoint.region.torch_checkpoint import policy_of
from storage_ops.checkpoint.saved.snapshots import with_snapshots
from storage_ops.checkpoint.state.execution import gpus_in_use, rng_of
from storage_ops.foundation import regions
from storage_ops.foundation.op_names import Op

_NUMBER = 1 << 40  # above those that torch counts up
# A function that sets the state of a generator, and the state.
_RandomState = tuple[Callable[[Any], object], Any]


def _recompute(ctx: object, op: Op, *args: object, **kwargs: object) -> Any:
    return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def _recompute_all() -> tuple[Any, Any]:
    contexts: tuple[Any, Any] = torch_checkpoint.create_selective_checkpoint_contexts(_recompute)
    return contexts


@functools.cache
def _numbered(mode: type) -> Any:
    """Return a subclass of torch's caching mode with one number, which torch cannot replace."""
    number = property(lambda self: _NUMBER, lambda self, value: None)
    return type("OutputDiscardMode", (mode,), {"ac_graph_id": number})


class _WithRandomState:
    """A context around that of a forward or a recompute, which repeats the random numbers.

    Args:
        inner: the context of the forward or the recompute.
        states: the random states of the forward. The context of the forward fills this list, and
            the context of the recompute sets them.
        repeats: whether this is the context of the recompute.
    """

    def __init__(self, inner: Any, states: list[_RandomState], repeats: bool) -> None:
        self._inner, self._states, self._repeats = inner, states, repeats

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            if self._repeats:
                stack.callback(_set, _random_states())
                _set(self._states)
            else:
                self._states[:] = _random_states()
            stack.enter_context(self._inner)
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> Any:
        return self._entered.__exit__(*error)


def _random_states() -> list[_RandomState]:
    """Return for each generator in use the function that sets its state, and the state."""
    devices = torch.device("cpu"), *(torch.device("cuda", i) for i in gpus_in_use())
    return [(put, get()) for get, put in map(rng_of, devices)]


def _set(states: list[_RandomState]) -> None:
    for put, state in states:
        put(state)


def _contexts(
    context_fn: Callable[[], Any] | None, discards: bool, preserve_rng_state: bool
) -> tuple[Any, Any]:
    forward, recompute = contexts_of(context_fn or _recompute_all)
    if detect_fake_mode() is None:
        # A backend such as "eager" runs the checkpoint, and torch then repeats no random numbers.
        states: list[_RandomState] = []
        forward = _WithRandomState(forward, states, False)
        return forward, _WithRandomState(recompute, states, preserve_rng_state)
    if _MODE is not None and isinstance(forward, _MODE):
        own: Any = type(forward)
        kind: Any = with_snapshots(own)
        numbered = _HAS_NUMBERS and discards and context_fn is None
        forward.__class__ = _numbered(kind) if numbered else kind
    return forward, recompute


# True if torch takes the number of a checkpoint from its mode, as 2.13 does and 2.10 does not.
_MODE: Any = getattr(torch_checkpoint, "_CachingTorchDispatchMode", None)
_HAS_NUMBERS = _MODE is not None and "ac_graph_id" in inspect.signature(_MODE).parameters


def compiled_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    preserve_rng_state: bool,
    context_fn: Callable[[], Any] | None,
    discards: bool = True,
) -> Any:
    """Call `fn` as a checkpoint that a partitioner recomputes; outputs too, if it `discards`.

    Under a transform of torch.func, which allows no saved-tensor hooks, it is a plain call.
    """
    if _is_transformed():
        return fn(*args, **kwargs)
    options: dict[str, Any] = {"preserve_rng_state": preserve_rng_state}
    if _MODE is not None:
        options["context_fn"] = functools.partial(
            _contexts, context_fn, discards, preserve_rng_state
        )
    elif context_fn is not None:
        options["context_fn"] = context_fn
    compiling = torch.compiler.is_compiling()  # False where a graph breaks inside the region
    before = _side_effects(True) if compiling else False

    def region(*args: object) -> Any:  # keywords may have names that the checkpoint has too
        if compiling:
            _side_effects(before)
        return fn(*args, **kwargs)

    return torch_checkpoint.checkpoint(region, *args, use_reentrant=False, **options)


def _is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


# Dynamo calls a function that is marked constant while it traces, and guards on the transforms.
_is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _side_effects(allowed: bool) -> bool:
    """Set whether dynamo may trace what the next checkpoint does to Python objects.

    It refuses by default, because eager mode does such things again when it recomputes. A graph
    does not: each of them happens once, which is what a region is to do.

    Returns:
        The setting before.
    """
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_no_mistake)
    config: Any = torch._dynamo.config
    before = bool(getattr(config, _SIDE_EFFECTS, False))
    if hasattr(config, _SIDE_EFFECTS):
        setattr(config, _SIDE_EFFECTS, allowed)
    return before


def _is_no_mistake(record: logging.LogRecord) -> bool:
    """Return False for a warning of torch that does not apply here.

    torch warns once, where a checkpoint has contexts, that in-place ops must be avoided.
    """
    return "Detected that context_fn is passed" not in record.getMessage()


_SIDE_EFFECTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"
# Dynamo calls a function that is marked constant while it traces, and leaves it out of the graph.
_side_effects._dynamo_marked_constant = True  # type: ignore[attr-defined]


def traced_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context_fn: Callable[[], Any] | None,
    discards: bool,
) -> Any:
    """Call `fn` once, and mark what a trace records of it as a region."""
    policy, forward = policy_of(context_fn or torch_checkpoint.noop_context_fn)
    with forward:
        return regions.mark(fn, args, kwargs, policy=policy, discards=discards)
