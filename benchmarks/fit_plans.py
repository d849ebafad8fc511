"""Plans of `fit` against other ways to checkpoint a model: time of a step against its peak.

For models of transformers (GPT, Llama, ViT), a whole step (forward, backward, AdamW) without
checkpoints, with torch.utils.checkpoint of every layer, with torch's selective checkpointing by the
rules of torchtitan (attention and every second matrix product are saved), and under torch.compile
with an activation memory budget. `fit` is given the measured peak of each of these that saves
memory, and budgets between that of full checkpoints and that of none; its plans are carried out and
measured in the same way. Times are over those without checkpoints; peaks are everything that is on
the device in a step from the second on, by allocation events.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import storage_ops
from benchmarks._harness import expect, finish, interleave, milliseconds, parser, ratios, skip
from benchmarks.fit import MIB, Made, loss_of, measured, models, placed
from storage_ops.fitting.fit import NothingFits, Search
from storage_ops.fitting.units import units_of

NONE, FULL, SELECTIVE = "none", "torch full checkpoint", "torch selective, torchtitan's rules"
KINDS = ("GPT", "Llama", "ViT")
SIZES = {  # on a GPU large enough that kernels, and not the host, take the time
    "quick": {"tokens": 64, "width": 64, "layers": 3, "vocab": 512, "image": 64},
    "cpu": {"tokens": 128, "width": 192, "layers": 6, "vocab": 2048, "image": 112},
    "cuda": {"tokens": 2048, "width": 2048, "layers": 8, "vocab": 32768, "image": 512, "batch": 8},
}
# Bytes of a budget above a measured peak, of which a simulated one differs by some bytes, on a GPU
# by what it rounds sizes up.
SLACK = {"cpu": 1 << 10, "cuda": 1 << 20}
SHARES = (0.2, 0.4, 0.6, 0.8)  # of the way from full's peak to that of none
COMPILED = (0.5,)  # activation memory budgets of torch.compile
RowsOf = Callable[..., Iterator[dict[str, Any]]]  # of a model's name, what makes it, arguments
aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
SAVED = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)


class EverySecondProduct:
    """A policy for one checkpoint: saves attention, and matrix products but the second of each two.

    Products are counted apart in forward and recompute, so that both see the same ones.
    """

    def __init__(self) -> None:
        self._count = {True: 0, False: 0}

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """What becomes of the result of an op."""
        saved = op in SAVED
        if op in PRODUCTS:
            self._count[ctx.is_recompute] += 1
            saved = self._count[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(model: nn.Module, selective: bool) -> nn.Module:
    """A model whose layers are checkpointed by torch."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(EverySecondProduct())

    options: dict[str, Any] = {"context_fn": contexts} if selective else {}
    for unit in units_of(model):
        plain = unit.module.forward
        forward = partial(checkpoint, plain, use_reentrant=False, **options)
        unit.module.forward = forward  # type: ignore[method-assign]
    return model


def step_of(model: nn.Module, batch: Any, loss: Any) -> Callable[[], None]:
    """A step of a model with an optimizer of its own."""
    optimizer = torch.optim.AdamW(model.parameters())

    def run() -> None:
        loss_of(model, batch, loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def peers(made: Made) -> Iterator[tuple[str, nn.Module]]:
    """The ways to checkpoint that are not ours."""
    model = made[0]
    yield NONE, copy.deepcopy(model)
    yield FULL, checkpointed(copy.deepcopy(model), selective=False)
    yield SELECTIVE, checkpointed(copy.deepcopy(model), selective=True)
    for share in COMPILED:
        name = f"torch.compile, activation memory budget {share:g}"
        compiled: Any = torch.compile(copy.deepcopy(model), dynamic=False)
        torch._dynamo.reset()
        try:
            with torch._functorch.config.patch(activation_memory_budget=share):
                step_of(compiled, made[1], made[2])()  # compiled now, with this budget
        except Exception as error:
            skip(name, f"{type(error).__name__}: {str(error)[:200]}")
            continue
        yield name, compiled


def fitted(made: Made, budgets: dict[str, int]) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Models with the plan for each budget, and what is known of it."""
    model, batch, loss = made
    search = Search(model, batch, loss, torch.optim.AdamW)
    for why, budget in budgets.items():
        name = f"storage_ops, fit for {why}"
        try:
            plan = search.plan(budget)
        except NothingFits as error:
            skip(name, str(error))
            continue
        with tempfile.TemporaryDirectory() as folder:
            plan.save(path := Path(folder) / "fit.json")
            applied = storage_ops.load_fit(path, copy.deepcopy(model)).apply()
        facts = {
            "budget (MiB)": round(budget / MIB, 2),
            "simulated (MiB)": round(plan.peak_bytes / MIB, 2),
            "predicted": round(1 + plan.seconds / plan.step_seconds, 3),
        }
        yield name, applied, facts


def rows_of(
    kind: str, make: Callable[[], Made], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """All ways for one model."""
    device = arguments.device
    torch.manual_seed(0)
    made = _, batch, loss = placed(make(), device)
    found = dict(peers(made))
    peaks = {name: measured(each, batch, loss) for name, each in found.items()}
    low, high = peaks[FULL], peaks[NONE]
    budgets = {f"the peak of {name}": peak + SLACK[device] for name, peak in peaks.items()}
    del budgets[f"the peak of {NONE}"]
    for share in SHARES:
        budgets[f"{share:.0%} of the way to none"] = int(low + share * (high - low))
    facts: dict[str, dict[str, Any]] = {}
    for name, applied, known in fitted(made, budgets):
        found[name], facts[name] = applied, known
        peaks[name] = measured(applied, batch, loss)
    cases = {name: step_of(each, batch, loss) for name, each in found.items()}
    seconds = interleave(cases, arguments.repeats, device, kind)
    times = ratios(seconds, NONE)
    for name in cases:
        median, least, most = times[name]
        yield {
            "shape": kind, "case": name, "time / none": round(median, 3),
            "least - most": f"{least:.2f} - {most:.2f}", "ms": milliseconds(seconds[name]),
            "peak (MiB)": round(peaks[name] / MIB, 2), **facts.get(name, {}),
        }  # fmt: skip


def all_rows(arguments: argparse.Namespace, rows_of: RowsOf) -> Iterator[dict[str, Any]]:
    """Model by model: `rows_of` its name, what makes it, and the arguments."""
    try:
        made = models(**SIZES["quick" if arguments.quick else arguments.device])
    except ImportError as error:
        skip("all models", f"transformers is not installed: {error}")
        return
    expect(len(arguments.models))
    for kind in arguments.models:
        yield from rows_of(kind, made[kind], arguments)


def run_models(stem: str, text: str | None, rows_of: RowsOf) -> None:
    """Measure the models that are asked for, write and print."""
    options = parser(text)
    options.add_argument("--models", nargs="+", default=KINDS,
                         choices=[*KINDS, "Mixtral", "T5", "UNet"])  # fmt: skip
    arguments = options.parse_args()
    finish(stem, all_rows(arguments, rows_of), arguments)


if __name__ == "__main__":
    run_models("fit_plans", __doc__, rows_of)
