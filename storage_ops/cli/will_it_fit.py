"""`python -m storage_ops will-it-fit`: tell whether a training step fits, without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from storage_ops.cli import (
    autocast,
    evaluation,
    gradient_checkpointing,
    hf_model,
    output,
    ranks,
    serve,
)
from storage_ops.cli.workload import model_errors, workload
from storage_ops.quantities import readable

HELP = "tell whether a training step of a model fits into a GPU"
EXAMPLE = "--hf-config config.json --batch 4 --seq 8192 --budget 70GiB --device h100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    hf_model.add_arguments(parser)
    files = parser.add_argument_group("the output")
    output.add_json(files)
    files.add_argument("--plot", type=Path, metavar="FILE", help="draw memory over the step")
    files.add_argument(
        "--html", type=Path, metavar="FILE", help="write the answer, with pictures, as an HTML page"
    )
    questions = parser.add_argument_group("other questions")
    evaluation.add_arguments(questions)
    questions.add_argument(
        "--serve",
        action="store_true",
        help="tell whether generating text in plain PyTorch fits, instead of training",
    )
    questions.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="use the gradient checkpointing of transformers, and compare it with a plan of fit",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command. Return 0 if the step fits, 1 if not."""
    from storage_ops.measure import page
    from storage_ops.memory import will_it_fit

    output.check_budget(args.budget)
    args.device = output.found(args.device)
    if args.serve:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        serve.check(args, {name: parser.get_default(name) for name in vars(args)})
        return serve.run(args, console)
    evaluation.check(args)
    output.check_plot(args.plot, images_only=False)
    output.check_file("--html", args.html)
    step = workload(args)
    model, batch, loss = step
    evaluation_step = evaluation.step_of(args, step)
    peaks = []
    step_peaks: tuple[int, int] | None = None  # of a training step and an evaluation step
    buckets = ranks.bucket_bytes(args, model)
    one_rank = ranks.one_of(args, model)
    errors = model_errors(args, model)
    with errors, one_rank, autocast.block(args), contextlib.ExitStack() as checkpoints:
        optimizer = ranks.optimizer_of(args, model)
        if args.gradient_checkpointing:
            checkpoints.enter_context(gradient_checkpointing.enabled(model))
        report = will_it_fit(
            model, batch, args.budget, loss, optimizer, args.device, ranks.accumulates(args)
        )
        training_peak = report.peak_bytes + buckets
        if evaluation_step is not None:
            evaluated = evaluation.evaluated(args, evaluation_step, report.step)
            report = evaluation.larger(report, evaluated)
            step_peaks = training_peak, evaluated.peak_bytes + buckets
        report = ranks.with_buckets(report, buckets)
        checkpoints.close()
        if args.gradient_checkpointing:
            peaks = gradient_checkpointing.compared(
                args, step, optimizer, training_peak, report.budget_bytes
            )
        assumptions = ranks.assumptions(args, model)
    if args.plot is not None:
        report.step.plot(args.plot, report.budget_bytes)
    evaluation_decides = step_peaks is not None and step_peaks[1] > step_peaks[0]
    advice = "" if report.fits else _what_now(args, report, evaluation_decides)
    if args.html is not None:
        tables = [report.__rich__()]
        tables += [gradient_checkpointing.table(peaks, report.budget_bytes)] if peaks else []
        text = page.of(report.step, report.budget_bytes, tables, advice)
        args.html.write_text(text, encoding="utf-8")
    if args.json:
        names = ("fits", "peak_bytes", "budget_bytes", "by_owner", "device")
        facts: dict[str, Any] = {name: getattr(report, name) for name in names}
        if peaks:
            facts["compared"] = [peak._asdict() for peak in peaks]
        if step_peaks:
            keys = "training_peak_bytes", "evaluation_peak_bytes"
            facts |= dict(zip(keys, step_peaks, strict=True))
        if assumptions:
            facts["assumptions"] = assumptions
        output.print_json(facts, console)
    else:
        console.print(report)
        output.print_assumptions(assumptions, console)
        if step_peaks:
            console.print(evaluation.compared(*step_peaks), highlight=False, soft_wrap=True)
        if peaks:
            console.print(gradient_checkpointing.table(peaks, report.budget_bytes))
        if advice:
            console.print(advice, highlight=False, markup=False, soft_wrap=True)
    return 0 if report.fits else 1


def _what_now(args: argparse.Namespace, report: Any, evaluation_decides: bool) -> str:
    """Return advice for a step that does not fit: a command of `fit`, if recomputing can help.

    `evaluation_decides` is True if the evaluation step has the larger peak.
    """
    if evaluation_decides:
        return (
            "The evaluation step has the larger peak. Pass a smaller --eval-batch or --eval-logits."
        )
    budget, batch = report.budget_bytes, report.step.by_owner.get("batch", 0)
    lasting = report.step.kept_bytes - batch
    if lasting > budget:
        return (
            "Recomputing cannot make it fit: parameters, gradients, optimizer state and workspaces "
            f"alone take {readable(lasting, up=True)}, more than the budget of {readable(budget)}. "
            f"Shard them over {'more' if args.gpus > 1 else 'several'} --gpus, or choose an "
            "--optimizer or a --dtype that takes less."
        )
    if lasting + batch > budget:
        return (
            f"Recomputing cannot make it fit: the batch takes {readable(batch, up=True)}, and "
            f"parameters, gradients, optimizer state and workspaces {readable(lasting, up=True)}, "
            f"together more than the budget of {readable(budget)}. Choose a smaller batch."
        )
    if args.gpus > 1 and (args.shard == "ddp" or args.tensor_parallel > 1):
        return (
            "`fit` can choose what to recompute, but only with --shard fsdp2 or zero3 and without "
            "--tensor-parallel."
        )
    command = shlex.join(hf_model.command("fit", args))
    return f"To find out what to recompute so that it fits, run:\n{command}"
