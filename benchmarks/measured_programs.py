"""Estimates and plans of training programs of public packages, against allocations on a CPU.

`python -m benchmarks.measured_programs` writes docs/measured-programs.md. For each program of
`_programs.py` the page has the estimated and the measured peak of a step with AdamW. It also has
the peak and the gradients of a step with a plan for `SHARE` of the estimate. `--only NAME` runs one
program and prints it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import storage_ops
from benchmarks._harness import MIB, ROOT
from benchmarks._programs import Program, programs
from storage_ops.fitting.search import NothingFits
from storage_ops.memory import measure, simulate_step

PAGE = ROOT / "docs" / "measured-programs.md"
SHARE = 0.8  # of the estimate, as the budget of a plan
HEAD = """# Measured programs

Are estimates and plans correct for models of other packages? Each row is a training step with
AdamW. Its model is from a public package, at a size that a CPU can train.

* **Estimate** is the peak that `simulate_step` returns.
* **Measured** is the peak of the step on a CPU, with parameters, optimizer state and batch.
* **Budget** is the budget of a plan of `fit`: 80 % of the estimate or, after "least", the smallest
  budget for which there is a plan.
* **With the plan** is the measured peak of a step with the plan.
* **Bit-equal** is "yes" if the plan changes no bit of the gradients.

With several threads, oneDNN adds up the gradient of some convolution weights in a buffer that no
estimate counts. In the step of torchvision's resnet18 with a plan, two threads need 0.15 MiB.

`make measured-programs` measures all rows again. The weekly workflow does so too, and keeps the
page as an artifact.

"""
COLUMNS = ("package", "model", "estimate (MiB)", "measured (MiB)", "difference", "budget (MiB)",
           "with the plan (MiB)", "bit-equal")  # fmt: skip


def nbytes(tensors: object) -> int:
    """Return the bytes of the distinct storages of tensors."""
    kept = [t.untyped_storage() for t in tree_leaves(tensors) if isinstance(t, Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in kept}.values())


def backward(model: nn.Module, batch: dict[str, Tensor], program: Program) -> None:
    """Run forward, loss and backward from the same random numbers each time."""
    torch.manual_seed(1)
    program.loss(model(**batch)).backward()


def gradients_of(run: Callable[[], None], model: nn.Module) -> list[Tensor | None]:
    """Return the gradients after a call, and remove them from the model."""
    run()
    result = [p.grad for p in model.parameters()]
    model.zero_grad()
    return result


def peak_of(model: nn.Module, batch: dict[str, Tensor], program: Program) -> float:
    """Return the peak bytes of the second of two steps, including all memory allocated before."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step() -> None:
        backward(model, batch, program)
        optimizer.step()

    step()
    optimizer.zero_grad()
    with measure() as measured:
        step()
    states = [list(state.values()) for state in optimizer.state.values()]
    kept = [list(model.parameters()), list(model.buffers()), batch, states]
    model.zero_grad()
    return nbytes(kept) + measured.peak_bytes


def equal(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    """Return True if all gradients are bit-equal."""
    pairs = zip(left, right, strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def row_of(program: Program) -> tuple[str, ...]:
    """Measure a program. If its budget is refused, use the budget that `fit` names."""
    torch.manual_seed(0)
    model, batch = program.model().train(), program.batch()
    options: dict[str, Any] = {
        "loss": program.loss,
        "optimizer": torch.optim.AdamW,
        "device": "cpu",
    }
    estimate = simulate_step(model, batch, **options).peak_bytes
    plain = gradients_of(functools.partial(backward, model, batch, program), model)
    measured = peak_of(model, batch, program)
    budget, least = int(SHARE * estimate), ""
    try:
        plan = storage_ops.fit(model, batch, budget, **options)
    except NothingFits as refusal:
        budget, least = refusal.smallest_bytes, "least "
        plan = storage_ops.fit(model, batch, budget, **options)
    plan.apply()
    planned = gradients_of(functools.partial(backward, model, batch, program), model)
    same = equal(plain, planned)
    taken = peak_of(model, batch, program)
    return (
        program.package, program.name, f"{estimate / MIB:.2f}", f"{measured / MIB:.2f}",
        f"{100 * (estimate / measured - 1):+.2f} %", f"{least}{budget / MIB:.2f}",
        f"{taken / MIB:.2f}", "yes" if same else "no",
    )  # fmt: skip


def page_of(rows: list[tuple[str, ...]]) -> str:
    """Return the text of the page."""
    packages = sorted({row[0] for row in rows} | {"torch"})
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    table = [COLUMNS, tuple(["---"] * 2 + ["---:"] * 5 + ["---"]), *rows]
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return HEAD + "\n".join(lines) + f"\n\nMeasured with {versions}.\n"


def main() -> None:
    """Measure all programs whose packages are installed, and write the page."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", help="the name of one program, which is printed alone")
    only = options.parse_args().only
    rows = []
    for program in programs():
        if importlib.util.find_spec(program.package) is None or only not in (None, program.name):
            continue
        rows.append(row_of(program))
        print(*rows[-1], flush=True)
    if only is None:
        PAGE.write_text(page_of(rows))


if __name__ == "__main__":
    main()
