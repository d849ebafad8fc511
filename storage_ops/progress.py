"""Shows on a terminal what a call that takes seconds is doing."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

_DELAY = 1.0  # seconds that a call may take before anything is shown
_say: Callable[[str], None] | None = None  # of the call that is shown


@contextlib.contextmanager
def showing(what: str) -> Iterator[None]:
    """Show on the standard error what a with block does, as `say` names it, and for how long.

    Nothing is shown in the first second, or if the standard error is not a terminal. Nothing is
    shown in a worker process, in a rank other than the first, or in a thread other than the main
    one. The same is true while torch compiles and while a CUDA graph is captured. A block within
    another is part of it.
    """
    global _say
    if _say is not None or not _is_seen():
        yield
        return
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        show: Callable[[str], None] | None = None

        def start_late(doing: str) -> None:
            nonlocal show
            if show is None and time.monotonic() - began > _DELAY:
                show = stack.enter_context(_on_terminal(what, began))
            if show is not None:
                show(doing)

        _say = start_late
        try:
            yield
        finally:
            _say = None


def say(doing: str) -> None:
    """Name the current work, such as a layer. Long calls do so from time to time."""
    if _say is not None and threading.current_thread() is threading.main_thread():
        _say(doing)


def _is_seen() -> bool:
    import torch  # here, since commands that plan for a GPU go without

    return (
        sys.stderr is not None
        and sys.stderr.isatty()
        and threading.current_thread() is threading.main_thread()
        and multiprocessing.parent_process() is None
        and os.environ.get("RANK", "0") == "0"
        and not torch.compiler.is_compiling()
        and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        and importlib.util.find_spec("rich") is not None
    )


@contextlib.contextmanager
def _on_terminal(what: str, began: float) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_interactive,
        get_time=time.monotonic,
    )
    task = progress.add_task(what, total=None)
    progress.tasks[0].start_time = began
    with progress:
        yield lambda doing: progress.update(task, description=f"{what}: {doing}")
