"""Linear cross-entropy, forward and backward: time over its matrix products, and peak memory.

The floor is the three products of the unchunked loss at the same shape and dtype. "own products" is
our loss without its row kernel, so only the products of its plan. All cases run interleaved in one
process. Times are CPU times of the process, or times between events on a GPU. Peaks include
gradients, but not inputs. "loss" is the mean that a case returns. Shapes S1 to S3 are for a CPU, R1
to R9 for a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import storage_ops
from benchmarks._harness import (
    Case,
    expect,
    finish,
    interleave,
    milliseconds,
    parser,
    peak,
    ratios,
    real_logits,
    skip,
)  # fmt: skip
from benchmarks._loss_peers import Loss, Task, peers
from storage_ops.loss.call import Call
from storage_ops.loss.engine.head import problem_of
from storage_ops.loss.engine.ranks import Ranks
from storage_ops.loss.engine.tokens import tokens_of
from storage_ops.loss.planning import planner
from storage_ops.loss.planning.devices import rates_of
from storage_ops.loss.planning.problem import Problem
from storage_ops.loss.row_function import CrossEntropyRows

# Tokens, width, classes.
SHAPES = {"S1": (2048, 768, 50257), "S2": (1024, 2048, 32000), "S3": (512, 1024, 128256)}
GPU_SHAPES = {
    "R1": (4096, 4096, 128256),
    "R2": (8192, 4096, 128256),
    "R7": (32768, 768, 50257),
    "R6": (16384, 2048, 32000),
    "R8": (4096, 4096, 32000),
    "R5": (8192, 2304, 256000),
    "R3": (8192, 4096, 151936),
    "R4": (16384, 2048, 248320),
    "R9, 1024": (1024, 4096, 128256),
    "R9, 512": (512, 4096, 128256),
    "R9, 128": (128, 4096, 128256),
}
QUICK_SHAPES = {"quick": (512, 512, 32000)}
REHEARSED = {"least": (128, 64, 1000)}
SOFTCAPS = {"R5": 30.0}
SHARES = (2, 4, 8, 16, 64)
FLOOR = "floor (three products)"
REAL = "real "  # prefix of the shapes of --real-logits, followed by the hidden size
SLOW = 1.25  # times the predicted time of the chosen plan; --all-plans omits slower plans
VARIANTS = ("mean", "none", "half ignored")


@contextlib.contextmanager
def products_only() -> Iterator[None]:
    """Let our loss run only its matrix products, without its row kernel, in a with block."""
    kernel = CrossEntropyRows._row_kernel
    CrossEntropyRows._row_kernel = lambda *args: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        CrossEntropyRows._row_kernel = kernel  # type: ignore[method-assign]


@dataclass
class Bench:
    """The arguments of one shape and dtype, and the cases measured on them."""

    x: Tensor
    w: Tensor
    target: Tensor
    task: Task
    cases: dict[str, Case] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)  # case -> the case with only its products
    plans: dict[str, planner.Plan] = field(default_factory=dict)
    loss: Tensor | None = None  # of the latest step

    @property
    def valid(self) -> int | None:
        """Return how many tokens count, or None if all do."""
        valid = int((self.target >= 0).sum())
        return valid if valid < len(self.target) else None

    def ours(self, **options: Any) -> Loss:
        """Return the loss of this package."""
        call_options = {"softcap": self.task.softcap, "reduction": self.task.reduction, **options}
        call_options["max_valid"] = self.valid
        return lambda x, w, t: storage_ops.linear_cross_entropy(x, w, t, **call_options)

    def step(self, loss: Loss) -> Case:
        """Return a function that runs forward and backward from gradients of None."""

        def run() -> object:
            self.x.grad = self.w.grad = None
            result = loss(self.x, self.w, self.target)
            self.loss = result.detach()
            if result.requires_grad:
                result.sum().backward()
            return self.x.grad, self.w.grad

        return run

    def problem(self, options: dict[str, Any]) -> Problem:
        """Return the planner's problem."""
        needs = (self.x.requires_grad, self.w.requires_grad, False)
        call = Call(
            self.x, self.w, self.target, reduction=self.task.reduction,
            softcap=self.task.softcap or 0.0, max_valid=self.valid,
            accumulate_dtype=options.get("accumulate_dtype"), grad_mask=needs,
        )  # fmt: skip
        tokens = tokens_of(call, Ranks(), 0, len(self.w))
        return problem_of(call, tokens, len(self.w))

    def add_ours(self, name: str, **options: Any) -> None:
        """Add our loss, and a case with only its products."""
        run = self.step(self.ours(**options))

        def bare() -> object:
            with products_only():
                return run()

        chosen = options.get("plan")
        budget = options.get("memory_budget")
        rates = rates_of(self.x.device)
        self.plans[name] = chosen or planner.choose(self.problem(options), budget, rates)
        self.cases[name], self.cases[f"{name}: own products"] = run, bare
        self.own[name] = f"{name}: own products"


def add_budgets(bench: Bench, shares: list[int], all_plans: bool) -> None:
    """Add our loss at shares of the bytes of all logits; with `all_plans`, every plan that fits."""
    logits = len(bench.x) * len(bench.w) * bench.x.element_size()
    settings: list[tuple[str, dict[str, Any]]] = [("", {})]
    if bench.x.element_size() < 4:
        settings = [("", {"accumulate_dtype": bench.x.dtype}), (", fp32 sums", {})]
    for label, options in settings:
        if not all_plans:
            bench.add_ours(f"storage_ops, default budget{label}", **options)
        for share in shares:
            budget, name = logits // share, f"storage_ops, 1/{share}{label}"
            try:
                bench.add_ours(name, memory_budget=budget, **options)
            except ValueError as error:
                skip(f"{bench.task.label}: {name}", str(error))
                continue
            if all_plans:
                limit = SLOW * bench.plans[name].seconds
                fitting = planner.candidates(
                    bench.problem(options), budget, rates_of(bench.x.device)
                )
                others = {c.key: c for c in fitting if c.seconds <= limit}
                others.pop(bench.plans[name].key)
                for key, plan in others.items():
                    run = bench.step(bench.ours(plan=plan, **options))
                    bench.cases[f"{name}: {key}"] = run


def frozen_cases(bench: Bench) -> dict[str, tuple[Case, Case]]:
    """Return our loss and its floor of matrix products, by the name of what needs no gradient."""
    x, w = bench.x.detach(), bench.w.detach()
    g = torch.randn(len(x), len(w), device=x.device, dtype=x.dtype)
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()

    def floor(*products: Callable[[], Tensor]) -> Case:
        return lambda: (x @ w.t(), *(product() for product in products))

    def ours(x: Tensor, w: Tensor) -> Case:
        part = Bench(x, w, bench.target, bench.task)
        return part.step(part.ours())

    return {
        "no-grad": (ours(x, w), floor()),
        "frozen weight": (ours(a, w), floor(lambda: g @ w)),
        "frozen input": (ours(x, b), floor(lambda: g.t() @ x)),
    }


def row(shape: str, case: str, times: tuple[float, float, float], **more: Any) -> dict[str, Any]:
    """Return one row of the result."""
    median, least, most = times
    return {"shape": shape, "case": case, "time / floor": round(median, 3),
            "least - most": f"{least:.2f} - {most:.2f}", "ms": "", "time / own products": "",
            "peak (MiB)": "", "loss": "", "plan": ""} | more  # fmt: skip


def measure(bench: Bench, variant: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield all rows of one shape, dtype and variant."""
    task, device = bench.task, arguments.device
    x, w = bench.x.detach(), bench.w.detach()
    g = torch.randn(len(x), len(w), device=device, dtype=x.dtype)
    bench.cases[FLOOR] = lambda: (x @ w.t(), g @ w, g.t() @ x)
    if not arguments.all_plans:
        for name, loss in peers(task):
            bench.cases[name] = bench.step(loss)
    add_budgets(bench, arguments.shares, arguments.all_plans)
    seconds = interleave(bench.cases, arguments.repeats, device, task.label)
    over_floor = ratios(seconds, FLOOR)
    for case, run in bench.cases.items():
        if case in bench.own.values():
            continue
        bench.x.grad = bench.w.grad = None
        bench.loss = None
        more: dict[str, Any] = {"ms": milliseconds(seconds[case]), "peak (MiB)": peak(run, device)}
        if bench.loss is not None:
            summed = (bench.valid or len(bench.target)) if variant == "none" else 1
            more["loss"] = round(float(bench.loss.double().sum()) / summed, 5)
        if bench.own.get(case) in seconds:
            more["time / own products"] = round(ratios(seconds, bench.own[case])[case][0], 3)
            plan = bench.plans[case]
            more["plan"] = f"{plan.strategy} {plan.num_chunks} x {plan.num_slices}"
        yield row(task.label, case, over_floor[case], **more)
    bench.x.grad = bench.w.grad = None
    if not arguments.all_plans and variant == "mean":
        for case, (ours, floor) in frozen_cases(bench).items():
            both = {"ours": ours, "floor": floor}
            times = ratios(interleave(both, arguments.repeats, device, task.label), "floor")
            yield row(task.label, f"storage_ops, {case}, its own floor", times["ours"])


def make(shape: str, dtype: torch.dtype, variant: str, arguments: argparse.Namespace) -> Bench:
    """Return the arguments of a shape, random or from a language model."""
    device = arguments.device
    if shape.startswith(REAL):
        hidden = int(shape.removeprefix(REAL))
        x, w, target = real_logits(arguments.real_logits, hidden, device, dtype, arguments.quick)
        shape = f"real logits, {x.shape[1]} wide"
    else:
        tokens, hidden, vocab = (SHAPES | GPU_SHAPES | QUICK_SHAPES | REHEARSED)[shape]
        x = torch.randn(tokens, hidden, device=device).to(dtype)
        w = (torch.randn(vocab, hidden, device=device) * hidden**-0.5).to(dtype)
        target = torch.randint(vocab, (tokens,), device=device)
    x.requires_grad_()
    w.requires_grad_()
    tokens, vocab = len(x), len(w)
    if variant == "half ignored":
        target[torch.randperm(tokens, device=device)[: tokens // 2]] = -100
    label = f"{shape} {str(dtype).removeprefix('torch.')}"
    label += "" if variant == "mean" else f", {variant}"
    reduction = "none" if variant == "none" else "mean"
    return Bench(x, w, target, Task(label, tokens, vocab, dtype, device, SOFTCAPS.get(shape),
                                    reduction))  # fmt: skip


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all shapes."""
    plans = [(shape, dtype, variant) for dtype in arguments.dtypes for shape in arguments.shapes
             for variant in arguments.variants]  # fmt: skip
    expect(len(plans) * (1 if arguments.all_plans else 4))
    for shape, dtype, variant in plans:
        torch._dynamo.reset()
        bench = make(shape, getattr(torch, dtype), variant, arguments)
        yield from measure(bench, variant, arguments)


def main() -> None:
    """Measure, write and print."""
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+",
                         choices=[*SHAPES, *GPU_SHAPES, *QUICK_SHAPES, *REHEARSED])  # fmt: skip
    options.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"])
    options.add_argument("--variants", nargs="+", default=["mean"], choices=VARIANTS)
    options.add_argument("--shares", nargs="+", type=int,
                         help="budgets: the logits' bytes divided by these")  # fmt: skip
    options.add_argument("--real-logits", type=Path, metavar="FILE",
                         help="measure the head of a language model in an .npz file")  # fmt: skip
    options.add_argument("--hidden", nargs="+", type=int, default=[0, 4096],
                         help="hidden sizes of --real-logits; 0: that of the file")  # fmt: skip
    options.add_argument(
        "--all-plans", action="store_true", help="time every plan that fits and might be fastest"
    )
    arguments = options.parse_args()
    on_gpu, quick = arguments.device == "cuda", arguments.quick
    shapes = ["R8"] if on_gpu and quick else GPU_SHAPES if on_gpu else SHAPES
    if arguments.real_logits:
        arguments.shapes = [f"{REAL}{0 if quick else hidden}" for hidden in arguments.hidden]
    arguments.shapes = arguments.shapes or list(QUICK_SHAPES if quick and not on_gpu else shapes)
    full = ["bfloat16"] if on_gpu else ["float32", "bfloat16"]
    arguments.dtypes = arguments.dtypes or (full[:1] if quick else full)
    arguments.shares = arguments.shares or list((4, 64) if quick else SHARES)
    stem = "linear_cross_entropy_plans" if arguments.all_plans else "linear_cross_entropy"
    finish(stem, all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
