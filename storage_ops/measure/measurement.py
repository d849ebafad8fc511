"""Measures peak memory and memory over time for a block of code."""

from __future__ import annotations

import gc
import inspect
import os
import threading
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from storage_ops.checkpoint.layers.config_policy import class_of, uncompiled
from storage_ops.foundation.ledger import levels
from storage_ops.measure.owners import Marks, history
from storage_ops.quantities import parse_bytes

# CPU activity includes the memory events of every device. No other activity is requested: CUPTI,
# which records GPU work and CUDA runtime calls, slows a block down and serves one profiler at a
# time. If torch has no filters, runtime calls count as CPU activity.
_FILTERS = "activity_filters" in inspect.signature(torch.autograd.profiler.profile).parameters
_WITHOUT_CUPTI = {ProfilerActivity.CPU: ["CPU_OP", "CPU_INSTANT_EVENT", "USER_ANNOTATION"]}
ACTIVITIES: list[Any] = [_WITHOUT_CUPTI if _FILTERS else ProfilerActivity.CPU]
_BEGIN = "storage_ops measure"  # the first event of a measurement
# Held by the measure that runs. Two profilers in two threads would end the process.
_running = threading.Lock()


@dataclass(frozen=True)
class Sample:
    """Bytes above the level at entry, from a moment on."""

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Life:
    """One allocation of a timeline.

    Attributes:
        owner: "parameters", "gradients", "optimizer state", "activations of " and the name of a
            module, or "temporaries". An estimate also has "inputs" and others. "" if it is not
            known.
        nbytes: its size in bytes.
        start: the index of the first sample of the timeline with it.
        end: the index of the first sample without it; None if it is in memory at the end.
    """

    owner: str
    nbytes: int
    start: int
    end: int | None


def numbered(device: str | torch.device) -> torch.device:
    """Return a named device if torch finds it. "cuda" is the current GPU, and "cpu:0" is "cpu".

    Raises:
        ValueError: the name is not a device, or the device does not exist.
    """
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"`device` is {device!r}. Expected 'cpu' or a CUDA device.") from None
    if torch_device.type == "cpu":
        return torch.device("cpu")  # the device of each tensor on it, which has no number
    if torch_device.type != "cuda":
        return torch_device
    if not torch.cuda.is_available():
        raise ValueError(f"`device` is {device!r}, but torch finds no GPU. Expected 'cpu'.")
    if torch_device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if torch_device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(
            f"`device` is {device!r}. Expected a number below {count}, the number of GPUs."
        )
    return torch_device


@dataclass
class Measurement:
    """The memory that a `measure` block allocated. Raises AttributeError before the block ends.

    Attributes:
        peak_bytes: the highest level above the level at entry.
        kept_bytes: the level at exit above the level at entry; negative if the block freed more.
        timeline: the level after every allocation and release, in order.
        lives: every allocation with its owner, its bytes, and its begin and end.
        subject: what was measured, such as the class of the model. "" if it is not known.
        device: where it was measured, such as "cpu" or "h100".
    """

    peak_bytes: int = field(default_factory=int)  # a plain default could be read before the end
    kept_bytes: int = field(default_factory=int)
    timeline: list[Sample] = field(default_factory=list, repr=False)
    lives: list[Life] = field(default_factory=list, repr=False)
    subject: str = field(default_factory=str, repr=False, compare=False, kw_only=True)
    device: str = field(default_factory=str, repr=False, compare=False, kw_only=True)

    def __repr__(self) -> str:
        if not vars(self):
            return "Measurement(of a block that has not ended)"
        return f"Measurement(peak_bytes={self.peak_bytes}, kept_bytes={self.kept_bytes})"

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            if name in {f.name for f in fields(Measurement)}:
                raise AttributeError(
                    f"`{name}` is known only after the block of measure has ended. Read it after "
                    "the block."
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def plot(self, path: str | os.PathLike[str], budget: int | float | str | None = None) -> None:
        """Draw memory over time into a file, in a colour for each owner.

        Owners whose names differ only in numbers, such as layers, have one colour. The seven owners
        with most bytes at the peak have their own colours, and all others share one. The x axis is
        the share of allocations and releases, because the seconds of an estimate are not those of a
        GPU.

        Args:
            path: the file. Its ending chooses the format. ".html" is a page of plotly that shows
                numbers under the pointer and needs no network. ".pickle" is a file for PyTorch's
                memory visualizer (pytorch.org/memory_viz). Any other is an image of matplotlib,
                such as ".png" or ".svg".
            budget: bytes, or text such as "80GiB", at which a line is drawn, unless
                it is more than four times the peak. None: no line.

        Raises:
            ModuleNotFoundError: the drawing library is not installed. The error names the library
                and the command that installs it.
            ValueError: nothing was allocated, matplotlib does not know the ending, or `budget` is
                no number of bytes.

        Example:
            >>> mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
            >>> with storage_ops.memory.measure(model=mlp) as m:
            ...     mlp(torch.randn(32, 64)).sum().backward()
            >>> m.plot("memory.png")
        """
        from storage_ops.measure.plot import save

        save(self, path, None if budget is None else parse_bytes(budget, "`budget`"))


class measure:
    """Context manager that measures the memory of a block.

    On the CPU, allocations of torch in this thread count, from the events of torch.profiler.
    Buffers inside math libraries are not seen. torch knows the size of a block only if it was
    allocated inside of a `measure`. The release of another block is not seen, or with the size of
    an earlier block at its address. On CUDA, the peak is that of the caching allocator, and the
    timeline comes from the same events. The block runs somewhat slower, so do not time it.

    Args:
        device: the device whose memory is measured, "cpu" or a CUDA device.
        model: a module that runs in the block, without compiled parts. Each allocation then has an
            owner, and `Measurement.plot` shows the owners. An owner is the gradients of parameters,
            the state of an optimizer, or a module. It is the innermost module whose call made the
            allocation and returned before it was freed.

    Raises:
        TypeError: model is no module. ValueError: another device, or a compiled module.
        RuntimeError: a torch profiler is running already, or one that began inside the block has
            ended the measurement.

    Example:
        >>> with storage_ops.memory.measure(device="cpu") as m:
        ...     kept = torch.empty(256) + torch.empty(256)
        >>> m.peak_bytes, m.kept_bytes
        (3072, 1024)
    """

    def __init__(self, device: str | torch.device = "cpu", model: nn.Module | None = None) -> None:
        self._device = numbered(device)
        if self._device.type not in ("cpu", "cuda"):
            raise ValueError(f"measure: `device` is {device!r}. Expected 'cpu' or a CUDA device.")
        self._marks = Marks(model)
        self._subject = "" if model is None else class_of(uncompiled(model)).__name__
        self._entry_bytes: int | None = None  # bytes of the allocator of a GPU

    def __enter__(self) -> Measurement:
        # torch's variable knows the profilers of all threads.
        if torch.autograd.profiler._is_profiler_enabled or not _running.acquire(blocking=False):
            raise RuntimeError(
                "measure: a torch profiler or another measure is running, perhaps in another "
                "thread, and torch has one profiler at a time. End it first."
            )
        try:
            return self._begin()
        except BaseException:
            _running.release()
            raise

    def _begin(self) -> Measurement:
        self._result = Measurement.__new__(Measurement)  # has no numbers until the end
        gc.collect()  # garbage of earlier code must not be freed inside the block
        # Otherwise Kineto reports each start and stop on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._entry_bytes = torch.cuda.memory_allocated(self._device)
        # torch 2.10 and 2.11 warn about events that are not accumulated, even in a first cycle.
        self._profile = profile(activities=ACTIVITIES, profile_memory=True, acc_events=True)
        self._marks.__enter__()
        try:
            self._profile.__enter__()
            # Otherwise all events are read in Python when the profiler stops. They are not needed
            # here.
            profiler: Any = self._profile.profiler
            profiler.acc_events = False
            with torch._C._profiler._RecordFunctionFast(_BEGIN):  # no op, as record_function is
                pass
        except BaseException as error:
            self._marks.close()
            if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                self._profile.__exit__(type(error), error, error.__traceback__)
            raise
        return self._result

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end(kind, error, trace)
        finally:
            _running.release()

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        events: list[Any] = []
        try:
            self._marks.close()
        finally:
            if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                self._profile.__exit__(kind, error, trace)
                profiler: Any = self._profile.profiler
                events = profiler.kineto_results.experimental_event_tree()
            else:  # code in the block has ended the profiler, but not torch's record of it
                torch.autograd.profiler._set_is_profiler_enabled(False)
        del self._profile
        if not any(event.name == _BEGIN for event in events):
            if error is not None:
                return
            raise RuntimeError(
                "measure: a torch profiler began inside the block, and torch has one profiler at a "
                "time. So the block was not measured. Begin no other profiler in it."
            )
        self._read(events)
        if self._entry_bytes is not None:
            allocated = torch.cuda.memory_allocated(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            self._result.kept_bytes = allocated - self._entry_bytes
            self._result.peak_bytes = peak - self._entry_bytes

    def _read(self, events: list[Any]) -> None:
        changes, allocations = history(events, self._device.type, self._device.index)
        after = levels(nbytes for _, nbytes in changes)
        timeline = [
            Sample((start - changes[0][0]) / 1e9, level)
            for (start, _), level in zip(changes, after[1:], strict=True)
        ]
        lives = [Life(t.owner, t.nbytes, t.start, t.end) for t in allocations]
        result = Measurement(
            max(after), after[-1], timeline, lives, subject=self._subject, device=str(self._device)
        )
        vars(self._result).update(vars(result))
