"""Time of the row kernel of linear cross-entropy, relative to a copy of the same bytes.

The kernel replaces logits by their gradient. Like a copy, it reads and writes every logit once.
"GB/s" counts those bytes. If memory bandwidth is the limit, as on a GPU, no kernel can be faster
than a copy.

On a GPU the kernel has two forms. Both are measured, and the faster one of each shape is marked as
the one to keep. "predicted" is the time of the streamed form by `benchmarks/_row_model.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks._harness import expect, finish, interleave, milliseconds, parser, ratios
from benchmarks._row_model import ASSUMPTIONS, predicted
from storage_ops.loss.planning.problem import padded
from storage_ops.loss.planning.schedule import GRADIENT, UPDATE

SHAPES = {
    "cpu": {"512 x 50257": (512, 50257), "128 x 128256": (128, 128256)},
    "cuda": {
        "4096 x 128256": (4096, 128256),
        "4096 x 50257": (4096, 50257),
        "4096 x 32000": (4096, 32000),
        "1024 x 256000": (1024, 256000),
    },
}
# Bits of the phases that ask for a form, as in cuda/linear_cross_entropy.cu.
FORMS = {"direct form": 16, "streamed form": 32}
# The largest times of the kernel relative to a copy that the project wants.
GOALS = {
    "4096 x 128256 bfloat16": 1.18,
    "4096 x 32000 bfloat16": 1.25,
    "1024 x 256000 bfloat16": 1.25,
}


def kernel(logits: torch.Tensor, form: int = 0) -> Any:
    """Return a call of the kernel on these logits."""
    rows, columns = logits.shape
    device = logits.device
    target = torch.randint(columns, (rows,), device=device)
    upstream = torch.ones(1, 1, device=device)
    state, argmax = torch.zeros(6, rows, device=device), torch.zeros_like(target)
    return partial(
        torch.ops.storage_ops._cross_entropy_rows, logits, target, None, None, upstream, state,
        argmax, 0, columns, -100, 0.0, 1.0, 0.0, UPDATE | GRADIENT | form,
    )  # fmt: skip


def forms(logits: torch.Tensor) -> dict[str, Any]:
    """Return a call for each form that the kernel has for these logits."""
    expected = predicted(*logits.shape, logits.itemsize, ASSUMPTIONS["expected"])
    if not logits.is_cuda or expected is None:
        return {"row kernel": kernel(logits)}
    return {name: kernel(logits, form) for name, form in FORMS.items()}


def judged(rows: list[dict[str, Any]], logits: torch.Tensor) -> None:
    """Add the goal, the prediction and the form to keep to the rows of one shape."""
    ours = rows[1:]
    for row in ours:
        if row["shape"] in GOALS:
            row["goal"] = GOALS[row["shape"]]
        if row["case"] == "streamed form":
            expected = predicted(*logits.shape, logits.itemsize, ASSUMPTIONS["expected"])
            row["predicted"] = round(expected or 0, 2)
    if len(ours) > 1:
        min(ours, key=lambda row: row["time / copy"])["keep"] = "yes"


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all shapes, each in float32 and bfloat16."""
    device = arguments.device
    shapes = SHAPES[device]
    chosen = list(shapes)[:1] if arguments.quick else list(shapes)
    expect(2 * len(chosen))
    for shape in chosen:
        for dtype in (torch.float32, torch.bfloat16):
            rows, columns = shapes[shape]
            # Rows are aligned for vector instructions, as in the buffer of the loss.
            buffer = torch.randn(rows, padded(columns), device=device).to(dtype)
            logits, copy = buffer[:, :columns], torch.empty_like(buffer)
            cases = {"copy": partial(copy.copy_, buffer), **forms(logits)}
            label = f"{shape} {str(dtype).removeprefix('torch.')}"
            seconds = interleave(cases, arguments.repeats, device, label)
            times = ratios(seconds, "copy")
            results = []
            for case in cases:
                median, least, most = times[case]
                ms = milliseconds(seconds[case])
                results.append(
                    {
                        "shape": label,
                        "case": case,
                        "time / copy": round(median, 3),
                        "least - most": f"{least:.2f} - {most:.2f}",
                        "ms": ms,
                        "GB/s": round(2 * logits.nbytes / ms / 1e6, 1),
                    }
                )
            judged(results, logits)
            yield from results


def main() -> None:
    """Measure, write and print."""
    arguments = parser(__doc__).parse_args()
    finish("row_kernel", all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
