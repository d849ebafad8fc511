"""Measures the times of ops and of the host on this machine, for predictions of `fit`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from storage_ops._op_arguments import tensors_in
from storage_ops.checkpoint.saved.guard import by_storage
from storage_ops.checkpoint.selective.selective import is_ignored
from storage_ops.fitting.actions import Action
from storage_ops.fitting.calibration import Calibration, device_name, path_of
from storage_ops.fitting.samples import SIZES, SIZES_OF_CPU, Block, Size, Step, step, steps
from storage_ops.fitting.step import computes, traffic_of
from storage_ops.foundation.op_names import Overload
from storage_ops.foundation.ops import Args, Kwargs, facts_of, flops_of
from storage_ops.loss.planning.op_times import HostTimes, MeasuredTimes, Points, reduced
from storage_ops.progress import say, showing

_DTYPES = (torch.float32, torch.bfloat16)
# An op is left out if it was measured only with less work (operations or bytes). The time of such
# an op says nothing about large calls.
_LARGE = 1e4
_ALWAYS, _RUNS = 2, 3  # sizes that are measured in any case, and how often
_LEAST = 1e-7  # seconds of a kernel that takes no longer than its launch
# Cycles for which a GPU waits, so that the host launches all kernels of an op meanwhile: 0.1 ms.
_HEAD_START = 200_000
# Layers by which the host is measured, repetitions, and seconds after which no other one begins.
# All take five seconds, but if other processes use all processors, a hundred times as long.
_SMALL, _LAYERS, _ROUNDS, _MOST_SECONDS = SIZES[1], 3, 50, 20.0
_Call = tuple[str, str, float]  # name of the op, dtype of its result, work
_Seconds = Callable[[], float]
_Timed = tuple[_Call, float]  # and its seconds
_Sample = tuple[Size, torch.dtype, str]  # its size and dtype, and the name of the model


def calibrate(device: str | torch.device | None = None, seconds: float = 45.0) -> Calibration:
    """Measure how long ops take on this machine, so that `fit` predicts the time of its steps.

    Without a calibration, `fit` predicts from a table of the rates of devices. A calibration
    measures matrix products, convolutions, attention, norms, element functions, indexing and copies
    in float32 and bfloat16. On a CPU it also measures the work of the host for ops and checkpoints.

    The result is kept in the user's cache directory. There is a file for each device, version of
    torch, version of this package, and number of threads of a CPU. `fit` uses it for plans for that
    device, also in other processes.

    Args:
        device: "cpu" or "cuda". None: the GPU if there is one, else the CPU.
        seconds: time to measure ops. The largest sizes are left out if it is over before them. A
            CPU takes about five seconds more, for checkpoints, and up to 20 on a busy machine.

    Returns:
        The measured times, which print as a table.

    Raises:
        ValueError: `device` is not one of this machine, or `seconds` is not positive.

    Example:
        >>> calibration = storage_ops.calibrate("cpu", seconds=0.5)
        >>> calibration.op_times.seconds("aten::mm", "float32", 1e6) > 0
        True
    """
    where = _device(device)
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds < math.inf):
        raise ValueError(f"`seconds` is {seconds!r}. Expected a positive number.")
    name = device_name(where)
    path = path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)  # an error comes before the work
    gpus = [where] if where.type == "cuda" else []
    with showing("calibrate"), torch.random.fork_rng(gpus), torch.enable_grad():
        sizes = SIZES if where.type == "cuda" else SIZES[:SIZES_OF_CPU]
        calls = _measured(where, sizes, seconds)
        launch = _launch(calls, sizes[0])
        times = MeasuredTimes(_points(calls, launch))
        host = HostTimes() if where.type == "cuda" else _host_times(launch)
    calibration = Calibration(name, times, host, path)
    calibration.save()
    return calibration


def _device(device: str | torch.device | None) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        device = "cuda" if gpus else "cpu"
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        where = torch.device("meta")
    if where.type == "cuda" and gpus and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    if where.type != "cpu" and not (where.type == "cuda" and gpus and where.index < gpus):
        expected = "'cpu'" if not gpus else f"'cpu' or 'cuda', of which there are {gpus}"
        raise ValueError(
            f"`device` is {device!r}. Expected a device of this machine: {expected}. Calibrate a "
            "GPU on the machine that has it."
        )
    return where


class _Stopwatch(TorchDispatchMode):
    """Measures each op that takes time.

    Attributes:
        calls: ops in the order of their calls, and functions that return the seconds of each. On a
            GPU, they may be called once the device has finished.
        count: number of all ops, with views.
    """

    def __init__(self, on_gpu: bool, clock: _Seconds = time.perf_counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_gpu, self._clock = on_gpu, clock
        self.calls: list[tuple[_Call, _Seconds]] = []
        self.count = 0

    def __torch_dispatch__(
        self, op: Overload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = by_storage(tensors_in((args, kwargs)))
        out, seconds = self._run(lambda: op(*args, **kwargs))
        if is_ignored(op, args):
            return out
        self.count += 1
        outputs = by_storage(tensors_in(out))
        if not computes(op, inputs, outputs):
            return out
        work = flops_of(op, args, kwargs, out) or traffic_of(inputs, outputs)
        dtype = str(next(iter(outputs.values())).dtype).removeprefix("torch.")
        self.calls.append(((facts_of(op).family, dtype, float(work)), seconds))
        return out

    def _run(self, call: Callable[[], Any]) -> tuple[Any, _Seconds]:
        if self._on_gpu:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HEAD_START)
            first.record()
            out = call()
            last.record()
            return out, lambda: first.elapsed_time(last) / 1e3
        began = self._clock()
        out = call()
        taken = self._clock() - began
        return out, lambda: taken


def _measured(
    device: torch.device, sizes: Sequence[Size], seconds: float
) -> dict[_Sample, list[_Timed]]:
    """Return the ops of each sample with their seconds, repeated until the time is over.

    The smallest samples run at least `_RUNS` times, so that a pause of this process in one of the
    runs does not count.
    """
    end = time.monotonic() + seconds
    best: dict[_Sample, list[_Timed]] = {}
    for number in itertools.count():
        if number >= _RUNS and time.monotonic() > end:
            break
        for size, dtype in itertools.product(sizes, _DTYPES):
            if size not in sizes[:_ALWAYS] and time.monotonic() > end:
                continue
            say(f"width {size.width}, {str(dtype).removeprefix('torch.')}")
            for name, run in steps(size, device, dtype):
                key = size, dtype, name
                # A GPU may be too small, or a device may lack an op. Then other samples suffice.
                with contextlib.suppress(RuntimeError):
                    calls = _timed(run, device, warm=number == 0)
                    best[key] = _fastest(best.get(key, calls), calls)
    return best


def _points(calls: dict[_Sample, list[_Timed]], launch: float) -> dict[str, dict[str, Points]]:
    """Return the points of each op by its name and dtype. `launch`: seconds of an empty op."""
    samples: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for (name, dtype, work), taken in itertools.chain.from_iterable(calls.values()):
        samples[name, dtype].append((work, max(taken - launch, _LEAST)))
    points: dict[str, dict[str, Points]] = defaultdict(dict)
    for (name, dtype), pairs in samples.items():
        if max(work for work, _ in pairs) >= _LARGE:
            points[name][dtype] = reduced(pairs)
    return dict(points)


def _timed(run: Step, device: torch.device, warm: bool) -> list[_Timed]:
    """Return the ops of a step with the seconds of each."""
    if warm:
        run()
    stopwatch = _Stopwatch(device.type == "cuda")
    with stopwatch:
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [(call, seconds()) for call, seconds in stopwatch.calls]


def _fastest(first: list[_Timed], second: list[_Timed]) -> list[_Timed]:
    """Return the lower time of each op in two runs of a step. Other processes only slow ops."""
    if [call for call, _ in first] != [call for call, _ in second]:
        return second
    return [(call, min(a, b)) for (call, a), (_, b) in zip(first, second, strict=True)]


def _launch(calls: dict[_Sample, list[_Timed]], smallest: Size) -> float:
    """Return the usual time of an op whose kernel does nearly nothing."""
    times = sorted(t for (size, *_), timed in calls.items() if size == smallest for _, t in timed)
    return times[len(times) // 4]


def _host_times(launch: float) -> HostTimes:
    """Measure the host's work on a CPU for ops, and for the actions of `fit`.

    `launch`: seconds of a call of an op whose kernel does nothing.
    """
    say("checkpoints")
    discarded, first_product = ("norm2", "gelu"), (("aten::addmm", 0),)
    keep, full, selective, discard = blocks = [
        _Blocks(action)
        for action in (
            Action("keep"), Action("full"), Action("selective", first_product),
            Action("output_discard", discarded=discarded),
        )
    ]  # fmt: skip
    end = time.monotonic() + _MOST_SECONDS
    for number in range(_ROUNDS):
        if number > 0 and time.monotonic() > end:
            break
        for layers in blocks:  # in turn, so that other processes slow all of them alike
            layers.measure()
    op = keep.of_host / len(keep.calls)

    def more(layers: _Blocks) -> float:
        """Return the host's seconds for an action in a layer, besides the ops that run again."""
        again = len(layers.calls) - len(keep.calls)
        return max(layers.of_host - keep.of_host - again * op, 0.0) / _LAYERS

    region = more(full)
    decisions = 2 * keep.count_in_forward / _LAYERS
    decision = max(more(selective) - region, 0.0) / decisions
    return HostTimes(op + launch, region, more(discard) / len(discarded), decision)


class _Blocks:
    """Layers with an action.

    Attributes:
        calls: ops of a step that take time.
        count_in_forward: number of ops of a forward, with views.
    """

    def __init__(self, action: Action) -> None:
        layers = [Block(_SMALL.width) for _ in range(_LAYERS)]
        for layer in layers:
            action.apply(layer)
        model = nn.Sequential(*layers)
        x = torch.randn(_SMALL.batch, _SMALL.tokens, _SMALL.width, requires_grad=True)
        self._run = functools.partial(step, model, x)
        self._run()
        self.calls = _watched(self._run).calls
        self.count_in_forward = _watched(functools.partial(model, x)).count
        self._seconds = self._of_ops = math.inf

    def measure(self) -> None:
        """Measure a step, and its ops alone in one more step. Keep the shortest times."""
        began = time.thread_time()
        self._run()
        self._seconds = min(self._seconds, time.thread_time() - began)
        of_ops = sum(seconds() for _, seconds in _watched(self._run).calls)
        self._of_ops = min(self._of_ops, of_ops)

    @property
    def of_host(self) -> float:
        """Return the seconds of a step outside of ops."""
        return max(self._seconds - self._of_ops, 0.0)


def _watched(run: Callable[[], object]) -> _Stopwatch:
    """Run a function on the CPU, and return its ops with the seconds that this thread computes.

    The host's work is that of one thread. The time in which it waits for other threads, or for
    other processes, does not count.
    """
    with (stopwatch := _Stopwatch(on_gpu=False, clock=time.thread_time)):
        run()
    return stopwatch
