"""Plans of `fit` against other checkpoints: time of a step and its peak.

Peers are no checkpoints, torch's full checkpoint of every layer, torch's selective checkpoint by
the rules of torchtitan, and torch.compile with an activation memory budget. Budgets for `fit` are
the measured peak of each, and values between the peak of full checkpoints and of none.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
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
from benchmarks._harness import (
    MIB,
    Clock,
    Runs,
    curve,
    group_done,
    interleave,
    milliseconds,
    ratios,
    skip,
    tick,
)
from benchmarks.fit.models import Parts, facts_of, measured, placed, step_of
from storage_ops.fitting.plan import FitPlan
from storage_ops.fitting.search import NothingFits, Search
from storage_ops.fitting.units import units_of
from storage_ops.memory import Measurement, Sample

NONE, FULL, SELECTIVE = "none", "torch full checkpoint", "torch selective, torchtitan's rules"
# Bytes of a budget above a measured peak. A simulated peak differs from it by some bytes, on a GPU
# by the allocator's rounding of sizes.
SLACK = {"cpu": 1 << 10, "cuda": 1 << 20}
BETWEEN = (0.2, 0.4, 0.6, 0.8)  # from 0, the peak of full checkpoints, to 1, that of none
Facts = dict[str, Any]
aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
SAVED = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def size(kind: str, arguments: argparse.Namespace) -> dict[str, int]:
    """Return the size of the models. On a GPU, kernels take longer than the host."""
    if arguments.quick:
        return {"tokens": 64, "width": 64, "layers": 3, "vocab": 512, "image": 64}
    if arguments.device == "cpu":
        return {"tokens": 128, "width": 192, "layers": 6, "vocab": 2048, "image": 112}
    large = {"tokens": 2048, "width": 2048, "layers": 8, "vocab": 32768}
    return large | {"image": 512, "batch": 8}


class EverySecondProduct:
    """A policy for one checkpoint that saves attention and every second matrix product.

    Forward and recompute have separate counts of products, so that both save the same ones.
    """

    def __init__(self) -> None:
        self._count = {True: 0, False: 0}

    def __call__(self, ctx: Any, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        """Return the policy for the result of an op."""
        saved = op in SAVED
        if op in PRODUCTS:
            self._count[ctx.is_recompute] += 1
            saved = self._count[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    """Return the contexts of a selective checkpoint by the rules of torchtitan."""
    return create_selective_checkpoint_contexts(EverySecondProduct())


def checkpointed(layers: list[nn.Module], selective: bool) -> None:
    """Checkpoint these layers with torch."""
    options: dict[str, Any] = {"context_fn": selective_contexts} if selective else {}
    for layer in layers:
        forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)
        layer.forward = forward  # type: ignore[method-assign]


def peers(parts: Parts, shares: list[float]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model with the checkpoints of each peer."""
    model, batch, loss = parts
    yield NONE, copy.deepcopy(model)
    for name in (FULL, SELECTIVE):
        changed = copy.deepcopy(model)
        checkpointed([unit.module for unit in units_of(changed)], selective=name == SELECTIVE)
        yield name, changed
    for share in shares:
        name = f"torch.compile, activation memory budget {share:g}"
        compiled: Any = torch.compile(copy.deepcopy(model), dynamic=False)
        torch._dynamo.reset()
        try:
            with torch._functorch.config.patch(activation_memory_budget=share):
                step_of(compiled, batch, loss)()  # compiled now, with this budget
        except Exception as error:
            skip(name, f"{type(error).__name__}: {str(error)[:200]}")
            continue
        yield name, compiled


def saved(plan: FitPlan[Any], path: Path) -> Callable[[nn.Module], nn.Module]:
    """Save a plan, and return a function that applies it to another copy of the model."""
    plan.save(path)
    return lambda model: storage_ops.load_fit(path, model).apply()


def rows_of(
    kind: str, base: str, seconds: dict[str, Runs], peaks: dict[str, int], facts: dict[str, Facts]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case: its time over that of `base`, its peak, and its plan."""
    times = ratios(seconds, base)
    for name, runs in seconds.items():
        median, least, most = times[name]
        yield {
            "shape": kind, "case": name, f"time / {base}": round(median, 3),
            "least - most": f"{least:.2f} - {most:.2f}", "ms": milliseconds(runs),
            "peak (MiB)": round(peaks[name] / MIB, 2), **facts.get(name, {}),
        }  # fmt: skip


def plans(
    kind: str, make: Callable[[], Parts], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model, with all cases interleaved."""
    device = arguments.device
    torch.manual_seed(0)
    parts = model, batch, loss = placed(make(), device)
    model_of = dict(peers(parts, arguments.shares))
    peaks = {name: measured(each, batch, loss) for name, each in model_of.items()}
    low, high = peaks[FULL], peaks[NONE]
    budgets = {f"the peak of {name}": peak + SLACK[device] for name, peak in peaks.items()}
    del budgets[f"the peak of {NONE}"]
    budgets |= {f"{s:.0%} of the way to none": int(low + s * (high - low)) for s in BETWEEN}
    facts: dict[str, Facts] = {}
    search = Search(model, batch, loss, torch.optim.AdamW)
    with tempfile.TemporaryDirectory() as folder:
        for why, budget in budgets.items():
            name = f"storage_ops, fit for {why}"
            try:
                plan = search.plan(budget)
            except NothingFits as error:
                skip(f"{kind}: {name}", str(error))
                continue
            model_of[name] = saved(plan, Path(folder) / "fit.json")(copy.deepcopy(model))
            facts[name], peaks[name] = (
                facts_of(plan, budget),
                measured(model_of[name], batch, loss),
            )
    cases = {name: step_of(each, batch, loss) for name, each in model_of.items()}
    seconds = interleave(cases, arguments.repeats, device, kind)
    yield from rows_of(kind, NONE, seconds, peaks, facts)


# Actions of plans for an H100 that are computed without a GPU.
BITWISE = ["output_discard", "selective", "full"]
HEAD = [*BITWISE, "linear_cross_entropy"]
# The actions that plans may use, and their budgets as shares of the peak without checkpoints.
CARRIED: dict[str, tuple[list[str] | None, tuple[float, ...]]] = {
    "default": (None, (0.84, 0.67)),
    "with the loss": (HEAD, (0.51, 0.34)),
    "with the loss and offloading": ([*HEAD, "offload"], (0.51,)),
    "with all": ([*HEAD, "offload", "tile"], (0.40, 0.30)),
}
STEPS, WARM = 5, 2


def size_of_carried(kind: str, arguments: argparse.Namespace) -> dict[str, int]:
    """Return the size of the Llama."""
    if arguments.quick:
        small = {"tokens": 64, "width": 64, "layers": 2, "vocab": 512}
        return small | {"image": 32, "batch": 2, "inner": 4}
    large = {"tokens": 8192, "width": 2048, "layers": 16, "vocab": 128256}
    return large | {"image": 32, "batch": 2, "inner": 4}


def carried(
    kind: str, make: Callable[[], Parts], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for each plan that is computed on the meta device for an H100 and run here.

    Each case trains alone. Its peak includes the workspaces of cuBLAS, which have a column too.
    """
    device, none = arguments.device, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, apply, facts in planned_without_a_gpu(make, Path(folder), device):
            tick(name, 0.0)
            with torch.device(device):
                model, batch, loss = placed(make(), device)
            tokens = batch["input_ids"].shape
            seconds, peak = alone(apply(model), batch, loss)
            none = none or seconds
            if device == "cuda":
                facts["workspaces (MiB)"] = round(workspaces() / MIB, 2)
            yield {
                "shape": f"Llama, {tokens[0]} x {tokens[1]} tokens", "case": name,
                "time / none": round(seconds / none, 3), "ms": round(seconds * 1e3, 1),
                "peak (MiB)": round(peak / MIB, 2), **facts,
            }  # fmt: skip
            del model, batch
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    group_done()


def on_meta(make: Callable[[], Parts], dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """Return the model and its batch on the meta device."""
    with torch.device("meta"):
        model, batch, _ = placed(make(), "meta", dtype)
    return model, batch


def timelines(
    kind: str, make: Callable[[], Parts], arguments: argparse.Namespace
) -> Iterator[Facts]:
    """Yield simulated memory over a step on an H100, without and with a plan for half the peak."""
    model, batch = on_meta(make, torch.bfloat16)
    asked: Any = {"optimizer": torch.optim.AdamW, "device": "h100"}
    plain = storage_ops.memory.simulate_step(model, batch, **asked)
    actions, (share, *_) = CARRIED["with the loss"]
    plan = storage_ops.fit(model, batch, int(share * plain.peak_bytes), actions=actions, **asked)
    plan.apply()
    ours = storage_ops.memory.simulate_step(model, batch, **asked)
    tokens = batch["input_ids"].shape
    for name, step in (("plain PyTorch", plain), ("storage_ops", ours)):
        # A simulation does not have the seconds of a GPU.
        events = [Sample(float(k), sample.nbytes) for k, sample in enumerate(step.timeline)]
        yield {
            "shape": f"Llama, {tokens[0]} x {tokens[1]} tokens", "case": name,
            "simulated (MiB)": round(step.peak_bytes / MIB, 2),
            "parameters (MiB)": round(sum(p.nbytes for p in model.parameters()) / MIB, 2),
            "memory": curve(Measurement(step.peak_bytes, step.kept_bytes, events)),
        }  # fmt: skip
    group_done()


def planned_without_a_gpu(
    make: Callable[[], Parts], folder: Path, device: str
) -> Iterator[tuple[str, Callable[[Any], Any], Facts]]:
    """Yield the name of each case, a function that prepares the model, and its prediction."""

    def of_transformers(model: Any) -> nn.Module:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        changed: nn.Module = model
        return changed

    model, batch = on_meta(make, torch.float32 if device == "cpu" else torch.bfloat16)
    asked: Any = {"optimizer": torch.optim.AdamW, "device": "h100"}
    none = storage_ops.memory.simulate_step(model, batch, **asked).peak_bytes
    yield "none", lambda m: m, {"simulated (MiB)": round(none / MIB, 2), "predicted": 1.0}
    yield "transformers, every layer", of_transformers, {}
    for kind, (actions, shares) in CARRIED.items():
        for share in shares:
            name, budget = f"storage_ops, {kind}, {share:.0%}", int(share * none)
            try:
                plan = storage_ops.fit(model, batch, budget, actions=actions, **asked)
            except ValueError as error:
                skip(name, str(error))
                continue
            yield name, saved(plan, folder / f"{kind}, {share}.json"), facts_of(plan, budget)


def alone(model: nn.Module, batch: Any, loss: Any) -> tuple[float, int]:
    """Return the median seconds of a step, and the peak bytes of all steps."""
    device, step = batch["input_ids"].device.type, step_of(model, batch, loss)
    for _ in range(WARM):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(STEPS):
        clock = Clock(device)
        step()
        seconds.append(clock.stop()[1])
    if device == "cuda":
        return statistics.median(seconds), torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return statistics.median(seconds), measured(model, batch, loss)


def workspaces() -> int:
    """Free the workspaces of cuBLAS for a case, and return their bytes."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()
