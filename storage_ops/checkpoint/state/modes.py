"""Restore a user's `TorchFunctionMode` and `TorchDispatchMode` for the recompute.

A mode can change the result of every function or op. So a recompute enters the modes of the forward
that have ended since. Modes of torch and of this package are left out: they only observe or trace,
or the code that entered them enters them again, such as a selective checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from storage_ops.checkpoint.saved.saved import fail

_C: Any = torch._C


def _is_of_user(mode: object) -> bool:
    return type(mode).__module__.partition(".")[0] not in ("torch", "storage_ops")


class Modes:
    """The modes of a user that were active around a forward, outermost first.

    The object also knows if torch calls `__torch_function__` at all. torch does not, for example,
    while it runs the `backward` method of a tensor subclass.
    """

    def __init__(
        self, calls_functions: object, functions: Iterable[Any], ops: Iterable[Any]
    ) -> None:
        """Remember whether torch calls `__torch_function__`, and the two stacks of modes."""
        self._calls_functions = calls_functions
        self._stacks = tuple(filter(_is_of_user, functions)), tuple(filter(_is_of_user, ops))

    @property
    def see_ops(self) -> bool:
        """Return True if a dispatch mode of a user is among the modes."""
        return bool(self._stacks[1])

    def again(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that enters those of the modes that are not active on entry.

        Other modes, which are active only around the backward, stay active.

        Raises:
            RuntimeError: on entry, if an outer mode has ended and an inner one is active.
        """
        if self is NO_MODES and _C._is_torch_function_enabled():
            return _NOTHING
        return self._entered()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        before = _C._get_torch_function_state()
        try:
            _C._set_torch_function_state(self._calls_functions)
            with contextlib.ExitStack() as entered:
                for first, now in zip(self._stacks, active_modes()._stacks, strict=True):
                    for mode in _missing(first, now):
                        entered.enter_context(mode)
                yield
        finally:
            _C._set_torch_function_state(before)


_NOTHING = contextlib.nullcontext()
_CALLS = _C._TorchFunctionState.ENABLED
NO_MODES = Modes(_CALLS, (), ())


def active_modes() -> Modes:
    """Return the modes of a user that are active in this thread."""
    if (
        _C._is_torch_function_enabled()
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
    ):
        return NO_MODES
    stacks = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    return Modes(_C._get_torch_function_state(), *stacks)


def _missing(first: tuple[Any, ...], now: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the modes of `first` that must be entered if the modes `now` are active."""
    active = [mode for mode in now if any(mode is other for other in first)]
    if [*map(id, active)] != [*map(id, first[: len(active)])]:
        fail(
            f"a recompute found the Python modes {_names(now)} active, and its forward ran in "
            f"{_names(first)}. Run the backward in none of these modes, or in the same modes, "
            "entered in the same order."
        )
    return first[len(active) :]


def _names(modes: tuple[Any, ...]) -> str:
    return "[" + ", ".join(type(mode).__name__ for mode in modes) + "]"
