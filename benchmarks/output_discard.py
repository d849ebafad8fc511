"""Memory and time of output discarding against plain autograd and torch.utils.checkpoint.

Cases are plain autograd, the producer under torch.utils.checkpoint, and its output discarded. The
output is bound again without a copy, or by a copy as without a native library. Classes of other
packages are cases too, if they are installed and the block has the same region for them.

Peaks at the published size are simulated by storage_ops.memory.estimate, with parameters and input,
beside the peaks that OLMo-core publishes. The other peaks and the times are measured, on a CPU at a
reduced size and without parameters and input. Times are ratios of medians within one process. On a
CPU, they are CPU times of one thread, because wall time is unreliable on a shared machine. "host
us" is the time that one region with tiny tensors adds to forward and backward.

`--only host_overhead` measures only that time, and steps of ten tiny blocks with each kind of
checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import storage_ops
from benchmarks import _host_overhead
from benchmarks._blocks import BLOCKS, PUBLISHED_MB, WAYS, Block, stack, step
from benchmarks._discarding import Make, by_hook, peers
from benchmarks._harness import (
    MIB,
    expect,
    finish,
    interleave,
    milliseconds,
    parser,
    peak,
    ratios,
    skip,
)
from storage_ops.storage.kernels import storage_path

PLAIN, CHECKPOINT, DISCARD = WAYS
COPY = "discard, copy"
PUBLISHED_SIZE = {"d_model": 2048, "d_ff": 8192, "batch": 2, "tokens": 2048}
CPU_SIZE = {"d_model": 256, "d_ff": 1024, "batch": 2, "tokens": 256}
ROUNDS_OF_A_REGION, CALLS_OF_A_REGION = 21, 100
HOST = "host_overhead"  # the name for `--only` of the host time of regions


def path_of(way: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager with the storage path of a case."""
    return storage_path("copy") if way == COPY else contextlib.nullcontext()


def run_of(way: str) -> Callable[[Block, Tensor], Tensor]:
    """Return the function that runs a block in a case."""
    return WAYS[DISCARD if way == COPY else way]


def build(
    name: str, layers: int, size: dict[str, int], dtype: torch.dtype, device: str
) -> tuple[nn.ModuleList, Tensor]:
    """Return a stack and its input."""
    blocks = stack(name, layers, size["d_model"], size["d_ff"], dtype, device)
    shape = (size["batch"], size["tokens"], size["d_model"])
    return blocks, torch.randn(shape, dtype=dtype, device=device).requires_grad_()


def simulated(name: str, layers: int, dtype: torch.dtype) -> dict[str, float]:
    """Return the simulated peak MiB of every case at the published size on a GPU."""
    peaks = {}
    for way in (*WAYS, COPY):
        with path_of(way):
            blocks, x = build(name, layers, PUBLISHED_SIZE, dtype, "meta")
            estimate = storage_ops.memory.estimate(step, blocks, x, run_of(way))
            peaks[way] = round(estimate.peak_bytes / MIB, 1)
    return peaks


def clean_step(blocks: nn.ModuleList, x: Tensor, run: Callable[[Block, Tensor], Tensor]) -> None:
    """Run a step without gradients of the previous step."""
    x.grad = None
    blocks.zero_grad()
    step(blocks, x, run)


def _by_peer(make: Make, block: Block, x: Tensor) -> Tensor:
    return block.hooked(make, x)


def _is_right(
    name: str, blocks: nn.ModuleList, x: Tensor, run: Callable[[Block, Tensor], Tensor]
) -> bool:
    """Return True if a case has plain autograd's gradient. It runs on a copy that it may free."""
    gradients = []
    for run_once in (run_of(PLAIN), run):
        copy = x.detach().clone().requires_grad_()
        try:
            clean_step(blocks, copy, run_once)
        except RuntimeError as error:
            skip(name, str(error).splitlines()[0])
            return False
        gradients.append(copy.grad)
    if not torch.allclose(*gradients, rtol=1e-3):  # type: ignore[arg-type]
        skip(name, "its gradient is not that of plain autograd")
        return False
    return True


def measured(
    name: str, layers: int, size: dict[str, int], dtype: torch.dtype, device: str, repeats: int,
    makes: dict[str, Make],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return peak MiB above parameters and input, and times, of all cases, run interleaved."""
    blocks, x = build(name, layers, size, dtype, device)
    label = f"{name} x{layers}"
    cases = {way: partial(clean_step, blocks, x, run_of(way)) for way in WAYS}
    if type(blocks[0]).discarded is Block.discarded:
        for peer, make in makes.items():
            run = partial(_by_peer, make)
            if _is_right(f"{peer}, {label}", blocks, x, run):
                cases[peer] = partial(clean_step, blocks, x, run)
    labels = [*cases, COPY]
    seconds = interleave(dict(cases), repeats, device, label)
    result: dict[str, dict[str, Any]] = {}
    for way in labels:
        with path_of(way):
            if way == COPY:
                cases = {PLAIN: cases[PLAIN], CHECKPOINT: cases[CHECKPOINT], COPY: cases[DISCARD]}
                seconds = interleave(dict(cases), repeats, device, label)
            x.grad = None
            blocks.zero_grad()
            row: dict[str, Any] = {f"time / {PLAIN}": round(ratios(seconds, PLAIN)[way][0], 3)}
            median, least, most = ratios(seconds, CHECKPOINT)[way]
            row |= {f"time / {CHECKPOINT}": round(median, 3)}
            row |= {"least - most": f"{least:.2f} - {most:.2f}"}
            result[way] = {**row, "peak (MiB)": peak(cases[way], device)}
    return result


# The last op of a tiny region. Autograd saves the input of gelu. So a checkpoint that keeps outputs
# ends its recompute before gelu, but a discarded output needs it. Of sigmoid, autograd saves the
# output.
ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "sigmoid": torch.sigmoid,
}


def region_overhead(makes: dict[str, Make], end: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Return the microseconds that one region with tiny tensors adds to forward and backward."""
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def producer(x: Tensor) -> Tensor:
        return end(x @ w)

    def consumer(h: Tensor) -> Tensor:
        return h @ w

    forwards = {
        PLAIN: lambda x: consumer(producer(x)),
        CHECKPOINT: lambda x: consumer(checkpoint(producer, x, use_reentrant=False)),
        "output_discard()": storage_ops.output_discard(producer, consumer),
    }
    for way, make in {DISCARD: storage_ops.OutputDiscardCheckpoint, **makes}.items():
        forwards[way] = partial(by_hook, make, producer, consumer)

    def many(forward: Callable[[Tensor], Tensor]) -> None:
        for _ in range(CALLS_OF_A_REGION):
            forward(x).sum().backward()

    cases = {name: partial(many, forward) for name, forward in forwards.items()}
    runs = interleave(dict(cases), ROUNDS_OF_A_REGION, label="tiny region")
    micros = {k: [cpu / CALLS_OF_A_REGION * 1e6 for _, cpu in v] for k, v in runs.items()}
    base = micros.pop(PLAIN)
    return {
        way: round(statistics.median(a - b for a, b in zip(times, base, strict=True)), 1)
        for way, times in micros.items()
    }


def host_overhead(device: str) -> Iterator[dict[str, Any]]:
    """Yield the time of steps with checkpoints over that of the plain step, nearly all in Python.

    On a CPU, it is the CPU time of one thread. On a GPU, it is the time of the device, which waits
    for the host.
    """
    for size, ((width, batch, tokens), rounds) in _host_overhead.SIZES.items():
        cases = _host_overhead.cases(width, batch, tokens, device)
        runs = interleave(cases, rounds, device, f"host, {size}")
        plain = milliseconds(runs[PLAIN])
        for case, (median, least, most) in ratios(runs, PLAIN).items():
            yield {
                "shape": f"{_host_overhead.LAYERS} SwiGLU blocks, {size}",
                "case": case,
                "host time / plain": round(median, 2),
                "least - most": f"{least:.2f} - {most:.2f}",
                "plain (ms)": plain,
            }


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all blocks, then the times of regions with tiny tensors."""
    device, repeats = arguments.device, arguments.repeats
    size = PUBLISHED_SIZE if device == "cuda" else CPU_SIZE
    dtype = getattr(torch, arguments.dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    makes = peers(device)
    blocks = [name for name in arguments.only if name in BLOCKS]
    host = HOST in arguments.only
    expect(2 * len(blocks) * len(arguments.layers) + host * (len(_host_overhead.SIZES) + len(ENDS)))
    for name in blocks:
        for layers in arguments.layers:
            fp32, bf16 = (simulated(name, layers, t) for t in (torch.float32, torch.bfloat16))
            real = measured(name, layers, size, dtype, device, repeats, makes)
            published = PUBLISHED_MB[name] if layers == 8 and name in PUBLISHED_MB else ("",) * 4
            theirs = dict(zip(fp32, published, strict=True))
            for way, row in real.items():
                simulated_peaks = {
                    "GPU, fp32 (MiB)": fp32[way],
                    "GPU, fp32, published (MiB)": theirs[way],
                    "GPU, bf16 (MiB)": bf16[way],
                } if way in fp32 else {}  # fmt: skip
                yield {"shape": f"{name} x{layers}", "case": way, **row, **simulated_peaks}
    if host:
        yield from host_overhead(device)
        for name, end in ENDS.items():
            for way, micros in region_overhead(makes, end).items():
                yield {"shape": f"tiny region, {name}", "case": way, "host us": micros}
    torch.set_num_threads(threads)


def main() -> None:
    """Simulate, measure, write and print."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="*", choices=[*BLOCKS, HOST])
    options.add_argument("--layers", nargs="*", type=int)
    options.add_argument("--dtype", default="float32", help="the dtype of measured cases")
    arguments = options.parse_args()
    quick = arguments.quick
    arguments.only = arguments.only or (["swiglu", "rms_norm", HOST] if quick else [*BLOCKS, HOST])
    arguments.layers = arguments.layers or ([8] if quick else [1, 8])
    finish("output_discard", all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
