"""Runs one case."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import fit
from benchmarks._harness import expect, finish, parser, skip
from benchmarks.fit import accuracy, predictions, processes, ways
from benchmarks.fit.models import models

KINDS = ("GPT", "Llama", "ViT", "Mixtral", "T5", "UNet")
Rows = Iterator[dict[str, Any]]
# Case -> the rows of one model, the size of the models, and the default number of KINDS.
MODEL_CASES: dict[str, tuple[Callable[..., Rows], Callable[..., dict[str, int]], int]] = {
    "peaks": (accuracy.peaks, accuracy.size_of_peaks, 6),
    "budgets": (accuracy.budgets, accuracy.size_of_budgets, 6),
    "plans": (ways.plans, ways.size, 3),
    "compiled": (processes.compiled, ways.size, 3),
    "carried": (ways.carried, ways.size_of_carried, 1),
    "predictions": (predictions.predictions, ways.size, 6),
    "timeline": (ways.timelines, ways.size_of_carried, 1),
}
# Case -> rows for no model of KINDS, after the rows of the models.
OTHERS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "peaks": accuracy.llamas,
    "budgets": accuracy.all_tiles,
}


def all_rows(case: str, arguments: argparse.Namespace) -> Rows:
    """Return the rows of a case, model by model."""
    rows, size, _ = MODEL_CASES[case]
    expect(len(arguments.models))
    for kind in arguments.models:
        try:
            make = models(**size(kind, arguments))[kind]
        except ImportError as error:
            skip("all models", f"transformers is not installed: {error}")
            break
        yield from rows(kind, make, arguments)
    if case in OTHERS and not arguments.only_models:
        yield from OTHERS[case](arguments)


def main() -> None:
    """Measure, write and print."""
    options = parser(fit.__doc__)
    texts = "; ".join(f"{case}: {text}" for case, (_, text) in fit.CASES.items())
    options.add_argument("case", nargs="?", default="peaks", choices=list(fit.CASES), help=texts)
    options.add_argument("--models", nargs="+", choices=KINDS)
    options.add_argument("--only-models", action="store_true",
                         help="leave out tiles and the seconds of Llama-8B")  # fmt: skip
    options.add_argument("--shares", nargs="+", type=float, default=[0.5],
                         help="activation memory budgets of torch.compile")  # fmt: skip
    options.add_argument("--looks", type=int, default=3,
                         help="plans that are compiled for each peak")  # fmt: skip
    arguments = options.parse_args()
    if arguments.case in ("carried", "timeline"):
        arguments.models = ["Llama"]
    arguments.models = arguments.models or KINDS[: MODEL_CASES[arguments.case][2]]
    finish(fit.CASES[arguments.case][0], all_rows(arguments.case, arguments), arguments)


if __name__ == "__main__":
    main()
