"""Compares simulations and plans with real steps: peaks, budgets, owners of memory, tiles."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import storage_ops
from benchmarks._harness import MIB, Case, group_done, interleave, ratios, tick
from benchmarks.fit.models import Parts, measured, models, placed, step_of
from storage_ops.fitting.search import NothingFits, Search

LAYERS = ["GPT2Block", "LlamaDecoderLayer", "MixtralDecoderLayer", "ViTLayer", "T5Block",
          "Residual"]  # fmt: skip
BUDGETS = 20
LIMITS = (0.95, 0.7, 0.5)  # shares of the peak
TILES = (2, 4, 8, 16)
CHECKPOINT = "full checkpoint"
Rows = Iterator[dict[str, Any]]


def size_of_peaks(kind: str, arguments: argparse.Namespace) -> dict[str, int]:
    """Return the size of the models of `peaks`."""
    if arguments.quick:
        return {"tokens": 128, "width": 128, "layers": 3, "vocab": 4096, "image": 64}
    return {"tokens": 256, "width": 256, "layers": 4, "vocab": 4096, "image": 96}


def peaks(kind: str, make: Callable[[], Parts], arguments: argparse.Namespace) -> Rows:
    """Yield simulated and measured peaks, in two dtypes, without and with full checkpoints."""
    for dtype in (torch.float32, torch.bfloat16):
        for checkpoint in ("none", "full"):
            name = str(dtype).removeprefix("torch.")
            tick(f"{kind}, {name}, {checkpoint}", 0.0)
            torch.manual_seed(0)
            model, batch, loss = placed(make(), "cpu", dtype)
            if checkpoint == "full":
                cfg = storage_ops.ActivationCheckpointConfig(LAYERS, allow_no_match=True)
                storage_ops.apply_activation_checkpoint(model, cfg)
            began = time.process_time()
            simulated = storage_ops.memory.simulate_step(
                model, batch, loss=loss, optimizer=torch.optim.AdamW,
                assume={"topk": 0.25} if kind == "Mixtral" else None,
            )  # fmt: skip
            seconds = time.process_time() - began
            peak = measured(model, batch, loss)
            yield {
                "case": kind, "dtype": name, "checkpoint": checkpoint,
                "simulated_MiB": round(simulated.peak_bytes / MIB, 2),
                "measured_MiB": round(peak / MIB, 2),
                "error_percent": round(100 * (simulated.peak_bytes / peak - 1), 3),
                "cpu_seconds": round(seconds, 2),
            }  # fmt: skip
    group_done()


def llamas(arguments: argparse.Namespace) -> Rows:
    """Yield the CPU seconds of `will_it_fit` for Llama-8B, also with more layers."""
    for layers in (32, 80):
        tick(f"Llama-8B, {layers} layers", 0.0)
        size = {"tokens": 8192, "width": 4096, "vocab": 128256, "image": 32}
        with torch.device("meta"):
            parts = models(**size, layers=layers, kv_share=4, inner=3.5)["Llama"]()
        model, batch, _ = placed(parts, "meta", torch.bfloat16)
        began = time.process_time()
        report = storage_ops.memory.will_it_fit(model, batch)
        yield {
            "case": f"Llama-8B, {layers} layers", "dtype": "bfloat16", "checkpoint": "none",
            "simulated_MiB": round(report.peak_bytes / MIB, 2),
            "cpu_seconds": round(time.process_time() - began, 2),
        }  # fmt: skip


def size_of_budgets(kind: str, arguments: argparse.Namespace) -> dict[str, int]:
    """Return the size of the models of `budgets`."""
    # With fewer patches than these, the peak of a ViT is in the optimizer's step.
    image = 112 if kind == "ViT" else 48
    return {"tokens": 64, "width": 64, "layers": 4, "vocab": 1024, "image": image}


def budgets(kind: str, make: Callable[[], Parts], arguments: argparse.Namespace) -> Rows:
    """Yield the share of memory that `explain_oom` attributes, and plans for twenty budgets."""
    for rows in (attributed, planned):
        tick(kind, 0.0)
        torch.manual_seed(0)
        yield rows(kind, make())
    group_done()


def smallest(search: Search) -> int:
    """Return the smallest feasible budget, which the error for a smaller one names."""
    try:
        search.plan(1)
    except NothingFits as error:
        return error.smallest_bytes
    raise AssertionError("a step fits into one byte")


def planned(name: str, parts: Parts) -> dict[str, Any]:
    """Return the row of the plans of a model for all budgets."""
    model, batch, loss = parts
    search = Search(model, batch, loss, torch.optim.AdamW)
    low, high = smallest(search), measured(copy.deepcopy(model), batch, loss)
    over, errors, seconds = [], [], []
    for i in range(BUDGETS):
        budget = low + (high - low) * i // (BUDGETS - 1)
        tick(f"{name}, budget {i + 1} of {BUDGETS}", i / BUDGETS)
        plan = search.plan(budget)
        plan.apply()
        state = copy.deepcopy(model.state_dict())
        peak = measured(model, batch, loss)
        model.load_state_dict(state)
        plan.undo()
        seconds.append(plan.seconds)
        over.append(peak / budget)
        errors.append(abs(plan.peak_bytes / peak - 1))
        assert plan.peak_bytes <= budget
    below = False
    try:
        search.plan(low - 1)
    except NothingFits as error:
        below = f"({low} bytes)" in str(error)
    return {
        "shape": name, "case": f"{BUDGETS} budgets",
        "smallest (MiB)": round(low / MIB, 2), "none (MiB)": round(high / MIB, 2),
        "largest measured / budget": round(max(over), 5),
        "simulated off by (%)": round(100 * max(errors), 3),
        "more budget never slower": all(a >= b for a, b in pairwise(seconds)),
        "smallest named below it": below,
    }  # fmt: skip


def attributed(name: str, parts: Parts) -> dict[str, Any]:
    """Return the row of the smallest share of the bytes that `explain_oom` attributes."""
    model, batch, loss = parts
    memory, shares = storage_ops.memory, []
    step = step_of(model, batch, loss)
    step()
    peak = measured(copy.deepcopy(model), batch, loss)
    for share in LIMITS:
        # The plan at the end of a report is slow, and not measured here.
        with mock.patch("storage_ops.oom.explain_oom.advise", lambda *_: (None, "")):
            try:
                with memory.limit(int(share * peak), "cpu"), memory.explain_oom("cpu") as report:
                    step()
            except torch.OutOfMemoryError:
                shares.append(report.attributed_share)
        model.zero_grad()
    return {"shape": name, "case": f"explain_oom, {len(shares)} limits",
            "least share attributed": round(min(shares, default=0.0), 4)}  # fmt: skip


class MLP(nn.Module):
    """The MLP of a Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in "gu")
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def all_tiles(arguments: argparse.Namespace) -> Rows:
    """Yield forward and backward of an MLP in tiles, over a full checkpoint of it."""
    width, tokens = (128, 512) if arguments.quick else (512, 4096)
    for dtype in (torch.float32, torch.bfloat16):
        plain = MLP(width).to(dtype)
        x = torch.randn(1, tokens, width, dtype=dtype, requires_grad=True)
        modules: dict[str, nn.Module] = {
            CHECKPOINT: storage_ops.CheckpointWrapper(copy.deepcopy(plain))
        }
        modules |= {f"{n} tiles": storage_ops.tile(copy.deepcopy(plain), n) for n in TILES}
        cases: dict[str, Case] = {name: step_of_tiles(way, x) for name, way in modules.items()}
        times = ratios(interleave(cases, arguments.repeats, "cpu", "tile"), CHECKPOINT)
        for name, run in cases.items():
            with storage_ops.memory.measure() as m:
                run()
            median, least, most = times[name]
            yield {
                "shape": f"tile, {tokens} x {width}, {str(dtype).removeprefix('torch.')}",
                "case": name, f"time / {CHECKPOINT}": round(median, 3),
                "least - most": f"{least:.2f} - {most:.2f}",
                "peak (MiB)": round(m.peak_bytes / MIB, 2),
            }  # fmt: skip


def step_of_tiles(module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward and drops the gradients."""

    def run() -> None:
        module(x).sum().backward()
        module.zero_grad()
        x.grad = None

    return run
