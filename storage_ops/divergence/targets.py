"""Targets besides a teacher: the student's cross-entropy, from the same tiles of logits.

Let p be the student's probabilities, q the teacher's, and w the weight of the targets. The forward
divergence at temperature 1 and the cross-entropy have the gradient

    p - q + w (p - [target]) = (1 + w) (p - q / (1 + w)) - w [target]

The kernel of the divergence computes the first term, with a larger log-sum-exp of the teacher. So
the targets take a few numbers per token, and no pass over a tile.

Otherwise, the row kernel of linear cross-entropy overwrites logits by a gradient, and so does the
kernel of the divergence. Both gradients are added. This takes some passes over a tile, but a
separate loss would take three matrix products. The divergence runs first and overwrites the
teacher's logits. If there are no teacher's logits, or of another dtype, the targets use a copy of
the student's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from storage_ops.divergence.call import IGNORED, DivergenceCall
from storage_ops.loss.engine.tokens import Tokens, may_count
from storage_ops.loss.planning.schedule import GRADIENT, Step

_rows = torch.ops.storage_ops._cross_entropy_rows


class Targets:
    """The targets of a call's tokens.

    Attributes:
        weight: the factor of the cross-entropy.
        state: (STATE_ROWS, n) statistics of the rows; see csrc/rows/row_math.h.
    """

    def __init__(self, call: DivergenceCall, tokens: Tokens, state: Tensor, bias: Tensor | None):
        self.weight, self.state = call.target_weight, state
        self._target, self._bias = tokens.target, bias
        self._softcap, self._classes = call.softcap, call.valid_classes or len(call.weight)
        self._memory: Tensor | None = None

    def losses(self) -> Tensor:
        """Return (n,) the weighted cross-entropy of each token; 0 where the target is ignored."""
        shift, total, _, _, _, logit = self.state.unbind(0)
        return self.weight * (total.log() + (shift - logit))

    def take(self, step: Step, tile: Tensor, upstream: Tensor, copied: bool) -> Tensor | None:
        """Compute the statistics of a tile of logits, its gradient, or both, as `step` asks.

        The gradient overwrites a copy of the tile if `copied`, otherwise the tile.
        """
        learns, rows, classes = bool(step.phases & GRADIENT), step.rows, step.classes
        if learns and copied:
            if self._memory is None:
                self._memory = tile.new_empty(tile.untyped_storage().nbytes() // tile.itemsize)
            tile = self._memory.as_strided(tile.shape, tile.stride()).copy_(tile)
        factor = (upstream * self.weight).unsqueeze(0)
        _rows(
            tile, self._target[rows], None if self._bias is None else self._bias[classes], None,
            factor if learns else None, self.state[:, rows], None, classes.start, self._classes,
            IGNORED, self._softcap, 1.0, 0.0, step.phases,
        )  # fmt: skip
        return tile if learns else None

    def read(self, step: Step, tile: Tensor, lse: Tensor) -> None:
        """Set the state of the rows of a tile with whole rows, from their log-sum-exps."""
        target, state = self._target[step.rows], self.state[:, step.rows]
        logit, column = self._at_targets(step, tile, self._bias)
        ignored, wrong = target == IGNORED, self._is_wrong(target)
        if may_count(target) and wrong.any():
            raise RuntimeError(
                f"linear_kl_div: `target` {int(target[wrong][0])} is out of range. Expected "
                f"ignore_index ({IGNORED}) or a class index from 0 to {self._classes - 1}."
            )
        state[0] = lse.masked_fill(ignored | wrong, 0)
        state[1] = torch.ones_like(lse).masked_fill_(wrong, torch.nan)
        state[5] = torch.where(column >= 0, logit, 0)

    def mixed(self, step: Step, state: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state and the upstream gradient for the first term of the gradient.

        A target that is not a class makes the gradient of its row nan.
        """
        state = state.clone()
        state[1] += math.log1p(self.weight)
        wrong = self._is_wrong(self._target[step.rows])
        return state, (upstream * (1 + self.weight)).masked_fill(wrong, torch.nan)

    def at_targets(
        self, step: Step, heads: tuple[Tensor, ...], biases: tuple[Tensor | None, ...],
        state: Tensor, upstream: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return (rows,) the gradient at the targets, from logits, `mixed` and the true upstream.

        It is computed before p is rounded to 16 bits, because p - 1 would then lose most digits.
        """
        p, q = (
            (self._at_targets(step, tile, bias)[0] - lse).exp()
            for tile, bias, lse in zip(heads, biases, state, strict=False)
        )
        value: Tensor = (p - q) * (upstream * (1 + self.weight)) - upstream * self.weight
        return value

    def write(self, step: Step, tile: Tensor, value: Tensor) -> None:
        """Overwrite the gradient of a tile at the targets that it has."""
        column = self._at_targets(step, tile, None)[1]
        rows = torch.arange(len(tile), device=tile.device)
        places = column.clamp(min=0)
        # A 16-bit scatter_ would copy the whole tile to float32.
        tile[rows, places] = torch.where(column >= 0, value.to(tile.dtype), tile[rows, places])

    def _is_wrong(self, target: Tensor) -> Tensor:
        return (target != IGNORED) & ((target < 0) | (target >= self._classes))

    def _at_targets(self, step: Step, tile: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the logits at the targets, and their columns, which are -1 outside of the tile."""
        target, (start, stop) = self._target[step.rows], (step.classes.start, step.classes.stop)
        inside = (target >= start) & (target < min(stop, self._classes))
        column = torch.where(inside, target - start, -1)
        places = column.clamp(min=0)
        logit = tile.gather(1, places.unsqueeze(1)).squeeze(1).to(self.state.dtype)
        return logit if bias is None else logit + bias[start + places], column

    def free(self) -> None:
        """Free the memory of the copy."""
        self._memory = None
