"""Forward and backward of linear cross-entropy: time over its matrix products, and peak memory.

The floor is the three products of the unchunked loss at the same shape and dtype, in the same run.
Times are process CPU times; peaks are those of allocations above inputs, gradients included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import storage_ops
from benchmarks._harness import finish, interleave, parser, ratios

MIB = 1 << 20
SHAPES = {"S1": (2048, 768, 50257), "S2": (1024, 2048, 32000), "S3": (512, 1024, 128256)}


def cases(x: Tensor, w: Tensor, target: Tensor) -> dict[str, Callable[[], object]]:
    """Every way to compute the loss and both gradients, and the floor."""
    logits_bytes = len(x) * len(w) * x.element_size()
    g = torch.randn(len(x), len(w)).to(x.dtype)

    def floor() -> object:
        a, b = x.detach(), w.detach()
        return a @ b.t(), g @ b, g.t() @ a

    def step(loss: Callable[..., Tensor], **options: Any) -> Callable[[], object]:
        def run() -> object:
            x.grad = w.grad = None
            loss(x, w, target, **options).backward()
            return x.grad, w.grad

        return run

    def eager(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w), target)

    ours = storage_ops.linear_cross_entropy
    fixed = len(w) * x.shape[1] * 4 if x.element_size() < 4 else 0
    result = {
        "floor (three products)": floor,
        "eager": step(eager),
        "torch.compile": step(torch.compile(eager)),
        "storage_ops, default budget": step(ours),
    }
    for share in (2, 4, 8):
        budget = logits_bytes // share + fixed + 4 * MIB
        result[f"storage_ops, 1/{share} of the logits"] = step(ours, memory_budget=budget)
    native = getattr(F, "linear_cross_entropy", None)
    if native is not None and "linear_weight" in inspect.signature(native).parameters:
        result["F.linear_cross_entropy, defaults"] = step(native)
    return result


def peak(run: Callable[[], object]) -> float:
    """Peak MiB of a run above its inputs."""
    with storage_ops.memory.measure() as m:
        run()
    return round(m.peak_bytes / MIB, 1)


def main() -> None:
    """Measure, write and print."""
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", default=["S1"], choices=list(SHAPES))
    options.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = options.parse_args()
    rows = []
    for name in arguments.shapes:
        tokens, hidden, vocab = SHAPES[name]
        dtype = getattr(torch, arguments.dtype)
        x = torch.randn(tokens, hidden).to(dtype).requires_grad_()
        w = (torch.randn(vocab, hidden) * hidden**-0.5).to(dtype).requires_grad_()
        runs = cases(x, w, torch.randint(vocab, (tokens,)))
        times = ratios(interleave(runs, arguments.repeats), "floor (three products)")
        for case, run in runs.items():
            x.grad = w.grad = None
            median, least, most = times[case]
            rows.append(
                {
                    "case": f"{name} {arguments.dtype}: {case}",
                    "time / floor": round(median, 3),
                    "least - most": f"{least:.2f} - {most:.2f}",
                    "peak (MiB)": peak(run),
                }
            )
    finish("linear_cross_entropy", rows, arguments)


if __name__ == "__main__":
    main()
