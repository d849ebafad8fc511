"""Trains GPT-2-like and Llama-like models with parts of storage_ops on or off.

A case is a set of features joined by +, such as "compile+linear_cross_entropy". "plain" has none
and "all" has the three parts that work in eager mode. The cases train side by side from the same
seed, on the same batches of real text, a step of each in turn. The report has for each the peak
memory of forward and backward above parameters, optimizer and gradients. It also has tokens per
second, the time of a step over that of "plain", and the largest difference from its losses. Times
are CPU times of the process or device times of the GPU.

    python -m benchmarks.train_gpt --size gpt2-6 --cases plain all
    python -m benchmarks.train_gpt --size llama-mini --cases all --steps 500 --folder run --resume

The second is a training job, with its log (JSON lines) and its checkpoint in the folder. After an
interruption the same command continues exactly at the last checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._gpt import COMPILERS, FEATURES, SIZES, features_of, missing
from benchmarks._harness import (
    MIB,
    RESULTS,
    curve,
    finish,
    hardware,
    parser,
    ratios,
    release,
    skip,
)
from benchmarks._training import Job, Settings
from storage_ops.cli.demo import corpus

PLAIN = "plain"
EAGER = [
    PLAIN, "linear_cross_entropy", "output_discard", "selective_checkpoint", "all",
    "full_checkpoint", "checkpoint", "torch_selective",
]  # fmt: skip
COMPILED = [
    "compile", "compile+linear_cross_entropy", "compile+all", "autochunk", "auto_chunker",
    "traced+all",
]  # fmt: skip
PEERS = ["liger", "liger+checkpoint"]


def tokens_of(text: Path | None, vocab: int, most: int | None = None) -> Tensor:
    """Return the tokens of a text, by a byte-pair encoding of at most `vocab` trained on it."""
    read = text.read_text(errors="replace") if text else corpus.standard_library_text()
    return corpus.encode(read[:most], vocab)[0]


def rows_of(jobs: list[Job], shape: str) -> Iterator[dict[str, Any]]:
    """Yield the time, memory and losses of each case."""
    base, most = jobs[0], 0
    # The steps that all of them ran in this process, without the first, which warms up.
    count = min(len(job.seconds) for job in jobs)
    timed = {job.case: job.seconds[-count:][count > 1 :] if count else [] for job in jobs}
    times = ratios(timed, base.case) if count else {}
    for job in jobs:
        memory, config = job.memory(), job.settings.config
        tokens = config.batch * config.context * job.settings.accumulate
        most = most or memory.peak_bytes
        difference = max(abs(a - b) for a, b in zip(job.losses, base.losses, strict=True))
        row = {
            "shape": shape, "case": job.case, "peak (MiB)": round(memory.peak_bytes / MIB, 1),
            f"peak / {base.case}": round(memory.peak_bytes / most, 3),
            **_speed(times.get(job.case), base.case),
            "tokens / s": _rate(timed[job.case], tokens),
            "steps": len(job.losses), "last loss": round(job.losses[-1], 4),
            "loss apart": float(f"{difference:.1e}"),
        }  # fmt: skip
        yield row | ({"memory": curve(memory)} if job.case in (base.case, "all") else {})


def _speed(extremes: tuple[float, float, float] | None, base: str) -> dict[str, Any]:
    if extremes is None:  # resumed after its last step
        return {}
    median, least, most = extremes
    return {f"time / {base}": round(median, 3), "least - most": f"{least:.2f} - {most:.2f}"}


def _rate(seconds: list[tuple[float, float]], tokens: int) -> int | None:
    return round(tokens / statistics.median(wall for wall, _ in seconds)) if seconds else None


def groups_of(cases: list[str]) -> list[list[str]]:
    """Return groups of cases to train side by side: all eager ones, then each compiled and plain.

    So the rows of the first group are available early, and no compiled model disturbs another.
    """
    compiled = [case for case in cases if not features_of(case).isdisjoint(COMPILERS)]
    if PLAIN not in cases or not compiled:
        return [cases]
    return [[c for c in cases if c not in compiled], *([PLAIN, case] for case in compiled)]


def jobs_of(
    cases: list[str],
    arguments: argparse.Namespace,
    settings: Settings,
    data: Tensor,
    folders: dict[str, Path | None],
) -> list[Job]:
    """Return the jobs that can run here, and note the others.

    Each job uses its folder of `folders`.
    """
    device, jobs = torch.device(arguments.device), []
    for case in cases:
        why = missing(features_of(case), device)
        if why is not None:
            skip(case, why)
            continue
        job = Job(case, settings, data, device, folders.pop(case, None))
        if arguments.resume and job.folder and job.resume():
            print(f"{case}: continues after step {len(job.losses)}", flush=True)
        jobs.append(job)
    return jobs


def trained(arguments: argparse.Namespace, jobs: list[Job]) -> Iterator[Job]:
    """Train all jobs, a step of each in turn. Yield the jobs without an error."""
    failed: set[str] = set()
    for step in range(arguments.steps):
        for job in jobs if step % 2 == 0 else reversed(jobs):
            if len(job.losses) > step or job.case in failed:
                continue
            try:
                record = job.step()
            except Exception as error:
                if len(jobs) == 1:
                    raise
                failed.add(job.case)
                skip(job.case, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
                continue
            print(
                f"step {record['step']:4}  loss {record['loss']:.5f}  "
                f"{record['tokens_per_second']:8.0f} tokens/s  {job.case}",
                flush=True,
            )
            if job.folder is not None and record["step"] % arguments.save_every == 0:
                job.save()
    yield from (job for job in jobs if job.case not in failed)


def all_rows(arguments: argparse.Namespace, kept: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield stored rows and rows of this run."""
    config = SIZES[arguments.size]
    if arguments.batch:
        config = dataclasses.replace(config, batch=arguments.batch)
    settings = Settings(
        config, arguments.steps, arguments.accumulate, arguments.dtype, arguments.seed
    )
    shape = f"{arguments.size}, {config.batch} x {config.context} tokens, {settings.dtype}"
    if settings.accumulate > 1:
        shape += f", {settings.accumulate} batches a step"
    yield from (r for r in kept if r["shape"] != shape or r["case"] not in arguments.cases)
    data = tokens_of(arguments.text, config.vocab, 1_000_000 if arguments.quick else None)
    folders = dict.fromkeys(arguments.cases, arguments.folder)
    jobs: list[Job] = []
    for number, cases in enumerate(groups_of(arguments.cases)):
        jobs.clear()
        torch._dynamo.reset()
        release(arguments.device)  # the jobs of two groups may not fit together
        jobs += trained(arguments, jobs_of(cases, arguments, settings, data, folders))
        if len(jobs) > (number > 0):
            rows = rows_of(jobs, shape)
            if number > 0:  # plain already has a row
                next(rows)
            yield from rows


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, write and print."""
    options = parser(__doc__)
    options.add_argument(
        "--size", choices=list(SIZES), help="the model (default: gpt2-6, on a GPU gpt2-small)"
    )
    options.add_argument("--cases", "--features", nargs="+", metavar="CASE",
                         help="plain, all, or features joined by +: "
                              + ", ".join(FEATURES))  # fmt: skip
    options.add_argument("--steps", type=int, help="of the optimizer (default: --repeats and one)")
    options.add_argument("--accumulate", type=int, default=1, help="batches per step")
    options.add_argument("--batch", type=int, help="sequences in a batch, if not those of the size")
    options.add_argument("--dtype", choices=["float32", "bfloat16"],
                         help="bfloat16: autocast (default on a GPU)")  # fmt: skip
    options.add_argument("--text", type=Path, help="a text file (default: Python's library)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--folder", type=Path, help="where logs and checkpoints go")
    options.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    options.add_argument("--resume", action="store_true", help="continue from the checkpoints")
    options.add_argument("--keep", action="store_true", help="keep other rows of the result file")
    arguments = options.parse_args(argv)
    gpu = arguments.device == "cuda"
    arguments.size = arguments.size or (
        "gpt2-tiny" if arguments.quick else "gpt2-small" if gpu else "gpt2-6"
    )
    arguments.steps = arguments.steps or (3 if arguments.quick else arguments.repeats) + 1
    arguments.dtype = arguments.dtype or ("bfloat16" if gpu else "float32")
    arguments.cases = (
        arguments.cases or EAGER + COMPILED[: 1 if arguments.quick else None] + PEERS * gpu
    )
    _check(options, arguments)
    path = arguments.json or RESULTS / hardware(arguments.device) / "train_gpt.json"
    kept = json.loads(path.read_text())["rows"] if arguments.keep and path.exists() else []
    finish("train_gpt", all_rows(arguments, kept), arguments)


def _check(options: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    try:
        for case in arguments.cases:
            features_of(case)
    except ValueError as error:
        options.error(str(error))
    for name in ("steps", "accumulate", "save_every"):
        if getattr(arguments, name) < 1:
            flag = name.replace("_", "-")
            options.error(f"--{flag} is {getattr(arguments, name)}. Expected at least 1.")
    if arguments.text is not None and not arguments.text.is_file():
        options.error(f"--text is {arguments.text}. Expected a file.")
    if arguments.resume and arguments.folder is None:
        options.error("--resume needs checkpoints. Pass --folder with the folder that has them.")


if __name__ == "__main__":
    main()
