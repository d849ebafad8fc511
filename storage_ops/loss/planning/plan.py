"""`storage_ops.plan`: plans for linear cross-entropy, before any tensor exists."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from storage_ops import matmul
from storage_ops.loss.planning import budgets, cost, planner
from storage_ops.loss.planning.devices import (
    DEVICES,
    Rates,
    has_row_kernel,
    key_of,
    named,
    rates_of,
)
from storage_ops.loss.planning.planner import Plan
from storage_ops.loss.planning.problem import GRADS, REDUCTIONS, Grad, Problem, Reduction
from storage_ops.loss.planning.schedule import Strategy
from storage_ops.matmul import Matmul
from storage_ops.matmul.aten import Aten
from storage_ops.quantities import metric, parse_bytes, readable

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_SHORT = {
    "double": "float64", "fp64": "float64", "float": "float32", "fp32": "float32",
    "bf16": "bfloat16", "half": "float16", "fp16": "float16",
}  # fmt: skip


def dtype_name(dtype: Any, argument: str = "dtype") -> str:
    """Return the name of a dtype of torch, or of a text such as "bf16"."""
    # The dtype is read from its text, because plans also work without torch.
    name = str(dtype).removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in ITEMSIZE:
        kind = ValueError if isinstance(dtype, str) or name != str(dtype) else TypeError
        raise kind(f"`{argument}` is {dtype!r}. Expected one of {', '.join(ITEMSIZE)}.")
    return name


def _check_count(argument: str, value: int, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{argument}` is {value!r}. Expected an int.")
    if value < least or (most is not None and value > most):
        rule = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"`{argument}` is {value}. Expected {rule}.")


def _own_or_wide(argument: str, dtype: Any, own: str) -> str | None:
    """Return the name of a dtype: `own` for None, or float32 if `own` is 16-bit."""
    if dtype is None:
        return None
    name = dtype_name(dtype, argument)
    if name not in (own, "float64" if own == "float64" else "float32"):
        raise ValueError(f"`{argument}` is {dtype!r}. Expected None, {own} or float32.")
    return name


def _present() -> Rates:
    """Return the rates of the current GPU, or of the CPU if there is no GPU."""
    import torch

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    return rates_of(device)


def default_device() -> str:
    """Return the name of the current GPU's rates, or "cpu"."""
    present = _present().name
    return next(name for name in DEVICES if named(name).name == present)


def problem_of(
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: Any,
    grads: Collection[str],
    reduction: str,
    accumulate_dtype: Any,
    logits_dtype: Any,
    max_valid: int | None,
    device: str,
    gradient_tolerance: float = 0.0,
    share: float | None = None,
) -> Problem:
    """Return the problem for the planner, from the checked arguments of `plan`."""
    for argument, value, least in (
        ("tokens", tokens, 0),
        ("hidden", hidden, 1),
        ("vocab", vocab, 1),
    ):
        _check_count(argument, value, least)
    name = dtype_name(dtype)
    if not isinstance(grads, (list, tuple, set, frozenset)) or not set(grads) <= set(GRADS):
        raise ValueError(f"`grads` is {grads!r}. Expected a sequence of some of {GRADS}.")
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f"`reduction` is {reduction!r}. Expected one of {REDUCTIONS}.")
    sums = _own_or_wide("accumulate_dtype", accumulate_dtype, name)
    logits = _own_or_wide("logits_dtype", logits_dtype, name)
    if max_valid is not None:
        _check_count("max_valid", max_valid, 0)
    device, given = key_of(device), device
    if device not in DEVICES:
        raise ValueError(f"`device` is {given!r}. Expected one of {', '.join(DEVICES)}.")
    itemsize = ITEMSIZE[name]
    products: Matmul = Aten(itemsize, cuda=True)
    if device == "cpu":
        import torch

        products = matmul.of(getattr(torch, name), "cpu", torch.get_num_threads())
    in_forward = reduction != "none" and name != "float16"
    p = Problem(
        tokens if max_valid is None else min(tokens, max_valid),
        hidden,
        vocab,
        products,
        0 if max_valid is None else max(tokens - max_valid, 0),
        (GRADS[0] in grads, GRADS[1] in grads, GRADS[2] in grads),
        sums_fp32=sums != name,
        in_forward=in_forward,
        keeps=not in_forward and bool(grads),
        gathers=max_valid is not None,
        plain=device == "cpu" and not has_row_kernel("cpu"),
        wide_logits=logits not in (None, name),
    )
    return cost.selecting(p, _expected(gradient_tolerance, share), named(device))


def _expected(gradient_tolerance: float, share: float | None) -> float:
    """Return the expected share of classes that gradients are multiplied with, after checks."""
    for argument, value in (("gradient_tolerance", gradient_tolerance), ("share", share)):
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            raise TypeError(f"`{argument}` is {value!r}. Expected a number.")
    if not 0 <= gradient_tolerance < 1:
        rule = "a probability from 0 to below 1"
        raise ValueError(f"`gradient_tolerance` is {gradient_tolerance}. Expected {rule}.")
    if share is None:
        return cost.EXPECTED if gradient_tolerance else 1.0
    if not gradient_tolerance or not 0 < share <= 1:
        rule = "None, or from above 0 to 1 with a gradient_tolerance"
        raise ValueError(f"`share` is {share}. Expected {rule}.")
    return float(share)


def pick(
    p: Problem,
    rates: Rates,
    memory_budget: int | None,
    strategy: str | None = None,
    num_chunks: int | None = None,
) -> Plan:
    """Return the best plan for a problem, or the one with this strategy and num_chunks."""
    names = planner.allowed(replace(p, keeps=False))
    if strategy is not None and strategy not in names:
        raise ValueError(
            f"`strategy` is {strategy!r}. Expected one of {', '.join(names)} with these grads, "
            "dtype and reduction."
        )
    if num_chunks is not None:
        _check_count("num_chunks", num_chunks, 1, max(p.tokens, 1))
        strategy = strategy or names[0]
    return planner.choose(p, memory_budget, rates, strategy, num_chunks)


def fast_budget(chosen: Plan, p: Problem, rates: Rates, memory_budget: int | None) -> int | None:
    """Return the least budget for a fast plan, if the budget makes the chosen plan slow.

    A plan is slow if it takes more than SLOW of the time of its products alone. None: it is not
    slow, no budget helps, or the plan was not chosen for its budget.
    """
    floor, whole = planner.floor_seconds(p, rates), planner.whole_budget(p)
    limit = budgets.SLOW * floor

    def seconds(budget: int) -> float:
        return planner.choose(p, budget, rates).seconds

    if chosen.seconds <= limit or seconds(whole) > limit:
        return None
    if chosen != planner.choose(p, memory_budget, rates):
        return None
    return budgets.least_within(limit, seconds, chosen.peak_bytes, whole)


def _if_slow(chosen: Plan, p: Problem, rates: Rates, memory_budget: int | None) -> str:
    budget = fast_budget(chosen, p, rates, memory_budget)
    if budget is None:
        return ""
    ratio = chosen.seconds / planner.floor_seconds(p, rates)
    enough = readable(budget, up=True)
    return (
        f"  too small          {ratio:.2f} of the time of the products alone; a budget of {enough} "
        f"takes at most {budgets.SLOW}\n"
    )


def describe(chosen: Plan, p: Problem, rates: Rates, memory_budget: int | None) -> str:
    """Return a few lines about a plan, its budget, and the source of its rates."""
    default = planner.default_budget(p, rates)
    if memory_budget is not None:
        budget = readable(memory_budget)
    elif chosen.peak_bytes <= default:
        budget = f"{readable(default)}, the default"
    else:
        budget = "none"  # strategy or num_chunks choose the plan
    least = readable(planner.smallest_budget(p), up=True)
    rate = metric(p.matmul.rate(rates), "FLOP/s")
    return (
        f"{chosen}\n"
        f"  memory budget      {budget}; the smallest possible is {least}\n"
        f"{_if_slow(chosen, p, rates, memory_budget)}"
        f"  rates              {rates.name}: {rate}, {metric(rates.bandwidth, 'B/s')}"
    )


def plan(
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: Any = "bfloat16",
    *,
    memory_budget: int | float | str | None = None,
    grads: Collection[Grad] = ("input", "weight"),
    reduction: Reduction = "mean",
    accumulate_dtype: Any = None,
    logits_dtype: Any = None,
    max_valid: int | None = None,
    gradient_tolerance: float = 0.0,
    share: float | None = None,
    device: str | None = None,
    strategy: Strategy | None = None,
    num_chunks: int | None = None,
) -> Plan:
    """Print and return how `linear_cross_entropy` will run, before it allocates memory.

    If the budget makes the loss slower than 1.35 of its matrix products alone, the text has the
    least budget that does not.

    Args:
        tokens, hidden, vocab: N, D and V of `input (N, D) @ linear_weight (V, D).T`.
        dtype: the dtype of input and weight: a torch.dtype, or text such as "bfloat16" or "bf16".
        memory_budget: scratch memory beyond inputs, outputs and returned gradients: bytes, or text
            such as "400MiB", "0.5GiB" or "2e8". None: the default of `linear_cross_entropy`.
        grads: which of "input", "weight" and "bias" need gradients. Empty if none does.
        reduction: "mean", "sum" or "none".
        accumulate_dtype, logits_dtype: as in `linear_cross_entropy`, as a dtype or text.
        max_valid: the most tokens that are not ignored; ignored tokens then cost no work.
        gradient_tolerance: as in `linear_cross_entropy`.
        share: with gradient_tolerance: the part of the classes that a token's gradient is expected
            to be multiplied with. None: 0.4, which a trained model of 49,152 classes needs for
            3e-3.
        device: the device that the time is predicted for: "h200", "h100", "gh200", "b200", "gb200",
            "b300", "gb300", "a100", "l40s", "rtx4090", "rtx5090" or "cpu". None: the GPU that is
            present (by the rates of an A100 if it is none of these), or the CPU with the current
            number of threads. Times for a GPU come from its data sheet, except an H200's; times for
            a CPU are those of two cores with AVX-512.
        strategy: require "token-chunked", "vocab-sliced" or "running-rescale".
        num_chunks: require about this many equal chunks of tokens. Without a strategy they are
            token-chunked if possible. The budget is then only checked, or limits the width of the
            slices of the vocabulary.

    Returns:
        The plan, which `linear_cross_entropy` takes as its argument `plan`. Its fields are those of
        `storage_ops.loss.planning.planner.Plan`: strategy, rows, columns, widest, threads,
        borrowed, num_chunks, num_slices, products, peak_bytes, flops, bytes_moved, seconds, mode
        and keeps.

    Raises:
        TypeError, ValueError: an argument is wrong, or no plan keeps to memory_budget. The error
            has the value, what was expected, and the smallest possible budget.

    Example:
        >>> p = storage_ops.plan(8192, 4096, 128256, memory_budget="400MiB", device="h200")
        token-chunked 3.35-GEMM: 1 x 10 tiles of 8192 x 20416 (tokens x classes)
          peak extra memory  ... MiB
          matrix products    28.8 TFLOP in 3.35 products
          memory traffic     ... GB
          predicted time     39... ms
          memory budget      400 MiB; the smallest possible is ... MiB
          rates              H200: 790 TFLOP/s, 4.3 TB/s
        >>> p.peak_bytes <= 400 << 20
        True
        >>> tight = storage_ops.plan(64, 16, 1000, "fp32", memory_budget="1 MiB", device="cpu")
        token-chunked 3-GEMM: ...
        >>> x, w = torch.randn(64, 16), torch.randn(1000, 16, requires_grad=True)
        >>> loss = storage_ops.linear_cross_entropy(x, w, torch.randint(1000, (64,)), plan=tight)
    """
    budget = None if memory_budget is None else parse_bytes(memory_budget, "`memory_budget`")
    rates = _present() if device is None else None
    device = default_device() if device is None else device
    p = problem_of(
        tokens, hidden, vocab, dtype, grads, reduction, accumulate_dtype, logits_dtype, max_valid,
        device, gradient_tolerance, share,
    )  # fmt: skip
    rates = rates or named(device)
    chosen = pick(p, rates, budget, strategy, num_chunks)
    print(describe(chosen, p, rates, budget))
    return chosen
