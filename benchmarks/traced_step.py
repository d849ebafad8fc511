"""The time to trace a training step, and the traced step against eager and make_fx.

The model is a GPT with dropout 0.1. There are four cases: plain blocks, torch.utils.checkpoint, a
checkpoint whose policy saves matrix products, and a discarded output of the up-projection. The step
of GPT-2 small is traced at several depths. The CPU seconds are those of recording, and those of the
rewrite that recomputes (`remat`).

Peaks and times are measured on a CPU at a reduced size. Peaks count activations and gradients. A
time is the median of ratios to eager's CPU time in one process. The graph that torch's make_fx
records of the same step runs only for its peak, because it repeats dropout with other numbers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import storage_ops
from benchmarks._harness import expect, finish, interleave, parser
from storage_ops.cli.demo.model import GPT, PRESETS, Config
from storage_ops.graph.recompute.remat import recompute

MB = 1 << 20
WAYS = ("plain", "checkpoint", "matmuls saved", "output discarded")
SMALL = Config(layers=4, width=256, heads=4, context=256, batch=4, vocab=2048)
PRODUCTS = [getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm")]
Step = Callable[[Tensor, Tensor], Any]


class Layer(nn.Module):
    """A block and a dropout with a kind of checkpoint."""

    def __init__(self, block: nn.Module, way: str) -> None:
        super().__init__()
        self.body = nn.Sequential(block, nn.Dropout(0.1))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        y: Tensor
        if self.way in ("plain", "output discarded"):
            y = self.body(x)
        elif self.way == "checkpoint":
            y = checkpoint(self.body, x, use_reentrant=False)
        else:
            contexts = partial(create_selective_checkpoint_contexts, PRODUCTS)
            y = checkpoint(self.body, x, use_reentrant=False, context_fn=contexts)
        return y


def make(config: Config, way: str) -> tuple[Step, tuple[Tensor, Tensor]]:
    """Return a function for loss and gradients of a model, and a batch."""
    model = GPT(config, save_memory=way == "output discarded")
    model.save_memory = False  # the same loss in every case
    model.blocks = nn.ModuleList(Layer(block, way) for block in model.blocks)  # type: ignore[arg-type]
    parameters = list(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> Any:
        loss = model(tokens, targets)
        return loss.detach(), torch.autograd.grad(loss, parameters)

    tokens, targets = torch.randint(config.vocab, (2, config.batch, config.context))
    return step, (tokens, targets)


def cost(layers: int) -> tuple[float, float]:
    """Return the CPU seconds of recording GPT-2 small at a depth, and of the recompute rewrite."""
    small = PRESETS["gpt2-small"]
    config = Config(layers, small.width, small.heads, small.context, batch=1, vocab=50257)
    step, data = make(config, "checkpoint")
    start = time.process_time()
    traced = storage_ops.graph.trace_step(step, *data)
    both = time.process_time() - start
    before = traced.gm.meta["storage_ops_before"]
    start = time.process_time()
    recompute(before, foreign=False)
    rewrite = time.process_time() - start
    return both - rewrite, rewrite


def peak(run: Step, data: tuple[Tensor, Tensor]) -> int:
    """Return the bytes of a second call above the parameters."""
    with torch.set_grad_enabled(not isinstance(run, torch.fx.GraphModule)):
        run(*data)
        with storage_ops.memory.measure() as measured:
            run(*data)
    return measured.peak_bytes


def compare(way: str, repeats: int) -> dict[str, Any]:
    """Return the peaks of one case, and the time of a traced step over that of eager."""
    step, data = make(SMALL, way)
    traced = storage_ops.graph.trace_step(step, *data)
    eager, ours = peak(step, data), peak(traced, data)
    theirs: float | str = ""
    if way != "output discarded":
        try:
            theirs = round(peak(make_fx(step)(*data), data) / MB, 1)
        except RuntimeError as error:  # with a policy, torch refuses dropout because it is in-place
            theirs = type(error).__name__
    seconds = interleave({"eager": partial(step, *data), "traced": partial(traced, *data)}, repeats)
    pairs = zip(seconds["traced"], seconds["eager"], strict=True)
    return {
        "eager MB": round(eager / MB, 1),
        "traced MB": round(ours / MB, 1),
        "traced / eager": round(ours / eager, 3),
        "predicted MB": round(traced.peak.peak_bytes / MB, 1),
        "make_fx MB": theirs,
        "time / eager": round(statistics.median(a / b for (_, a), (_, b) in pairs), 3),
    }


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of every case, then the times of tracing at every depth."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expect(len(WAYS))
    for way in WAYS:
        yield {"case": way, **compare(way, arguments.repeats)}
    cost(1)  # the first time also imports and fills caches
    for layers in arguments.layers:
        tries = [cost(layers) for _ in range(1 if arguments.quick else 3)]
        trace, rewrite = (
            round(statistics.median(column), 2) for column in zip(*tries, strict=True)
        )
        case = f"GPT-2 small, {layers} layers"
        yield {"case": case, "trace s": trace, "remat s": rewrite}
    torch.set_num_threads(threads)


def main() -> None:
    """Measure, write and print."""
    options = parser(__doc__)
    options.add_argument("--layers", nargs="*", type=int)
    arguments = options.parse_args()
    arguments.layers = arguments.layers or ([3] if arguments.quick else [3, 6, 12, 24])
    arguments.device = "cpu"  # on any machine, because tracing runs on the host
    finish("traced_step", all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
