"""The demo, from its arguments to its table."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import storage_ops
from storage_ops.cli import output
from storage_ops.cli.demo import corpus, picture
from storage_ops.cli.demo.model import PRESETS
from storage_ops.cli.demo.train import TrainingRun, train
from storage_ops.quantities import MIB
from storage_ops.tables import Grid


def _complaint(args: argparse.Namespace) -> str | None:
    if args.preset not in PRESETS:
        return f"--preset is {args.preset}. Expected one of {', '.join(PRESETS)}."
    if args.text is not None and not args.text.is_file():
        return f"--text is {args.text}. Expected the path of a file."
    if args.steps < 2:
        return f"--steps is {args.steps}. Expected at least 2."
    if args.device.partition(":")[0] not in ("cpu", "cuda"):
        return f"--device is {args.device}. Expected cpu or cuda."
    if not -(2**63) <= args.seed < 2**64:
        return f"--seed is {args.seed}. Expected a number of 64 bits."
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        return (
            f"--device is {args.device}, but this torch ({torch.__version__}) sees no GPU. Pass "
            "--device cpu."
        )
    return None


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the demo. Return the exit code."""
    shown = Console(stderr=True) if args.json else console
    complaint = _complaint(args)
    if complaint is not None:
        output.complain(complaint)
        return 2
    output.check_plot(args.plot)
    config = PRESETS[args.preset]
    with shown.status("reading text and training a byte-pair encoding"):
        text = (
            args.text.read_text(errors="replace") if args.text else corpus.standard_library_text()
        )
        data, tokenizer = corpus.encode(text, config.vocab)
    config = dataclasses.replace(config, vocab=tokenizer.get_vocab_size())
    if len(data) <= config.context + 1:
        output.complain(f"--text has {len(data)} tokens. Expected more than {config.context + 1}.")
        return 2
    shown.print(
        f"{len(text) / 1e6:.1f} MB of text, {len(data):,} tokens, vocabulary {config.vocab:,}; "
        f"{config.layers} layers of width {config.width}, "
        f"{config.batch} x {config.context} tokens a step"
    )
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )  # fmt: skip
    with Progress(*columns, console=shown) as bar:
        tasks: dict[str, object] = {}

        def progress(current: TrainingRun) -> None:
            if current.label not in tasks:
                tasks[current.label] = bar.add_task(current.label, total=args.steps, loss="")
            bar.update(tasks[current.label], advance=1, loss=f"{current.losses[-1]:.4f}")  # type: ignore[arg-type]

        device = torch.device(args.device)
        plain, ours = train(config, data, device, args.steps, args.seed, progress)
    shown.print(_table(plain, ours, storage_ops.info()))
    losses = {run.label: run.losses for run in (plain, ours)}
    picture.draw(args.plot, losses, {run.label: run.memory for run in (plain, ours)})
    shown.print(f"Loss and memory curves: {args.plot}")
    if args.json:
        output.print_json([_facts(plain), _facts(ours)], console)
    return 0


def _facts(run: TrainingRun) -> dict[str, Any]:
    return {
        "label": run.label,
        "losses": run.losses,
        "peak_bytes": run.memory.peak_bytes,
        "step_seconds": run.step_seconds,
    }


def _table(plain: TrainingRun, ours: TrainingRun, info: dict[str, Any]) -> Grid:
    """Return a table that compares the two trainings."""
    apart = max(abs(a - b) for a, b in zip(plain.losses, ours.losses, strict=True))
    peaks = plain.memory.peak_bytes, ours.memory.peak_bytes
    times = plain.step_seconds, ours.step_seconds
    finals = (f"{r.losses[-1]:.4f}" for r in (plain, ours))
    saved = f"{100 * (1 - peaks[1] / peaks[0]):.0f} % saved"
    slower = f"x {times[1] / times[0]:.2f}"
    return Grid(
        "The same GPT, trained twice from the same seed",
        ("", plain.label, ours.label, "difference"),
        [
            ("final loss", *finals, f"{apart:.1e} at most"),
            ("peak memory of a step", *(f"{peak / MIB:.0f} MiB" for peak in peaks), saved),
            ("time of a step (median)", *(f"{1000 * t:.0f} ms" for t in times), slower),
        ],
        "memory above parameters and optimizer state, gradients included\n"
        f"storage path: {info['storage_path']}, guard: {'on' if info['guard'] else 'none'}, "
        f"row kernel: {info['row_kernel']}",
        words=("",),
    )
