"""Answers of `will-it-fit` for types of models that people train, at their default configs.

`make model-types` asks about all cases of `_model_types.py` for an H100, and writes the table of
docs/model-types.md. The weekly workflow does so too. Nothing is measured. Each case is one run of
the command in a separate process, for at most `SECONDS`. The script fails if a case crashes or
takes too long, or if the command counts other bytes of parameters than the model has.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import multiprocessing
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks._harness import MIB, expect, finish, group_done, parser
from benchmarks._model_types import Case, cases
from storage_ops import cli
from storage_ops.cli import will_it_fit
from storage_ops.cli.workload import workload
from storage_ops.foundation.ledger import rounded

SECONDS = 240
QUICK = "gpt2", "bert", "vit"
BUDGET = "79GiB"  # of an H100
BROKEN = "broken: "  # how the answer of a case that failed begins


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of the distinct storages of parameters, as a GPU's allocator rounds them."""
    storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in model.parameters()}
    return sum(rounded(storage.nbytes()) for storage in storages.values())


def named(case: Case) -> dict[str, Any]:
    """Return the first columns of a row."""
    return {
        "shape": case.family, "case": case.name, "class": case.model_class, "batch": case.batch,
    }  # fmt: skip


def answer_of(case: Case) -> dict[str, Any]:
    """Run the command for a case in this process. Return the row of its answer."""
    row = named(case)
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        options = [*case.options(Path(folder)), "--budget", BUDGET, "--device", "h100", "--json"]
        before = time.process_time()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["will-it-fit", *options])
        seconds = round(time.process_time() - before, 1)
        notes = re.sub(r"\S*/site-packages/", "", " ".join(err.getvalue().split()))
        if code not in (0, 1):
            return {**row, "answer": f"refused: {notes}".replace(folder, "FOLDER")}
        declared = argparse.ArgumentParser()
        will_it_fit.add_arguments(declared)
        model = workload(declared.parse_args(options)).model
    facts = json.loads(out.getvalue())
    counted, expected = facts["by_owner"]["parameters"], parameter_bytes(model)
    if counted != expected:
        answer = f"{BROKEN}it counts {counted} bytes of parameters; expected {expected}"
        return {**row, "answer": answer}
    return {
        **row, "parameters": sum(p.numel() for p in model.parameters()),
        "peak (MiB)": round(facts["peak_bytes"] / MIB, 1),
        "answer": "fits" if facts["fits"] else "does not fit", "seconds": seconds, "assumes": notes,
    }  # fmt: skip


def answer_in_process(case: Case) -> dict[str, Any]:
    """Ask in a separate process. Return its row, or a row that says how the process failed."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sender.send(answer_of(case)))
    process.start()
    sender.close()
    answer = f"no answer in {SECONDS} seconds"
    try:
        if receiver.poll(SECONDS):
            row: dict[str, Any] = receiver.recv()
            return row
    except EOFError:
        process.join()
        answer = f"exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return {**named(case), "answer": BROKEN + answer}


def rows(chosen: list[Case], broken: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of cases, one process after the other. Add failed cases to `broken`."""
    expect(len(chosen))
    for case in chosen:
        row = answer_in_process(case)
        print(*row.values(), flush=True)
        if row["answer"].startswith(BROKEN):
            broken.append(case.name)
        yield row
        group_done()


def installed(case: Case) -> bool:
    """Return True if the package of a case is installed."""
    return importlib.util.find_spec(case.family.partition(":")[0]) is not None


def main() -> None:
    """Ask about all cases whose packages are installed, and write the rows."""
    options = parser(__doc__)
    options.add_argument("--only", default="", help="a part of the names of families or types")
    arguments = options.parse_args()
    chosen = [
        case
        for case in cases()
        if installed(case) and arguments.only in f"{case.family} {case.name}"
    ]
    if arguments.quick:
        chosen = [case for case in chosen if case.name in QUICK]
    broken: list[str] = []
    finish("model_types", rows(chosen, broken), arguments)
    if broken:
        raise SystemExit(f"broken: {', '.join(broken)}")


if __name__ == "__main__":
    main()
