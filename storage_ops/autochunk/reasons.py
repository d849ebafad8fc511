"""The reasons why a graph is not chunked, and their reports: errors, warnings and a log.

`STORAGE_OPS_LOGS=autochunk` prints the decisions of the auto-chunker about each node.
"""

from __future__ import annotations

import json
import logging
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import fx

log = logging.getLogger("storage_ops.autochunk")
_COUNTED = "storage_ops.autochunk messages "

_REMEDY = (
    " A step that returns its loss alone is chunked: return only the loss. For a causal model of "
    "transformers, call storage_ops.patch_causal_lm(model) instead. Its loss needs no chunks."
)


def print_if_asked() -> None:
    """Print the log to stderr if `STORAGE_OPS_LOGS` has `autochunk` among its names."""
    if "autochunk" in os.environ.get("STORAGE_OPS_LOGS", "").split(","):
        log.setLevel(logging.DEBUG)
        log.addHandler(logging.StreamHandler())


print_if_asked()


class ChunkError(RuntimeError):
    """A graph is not chunked, although `strict=True` requires it."""


class Conflict(Exception):
    """The reason why a graph, or one node of it, is not chunked."""

    def __init__(self, reason: str, node: fx.Node | None = None):
        super().__init__(reason)
        self.node = node


def describe(conflict: Conflict) -> str:
    """Return a conflict's message with its node and the line of the user's code."""
    node = conflict.node
    if node is None:
        return str(conflict)
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [i for i, line in enumerate(lines[:-1]) if line.startswith("File ")]
    where = f" ({lines[places[-1]]}: {lines[places[-1] + 1]})" if places else ""
    return f"{node.name} = {node.target}: {conflict}{where}"


def internal(error: Exception) -> str:
    """Return the reason for an unexpected error: its text, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return (
        f"internal error of the auto-chunker, {type(error).__name__}: {error}{place}. The graph is "
        "unchanged. Please report this with the output of STORAGE_OPS_LOGS=autochunk"
    )


def warn(reason: str) -> None:
    """Warn that a graph is not chunked, with the reason."""
    remedy = _REMEDY if "is returned" in reason else ""
    warnings.warn(
        f"storage_ops.autochunk: the graph is not chunked. Reason: {reason}.{remedy}", stacklevel=1
    )


class Messages:
    """Messages about a graph, which are repeated if the compiled graph comes from a cache.

    Inductor's caches store the counters that change while a graph is compiled, and add them again
    with the cached graph. So each message becomes a counter whose name is its text.
    """

    def __init__(self) -> None:
        self.text: str | None = None

    @contextmanager
    def collect(self) -> Iterator[list[str]]:
        """Collect the lines that are logged in a with block, and reasons appended to the list."""
        lines: list[str] = []
        reasons: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        log.addHandler(handler)
        try:
            yield reasons
        finally:
            log.removeHandler(handler)
        self.text = json.dumps([lines, reasons])

    def count(self) -> None:
        """Count the messages, for the first graph that Inductor compiles from a joint graph."""
        from torch._dynamo.utils import counters

        if self.text:
            counters["inductor"][_COUNTED + self.text] += 1
            self.text = ""

    def repeat(self) -> None:
        """Log and warn again with the messages of a cached graph.

        Do nothing if the graph was just compiled.
        """
        from torch._dynamo.utils import counters

        for key in [key for key in counters["inductor"] if key.startswith(_COUNTED)]:
            del counters["inductor"][key]
            if self.text is None:
                lines, reasons = json.loads(key.removeprefix(_COUNTED))
                for line in lines:
                    log.debug("%s", line)
                for reason in filter(None, reasons):
                    warn(reason)
