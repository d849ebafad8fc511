"""The demo's training: the same GPT in plain PyTorch and with storage_ops, from the same seed.

Losses are of the same batches. Memory is of one step, above parameters and optimizer state.
"timeline" is its curve, with seconds and MiB after every change. Times are of whole steps. `make
results` draws "losses" and "timeline" as docs/demo.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks._harness import (
    MIB,
    curve,
    expect,
    finish,
    group_done,
    interleave,
    milliseconds,
    parser,
    ratios,
    tick,
)  # fmt: skip
from storage_ops.cli.demo import corpus
from storage_ops.cli.demo.model import PRESETS
from storage_ops.cli.demo.train import TrainingRun, train


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train, then time single steps in turn."""
    expect(2)
    config = PRESETS[arguments.preset]
    data, tokenizer = corpus.encode(corpus.standard_library_text(), config.vocab)
    config = dataclasses.replace(config, vocab=tokenizer.get_vocab_size())
    device = torch.device(arguments.device)
    steps = arguments.steps

    def progress(run: TrainingRun) -> None:
        tick(f"{run.label}, step {len(run.losses)} of {steps}", len(run.losses) / steps)

    plain, ours = train(config, data, device, steps, 0, progress)
    group_done()
    difference = max(abs(a - b) for a, b in itertools.zip_longest(plain.losses, ours.losses))
    losses = {run.label: list(run.losses) for run in (plain, ours)}
    window = config.context + 1
    batch = data[: config.batch * window].view(config.batch, window).to(device)
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    cases = {run.label: partial(run.step, tokens, targets) for run in (plain, ours)}
    seconds = interleave(cases, arguments.repeats, arguments.device, "step")
    times = ratios(seconds, plain.label)
    for run in (plain, ours):
        median, least, most = times[run.label]
        yield {
            "shape": f"demo, {arguments.preset}, {steps} steps",
            "case": run.label,
            "time / plain": round(median, 3),
            "least - most": f"{least:.2f} - {most:.2f}",
            "ms": milliseconds(seconds[run.label]),
            "peak (MiB)": round(run.memory.peak_bytes / MIB, 1),
            "final loss": round(losses[run.label][-1], 4),
            "losses apart by": float(f"{0.0 if run is plain else difference:.2g}"),
            "losses": [round(loss, 4) for loss in losses[run.label]],
            "timeline": curve(run.memory),
        }


def main() -> None:
    """Measure, write and print."""
    options = parser(__doc__)
    options.add_argument("--preset", default="tiny", choices=PRESETS)
    options.add_argument("--steps", type=int)
    arguments = options.parse_args()
    arguments.steps = arguments.steps or (6 if arguments.quick else 32)
    finish("demo", all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
