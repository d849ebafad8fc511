"""Rates at which devices multiply matrices and move memory, for the planner's predictions."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from storage_ops.loss.planning.op_times import HostTimes, MeasuredTimes
from storage_ops.matmul import scratch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Rates:
    """Sustained rates of a device.

    Attributes:
        name: the name that users know.
        flops16, flops32, flops64: floating-point operations per second of matrix products.
        bandwidth: bytes per second to and from memory.
        cache_bytes: a slice of the weight up to this size is read from memory once.
        launch_seconds: fixed cost of one operation.
        overlaps: whether arithmetic and memory traffic of a product overlap.
        few_rows16: 16-bit products of n rows take 1 + few_rows16 / n times as long.
        copying: with the package's own products, copying a number of an operand takes as long as
            this many multiplications.
        merge_seconds: assumed time for ranks to merge some rows, in two collectives of a few
            numbers each.
        host: seconds of the host that add to the time of ops. 0 if the device works meanwhile.
        link: bytes per second to and from host memory, in each direction at the same time. 0 if the
            device has no other memory.
        fuses: whether code is compiled. Then elementwise ops and ops on rows move no bytes of their
            own.
        threads: threads that a GPU runs at a time.
        memory: usable bytes of a GPU, in whole GiB; 0 for a CPU. A GPU that is present has the
            memory that its driver reports. In the table, an H200's is measured, and
            docs/largest-that-fits.md has the sources of the others.
        op_times: measured times of ops, for predictions of `fit`. Ops without them take the time
            that follows from the rates. Plans of the loss do not use them, so that a calibration
            changes no result.
    """

    name: str
    flops16: float
    flops32: float
    flops64: float
    bandwidth: float
    cache_bytes: int
    launch_seconds: float
    overlaps: bool
    few_rows16: float = 0.0
    copying: float = 10.0
    merge_seconds: float = 1e-3
    host: HostTimes = field(default_factory=HostTimes)
    link: float = 0.0
    fuses: bool = False
    threads: int = 0
    memory: int = 0
    op_times: MeasuredTimes = field(default_factory=MeasuredTimes, compare=False)

    @property
    def usable(self) -> int:
        """Bytes of a GPU that a step can use: its memory without the CUDA context. 0 for a CPU."""
        return max(self.memory - CONTEXT_BYTES, 0)

    def flops(self, itemsize: int, upcast: bool = False) -> float:
        """Return the rate of products of elements of this size, in operations per second."""
        if itemsize == 8:
            return self.flops64
        return self.flops32 if itemsize == 4 or upcast else self.flops16


def _gpu(
    name: str, gib: int, flops16: float, flops32: float, bandwidth: float, cache: int, link: float,
    threads: int, fewer64: int = 2,
) -> Rates:  # fmt: skip
    """Return the rates of a GPU.

    Args:
        gib: its memory in GiB.
        fewer64: the slowdown of float64 products relative to float32.
    """
    return Rates(name, flops16, flops32, flops32 / fewer64, bandwidth, cache, 5e-6, True,
                 merge_seconds=6e-5, link=link, threads=threads, memory=gib << 30)  # fmt: skip


# Host times of a CPU: measured by `calibrate` on an AMD EPYC with AVX-512, with the C++ code of
# regions and policies.
_HOST = HostTimes(op=7e-6, region=1.5e-4, discard=2.5e-4, decision=1.5e-6)
# Both CPUs: two cores, torch 2.13. The rates of an AMD EPYC with AVX-512 are fitted to the times of
# the products alone, in chunks and in slices. On an Intel Xeon with AMX, plans by its rates were
# the fastest. Processors of one kind have similar ratios of rates, and plans depend on ratios only.
_AVX512 = Rates("cpu", 390e9, 200e9, 90e9, 14e9, 1 << 20, 2e-5, False, 6.0, host=_HOST)
_AMX = Rates(
    "cpu with AMX", 1100e9, 340e9, 170e9, 22e9, 2 << 20, 2e-5, False, copying=150.0, host=_HOST
)

# Measured times, in the format of a calibration (`Calibration.op_times`). The products are those of
# the floor in benchmarks/results/nvidia-h200/linear_cross_entropy.json, a third of it each. The
# copies are in row_kernel.json, with bytes read and written. No other op was measured alone.
_OF_H200 = MeasuredTimes(
    {
        "aten::mm": {"bfloat16": ((1.074e12, 1.335e-3), (4.304e12, 5.451e-3))},
        "aten::copy_": {
            "bfloat16": ((5.243e8, 1.25e-4), (8.234e8, 1.94e-4), (2.101e9, 4.92e-4)),
            "float32": ((1.049e9, 2.47e-4), (1.647e9, 3.86e-4), (4.203e9, 9.78e-4)),
        },
    }
)

# Matrix products: NVIDIA's data sheets (dense peaks) times 0.8, which large bf16 products reach.
# fp32 runs on the ordinary cores (TF32 is off by default). Memory: data sheet times 0.9. Both rates
# of the H200 were measured (790 TFLOP/s, 4.3 TB/s). Links: PCIe x16 of the generation in the data
# sheet, half of its figure for both directions together (Gen6 256 GB/s, Gen5 128, Gen4 64), times
# 0.8. A GH200, GB200 or GB300 has NVLink-C2C to its Grace CPU (900 GB/s for both directions). Two
# GPUs of a GB200 or GB300 share the link. Rates are for one GPU, and for the GH200 with HBM3.
# Threads: multiprocessors of the data sheet, times the threads of one.
_GEN6, _GEN5, _GEN4, _C2C = 0.8 * 128e9, 0.8 * 64e9, 0.8 * 32e9, 0.8 * 450e9
GPUS = {
    "h200": replace(
        _gpu("H200", 139, 790e12, 54e12, 4.3e12, 25 << 20, _GEN5, 132 * 2048), op_times=_OF_H200
    ),
    "h100": _gpu("H100 SXM", 79, 790e12, 54e12, 3.0e12, 25 << 20, _GEN5, 132 * 2048),
    "gh200": _gpu("GH200", 94, 790e12, 54e12, 3.6e12, 25 << 20, _C2C, 132 * 2048),
    "b200": _gpu("B200", 178, 1800e12, 64e12, 7.2e12, 60 << 20, _GEN5, 148 * 2048),
    "gb200": _gpu("GB200", 184, 2000e12, 72e12, 7.2e12, 60 << 20, _C2C / 2, 148 * 2048),
    "b300": _gpu("B300", 267, 1800e12, 60e12, 7.2e12, 60 << 20, _GEN6, 160 * 2048, 60),
    "gb300": _gpu("GB300", 276, 2000e12, 64e12, 7.2e12, 60 << 20, _C2C / 2, 160 * 2048, 60),
    "a100": _gpu("A100 80GB", 79, 250e12, 15.6e12, 1.8e12, 20 << 20, _GEN4, 108 * 2048),
    "l40s": _gpu("L40S", 44, 290e12, 73e12, 0.78e12, 48 << 20, _GEN4, 142 * 1536, 64),
    "rtx4090": _gpu("RTX 4090", 23, 132e12, 66e12, 0.9e12, 36 << 20, _GEN4, 128 * 1536, 64),
    "rtx5090": _gpu("RTX 5090", 31, 168e12, 84e12, 1.6e12, 48 << 20, _GEN5, 170 * 1536, 64),
}
DEVICES = ("cpu", *GPUS)


def _letters(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return re.sub("[^a-z0-9]", "", name.lower())


_KEYS = {_letters(name): key for key, rates in GPUS.items() for name in (key, rates.name)}
# Ordered by rent in 2026, the cheapest first. docs/largest-that-fits.md has the price lists. No
# list has the GH200, GB200 or GB300 with the others, so their places are estimated.
BY_PRICE = (
    "rtx4090", "rtx5090", "l40s", "a100", "h100", "gh200", "h200", "b200", "gb200", "b300", "gb300"
)  # fmt: skip
CONTEXT_BYTES = 512 << 20  # roughly the memory of the CUDA context and of libraries
DEFAULT_GPU = "h100"  # for predictions without a named device or a GPU in use


def key_of(device: object) -> str:
    """Return the name in DEVICES for a name such as "RTX 4090", and other text in lower case."""
    return _KEYS.get(_letters(str(device)), str(device).lower())


def named(name: str) -> Rates:
    """Return the rates of one of DEVICES."""
    key = key_of(name)
    if key != "cpu":
        return GPUS[key]
    return _AMX if scratch.kind() == "amx_bf16" else _AVX512


def of_gpu(name: str) -> Rates | None:
    """Return the rates of a GPU from its driver's name, such as "NVIDIA H100 80GB HBM3"."""
    # "GH200" also contains "H200".
    longest = max((key for key in GPUS if key in _letters(name)), key=len, default=None)
    return None if longest is None else GPUS[longest]


_stands_for: ContextVar[Rates | None] = ContextVar("_stands_for", default=None)


@contextlib.contextmanager
def standing_for(gpu: Rates | None) -> Iterator[None]:
    """Plan for this GPU, wherever tensors are, in a with block. For simulations."""
    before = _stands_for.set(gpu)
    try:
        yield
    finally:
        _stands_for.reset(before)


def device_kind(t: Tensor) -> str:
    """Return the kind of device that a tensor is on or represents, such as "cpu"."""
    return t.device.type if _stands_for.get() is None else "cuda"


def on_gpu(t: Tensor) -> bool:
    """Return True if a tensor is on a CUDA device, or represents one that is."""
    return device_kind(t) == "cuda"


def rates_of(device: torch.device) -> Rates:
    """Return the rates for plans on a device.

    An unknown GPU has the rates of an A100.
    """
    return _stands_for.get() or _rates_at(device)


def threads_of(device: torch.device) -> int:
    """Return how many threads a GPU runs at a time. An unknown GPU counts as the default one."""
    stand_in = _stands_for.get()
    if stand_in is not None:
        return stand_in.threads
    return _threads_at(device) if device.type == "cuda" else GPUS[DEFAULT_GPU].threads


@functools.cache
def _threads_at(device: torch.device) -> int:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count * properties.max_threads_per_multi_processor


@functools.cache
def _rates_at(device: torch.device) -> Rates:
    import torch

    if device.type != "cuda":
        return named("cpu")
    properties = torch.cuda.get_device_properties(device)
    rates = of_gpu(properties.name) or GPUS["a100"]
    # GPUs of one name can differ in memory, and so can the parts that MIG divides a GPU into.
    # Whole GiB agree with the table, so a GPU has the same plans when it is named in advance.
    memory = properties.total_memory >> 30 << 30
    return rates if memory == rates.memory else replace(rates, memory=memory)


def has_row_kernel_for(t: Tensor) -> bool:
    """Return True if the row kernel is native on a tensor's device, or on the GPU it represents.

    If the plan is for a GPU of another machine, it is assumed to have the kernels.
    """
    return _stands_for.get() is not None or has_row_kernel(t.device.type)


@functools.cache
def has_row_kernel(device: str) -> bool:
    """Return True if the row kernel is native on a kind of device, not plain torch."""
    import torch

    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return key is not None and has_kernel("storage_ops::_cross_entropy_rows", key)
