"""The cosine distance of both heads' logits, in plain torch: 1 - z t / (|z| |t|).

It compares logits and not probabilities, so that neither log-sum-exp is needed. The state of a row
has |z|^2, |t|^2 and z t, from which the gradient of any part of the row follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Norms below this count as this, as in `F.cosine_similarity`: the distance of a row of zeros is 1.
_SMALLEST_NORM = 1e-8


def sums(z: Tensor, t: Tensor) -> Tensor:
    """Return the state (3, rows) of rows of logits, or the part of it that some classes add."""
    return torch.stack([z.square().sum(1), t.square().sum(1), (z * t).sum(1)])


def values(state: Tensor) -> Tensor:
    """Return the distance (rows,) of rows with this state."""
    student, teacher, product = state
    cosine: Tensor = product / (_norm(student) * _norm(teacher))
    return 1 - cosine


def gradient(z: Tensor, t: Tensor, state: Tensor) -> Tensor:
    """Return the gradient with respect to a tile of logits z. Overwrites both tiles."""
    student, teacher, product = state
    inverse = 1 / (_norm(student) * _norm(teacher))
    radial = (product * inverse / _norm(student).square()).unsqueeze(1)
    return z.mul_(radial).sub_(t.mul_(inverse.unsqueeze(1)))


def _norm(square: Tensor) -> Tensor:
    return square.sqrt().clamp(min=_SMALLEST_NORM)
