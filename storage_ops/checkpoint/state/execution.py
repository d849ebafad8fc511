"""Capture what a forward depends on besides its arguments, and repeat it.

That is random numbers, autocast, modes and defaults. The hooks of modules are in `calls`, and what
is in the places that a forward reaches is in `effects`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as fx_trace
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from storage_ops import _library
from storage_ops.checkpoint.saved.saved import fail
from storage_ops.checkpoint.state.calls import Calls
from storage_ops.checkpoint.state.effects import Effects
from storage_ops.checkpoint.state.modes import active_modes
from storage_ops.checkpoint.state.reachable import Surroundings
from storage_ops.checkpoint.state.unchanged import State, state_of

_trackers: OrderedDict[int, Any] = OrderedDict()


def register_rng_tracker(tracker: object) -> RemovableHandle:
    """Repeat the random numbers of a generator or tracker in every recompute from now on.

    The default generators of the CPU and of every device are repeated anyway. So is each
    `torch.Generator`, `random.Random` or `numpy.random.Generator` that a region is called with,
    closes over or names as a global. A module or another object among these may also have it as an
    attribute, or name it in its forward or `__call__`. Others are repeated only if registered, and
    so are those that a process has once, `random` and `numpy.random`.

    Args:
        tracker: a generator, `random`, `numpy.random`, or an object with `get_states()` and
            `set_states(states)`, as Megatron-LM's tracker of tensor-parallel random states has.

    Returns:
        A handle whose `remove()` undoes the registration.

    Raises:
        TypeError: `tracker` is neither.

    Example:
        >>> handle = storage_ops.register_rng_tracker(torch.Generator())
        >>> handle.remove()
    """
    _accessors(tracker)
    handle = RemovableHandle(_trackers)
    _trackers[handle.id] = tracker
    return handle


_ACCESSORS = (("get_states", "set_states"), ("get_state", "set_state"), ("getstate", "setstate"))


def _accessors(source: object) -> State:
    if (found := state_of(source)) is not None:
        return found
    for get, put in _ACCESSORS:
        if hasattr(source, get) and hasattr(source, put):
            return getattr(source, get), getattr(source, put)
    raise TypeError(
        f"register_rng_tracker: `tracker` is {type(source).__name__}. Expected a torch.Generator, "
        "random, numpy.random or an object with get_states() and set_states(states)."
    )


def rng_of(device: torch.device) -> State:
    """Return functions that get and set the state of a device's default generator."""
    if device.type == "cpu":
        return _state_of_cpu, torch.default_generator.set_state
    library = torch.get_device_module(device)
    put = functools.partial(library.set_rng_state, device=device)
    return functools.partial(library.get_rng_state, device), put


def _state_of_cpu() -> Tensor:
    state = torch.default_generator.get_state()
    if torch._C._len_torch_dispatch_stack():  # a simulation of `storage_ops.memory` counts it
        for mode in _get_current_dispatch_mode_stack():
            getattr(mode, "note_random_state", lambda _: None)(state)
    return state


_RNG_OF_CPU = rng_of(torch.device("cpu"))


def _device() -> torch.device | None:
    """Return the device where factories put tensors by default; None if no mode can have set one.

    Asking torch is slow, and mostly there is no mode.
    """
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def _autocast(device_type: str) -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )


def _deterministic() -> tuple[bool, bool]:
    return (
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
    )


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


def _attention() -> Any:
    return F.scaled_dot_product_attention


def _set_attention(attention: Callable[..., Tensor]) -> None:
    F.scaled_dot_product_attention = attention


class _Switch(threading.local):
    """The switch that makes checkpoints of this thread plain calls."""

    off = False


_switch = _Switch()


def is_disabled() -> bool:
    """Return True inside of `disable_checkpointing`."""
    return _switch.off


def is_traced_by_fx(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call has proxies of `torch.fx.symbolic_trace`, which are no tensors."""
    # make_fx sets the flag too.
    if torch.compiler.is_compiling() or not fx_trace.is_fx_symbolic_tracing():
        return False
    return any(isinstance(leaf, torch.fx.Proxy) for leaf in tree_leaves((args, kwargs)))


def _disable(off: bool) -> None:
    _switch.off = off


@contextlib.contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Make every checkpoint of this package a plain call, in the forwards of a with block.

    Holds for checkpointed layers, `OutputDiscardCheckpoint`, `output_discard` and chains, in this
    thread, in traced steps too: they save what plain autograd saves, and free nothing. A backward
    may run anywhere; it repeats what was checkpointed in the forward. Compiled code and
    `torch.utils.checkpoint` keep their checkpoints.

    Example:
        >>> layer = storage_ops.CheckpointWrapper(torch.nn.Linear(4, 4))
        >>> with storage_ops.disable_checkpointing():
        ...     y = layer(torch.randn(2, 4))
        >>> y.sum().backward()
    """
    before = _switch.off
    _switch.off = True
    try:
        yield
    finally:
        _switch.off = before


# Settings of torch that are on or off.
_FLAGS: tuple[State, ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    # torch.nn.attention.sdpa_kernel. Not the order in which it prefers them: torch changes that by
    # itself, at the first attention of a process on some GPUs.
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    # torch.backends.cudnn.flags
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
)


def _flags() -> tuple[bool, ...]:
    return tuple(get() for get, _ in _FLAGS)


def _set_flags(values: tuple[bool, ...]) -> None:
    for (get, put), value in zip(_FLAGS, values, strict=True):
        if get() != value:
            put(value)


# Modes that change what the same code computes, or by which kernel, which may save other tensors.
_SETTINGS: tuple[State, ...] = (
    (getattr(sys.modules.get(_library.SAVED_TENSORS), "flags", _flags), _set_flags),
    (is_disabled, _disable),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, _set_deterministic),
    # Context parallelism exchanges this function for the forward.
    (_attention, _set_attention),
)


def _dual_number() -> torch.Tensor | None:
    """Return a dual number that loses its tangent when the current level ends, if there is one."""
    if forward_ad._current_level < 0:
        return None
    dual = forward_ad.make_dual(torch.zeros(()), torch.ones(()))
    return None if forward_ad.unpack_dual(dual).tangent is None else dual


class _Leave:
    """Leaves a context manager, once."""

    def __init__(self, context: contextlib.AbstractContextManager[Any]) -> None:
        self._context: contextlib.AbstractContextManager[Any] | None = context

    def __call__(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)


class ExecutionState:
    """State captured before a region runs; a context manager that runs it again the same way."""

    def __init__(self, around: Surroundings, preserve_rng_state: bool) -> None:
        """Capture the state for a call with these surroundings."""
        devices = set(around.devices)
        if torch.cuda.is_initialized():
            devices |= {torch.device("cuda", i) for i in range(torch.cuda.device_count())}
        types = {"cpu", *(device.type for device in devices)}
        self._autocast = {name: _autocast(name) for name in types}
        self._device = _device()
        self.modes = active_modes()  # a recompute enters them around the call alone
        self._current = torch.cuda.current_device() if "cuda" in types else -1
        self._settings = [get() for get, _ in _SETTINGS]
        self._dual = _dual_number()
        self._undo: list[Callable[[], object]] = []
        self._training = [(module, module.training) for module in around.modules]
        self._calls = Calls(around.modules)
        self.effects = Effects(around)
        self._rng: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
        if not preserve_rng_state:
            return
        sources = [_RNG_OF_CPU, *map(rng_of, devices)] if devices else [_RNG_OF_CPU]
        sources += [_accessors(each) for each in (*around.generators, *_trackers.values())]
        self._rng = [(get, put, get()) for get, put in sources]

    def check_dual_level(self, region: str) -> None:
        """Raise if the forward ran in a level of dual numbers that has ended.

        A repetition then has no tangents, and does less work than the forward. Another level that
        is active now has none of the tangents either.

        Args:
            region: the name of the region.
        """
        if self._dual is not None and forward_ad.unpack_dual(self._dual).tangent is None:
            fail(
                f"{region} ran in a torch.autograd.forward_ad.dual_level() block that has ended, "
                "and dual numbers lose their tangents there. Run the backward inside the block, or "
                "the forward without checkpoints (storage_ops.disable_checkpointing())."
            )

    def __enter__(self) -> None:
        """Make the captured state current, where it is not."""
        self._undo = []
        try:
            self._restore()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        """Put back the state of before, all of it, even after an error."""
        self.put_back()

    def put_back(self) -> None:
        """Put back the rest of the state of before, as after an interrupt of `__exit__`."""
        try:
            while self._undo:
                self._undo[-1]()  # once more if an interrupt comes before the next line
                self._undo.pop()
        except Exception:
            self._undo.pop()
            raise
        finally:
            if self._undo:
                self.put_back()

    def _set(self, put: Callable[[Any], object], value: object, back: object) -> None:
        self._undo.append(functools.partial(put, back))
        put(value)

    def _around(self, context: contextlib.AbstractContextManager[Any]) -> None:
        context.__enter__()
        self._undo.append(_Leave(context))

    def _restore(self) -> None:
        for device_type, (enabled, dtype, cache) in self._autocast.items():
            if _autocast(device_type) != (enabled, dtype, cache):
                self._around(torch.autocast(device_type, dtype, enabled, cache))
        if _device() != self._device:
            self._around(self._device or torch.device("cpu"))
        if self._current >= 0:
            self._around(torch.cuda.device(self._current))
        for (get, put), value in zip(_SETTINGS, self._settings, strict=True):
            now = get()
            if now != value:
                self._set(put, value, now)
        for module, training in self._training:
            if module.training != training:
                put = functools.partial(setattr, module, "training")
                self._set(put, training, module.training)
        # Before the effects, which may reach what a tracker returns and is given.
        for get, put, state in self._rng:
            self._set(put, state, get())
        self._calls.restore(self._undo)
        self.effects.restore(self._undo)
