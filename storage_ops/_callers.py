"""Finds the line of the user's program that led to a call, for errors and warnings."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType, TracebackType

import torch

_TORCH = os.path.dirname(torch.__file__)
_NOT_THE_CALLERS = (
    _TORCH + os.sep,
    os.path.dirname(__file__) + os.sep,
    os.path.dirname(os.__file__) + os.sep + "contextlib.py",
    "<",
)
_LIBRARIES = ("site-packages", "dist-packages")


def users_place(
    at: FrameType | TracebackType | None, ignored: tuple[str, ...] = _NOT_THE_CALLERS
) -> tuple[FrameType, int] | None:
    """Return the innermost frame outside of torch and this package, and its line.

    Args:
        at: the innermost frame to look at, or the traceback of an exception.
        ignored: prefixes of file names that are not the caller's.
    """
    place = None
    while at is not None:
        frame = at.tb_frame if isinstance(at, TracebackType) else at
        if not frame.f_code.co_filename.startswith(ignored):
            place = frame, at.tb_lineno if isinstance(at, TracebackType) else at.f_lineno
            if isinstance(at, FrameType):
                break
        at = at.tb_next if isinstance(at, TracebackType) else at.f_back
    return place


def _installed() -> tuple[str, ...]:
    """Return the prefixes of the names of installed files.

    A virtual environment can take torch and the trainer from different folders: from the system's
    Python, or from a path that a program adds later.
    """
    folders = {path for path in sys.path if os.path.basename(path) in _LIBRARIES}
    return tuple(f"{path}{os.sep}" for path in (os.path.dirname(_TORCH), *folders))


def warn_caller(message: str) -> None:
    """Warn with a UserWarning that shows a line of the user's program.

    Lines of installed libraries, such as a trainer, are shown only if there is no other.
    """
    # Skip this frame: a frame in its own variable keeps the variables of all its callers alive.
    caller = sys._getframe(1)
    place = users_place(caller, (*_NOT_THE_CALLERS, *_installed())) or users_place(caller)
    if place is None:
        warnings.warn(message, stacklevel=2)
        return
    frame, line = place
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    module = str(names.get("__name__", "__main__"))
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, line, module, registry)
