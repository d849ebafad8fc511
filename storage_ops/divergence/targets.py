"""Targets besides a teacher: the student's cross-entropy, from the same tiles of logits.

The row kernel of linear cross-entropy overwrites logits by a gradient, and so does the kernel of
the divergence. Both gradients are added. This takes some passes over a tile, but a separate loss
would take three matrix products. The divergence runs first and overwrites the teacher's logits. If
there are no teacher's logits, or of another dtype, the targets use a copy of the student's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from storage_ops.divergence.call import IGNORED, DivergenceCall
from storage_ops.loss.engine.tokens import Tokens
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

    def free(self) -> None:
        """Free the memory of the copy."""
        self._memory = None
