"""Linear cross-entropy in plain torch: the row kernel's fallback, and the loss's definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from storage_ops.loss.planning.cost import plain_rows
from storage_ops.loss.planning.schedule import EXPONENTIALS, GRADIENT, SLOPE, UPDATE, slices


def _weighted(weight: Tensor, z: Tensor) -> Tensor:
    """Return weight * z, but 0 for a weight of 0 even when z is infinite."""
    return torch.where(weight == 0, 0, weight * z)


def logits_of(products: Tensor, bias: Tensor | None, softcap: float, logit_scale: float) -> Tensor:
    """Return logits from matrix products."""
    z = products if bias is None else products + bias
    z = z if logit_scale == 1 else z * logit_scale
    return torch.tanh(z / softcap).mul_(softcap) if softcap else z


def slope_of(z: Tensor, softcap: float, logit_scale: float) -> Tensor | float:
    """Return the derivatives of logits with respect to products."""
    return (1 - (z / softcap).square()) * logit_scale if softcap else logit_scale


def row_gradient(z: Tensor, share: Tensor | None, state: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of rows with respect to some of their logits.

    The target's contribution is not included.
    """
    shift, total, slope, _, mass, _ = (row.unsqueeze(1) for row in state)
    filled = F.pad(upstream, (0, 0, 0, 5 - len(upstream))).expand(5, len(z))
    to_target, spread, to_lse, entropy, square = filled.unsqueeze(2)
    p = (z - shift).exp() / total
    factor = to_target + _weighted(spread, mass) + to_lse
    factor = factor + _weighted(square, shift + total.log())
    result: Tensor = p * factor - _weighted(entropy, _weighted(p, z - shift - slope / total))
    return result if share is None else result - _weighted(spread, share)


def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    upstream: Tensor | None,
    state: Tensor,
    argmax: Tensor | None,
    first_column: int,
    vocabulary: int,
    ignore_index: int,
    softcap: float,
    logit_scale: float,
    label_smoothing: float,
    phases: int,
) -> None:
    """Merge a tile of logits into the state of its rows, and overwrite it.

    See csrc/rows/row_math.h.
    """
    rows, columns = logits.shape
    wide, index = state.dtype, target.dim() == 1
    kept = target != ignore_index if index else target.new_ones(rows, dtype=torch.bool)
    outside = torch.zeros_like(kept)
    if index:
        outside = kept & ((target < 0) | (target >= vocabulary))
        if logits.device.type == "cpu" and bool(outside.any()):
            raise RuntimeError(
                f"linear_cross_entropy: `target` {int(target[outside][0])} is out of range. "
                f"Expected ignore_index ({ignore_index}) or a class index from 0 to "
                f"{vocabulary - 1}."
            )
    if rows == 0 or columns == 0:
        if phases & UPDATE:
            _mark(state, argmax, kept, outside)
        return
    if rows > (height := plain_rows(rows, columns)):
        for begin in range(0, rows, height):
            part = slice(begin, begin + height)
            own = upstream if upstream is None or upstream.shape[1] == 1 else upstream[:, part]
            cross_entropy_rows(
                logits[part], target[part], bias, weight, own, state[:, part],
                None if argmax is None else argmax[part], first_column, vocabulary, ignore_index,
                softcap, logit_scale, label_smoothing, phases,
            )  # fmt: skip
        return
    z = logits_of(logits.to(wide), None if bias is None else bias.to(wide), softcap, logit_scale)
    local = target - first_column if index else target[:, 0]
    in_tile = kept & ~outside & (local >= 0) & (local < columns) if index else outside
    column = torch.where(in_tile, local, 0).long().unsqueeze(1)
    share = None
    if not index or label_smoothing:
        share = torch.zeros_like(z) if index else target * (1 - label_smoothing)
        share = (share + label_smoothing / vocabulary) * (1 if weight is None else weight)
    if phases & UPDATE:
        _update(z, share, state, argmax, first_column, bool(phases & SLOPE))
        hit = z.gather(1, column).squeeze(1)
        state[5] = torch.where(in_tile, hit, state[5])
        _mark(state, argmax, kept, outside)
    if phases & EXPONENTIALS:
        result = (z - state[0].unsqueeze(1)).exp()
    elif phases & GRADIENT:
        assert upstream is not None
        result = row_gradient(z, share, state, upstream)
        to_target = upstream[0].expand(rows)
        result.scatter_add_(1, column, torch.where(in_tile, -to_target, 0).unsqueeze(1))
    else:
        return
    result = result * slope_of(z, softcap, logit_scale)
    result.masked_fill_(~kept.unsqueeze(1), 0).masked_fill_(outside.unsqueeze(1), float("nan"))
    logits.copy_(result)


def _mark(state: Tensor, argmax: Tensor | None, kept: Tensor, outside: Tensor) -> None:
    """Set the state of ignored rows, and mark the sum of rows with an invalid target."""
    state.masked_fill_(~kept, 0)[1].masked_fill_(~kept, 1)
    state[1].masked_fill_(outside, float("nan"))
    if argmax is not None:
        argmax.masked_fill_(~kept, -1)


def _update(
    z: Tensor, share: Tensor | None, state: Tensor, argmax: Tensor | None, first: int, slope: bool
) -> None:
    shift, total, old_slope, dot, mass, _ = state
    largest = z.amax(1)  # nan if a logit is nan, and then the shift is nan, too
    before = torch.where(total == 0, -torch.inf, shift)
    if argmax is not None:
        better = ~before.isnan() & ((largest > before) | largest.isnan())
        argmax.copy_(torch.where(better, z.argmax(1) + first, argmax))
    new = torch.maximum(largest, before)
    new = torch.where(new == -torch.inf, 0, new)
    by = shift - new
    factor = torch.where(total == 0, 0, by.exp())
    moved = z - new.unsqueeze(1)
    e = moved.exp()
    if slope:
        old = _weighted(factor, old_slope + _weighted(total, by))
        state[2] = old + _weighted(e, moved).sum(1)
    if share is not None:
        state[3] = dot + _weighted(mass, by) + (share * moved).sum(1)
        state[4] = mass + share.sum(1)
    state[1] = total * factor + e.sum(1)
    state[0] = new


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    shift: bool | int = False,
    valid_classes: int | None = None,
    divisor: float | Tensor | None = None,
    selected_ids: Tensor | None = None,
    top_k: int | None = None,
    returns: Sequence[str] = ("loss",),
    **memory: Any,
) -> Any:
    """Compute the loss by its definition: all logits first, in the dtype of `input`.

    Arguments that only affect memory (`memory_budget`, `plan`, ...) are accepted and ignored.
    """
    dense = target.is_floating_point()
    linear_weight = linear_weight[:valid_classes]
    linear_bias = None if linear_bias is None else linear_bias[:valid_classes]
    weight = None if weight is None else weight[:valid_classes]
    target = target[..., :valid_classes] if dense else target
    if shift:
        k = int(shift)
        input = input[..., : max(input.shape[-2] - k, 0), :]
        target = target[..., k:, :] if dense else target[..., k:]
        token_weight = None if token_weight is None else token_weight[..., k:]
        selected_ids = None if selected_ids is None else selected_ids[..., k:, :]
    z = F.linear(input, linear_weight, linear_bias) * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    results, share = results_of(
        z, target, returns, weight=weight, ignore_index=ignore_index,
        label_smoothing=label_smoothing, z_loss=z_loss, token_weight=token_weight,
        selected_ids=selected_ids, top_k=top_k,
    )  # fmt: skip
    if "loss" in results:
        results["loss"] = reduced(results["loss"], share, reduction, divisor)
    chosen = tuple(results[name] for name in returns)
    return chosen[0] if len(chosen) == 1 else chosen


def results_of(
    z: Tensor,
    target: Tensor,
    names: Sequence[str],
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    selected_ids: Tensor | None = None,
    top_k: int | None = None,
) -> tuple[dict[str, Any], Tensor]:
    """Return the named results of logits (..., V), per token, and each token's share in a mean.

    One tensor as large as the logits is allocated for all names, and three more for entropy.
    """
    dense, vocab, zero = target.is_floating_point(), z.shape[-1], z.new_zeros(())
    counted = z.new_ones(z.shape[:-1], dtype=torch.bool) if dense else target != ignore_index
    if token_weight is not None:
        counted = counted & (token_weight != 0)
    classes = target.argmax(-1) if dense else torch.where(counted, target, 0).long()
    log_p = F.log_softmax(z, -1)
    share = counted.to(z.dtype) if token_weight is None else token_weight.to(z)
    if not dense:
        share = share * (
            counted if weight is None else torch.where(counted, weight.to(z)[classes], zero)
        )
    results: dict[str, Any] = {}
    lse = zero
    if z_loss or "lse" in names or "z_loss" in names:
        lse = torch.where(counted, z.logsumexp(-1), zero)
    if "loss" in names or "nll" in names:
        if dense:
            q = target.to(z.dtype) * (1 - label_smoothing) + label_smoothing / vocab
            loss = -((q if weight is None else q * weight.to(z)) * log_p).sum(-1)
            loss = nll = torch.where(counted, loss, zero)
        else:
            nll = torch.where(counted, -log_p.gather(-1, classes.unsqueeze(-1)).squeeze(-1), zero)
            loss = nll if weight is None else weight.to(z)[classes] * nll
            if label_smoothing:
                spread = -(log_p if weight is None else weight.to(z) * log_p).sum(-1)
                spread = torch.where(counted, spread, zero)
                loss = (1 - label_smoothing) * loss + label_smoothing / vocab * spread
        loss = loss + z_loss * lse.square() if z_loss else loss
        results |= {"loss": loss if token_weight is None else loss * token_weight.to(z), "nll": nll}
    if "entropy" in names:
        results["entropy"] = torch.where(counted, -_weighted(log_p.exp(), log_p).sum(-1), zero)
    if "argmax" in names or "correct" in names:
        argmax = torch.where(counted, z.argmax(-1), -1)
        results |= {"argmax": argmax, "correct": counted & (argmax == classes)}
    results |= {"lse": lse, "z_loss": z_loss * lse.detach().square()}
    mask = counted.unsqueeze(-1)
    if selected_ids is not None:
        selects = mask & (selected_ids >= 0) & (selected_ids != ignore_index)
        picked = log_p.gather(-1, torch.where(selects, selected_ids, 0).long())
        results["selected"] = torch.where(selects, picked, zero)
    if top_k:
        # A stable sort keeps the first of equal logits first.
        order = z.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
        values = torch.where(mask, log_p.gather(-1, order), zero)
        results["topk"] = (values, torch.where(mask, order, -1))
    return results, share


def reduced(
    losses: Tensor, share: Tensor, reduction: str, divisor: float | Tensor | None = None
) -> Tensor:
    """Return the loss from the losses of tokens and their shares in a mean."""
    if reduction == "none":
        return losses
    one = 1 if divisor is None else divisor
    return losses.sum() / (share.sum() if reduction == "mean" else one)


def scale(self: Tensor, factor: Tensor) -> None:
    """Multiply `self` by a number. On a CPU, a factor of 1 returns without reading `self`."""
    if factor.device.type != "cpu" or factor.item() != 1:
        self.mul_(factor)


def tile_sums(
    out: Tensor,
    tile: Tensor,
    lse: Tensor | None,
    row_weight: Tensor | None,
    bias: Tensor | None,
    bucket: Tensor | None,
    softcap: float,
    logit_scale: float,
    absolute: bool = False,
    slope: bool = False,
) -> None:
    """Add up a tile of numbers, or of the probabilities of its logits.

    Args:
        out: receives the sum of each column, or with `bucket` the sum of each row and bucket.
        tile: (rows, columns) numbers, or products.
        lse: (rows,) log-sum-exps of the logits, +inf for rows that do not count. None: `tile` has
            numbers.
        row_weight: (rows,) the factor of each row, or None.
        bias: (columns,) or None.
        bucket: (columns,) uint8, or None.
        softcap, logit_scale: see `logits_of`.
        absolute: without lse, add up the absolute values of the numbers.
        slope: multiply by the slope of the soft-cap.
    """
    bias = None if bias is None else bias.to(out.dtype)
    parts = slices(len(tile), plain_rows(*tile.shape))
    if bucket is None:
        out.zero_()
    for part in parts:
        values = logits_of(tile[part].to(out.dtype), bias, softcap, logit_scale)
        if lse is not None:
            slopes = 1 - (values / softcap).square() if slope and softcap else 1
            values = (values - lse[part].unsqueeze(1)).exp_() * slopes
        elif absolute:
            values = values.abs()
        if row_weight is not None:
            values = values * row_weight[part].unsqueeze(1)
        if bucket is None:
            out += values.sum(0)
        else:
            columns = bucket.long().expand_as(values)
            out[part].zero_().scatter_add_(1, columns, values)


def gather_gradient(
    out: Tensor,
    sums: Tensor | None,
    tile: Tensor,
    tokens: Tensor,
    start: Tensor,
    count: Tensor,
    lse: Tensor | None,
    factor: Tensor | None,
    target: Tensor | None,
    hit: Tensor | None,
    bias: Tensor | None,
    softcap: float,
    logit_scale: float,
) -> None:
    """Compute the gradient of cross-entropy for some classes and tokens of a tile of products.

    out[start[c] + i] is the gradient with respect to class c of tokens[i], for i < count[c]. With p
    the probabilities and s the slope of the soft-cap, it is s (p factor - hit [c is the target]).

    Args:
        out: the result, in the dtype of the tile or in 16 bits; no element is written twice.
        sums: (columns,) receives the sum of the absolute gradients that are written, per class,
            without the targets' parts; or None.
        tile: (rows, columns) products; without `lse`, gradients, which are only copied.
        tokens: rows of the tile.
        start: (columns,) the begin of each class in `out`; negative if it is not written.
        count: (columns,) the number of tokens of each class.
        lse: (rows,) log-sum-exps of the logits; +inf for rows whose gradient is 0.
        factor: (rows,) the factor from a probability to the gradient.
        target: (rows,) the column of the row's target, or a number that no column has.
        hit: (rows,) the target's extra part of the gradient, which is subtracted.
        bias: (columns,) or None.
        softcap, logit_scale: see `logits_of`.
    """
    (classes,) = (start.ge(0) & count.gt(0)).nonzero(as_tuple=True)
    wide = torch.promote_types(tile.dtype, torch.float32)
    some = None if bias is None else bias.to(wide)[classes]
    if sums is not None:
        sums.zero_()
    for part in slices(len(tokens), plain_rows(len(tokens), len(classes))):
        rows, place = tokens[part].unsqueeze(1), torch.arange(part.start, part.stop)
        values = tile[rows, classes].to(wide)
        hits: Tensor | int = 0
        if lse is not None and factor is not None and target is not None and hit is not None:
            z = logits_of(values, some, softcap, logit_scale)
            slope = slope_of(z, softcap, 1.0)
            values = (z - lse[rows]).exp_().mul_(factor[rows]).mul_(slope)
            hits = torch.where(classes == target[rows], hit[rows] * slope, 0)
            ignored = lse[rows] == torch.inf
            values.masked_fill_(ignored, 0)
            hits.masked_fill_(ignored, 0)
        is_listed = place.to(tile.device).unsqueeze(1) < count[classes]
        if sums is not None:
            sums[classes] += values.abs().masked_fill_(~is_listed, 0).sum(0)
        flat = start[classes] + place.to(tile.device).unsqueeze(1)
        out[flat[is_listed]] = (values - hits)[is_listed].to(out.dtype)


def put_rows(out: Tensor, rows: Tensor, part: Tensor, add: bool) -> None:
    """Add rows to rows of a matrix, or copy them: out[rows[i]] += part[i], or = part[i].

    No row appears twice. The sum is rounded once, to the dtype of `out`.
    """
    out[rows] = (out[rows].to(part.dtype) + part if add else part).to(out.dtype)
