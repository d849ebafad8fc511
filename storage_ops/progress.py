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

_DELAY = 1.0  # seconds before a message is shown
_say: Callable[[str], None] | None = None  # shows the current work of the running call


@contextlib.contextmanager
def showing(task: str) -> Iterator[None]:
    """Show on standard error what a with block does, and for how long.

    `say` names the current work. Nothing is shown in the first second, or if standard error is not
    a terminal. Nothing is shown in a worker process, in a rank other than the first, or outside of
    the main thread. The same is true while torch compiles or captures a CUDA graph. A nested block
    counts as part of the outer one.
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
                show = stack.enter_context(_on_terminal(task, began))
            if show is not None:
                show(doing)

        _say = start_late
        try:
            yield
        finally:
            _say = None


def say(doing: str) -> None:
    """Name the current work, such as a layer, in the progress message."""
    if _say is not None and threading.current_thread() is threading.main_thread():
        _say(doing)


def _is_seen() -> bool:
    import torch  # imported here, because commands that plan for a GPU need no torch

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
def _on_terminal(work: str, began: float) -> Iterator[Callable[[str], None]]:
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
    task = progress.add_task(work, total=None)
    progress.tasks[0].start_time = began
    with progress:
        yield lambda doing: progress.update(task, description=f"{work}: {doing}")
