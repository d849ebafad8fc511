"""Capture the global state that a forward depends on, and restore it for the recompute.

This state includes random numbers, autocast, modes and defaults. `calls` restores the hooks of
modules, and `effects` restores tensors, attributes and containers.
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
from typing_extensions import Self

from storage_ops import _library
from storage_ops.checkpoint.saved.saved import fail
from storage_ops.checkpoint.state.calls import Calls
from storage_ops.checkpoint.state.code_writes import UNSEEN
from storage_ops.checkpoint.state.contents import Contents
from storage_ops.checkpoint.state.effects import Effects
from storage_ops.checkpoint.state.known_walks import KnownWalk
from storage_ops.checkpoint.state.modes import NO_MODES, active_modes
from storage_ops.checkpoint.state.reachable import Surroundings
from storage_ops.checkpoint.state.unchanged import State, state_of

trackers: OrderedDict[int, Any] = OrderedDict()
_native: Any = sys.modules.get(_library.SAVED_TENSORS)


def register_rng_tracker(tracker: object) -> RemovableHandle:
    """Repeat the random numbers of a generator or tracker in every recompute from now on.

    Recomputes always repeat the default generators of the CPU and of every device. They also repeat
    each `torch.Generator`, `random.Random` and `numpy.random.Generator` that a region has as an
    argument, in its closure, as a global or in a Python module that its code names. It may also be
    an attribute of a module or another object that the region reaches, or a name in that object's
    forward or `__call__`. Register other generators, and the global ones of `random` and
    `numpy.random`.

    Args:
        tracker: a generator, `random`, `numpy.random`, or an object with `get_states()` and
            `set_states(states)`, as Megatron-LM's tracker of tensor-parallel random states has.

    Returns:
        A handle whose `remove()` undoes the registration.

    Raises:
        TypeError: `tracker` has no state that can be read and set.

    Example:
        >>> handle = storage_ops.register_rng_tracker(torch.Generator())
        >>> handle.remove()
    """
    _accessors(tracker)
    handle = RemovableHandle(trackers)
    trackers[handle.id] = tracker
    return handle


_ACCESSORS = (("get_states", "set_states"), ("get_state", "set_state"), ("getstate", "setstate"))


def _accessors(source: object) -> State:
    if (accessors := state_of(source)) is not None:
        return accessors
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


def gpus_in_use() -> range:
    """Return the numbers of all GPUs if the process uses CUDA, else none."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


def _state_of_cpu() -> Tensor:
    state = torch.default_generator.get_state()
    if torch._C._len_torch_dispatch_stack():  # simulations count the memory of the state
        for mode in _get_current_dispatch_mode_stack():
            getattr(mode, "note_random_state", lambda _: None)(state)
    return state


_RNG_OF_CPU = rng_of(torch.device("cpu"))


def _device() -> torch.device | None:
    """Return the default device, or None if no mode is active that can set one.

    `torch.get_default_device` is slow, and usually no mode is active.
    """
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


_Autocast = tuple[bool, torch.dtype, bool]


def _autocast(device_type: str) -> _Autocast:
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
    """Per-thread flag: whether checkpoints are plain calls."""

    off = False


_switch = _Switch()


def is_disabled() -> bool:
    """Return True inside a `disable_checkpointing()` block."""
    return _switch.off


def is_traced_by_fx(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an argument is a proxy of `torch.fx.symbolic_trace`, which is not a tensor."""
    # The flag alone does not suffice, because make_fx sets it too.
    if not fx_trace.is_fx_symbolic_tracing():
        return False
    return any(isinstance(leaf, torch.fx.Proxy) for leaf in tree_leaves((args, kwargs)))


def _disable(off: bool) -> None:
    _switch.off = off


@contextlib.contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Make every checkpoint of this package a plain call, in the forwards of a with block.

    This covers checkpointed layers, `OutputDiscardCheckpoint`, `output_discard` and chains in this
    thread, in traced steps too. They save the same tensors as plain autograd, and free nothing. The
    backward may run inside or outside of the block. Compiled code and `torch.utils.checkpoint` are
    not changed.

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
    # torch.nn.attention.sdpa_kernel. The priority of the backends is not restored, because torch
    # itself changes it in the first attention of a process on some GPUs.
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


# Settings that change results, or select kernels, which may save other tensors.
_OF_TORCH: tuple[State, ...] = (
    (_flags, _set_flags),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, _set_deterministic),
)
_OTHERS: tuple[State, ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (is_disabled, _disable),
    # Context parallelism replaces this function during the forward.
    (_attention, _set_attention),
)
# Maps the library's number for the settings of torch to their values, and to autocast.
known_settings: dict[int | None, tuple[list[Any], dict[str, _Autocast]]] = {}


def read_settings() -> tuple[int | None, list[Any], dict[str, _Autocast]]:
    """Return a number for the settings of torch, their values, and autocast on CPUs and GPUs.

    The number comes from the library, and is None without a library. If it is known, no setting is
    read in Python.
    """
    number = None if _native is None else _native.settings()
    settings = None if number is None else known_settings.get(number)
    if settings is None:
        autocast = {device_type: _autocast(device_type) for device_type in ("cpu", "cuda")}
        settings = known_settings[number] = [get() for get, _ in _OF_TORCH], autocast
    return number, *settings


def _dual_number() -> torch.Tensor | None:
    """Return a dual number, which loses its tangent when the level ends; None outside a level."""
    if forward_ad._current_level < 0:
        return None
    dual = forward_ad.make_dual(torch.zeros(()), torch.ones(()))
    return None if forward_ad.unpack_dual(dual).tangent is None else dual


class _Leave:
    """Callable that exits a context manager in its first call."""

    def __init__(self, context: contextlib.AbstractContextManager[Any]) -> None:
        self._context: contextlib.AbstractContextManager[Any] | None = context

    def __call__(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)


class ExecutionState:
    """State captured before a region runs, and a context manager that restores it.

    Attributes:
        modes: the modes that were active.
        effects: the state that the region can change.
        writes_unseen: whether the code may write tensors without a new version of them.
    """

    def __init__(self, surroundings: Surroundings, preserve_rng_state: bool) -> None:
        """Capture the state for a call with these surroundings."""
        devices = set(surroundings.devices)
        devices |= {torch.device("cuda", i) for i in gpus_in_use()}
        self._number, self._of_torch, known = read_settings()
        types = {"cpu", *(device.type for device in devices)}
        self._autocast = {name: known.get(name) or _autocast(name) for name in types}
        self._device = _device()
        self.modes = active_modes()  # a recompute enters them only around the call
        self._current = torch.cuda.current_device() if "cuda" in self._autocast else -1
        self._others = [get() for get, _ in _OTHERS]
        self._dual = _dual_number()
        self._undo: list[Callable[[], object]] = []
        self._modules, self._known = surroundings.modules, surroundings.known
        self._training = [(module, module.training) for module in surroundings.modules]
        # A known walk has no hooks, and compares the rest of its reads before a recompute.
        self._calls = Calls(surroundings.modules) if surroundings.known is None else None
        self.effects = Effects(surroundings)
        self.writes_unseen = surroundings.writes & UNSEEN != 0
        self._rng: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
        if not preserve_rng_state:
            return
        sources = [_RNG_OF_CPU, *map(rng_of, devices)] if devices else [_RNG_OF_CPU]
        sources += [_accessors(g) for g in (*surroundings.generators, *trackers.values())]
        self._rng = [(get, put, get()) for get, put in sources]

    @classmethod
    def of_snapshot(
        cls, snapshot: Any, walk: KnownWalk, attention: Callable[..., Any], running: bool
    ) -> Self:
        """Return the state before a call, of which the library has noted the parts.

        Args:
            snapshot: the library's object. When it was made, no mode was active.
            walk: the known walk of the call.
            attention: the value of `F.scaled_dot_product_attention`.
            running: whether the call still runs. If not, it has changed nothing.
        """
        self = cls.__new__(cls)
        self._number, self._current = snapshot.settings, snapshot.gpu
        self._of_torch, known = known_settings[self._number]
        types = ("cpu", "cuda") if self._current >= 0 else ("cpu",)
        self._autocast = {name: known[name] for name in types}
        self._device, self.modes, self._dual = None, NO_MODES, None
        self._others = [True, False, attention]
        self._undo = []
        self._modules, self._known, self._training, self._calls = [], walk, [], None
        copies = [Contents.of_library(*copy) for copy in snapshot.copies()]
        self.writes_unseen = False  # else Python would capture the state
        self.effects = Effects.of_snapshot(walk, snapshot.noted, copies, running)
        self._rng = [(*rng_of(torch.device(name)), state) for name, state in snapshot.random()]
        return self

    def finish(self) -> None:
        """Note that the forward has ended."""
        self.effects.finish()

    def modified(self, region: str) -> list[Tensor]:
        """Return the parameters that were modified in place since the forward, without a copy.

        Raises:
            RuntimeError: the forward has written a tensor that was not copied.
        """
        self.effects.check(region)
        return self.effects.modified()

    def exchanged(self) -> list[Tensor]:
        """Return the parameters and buffers that were replaced or removed since."""
        return self.effects.exchanged()

    def contexts(self, region: str, checks: bool) -> tuple[Any, ...]:
        """Return the context managers for a recompute, outermost first.

        Args:
            region: the name of the region, for errors.
            checks: whether to raise if the recompute would read other contents than the forward.
        """
        return self, self.modes.again(), self.effects.without_repeated_writes(region, checks)

    def check_dual_level(self, region: str) -> None:
        """Raise if the forward ran in a level of dual numbers that has ended.

        Then the recompute has no tangents, and runs fewer ops than the forward. Another level that
        is active now does not have these tangents.

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
        """Restore the captured state."""
        self._undo = []
        try:
            self._restore()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        """Put back the whole state from before `__enter__`, even after an error."""
        self.put_back()

    def put_back(self) -> None:
        """Put back the state from before `__enter__`. Continue if an interrupt ended `__exit__`."""
        try:
            while self._undo:
                self._undo[-1]()  # runs again if an interrupt comes before the next line
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

    def _enter(self, context: contextlib.AbstractContextManager[Any]) -> None:
        context.__enter__()
        self._undo.append(_Leave(context))

    def _restore(self) -> None:
        is_as_before = self._number is not None and _native.settings() == self._number
        for device_type, (enabled, dtype, cache) in self._autocast.items():
            if is_as_before and device_type == "cpu":
                continue
            if _autocast(device_type) != (enabled, dtype, cache):
                self._enter(torch.autocast(device_type, dtype, enabled, cache))
        if _device() != self._device:
            self._enter(self._device or torch.device("cpu"))
        if self._current >= 0:
            self._enter(torch.cuda.device(self._current))
        if not is_as_before:
            self._restore_settings(_OF_TORCH, self._of_torch)
        self._restore_settings(_OTHERS, self._others)
        unchanged = self.effects.are_places_unchanged()
        if not unchanged:
            self._restore_training()
        # Before the effects, because they may reach the states that a tracker returns.
        for get, put, state in self._rng:
            self._set(put, state, get())
        if not unchanged:
            calls = self._calls or Calls(self._modules, may_have_hooks=False)
            calls.restore(self._undo)
        self.effects.restore(self._undo, unchanged)

    def _restore_settings(self, settings: tuple[State, ...], values: list[Any]) -> None:
        for (get, put), value in zip(settings, values, strict=True):
            now = get()
            if now != value:
                self._set(put, value, now)

    def _restore_training(self) -> None:
        known = self._known
        if known is not None:
            self._modules = known.objects().modules
            before = ((m, known.contents(vars(m))["training"]) for m in self._modules)
            self._training = list(before)
        for module, training in self._training:
            if module.training != training:
                put = functools.partial(setattr, module, "training")
                self._set(put, training, module.training)
