"""Linear cross-entropy, forward and backward: time over its matrix products, and peak memory.

The floor is the three products of the unchunked loss at the same shape and dtype. "own products"
are those of the plan that ours follows, without its row kernel. All run interleaved in one process;
times are process CPU times; peaks are those of allocations above inputs, gradients included.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.nn import functional as F

import storage_ops
from benchmarks._harness import finish, interleave, parser, ratios
from storage_ops.ops import loss_tiles, planner
from storage_ops.ops.loss_autograd import problem_of
from storage_ops.ops.loss_rows import Spec, tokens_of

MIB = 1 << 20
SHAPES = {"S1": (2048, 768, 50257), "S2": (1024, 2048, 32000), "S3": (512, 1024, 128256)}
SHARES = (2, 4, 8, 16, 64)
FLOOR = "floor (three products)"
SLOW = 1.25  # --all-plans leaves out what is predicted to take so many times the chosen plan's time
Case = Callable[[], object]


@contextlib.contextmanager
def products_only() -> Iterator[None]:
    """Ours without its row kernel: the plan's matrix products alone."""
    kernel = loss_tiles._rows_kernel
    loss_tiles._rows_kernel = lambda *args: None
    try:
        yield
    finally:
        loss_tiles._rows_kernel = kernel


@dataclass
class Bench:
    """The arguments of one shape and dtype, and the cases measured on them."""

    x: Tensor
    w: Tensor
    target: Tensor
    cases: dict[str, Case] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)  # case -> the case of its products alone
    plans: dict[str, planner.Plan] = field(default_factory=dict)

    def step(self, loss: Callable[..., Tensor], **options: Any) -> Case:
        """Forward and backward from gradients of None."""

        def run() -> object:
            self.x.grad = self.w.grad = None
            result = loss(self.x, self.w, self.target, **options)
            if result.requires_grad:
                result.backward()
            return self.x.grad, self.w.grad

        return run

    def problem(self, options: dict[str, Any]) -> planner.Problem:
        """What the planner sees."""
        spec = Spec("mean", -100, 0.0, 0.0, 0.0, 1.0, False, None,
                    options.get("accumulate_dtype"), None, "", "")  # fmt: skip
        tokens = tokens_of(self.x, self.target, None, None, spec)
        needs = (self.x.requires_grad, self.w.requires_grad, False)
        return problem_of(tokens, self.w, spec, needs, True)

    def add_ours(self, name: str, **options: Any) -> None:
        """Ours, and its products alone."""
        run = self.step(storage_ops.linear_cross_entropy, **options)

        def bare() -> object:
            with products_only():
                return run()

        chosen = options.get("plan")
        budget = options.get("memory_budget")
        self.plans[name] = chosen or planner.choose(self.problem(options), budget)
        self.cases[name], self.cases[f"{name}: own products"] = run, bare
        self.own[name] = f"{name}: own products"


def eager(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """The loss as everybody writes it."""
    return F.cross_entropy(F.linear(x, w), target)


def add_peers(bench: Bench) -> None:
    """Eager, compiled, Inductor's chunker, and torch's own chunked loss at its best settings."""
    bench.cases["eager"] = bench.step(eager)
    bench.cases["torch.compile"] = bench.step(torch.compile(eager, dynamic=False))
    if hasattr(inductor_config, "auto_chunker"):
        # Its default threshold skips heads that amplify their input less than 8 times.
        settings = {"enable": True, "amplify_ratio_threshold": 0, "num_chunk": 8}
        options = {f"auto_chunker.{key}": value for key, value in settings.items()}
        chunked = torch.compile(eager, dynamic=False, options=options)
        bench.cases["Inductor auto_chunker, 8 chunks"] = bench.step(chunked)
    native = getattr(F, "linear_cross_entropy", None)
    if native is None or "options" not in inspect.signature(native).parameters:
        print("F.linear_cross_entropy: not in this torch, skipped")
        return
    chunk = min(512, len(bench.x) // 2)
    best = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, acc_dtype=bench.x.dtype)
    name = f"F.linear_cross_entropy, chunks of {chunk}, acc_dtype its own"
    bench.cases[name] = bench.step(native, options=best)


def add_budgets(bench: Bench, shares: list[int], all_plans: bool) -> None:
    """Ours at shares of one logits buffer; with `all_plans`, by every plan that fits."""
    logits = len(bench.x) * len(bench.w) * bench.x.element_size()
    settings: list[tuple[str, dict[str, Any]]] = [("", {})]
    if bench.x.element_size() < 4:
        settings = [("", {"accumulate_dtype": bench.x.dtype}), (", fp32 sums", {})]
    for label, options in settings:
        if not all_plans:
            bench.add_ours(f"storage_ops, default budget{label}", **options)
        # Sums in fp32 do not fit in the smallest shares of 16-bit logits.
        for share in shares[:2] if label else shares:
            budget, name = logits // share, f"storage_ops, 1/{share}{label}"
            try:
                bench.add_ours(name, memory_budget=budget, **options)
            except ValueError as error:
                print(f"{name}: {error}")
                continue
            if all_plans:
                limit = SLOW * bench.plans[name].seconds
                fitting = planner.candidates(bench.problem(options), budget)
                others = {c.key: c for c in fitting if c.seconds <= limit}
                others.pop(bench.plans[name].key)
                for key, plan in others.items():
                    run = bench.step(storage_ops.linear_cross_entropy, plan=plan, **options)
                    bench.cases[f"{name}: {key}"] = run


def frozen_cases(bench: Bench) -> dict[str, tuple[Case, Case]]:
    """Name -> (ours, the products it cannot do without)."""
    x, w = bench.x.detach(), bench.w.detach()
    g = torch.randn(len(x), len(w)).to(x.dtype)
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()

    def floor(*right: Callable[[], Tensor]) -> Case:
        return lambda: (x @ w.t(), *(make() for make in right))

    def ours(left: Tensor, right: Tensor) -> Case:
        return Bench(left, right, bench.target).step(storage_ops.linear_cross_entropy)

    return {
        "no-grad": (ours(x, w), floor()),
        "frozen weight": (ours(a, w), floor(lambda: g @ w)),
        "frozen input": (ours(x, b), floor(lambda: g.t() @ x)),
    }


def peak(run: Case) -> float:
    """Peak MiB of a run above its inputs."""
    with storage_ops.memory.measure() as m:
        run()
    return round(m.peak_bytes / MIB, 1)


def row(shape: str, case: str, times: tuple[float, float, float], **more: Any) -> dict[str, Any]:
    """One line of the result."""
    median, least, most = times
    return {"shape": shape, "case": case, "time / floor": round(median, 3),
            "least - most": f"{least:.2f} - {most:.2f}", "time / own products": "",
            "peak (MiB)": "", "plan": ""} | more  # fmt: skip


def measure(label: str, bench: Bench, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one shape and dtype."""
    x, w = bench.x.detach(), bench.w.detach()
    g = torch.randn(len(x), len(w)).to(x.dtype)
    bench.cases[FLOOR] = lambda: (x @ w.t(), g @ w, g.t() @ x)
    if not arguments.all_plans:
        add_peers(bench)
    add_budgets(bench, arguments.shares, arguments.all_plans)
    seconds = interleave(bench.cases, arguments.repeats)
    over_floor = ratios(seconds, FLOOR)
    rows = []
    for case, run in bench.cases.items():
        if case in bench.own.values():
            continue
        bench.x.grad = bench.w.grad = None
        more: dict[str, Any] = {"peak (MiB)": peak(run)}
        if case in bench.own:
            more["time / own products"] = round(ratios(seconds, bench.own[case])[case][0], 3)
            plan = bench.plans[case]
            more["plan"] = f"{plan.strategy} {plan.num_chunks} x {plan.num_slices}"
        rows.append(row(label, case, over_floor[case], **more))
    bench.x.grad = bench.w.grad = None
    if not arguments.all_plans:
        for case, (ours, floor) in frozen_cases(bench).items():
            times = ratios(interleave({"ours": ours, "floor": floor}, arguments.repeats), "floor")
            rows.append(row(label, f"storage_ops, {case}, its own floor", times["ours"]))
    return rows


def main() -> None:
    """Measure, write and print."""
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", default=["S1"], choices=list(SHAPES))
    options.add_argument("--dtypes", nargs="+", default=["float32"],
                         choices=["float32", "bfloat16"])  # fmt: skip
    options.add_argument("--shares", nargs="+", type=int, default=list(SHARES),
                         help="budgets: the logits' bytes divided by these")  # fmt: skip
    options.add_argument(
        "--all-plans", action="store_true", help="time every plan that fits and might be fastest"
    )
    arguments = options.parse_args()
    rows = []
    for dtype in arguments.dtypes:
        for name in arguments.shapes:
            tokens, hidden, vocab = SHAPES[name]
            kind = getattr(torch, dtype)
            x = torch.randn(tokens, hidden).to(kind).requires_grad_()
            w = (torch.randn(vocab, hidden) * hidden**-0.5).to(kind).requires_grad_()
            bench = Bench(x, w, torch.randint(vocab, (tokens,)))
            rows += measure(f"{name} {dtype}", bench, arguments)
    stem = "linear_cross_entropy_plans" if arguments.all_plans else "linear_cross_entropy"
    finish(stem, rows, arguments)


if __name__ == "__main__":
    main()
