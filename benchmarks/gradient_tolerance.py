"""Effects of leaving classes out of the gradient of linear cross-entropy.

`logits` uses the logits of a real language model from a file of `--real-logits`. It measures the
errors of both gradients, the share of multiplied classes, and times against the exact loss.
`training` trains a model from one seed with several tolerances, on the text of the standard
library.

`sampling` is an experiment on the logits of one chunk, in plain torch. It replaces the classes left
out by the product of their margins, as the loss does, or by a sample of them. Classes are drawn
with a probability proportional to their mass and divided by it, so the expected gradient is exact.

The first two also have a threshold for single elements. It leaves out every probability under
2^-12, as cut-cross-entropy does (Wijmans et al. 2024, arXiv:2411.09009, section 4.3), in plain
torch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import storage_ops
from benchmarks._gpt import SIZES
from benchmarks._harness import expect, finish, interleave, parser, ratios, real_logits, tick
from benchmarks._training import Job, Settings
from benchmarks.train_gpt import tokens_of
from storage_ops.loss.engine import run
from storage_ops.loss.engine.selection import Selection, select

SAMPLES = (256, 1024, 4096)
DRAWS = 8
TOLERANCES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
THRESHOLD = 2.0**-12
DTYPES = ["bfloat16", "float32"]
EXACT, FILTERED = "storage_ops", "elements above 2^-12"
Loss = Callable[..., Tensor]


class _Filtered(torch.autograd.Function):
    """Cross-entropy of a head whose gradient lacks the elements under the threshold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        logits = x.flatten(0, -2) @ w.t()
        ctx.save_for_backward(x, w, target, logits)
        return F.cross_entropy(logits, target.flatten())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, target, logits = ctx.saved_tensors
        dz = logits.float().softmax(1)
        hit = target.flatten().unsqueeze(1)
        dz.scatter_add_(1, hit, torch.full_like(hit, -1, dtype=dz.dtype))
        dz = torch.where(dz.abs() < THRESHOLD, 0, dz).mul_(grad / len(dz)).to(w.dtype)
        return (dz @ w).view_as(x), dz.t() @ x.flatten(0, -2), None


def _loss_of(case: str) -> Loss:
    if case == FILTERED:
        return _Filtered.apply  # type: ignore[no-any-return]
    tolerance = 0.0 if case == EXACT else float(case.rsplit(" ", 1)[1])
    return functools.partial(storage_ops.linear_cross_entropy, gradient_tolerance=tolerance)


def _cases() -> list[str]:
    return [EXACT, *(f"storage_ops {tolerance:g}" for tolerance in TOLERANCES), FILTERED]


@contextlib.contextmanager
def _counted() -> Iterator[list[tuple[int, int]]]:
    """Collect for each tile the numbers of logits with a multiplied gradient and of all logits."""
    tiles: list[tuple[int, int]] = []

    def counted(*args: Any) -> Selection | None:
        selected, shape = select(*args), args[2]
        if selected is None:
            tiles.append((shape[0] * shape[1],) * 2)
            return None
        ends = zip(selected.counts, selected.bounds, selected.bounds[1:], strict=False)
        gathered = sum(count * (end - begin) for count, begin, end in ends)
        rest = selected.flat * (shape[1] - selected.bounds[len(selected.counts)])
        tiles.append((gathered + rest, shape[0] * shape[1]))
        return selected

    with mock.patch.object(run, "select", counted):
        yield tiles


def _share(tiles: list[tuple[int, int]]) -> float:
    """Return the part of the logits of some tiles whose gradient is multiplied."""
    return sum(used for used, _ in tiles) / sum(every for _, every in tiles) if tiles else 1.0


def _error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.float() - exact.float()).norm() / exact.float().norm())


def logits(arguments: argparse.Namespace, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each case: errors, the share left out, and time over the exact loss."""
    x, w, target = real_logits(
        arguments.real_logits, arguments.hidden, arguments.device, getattr(torch, dtype),
        arguments.quick,
    )  # fmt: skip
    x, target = x[: arguments.tokens], target[: arguments.tokens]
    x.requires_grad_(), w.requires_grad_()
    shape, budget = f"{len(x)} x {x.shape[1]} x {len(w)} {dtype}", arguments.memory_budget
    shape += f", {budget}" if budget else ""
    within = {"memory_budget": budget} if budget else {}

    def gradients(case: str) -> tuple[Tensor, ...]:
        options = {} if case == FILTERED else within
        return torch.autograd.grad(_loss_of(case)(x, w, target, **options), (x, w))

    exact, rows = gradients(EXACT), {}
    for case in _cases():
        tick(f"errors of {case}", 0.0)
        with _counted() as tiles:
            ours = gradients(case)
        of_rows = (ours[1].float() - exact[1].float()).norm(dim=1)
        of_rows /= exact[1].float().norm(dim=1)
        rows[case] = {
            "classes multiplied": round(_share(tiles), 3) if tiles else "",
            "error of dX": _error(ours[0], exact[0]),
            "error of dW": _error(ours[1], exact[1]),
            "error of a row of dW, median": float(of_rows.median()),
        }
        del ours, of_rows
    del exact
    timed: dict[str, Callable[[], object]] = {
        case: functools.partial(gradients, case) for case in _cases() if case != FILTERED
    }
    runs = interleave(timed, arguments.repeats, arguments.device, shape)
    times = ratios(runs, EXACT)
    for case, row in rows.items():
        at = {"time / exact": round(times[case][0], 3)} if case in times else {}
        yield {"shape": shape, "case": case, **row, **at}


def sampling(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each replacement of the classes that one chunk of tokens leaves out."""
    x, w, target = real_logits(
        arguments.real_logits, arguments.hidden, "cpu", torch.float32, arguments.quick
    )
    x, target = x[: arguments.tokens], target[: arguments.tokens]
    logs = (x @ w.t()).log_softmax(1)

    def masses(out: Tensor, buckets: Tensor | None) -> None:
        none = x.new_zeros(len(x))
        torch.ops.storage_ops._tile_sums(out, logs, none, None, None, buckets, 0.0, 1.0)

    probabilities = logs.exp()
    hit = F.one_hot(target, len(w))
    exact = [(probabilities - hit) @ w, (probabilities - hit).t() @ x]
    del hit
    for number, tolerance in enumerate((3e-3, 3e-2)):
        tick(f"tolerance {tolerance}", number / 2)
        chosen = select(masses, target, logs.shape, x, tolerance, None, None)
        if chosen is None:
            continue
        left = probabilities.masked_fill(chosen.buckets < chosen.needs.unsqueeze(1), 0)
        by_margins = torch.zeros_like(left)
        of_class = chosen.buckets.clamp(max=len(chosen.counts))
        for bucket in range(1, len(chosen.counts) + 1):  # no token leaves out the first one
            part = left[:, of_class == bucket]
            by_margins[:, of_class == bucket] = part.sum(1, keepdim=True) * part.sum(0) / part.sum()
        for by, missing in (("", left), ("margins", left - by_margins)):
            products = missing @ w, missing.t() @ x
            yield _replaced(f"{tolerance:g}", by or "nothing", [products], exact)
            for count in SAMPLES:
                draws = [_drawn(missing, x, w, products, count) for _ in range(DRAWS)]
                case = f"{by}, {count} classes" if by else f"{count} classes"
                yield _replaced(f"{tolerance:g}", case, draws, exact)


def _drawn(
    left: Tensor, x: Tensor, w: Tensor, products: tuple[Tensor, Tensor], count: int
) -> tuple[Tensor, Tensor]:
    """Return the errors of both products of `left` with some of its classes drawn."""
    mass = left.abs().sum(0)
    classes = torch.multinomial(mass, count, replacement=True)
    part = left[:, classes] * (mass.sum() / (count * mass[classes]))
    of_weight = products[1].index_add(0, classes, part.t() @ x, alpha=-1)
    return products[0] - part @ w[classes], of_weight


def _replaced(
    tolerance: str, case: str, draws: list[tuple[Tensor, Tensor]], exact: list[Tensor]
) -> dict[str, Any]:
    """Return a row: errors of one draw and of the mean of all draws, over the exact gradients."""
    one, mean = draws[0], [sum(of) / len(draws) for of in zip(*draws, strict=True)]
    single = [float(e.norm() / t.norm()) for e, t in zip(one, exact, strict=True)]
    several = [
        float(torch.as_tensor(e).norm() / t.norm()) for e, t in zip(mean, exact, strict=True)
    ]
    return {
        "shape": f"tolerance {tolerance}", "case": case,
        "error of dX": single[0], "error of dW": single[1],
        f"error of dX, mean of {DRAWS}": several[0], f"error of dW, mean of {DRAWS}": several[1],
    }  # fmt: skip


def training(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each case, with losses and gradient norms over the training."""
    config = replace(SIZES["gpt2-tiny"], batch=8)
    steps = 6 if arguments.quick else arguments.steps
    data = tokens_of(arguments.text, config.vocab)
    interval = max(steps // 6, 1)
    expect(len(_cases()))
    for number, case in enumerate(_cases()):
        job = Job("linear_cross_entropy", Settings(config, steps), data, torch.device("cpu"))
        job.model.linear_loss = _loss_of(case)
        norms, shares = [], []
        for step in range(steps):
            tick(f"{case}, step {step}", (number + step / steps) / len(_cases()))
            with _counted() as chosen:
                norms.append(job.step()["gradient_norm"])
            shares.append(_share(chosen))
        mean = {
            f"loss at {end}": round(sum(job.losses[end - interval : end]) / interval, 4)
            for end in range(interval, steps + 1, interval)
        }
        tail = slice(steps - interval, None)
        yield {
            "shape": f"{steps} steps", "case": case, **mean,
            "gradient norm at the end": round(sum(norms[tail]) / interval, 4),
            "classes multiplied at the end": round(sum(shares[tail]) / interval, 3),
            "losses": job.losses, "shares": shares,
        }  # fmt: skip


def _all_dtypes(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    expect(len(arguments.dtypes))
    return itertools.chain(*(logits(arguments, dtype) for dtype in arguments.dtypes))


_COMMANDS = {"logits": _all_dtypes, "training": training, "sampling": sampling}


def main(argv: Sequence[str] | None = None) -> None:
    """Run `logits`, `training` or `sampling`, and store its rows."""
    options = parser(__doc__)
    options.add_argument("what", choices=list(_COMMANDS))
    options.add_argument("--real-logits", type=Path, help="an .npz file, not for `training`")
    options.add_argument("--hidden", type=int, default=1536)
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    options.add_argument("--memory-budget", help="for `logits`, of all cases; default: their own")
    options.add_argument("--text", type=Path, help="for `training`; default: the standard library")
    options.add_argument("--steps", type=int, default=300)
    arguments = options.parse_args(argv)
    if arguments.what != "training" and arguments.real_logits is None:
        options.error(f"{arguments.what} needs logits of a model. Pass --real-logits FILE.")
    rows = _COMMANDS[arguments.what](arguments)
    finish(f"gradient_tolerance_{arguments.what}", rows, arguments)


if __name__ == "__main__":
    main()
