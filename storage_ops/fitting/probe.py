"""What one layer takes with an action: bytes kept, peaks of forward and backward, seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from storage_ops.checkpoint.wrapper import CheckpointWrapper
from storage_ops.fitting.actions import Action, applied_to
from storage_ops.fitting.record import Call, Like
from storage_ops.fitting.step import Books, Op, OpTimes
from storage_ops.loss.devices import Rates


@dataclass(frozen=True)
class Cost:
    """What a call of a layer takes, besides its inputs, its outputs and their gradients.

    Attributes:
        kept: bytes between forward and backward.
        forward, backward: bytes at the highest level of each; the outputs, and the gradients that
            backward starts from, are part of them.
        seconds: of all its ops, forward and backward.
    """

    kept: int
    forward: int
    backward: int
    seconds: float


class _Source(torch.autograd.Function):
    """Makes the gradients from which the backward of a layer starts."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.likes = [(t.shape, t.dtype, t.device) for t in outputs]
        return torch.empty((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # type: ignore[override]
        return tuple(torch.empty(s, dtype=dtype, device=device) for s, dtype, device in ctx.likes)


class Probe:
    """Runs a layer by itself."""

    def __init__(self, call: Call, on_gpu: bool, rates: Rates) -> None:
        self._call, self._on_gpu, self._rates = call, on_gpu, rates

    def cost(self, action: Action) -> Cost:
        """What the layer takes with an action."""
        module = self._call.unit.module
        return applied_to(module, action, lambda: self._run(OpTimes(self._rates)))  # type: ignore[no-any-return]

    def ops(self) -> tuple[list[Op], int]:
        """The ops of its forward, and how many of them a full checkpoint runs again."""
        times, module = OpTimes(self._rates), self._call.unit.module
        forward: list[Op] = []

        @contextlib.contextmanager
        def logging() -> Iterator[None]:
            times.logs = True
            try:
                yield
            finally:
                times.logs = False

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            forward.extend(times.ops)
            times.ops.clear()
            with logging():
                yield

        CheckpointWrapper(module, context_fn=lambda: (logging(), again()))
        try:
            self._run(times)
        finally:
            Action("full").undo(module)
        return forward or times.ops, len(times.ops) if forward else 0

    def _run(self, times: OpTimes) -> Cost:
        books, module = Books(self._on_gpu), self._call.unit.module
        on_meta = any(p.is_meta for p in module.parameters())
        with contextlib.nullcontext() if on_meta else FakeTensorMode():
            args, kwargs = tree_map_only(Like, _made, self._call.args)
        with books.open(module, args, kwargs) as (_, args, kwargs):
            for p in module.parameters():
                p.grad = None
            inputs = {id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            marks: list[int] = []

            def run() -> None:
                marks.append(books.mark())
                with torch.enable_grad(), times:
                    outputs = module(*args, **kwargs)
                    marks.append(books.mark())
                    made = [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]
                    made = [t for t in made if id(t) not in inputs and t.requires_grad]
                    root = _Source.apply(*made) if made else None  # type: ignore[no-untyped-call]
                    del outputs, made
                    marks.append(books.mark())
                    if root is not None:
                        root.backward()

            books.run(run)
            levels = books.levels()
        start, after, before = marks
        base = levels[start]
        return Cost(
            levels[before] - base,
            max(levels[start : after + 1]) - base,
            max(levels[before:]) - base,
            times.seconds,
        )


def _made(like: Like) -> Tensor:
    t = like.make()
    return t.requires_grad_() if like.needs_grad else t
