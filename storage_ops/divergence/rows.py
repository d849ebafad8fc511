"""The row kernel of divergences in plain torch: the definition, for devices without a native one.

The formulas are in csrc/rows/divergence_math.h. A class has probability p under the student and q
under the teacher. a and b are the logarithms. A row has a value, and a center that its gradient
subtracts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from storage_ops import _schemas
from storage_ops.loss.planning.cost import STATE_ROWS
from storage_ops.loss.planning.devices import on_gpu
from storage_ops.loss.planning.schedule import GRADIENT, UPDATE, slices

_OPS = torch.ops.storage_ops

# Smaller norms are replaced by this value, as in `F.cosine_similarity`. The distance of a row of
# zeros is 1.
_SMALLEST_NORM = 1e-8
# The most copies of a piece of rows that are in memory at a time, in the arithmetic dtype.
COPIES = 6


def piece_elements(cuda: bool) -> int:
    """Return how many elements of a tile to process at a time. A piece has at least one row.

    The copies of such a piece fit into a CPU's cache.
    """
    return 1 << 23 if cuda else 1 << 17


def pieces(tile: Tensor) -> list[slice]:
    """Return slices of a tile's rows, the pieces that are processed one at a time."""
    return slices(len(tile), max(piece_elements(on_gpu(tile)) // max(tile.shape[1], 1), 1))


def scaled(
    logits: Tensor, bias: Tensor | None, scale: float, dtype: torch.dtype, cap: float = 0.0
) -> Tensor:
    """Return a copy of logits in the arithmetic dtype, with bias, soft-cap and temperature."""
    z = logits.to(dtype, copy=True)
    z = z if bias is None else z.add_(bias)
    z = z.div_(cap).tanh_().mul_(cap) if cap else z
    return z if scale == 1 else z.mul_(scale)


def cap_slope(logits: Tensor, bias: Tensor | None, dtype: torch.dtype, cap: float) -> Tensor:
    """Return the derivatives of capped logits with respect to logits."""
    return scaled(logits, bias, 1 / cap, dtype, cap).square_().neg_().add_(1)


def log_sum_exp(z: Tensor, state: Tensor | None = None) -> Tensor:
    """Return the log-sum-exp of each row (rows,). The row kernel of cross-entropy reads `z` once.

    `state`: zeros (STATE_ROWS, rows) that the kernel overwrites by its state.
    """
    state = z.new_zeros(STATE_ROWS, len(z)) if state is None else state
    target = torch.zeros(len(z), dtype=torch.int64, device=z.device)  # any class
    _OPS._cross_entropy_rows(
        z, target, None, None, None, state, None, 0, z.shape[1], -1, 0.0, 1.0, 0.0, UPDATE
    )
    return state[0] + state[1].log()


def normalise(z: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax of rows from their log-sum-exp. `z` becomes its logarithm."""
    return z.sub_(lse.unsqueeze(1)).exp()


def values(
    divergence: str, beta: float, a: Tensor, b: Tensor, p: Tensor, q: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return value and center (rows,) of whole rows, and the terms that `gradient` needs.

    Overwrites all arguments but `p`. Log-probabilities a, b and probabilities p, q: (rows,
    classes).
    """
    if divergence == "forward":
        value = _weighted(q, b.sub_(a), b).sum(1)
        center, terms = torch.zeros_like(value), q
    elif divergence == "reverse":
        terms = a.sub_(b)
        value = center = _weighted(p, terms, b).sum(1)
    elif divergence == "jsd":
        log_m = _log_mixture(beta, p, q)
        of_teacher = _weighted(q, b.sub_(log_m), b).sum(1)
        terms = a.sub_(log_m)
        center = _weighted(p, terms, log_m).sum(1)
        value = beta * of_teacher + (1 - beta) * center
    else:
        terms = _half_sign(a, b)
        value = torch.sub(p, q, out=b).abs_().sum(1).mul_(0.5)
        center = _weighted(p, terms, q).sum(1)
    return value, center, terms


def contributions(
    divergence: str, beta: float, a: Tensor, b: Tensor, p: Tensor, q: Tensor
) -> Tensor:
    """Return the terms that `gradient` needs for parts of rows.

    Overwrites all arguments but `p`.
    """
    if divergence == "forward":
        return q
    if divergence == "reverse":
        return a.sub_(b)
    if divergence == "jsd":
        return a.sub_(_log_mixture(beta, p, q))
    return _half_sign(a, b)


def gradient(divergence: str, beta: float, p: Tensor, terms: Tensor, center: Tensor) -> Tensor:
    """Return the gradient with respect to the logits. Overwrites `p` or `terms`."""
    if divergence == "forward":
        return p.sub_(terms)
    dz = _weighted(p, terms.sub_(center.unsqueeze(1)), terms)
    return dz.mul_(1 - beta) if divergence == "jsd" else dz


def _weighted(weight: Tensor, z: Tensor, out: Tensor) -> Tensor:
    """Return weight * z in `out`, but 0 for a weight of 0 even if z is not finite: 0 log 0 is 0."""
    return torch.mul(weight, z, out=out).masked_fill_(weight == 0, 0)


def _half_sign(a: Tensor, b: Tensor) -> Tensor:
    """Return half the sign of a - b, with a ramp where both are nearly equal. Overwrites `a`.

    csrc/rows/divergence_math.h explains the ramp.
    """
    steepness = 2.0 ** (38 if a.dtype == torch.float64 else 12)
    return a.sub_(b).mul_(steepness).clamp_(-0.5, 0.5)


def _log_mixture(beta: float, p: Tensor, q: Tensor) -> Tensor:
    mixture = p.mul(1 - beta).add_(q, alpha=beta)
    return mixture.clamp_(min=torch.finfo(p.dtype).tiny).log_()


def cosine_sums(z: Tensor, t: Tensor) -> Tensor:
    """Return the state (3, rows) of rows of logits, or the contribution of some classes to it.

    1 - z t / (|z| |t|) compares logits and not probabilities, so it needs no log-sum-exps. The
    state of a row has |z|^2, |t|^2 and z t. The gradient of any part of the row follows from them.
    """
    return torch.stack([z.square().sum(1), t.square().sum(1), (z * t).sum(1)])


def cosine_values(state: Tensor) -> Tensor:
    """Return the distance (rows,) of rows with this state."""
    student, teacher, product = state
    cosine: Tensor = product / (_norm(student) * _norm(teacher))
    return 1 - cosine


def cosine_gradient(z: Tensor, t: Tensor, state: Tensor) -> Tensor:
    """Return the gradient with respect to a tile of logits z. Overwrites both tiles."""
    student, teacher, product = state
    inverse = 1 / (_norm(student) * _norm(teacher))
    radial = (product * inverse / _norm(student).square()).unsqueeze(1)
    return z.mul_(radial).sub_(t.mul_(inverse.unsqueeze(1)))


def _norm(square: Tensor) -> Tensor:
    return square.sqrt().clamp(min=_SMALLEST_NORM)


def store(dz: Tensor, upstream: Tensor, scale: float, tile: Tensor) -> None:
    """Overwrite a tile by a gradient times `upstream` ((rows,) or (1,)), or by 0 if that is 0."""
    factor = (upstream * scale).unsqueeze(1)
    tile.copy_(dz.mul_(factor).masked_fill_(factor == 0, 0))


def divergence_rows(
    logits: Tensor,
    teacher: Tensor,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    state: Tensor,
    loss: Tensor,
    upstream: Tensor | None,
    divergence: str,
    beta: float,
    scale: float,
    phases: int,
    over_teacher: bool,
    caps: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Compute statistics and divergence of whole rows, or the gradient of a tile, or both.

    Args:
        logits: (rows, classes), overwritten by the gradient if GRADIENT is among the phases.
        teacher: (rows, classes), with over_teacher overwritten in place of `logits`.
        bias, teacher_bias: (classes,), in the arithmetic dtype.
        state: (3, rows), both log-sum-exps and the center, or the state of `cosine_sums`. Written
            by UPDATE, or read.
        loss: (rows,), written by UPDATE.
        upstream: (rows,) or (1,), the gradient with respect to each row's divergence.
        scale: factor of both heads' logits, applied after bias and soft-cap.
        caps: the soft-caps of both heads, 0 for none.
    """
    for part in pieces(logits):
        z = scaled(logits[part], bias, scale, state.dtype, caps[0])
        t = scaled(teacher[part], teacher_bias, scale, state.dtype, caps[1])
        own, dz = state[:, part], None
        if divergence == "cosine":
            if phases & UPDATE:
                own.copy_(cosine_sums(z, t))
                loss[part] = cosine_values(own)
            if phases & GRADIENT:
                dz = cosine_gradient(z, t, own)
        else:
            if phases & UPDATE:
                own[0], own[1] = log_sum_exp(z), log_sum_exp(t)
            heads = (divergence, beta, z, t, p := normalise(z, own[0]), normalise(t, own[1]))
            if phases & UPDATE:
                loss[part], own[2], terms = values(*heads)
            else:
                terms = contributions(*heads)
            if phases & GRADIENT:
                dz = gradient(divergence, beta, p, terms, own[2])
        if dz is not None:
            assert upstream is not None
            if caps[0]:
                dz.mul_(cap_slope(logits[part], bias, dz.dtype, caps[0]))
            rows = upstream if len(upstream) == 1 else upstream[part]
            store(dz, rows, scale, (teacher if over_teacher else logits)[part])


def statistics_over_ranks(
    logits: Tensor,
    teacher: Tensor,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    state: Tensor,
    loss: Tensor,
    divergence: str,
    beta: float,
    scale: float,
    caps: tuple[float, float],
    merge: Callable[[Tensor], None],
    add_up: Callable[[Tensor], Tensor],
) -> None:
    """Run `divergence_rows` with UPDATE alone, for rows whose other classes are on other ranks.

    Args:
        merge: merges the state of rows over all ranks, in place.
        add_up: adds sums over all ranks, in place.
    """
    if divergence == "cosine":
        for part in pieces(logits):
            z = scaled(logits[part], bias, scale, state.dtype, caps[0])
            t = scaled(teacher[part], teacher_bias, scale, state.dtype, caps[1])
            state[:, part] = cosine_sums(z, t)
        state.copy_(add_up(state.clone()))
        loss.copy_(cosine_values(state))
        return
    heads, count = ((logits, bias, caps[0]), (teacher, teacher_bias, caps[1])), len(logits)
    both_states = state.new_zeros(STATE_ROWS, 2 * count)  # the student's rows, then the teacher's
    for part in pieces(logits):
        for first, (tile, offset, cap) in zip((0, count), heads, strict=True):
            z = scaled(tile[part], offset, scale, state.dtype, cap)
            log_sum_exp(z, both_states[:, first + part.start : first + part.stop])
    merge(both_states)
    state[:2] = (both_states[0] + both_states[1].log()).view(2, count)
    for part in pieces(logits):
        z, t = (scaled(tile[part], b, scale, state.dtype, cap) for tile, b, cap in heads)
        lse = state[:2, part]
        loss[part], state[2, part], _ = values(
            divergence, beta, z, t, normalise(z, lse[0]), normalise(t, lse[1])
        )
    loss[:], state[2] = add_up(torch.stack([loss, state[2]]))


_schemas.library.impl("_divergence_rows", divergence_rows, "CompositeExplicitAutograd")
torch.library.register_fake(
    "storage_ops::_divergence_rows", lambda *args: None, lib=_schemas.library
)
