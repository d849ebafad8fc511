"""A stored teacher: the log-probabilities of a few classes of every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from storage_ops.divergence import rows
from storage_ops.divergence.call import DivergenceCall


@dataclass
class Coarse:
    """The classes of a stored teacher, and with `tail` one more class for all others.

    Attributes:
        log_probs: (n, K) the teacher's log-probabilities, in the arithmetic dtype.
        ids: (n, K) classes.
        broken: (n,) True for rows whose ids are not distinct classes, or None.
        divergence, beta, tail: the options of the call.
    """

    log_probs: Tensor
    ids: Tensor
    broken: Tensor | None
    divergence: str
    beta: float
    tail: bool

    @staticmethod
    def of(call: DivergenceCall, kept: Tensor | None, ignored: Tensor, classes: int) -> Coarse:
        """Return the coarse classes of the kept tokens. Check the ids if they can be read."""
        assert call.ids is not None and call.log_probs is not None
        ids = call.ids.reshape(-1, call.ids.shape[-1])
        log_probs = call.log_probs.reshape(ids.shape).to(call.wide)
        if kept is not None:
            ids, log_probs = ids.index_select(0, kept), log_probs.index_select(0, kept)
        ids, log_probs = ids[: len(ignored)].long(), log_probs[: len(ignored)]
        outside = ((ids < 0) | (ids >= classes)) & ~ignored.unsqueeze(1)
        ordered = ids.sort(1)[0]
        twice = (ordered[:, 1:] == ordered[:, :-1]) & ~ignored.unsqueeze(1)
        broken: Tensor | None = outside.any(1) | twice.any(1)
        if ids.device.type == "cpu":
            for wrong, values, rule in (
                (outside, ids, f"classes from 0 to {classes - 1}"),
                (twice, ordered[:, 1:], "ids that are distinct for every token"),
            ):
                if bool(wrong.any()):
                    raise RuntimeError(
                        "linear_kl_div: `teacher_topk` has the id "
                        f"{int(values[wrong][0])}{' twice for a token' if wrong is twice else ''}. "
                        f"Expected {rule}."
                    )
            broken = None
        else:
            ids = ids.clamp(0, classes - 1)
        # Without other classes, only rounding errors would be left for their probability.
        tail = call.tail and ids.shape[1] < classes
        return Coarse(log_probs, ids, broken, call.divergence, call.beta, tail)

    def logits(self, whole: slice, z: Tensor) -> Tensor:
        """Return (K + 1, rows): the student's logits of the classes, and the rest's log-sum-exp.

        z: (rows, V) whole rows of logits. The logits of the classes are overwritten with -inf.
        """
        ids = self.ids[whole]
        known, others = z.gather(1, ids), z.new_zeros(len(z), 1)
        if self.tail:
            others = z.scatter_(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        return torch.cat([known, others], 1).t()

    def _heads(self, whole: slice, state: Tensor) -> tuple[Tensor, ...]:
        """Return log-probabilities and probabilities of both heads over the coarse classes."""
        b, a = self.log_probs[whole].clone(), state.t().clone(memory_format=torch.contiguous_format)
        if self.tail:
            # The probability of the other classes under the teacher.
            rest = b.exp().sum(1, keepdim=True).neg_().clamp_(min=-1).log1p_()
            b = torch.cat([b, rest], 1)
        else:
            a = a[:, :-1]
        p, q = (rows.normalise(z, z.logsumexp(1)) for z in (a, b))
        return a, b, p, q

    def values(self, whole: slice, state: Tensor) -> Tensor:
        """Return the divergence of rows (rows,) from their coarse logits."""
        value = rows.values(self.divergence, self.beta, *self._heads(whole, state))[0]
        return value if self.broken is None else value.masked_fill(self.broken[whole], torch.nan)

    def gradient(self, whole: slice, state: Tensor, z: Tensor, first: int) -> None:
        """Overwrite a tile of logits, whose first class is `first`, by its gradient."""
        a, b, p, q = self._heads(whole, state)
        _, center, each = rows.values(self.divergence, self.beta, a, b, p, q)
        known = rows.gradient(self.divergence, self.beta, p, each, center)
        local = self.ids[whole] - first
        in_tile = (local >= 0) & (local < z.shape[1])
        local = torch.where(in_tile, local, 0)
        if self.tail:
            # Distribute the gradient of the rest over the other classes.
            rest = state[-1].unsqueeze(1)
            z.sub_(torch.where(rest == -torch.inf, 0, rest))
            z.scatter_reduce_(1, local, torch.where(in_tile, -torch.inf, torch.inf).to(z), "amin")
            z.exp_().mul_(known[:, -1:])
        else:
            z.zero_()
        z.scatter_add_(1, local, torch.where(in_tile, known[:, : local.shape[1]], 0))
