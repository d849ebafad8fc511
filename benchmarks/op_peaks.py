"""Memory of single ops on a GPU beyond their results, against the simulation.

The ops are attention by each of torch's kernels, convolutions in both memory layouts, and ops of
rows. Each row has the peak of a forward, and of forward and backward, above the memory before. The
difference from the simulated peak is temporary memory of the op that no simulation counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import storage_ops
from benchmarks._harness import MIB, expect, finish, group_done, parser, peak, skip, tick

Op = tuple[Callable[..., Tensor], list[Tensor]]
# Batch, heads of queries and of keys, tokens, size of a head, whether causal.
ATTENTION = {
    False: [(8, 16, 16, 257, 64, False), (4, 16, 16, 2048, 128, True), (2, 32, 8, 4096, 128, True)],
    True: [(2, 4, 2, 64, 16, True)],
}
KERNELS = {
    "chosen by torch": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Batch, channels in and out, height and width, size of the kernel, stride.
CONVOLUTIONS = {
    False: [(8, 64, 64, 256, 3, 1), (8, 320, 320, 64, 3, 1), (8, 3, 1024, 256, 16, 16),
            (8, 128, 64, 128, 1, 1)],
    True: [(2, 8, 8, 16, 3, 1)],
}  # fmt: skip
# Tokens, their width, and rows of a table.
ROWS = {False: (8192, 2048, 32768), True: (64, 32, 128)}
OF_ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear, bias": lambda x, table, ids: F.linear(x, table, table[:, 0]),
    "embedding": lambda x, table, ids: F.embedding(ids, table),
    "index": lambda x, table, ids: table[ids],
    "gathered log-probability": lambda x, table, ids: (
        F.linear(x, table).log_softmax(-1).gather(1, ids[:, None])
    ),
    "logsumexp": lambda x, table, ids: F.linear(x, table).logsumexp(-1),
    "cross-entropy": lambda x, table, ids: F.cross_entropy(F.linear(x, table), ids),
    "mean squared error": lambda x, table, ids: F.mse_loss(x, x.detach()),
    "deviation of columns": lambda x, table, ids: x.std(0),
    "LayerNorm": lambda x, table, ids: F.layer_norm(x, x.shape[1:], table[0], table[1]),
}
LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}


def attention(size: tuple[Any, ...], kernel: SDPBackend | None, device: str) -> Op:
    """Return attention by one kernel, and its inputs."""
    batch, heads, of_keys, tokens, width, causal = size
    q, k, v = (
        torch.randn(batch, n, tokens, width, device=device, dtype=torch.bfloat16)
        for n in (heads, of_keys, of_keys)
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=heads > of_keys)
        if kernel is None:
            return call(q, k, v)
        with sdpa_kernel(kernel):
            return call(q, k, v)

    return run, [t.requires_grad_() for t in (q, k, v)]


def convolution(
    size: tuple[int, ...], layout: torch.memory_format, dtype: torch.dtype, device: str
) -> Op:
    """Return a convolution of images, and its inputs."""
    batch, inside, outside, side, kernel, stride = size
    layer = nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2 if stride == 1 else 0)
    module = layer.to(device, dtype, memory_format=layout)
    x = torch.randn(batch, inside, side, side, device=device, dtype=dtype)
    return module, [x.contiguous(memory_format=layout).requires_grad_(), *module.parameters()]


def of_rows(
    size: tuple[int, int, int], op: Callable[[Tensor, Tensor, Tensor], Tensor], device: str
) -> Op:
    """Return an op of tokens and of a table with a row for each token's id, and its inputs."""
    tokens, width, rows = size
    x, table = (
        torch.randn(n, width, device=device, dtype=torch.bfloat16).requires_grad_()
        for n in (tokens, rows)
    )
    ids = torch.randint(rows, (tokens,), device=device)
    return lambda x, table: op(x, table, ids), [x, table]


def cases(quick: bool, device: str) -> Iterator[tuple[str, str, Callable[[], Op]]]:
    """Yield shape, case, and a function that creates the case."""
    for size in ATTENTION[quick]:
        for name, kernel in KERNELS.items():
            yield f"attention {size}", name, partial(attention, size, kernel, device)
    for size in CONVOLUTIONS[quick]:
        for name, layout in LAYOUTS.items():
            for dtype in (torch.bfloat16, torch.float32):
                label = f"{name}, {str(dtype).removeprefix('torch.')}"
                make = partial(convolution, size, layout, dtype, device)
                yield f"convolution {size}", label, make
    for name, op in OF_ROWS.items():
        yield f"rows {ROWS[quick]}", name, partial(of_rows, ROWS[quick], op, device)


def row_of(make: Callable[[], Op], device: str) -> dict[str, Any]:
    """Return the peaks of a case, in MiB."""
    run, leaves = make()
    called = leaves if not isinstance(run, nn.Module) else leaves[:1]
    gradient = torch.ones_like(run(*called))

    def both() -> None:
        torch.autograd.grad(run(*called), leaves, gradient, allow_unused=True)

    row: dict[str, Any] = {}
    for name, case in (("forward", lambda: run(*called)), ("with backward", both)):
        estimate = storage_ops.memory.estimate(case)
        simulated = (estimate.peak_bytes - estimate.input_bytes) / MIB
        case()  # libraries allocate the memory they keep
        measured = peak(case, device)
        row |= {f"{name} (MiB)": measured, f"{name}, simulated (MiB)": round(simulated, 1),
                f"{name}, more (MiB)": round(measured - simulated, 1)}  # fmt: skip
    return row


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all cases."""
    all_cases = list(cases(arguments.quick, arguments.device))
    expect(len(all_cases))
    for shape, case, make in all_cases:
        tick(f"{shape}, {case}", 0.0)
        try:
            yield {"shape": shape, "case": case, **row_of(make, arguments.device)}
        except RuntimeError as error:  # the kernel refuses these inputs
            skip(f"{shape}, {case}", str(error).splitlines()[0])
        group_done()


def main() -> None:
    """Measure, write and print."""
    arguments = parser(__doc__).parse_args()
    finish("op_peaks", all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
