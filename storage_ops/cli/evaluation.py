"""`--eval-batch`: an evaluation step during training, which may take more than a training step."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from storage_ops.cli.model_function import takes
from storage_ops.cli.workload import Workload, resized
from storage_ops.quantities import readable

if TYPE_CHECKING:
    from storage_ops.simulate.step import StepEstimate
    from storage_ops.simulate.will_it_fit import FitReport


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare --eval-batch and --eval-logits."""
    parser.add_argument(
        "--eval-batch",
        type=int,
        metavar="B",
        help="simulate an evaluation step of B sequences too; the larger peak is the answer",
    )
    parser.add_argument(
        "--eval-logits",
        type=int,
        default=0,
        metavar="K",
        help="evaluation batches whose logits a Trainer with compute_metrics keeps on the GPU "
        "(default: 0)",
    )


def check(args: argparse.Namespace) -> None:
    """Raise an error for options that have no effect together.

    Raises:
        ValueError: a number is wrong, or the evaluation has no logits to keep.
    """
    if args.eval_batch is not None and args.eval_batch < 1:
        raise ValueError(f"--eval-batch is {args.eval_batch}. Pass 1 or more.")
    if args.eval_logits < 0:
        raise ValueError(f"--eval-logits is {args.eval_logits}. Pass 0 or more.")
    if not args.eval_logits:
        return
    prefix = f"--eval-logits is {args.eval_logits}, but "
    if args.eval_batch is None:
        raise ValueError(f"{prefix}there is no evaluation. Pass --eval-batch, too.")
    if args.model is not None:
        raise ValueError(f"{prefix}the output of --model need not have logits. Leave it out.")
    if args.reference is not None:
        raise ValueError(f"{prefix}the loss of --reference has no logits. Leave it out.")


def step_of(args: argparse.Namespace, step: Workload) -> Workload | None:
    """Return the step with an evaluation batch, if requested.

    Raises:
        ValueError: the function of --model returns a list of batches, or has no argument for the
            batch size.
    """
    if args.eval_batch is None:
        return None
    if args.model is not None and not takes(args.model, "batch"):
        raise ValueError(
            f"--eval-batch is {args.eval_batch}, but {args.model} has no argument batch. Leave out "
            "--eval-batch."
        )
    changed = resized(step, args, "batch", args.eval_batch)
    if isinstance(changed.batch, list):
        raise ValueError(
            f"--eval-batch is {args.eval_batch}, but {args.model} returns a list of batches. "
            "Leave out --eval-batch."
        )
    return changed


def evaluated(args: argparse.Namespace, step: Workload, trained: StepEstimate) -> StepEstimate:
    """Return the simulated evaluation step after a training step of the same model."""
    from storage_ops.measure.owners import STATE
    from storage_ops.simulate.evaluate import Predictions, simulate_evaluation

    predictions = Predictions(
        args.eval_logits, args.gpus // args.tensor_parallel, args.autocast is not None
    )
    was_training = step.model.training
    step.model.eval()
    try:
        return simulate_evaluation(
            step.model, step.batch, state_bytes=trained.by_owner.get(STATE, 0),
            predictions=predictions, loss=step.loss, device=args.device,
        )  # fmt: skip
    finally:
        step.model.train(was_training)


def larger(report: FitReport, evaluation: StepEstimate) -> FitReport:
    """Return the report of the step with the higher peak."""
    peak = evaluation.peak_bytes
    if peak <= report.peak_bytes:
        return report
    evaluation.device = report.step.device
    evaluation.subject = report.step.subject.replace("Step", "Evaluation step", 1)
    return dataclasses.replace(
        report, fits=peak <= report.budget_bytes, peak_bytes=peak, by_owner=evaluation.by_owner,
        step=evaluation,
    )  # fmt: skip


def compared(training: int, evaluation: int) -> str:
    """Return a line with both peaks."""
    peaks = readable(training, up=True), readable(evaluation, up=True)
    return f"peak of a training step {peaks[0]}, of an evaluation step {peaks[1]}"
