"""One call of linear cross-entropy, and the memory of its tiles of logits: tokens by classes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from storage_ops.loss import tile_memory
from storage_ops.loss.plan_memory import STATE_ROWS, Problem
from storage_ops.loss.planner import Plan
from storage_ops.loss.tokens import Spec, Tokens, arithmetic
from storage_ops.matmul import products


@dataclass
class Task:
    """One call of linear cross-entropy: its arguments, and what a plan depends on.

    `vocabulary` and `first_class` are those of the whole vocabulary when `weight` holds a part.
    """

    tokens: Tokens
    weight: Tensor
    bias: Tensor | None
    spec: Spec
    problem: Problem
    into: Tensor | None
    vocabulary: int
    first_class: int


def new_state(task: Task) -> Tensor:
    """The state of rows of which nothing was seen."""
    x = task.tokens.x
    return x.new_zeros(STATE_ROWS, task.tokens.count, dtype=arithmetic(x.dtype))


def casts(tokens: Tokens) -> bool:
    """Whether the row kernel takes a copy of the targets of a tile: the distributions' part."""
    q = tokens.target
    fits = q.dtype == arithmetic(tokens.x.dtype) and (q.stride(-1) == 1 or q.shape[-1] < 2)
    return tokens.probabilities and not fits


def slices(stop: int, size: int, start: int = 0) -> list[slice]:
    """Pieces of up to this size."""
    return [slice(begin, min(begin + size, stop)) for begin in range(start, stop, size)]


class Buffer:
    """Memory of one tile. Rows start on 64 elements: odd sizes stay on the fast paths."""

    def __init__(self, like: Tensor, plan: Plan) -> None:
        self._flat, self._threads = new_tile(like, plan), plan.threads

    def form(self, x: Tensor, w: Tensor, parked: Tensor | None = None) -> Tensor:
        """The logits of these tokens (rows, D) and classes (columns, D); `parked`: the first."""
        tile = tile_of(self._flat, len(x), len(w))
        known = 0 if parked is None else len(parked)
        if parked is not None:
            tile[:known] = parked
        if known < len(x):
            products.logits(x[known:], w, tile[known:], self._threads)
        return tile


def new_tile(like: Tensor, plan: Plan) -> Tensor:
    """Memory of the largest tile."""
    return like.new_empty(plan.rows * tile_memory.padded(plan.columns))


def tile_of(memory: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix in flat memory that holds it."""
    ld = tile_memory.padded(columns)
    return memory[: rows * ld].view(rows, ld)[:, :columns]
