"""What linear cross-entropy computes for each token, before and after its tiles of logits.

With z the logits of a token, lse = log sum exp z, t its target, w the weights of the classes, e the
label smoothing, V the number of classes and a the weight of the token:

    loss = a * ((1 - e) w_t (lse - z_t) + e/V sum_j w_j (lse - z_j) + z_loss * lse^2)

and with a distribution q as target, q' = (1 - e) q + e/V:

    loss = a * (sum_j w_j q'_j (lse - z_j) + z_loss * lse^2)

The mean divides the sum by that of a * w_t, or of a for distributions, over the tokens that are not
ignored: torch's definition for class weights, extended to token weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from storage_ops.loss import ranks

UPDATE, GRADIENT, EXPONENTIALS, SLOPE = 1, 2, 4, 8  # phases of the row kernel


@dataclass(frozen=True)
class Spec:
    """The options of linear cross-entropy, in the order of the op's arguments."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float  # 0: none
    logit_scale: float
    shift: bool
    max_valid: int | None  # -1: count the valid tokens, at the price of a host sync
    accumulate_dtype: torch.dtype | None
    memory_budget: int | None
    plan: str  # "" lets the planner choose
    group: str  # "" or the name of the process group that shares the vocabulary


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything but matrix products: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Tokens:
    """Tokens as rows: flattened, shifted, and without the ignored ones where that is possible.

    Attributes:
        x: (N, D), all rows of the input.
        target: (n,) int64 or (N, V) probabilities.
        token_weight: (n,) in the arithmetic dtype, or None.
        kept: (n,) rows of x that the n tokens are, or None when they are all of them.
        broken: whether more tokens are valid than was promised, as a device bool, or None.
        class_weight: (V,) in the arithmetic dtype, or None.
        target_weight: (n,) the weight of each token's target, or None.
        shape: of a per-token output, before flattening.
        copied_bytes: of copies of arguments that had to be made.
    """

    x: Tensor
    target: Tensor
    token_weight: Tensor | None
    kept: Tensor | None
    broken: Tensor | None
    class_weight: Tensor | None
    target_weight: Tensor | None
    shape: torch.Size
    shift: bool
    copied_bytes: int

    @property
    def count(self) -> int:
        """Tokens that are worked on."""
        return len(self.target)

    @property
    def probabilities(self) -> bool:
        """Whether targets are distributions over the classes."""
        return self.target.dim() == 2

    @property
    def masked(self) -> bool:
        """Whether there are distributions whose weight may be 0, the input of which is not read."""
        return self.probabilities and self.token_weight is not None

    def gather(self, rows: slice) -> Tensor:
        """Input rows of a chunk of tokens; 0 where `masked` and the weight is 0, even for a nan."""
        if self.masked:
            assert self.token_weight is not None
            weightless = (self.token_weight[rows] == 0).unsqueeze(1)
            return self.x[rows].masked_fill(weightless, 0)
        return self.x[rows] if self.kept is None else self.x.index_select(0, self.kept[rows])

    def spread(self, values: Tensor) -> Tensor:
        """Per-token values (n,) in the shape that users see; 0 (-1 for indices) where ignored."""
        total, fill = self.shape.numel(), 0 if values.is_floating_point() else -1
        values = self._without_weightless(values, fill)
        if self.kept is not None:
            values = values.new_full((total,), fill).index_copy_(0, self.kept, values)
        elif len(values) < total:
            values = torch.nn.functional.pad(values, (0, total - len(values)))
        values = values.view(self.shape)
        return values[..., :-1].contiguous() if self.shift else values

    def spread_state(self, state: Tensor) -> Tensor:
        """The state with one column for every token, as it is kept for the backward."""
        total = self.shape.numel()
        if self.kept is None:
            return torch.nn.functional.pad(state, (0, total - self.count))
        return state.new_zeros(len(state), total).index_copy_(1, self.kept, state)

    def collect_state(self, state: Tensor) -> Tensor:
        """The inverse of `spread_state`."""
        return state[:, : self.count] if self.kept is None else state.index_select(1, self.kept)

    def collect(self, values: Tensor) -> Tensor:
        """The inverse of `spread`, for upstream gradients."""
        if self.shift:
            values = torch.nn.functional.pad(values, (0, 1))
        values = values.reshape(-1)
        values = values[: self.count] if self.kept is None else values.index_select(0, self.kept)
        return self._without_weightless(values, 0)

    def _without_weightless(self, values: Tensor, fill: int) -> Tensor:
        """`fill` where a token has weight 0, which class indices show as an ignored target."""
        if not self.probabilities or self.token_weight is None:
            return values
        return torch.where(self.token_weight == 0, fill, values)


def _shifted(values: Tensor, last: float) -> Tensor:
    """values[..., 1:], with `last` in the place that this leaves free."""
    result = torch.full_like(values, last, memory_format=torch.contiguous_format)
    result[..., :-1] = values[..., 1:]
    return result


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def copy_elements(t: Tensor | None, dtype: torch.dtype) -> int:
    """How many elements are copied for a tensor to be contiguous, and of this dtype."""
    if t is None or (t.dtype == dtype and t.is_contiguous()):
        return 0
    return t.numel()


def tokens_of(
    input: Tensor,
    target: Tensor,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    spec: Spec,
) -> Tokens:
    """Flatten the arguments; leave ignored tokens out on a CPU or where `max_valid` allows it."""
    dtype = arithmetic(input.dtype)
    shape = input.shape[:-1]
    total = shape.numel()
    x = input.reshape(total, input.shape[-1])
    copied = 0 if _same_storage(x, input) else x.nbytes
    probabilities = target.is_floating_point()
    if token_weight is not None:
        token_weight = token_weight.to(dtype)
    if class_weight is not None:
        copied += copy_elements(class_weight, dtype) * dtype.itemsize
        class_weight = class_weight.to(dtype).contiguous()
    if probabilities:
        flat = target.reshape(total, target.shape[-1])
        copied += 0 if _same_storage(flat, target) else flat.nbytes
        if spec.shift:
            # Row i has the target of row i + 1; the last of each sequence has none.
            weight = torch.ones_like(target[..., 0], dtype=dtype)
            weight = weight if token_weight is None else token_weight
            token_weight, flat = _shifted(weight, 0), flat[1:]
        if token_weight is not None:
            token_weight = token_weight.reshape(-1)[: len(flat)].contiguous()
        return Tokens(
            x, flat, token_weight, None, None, class_weight, None, shape, spec.shift, copied
        )
    target = target.long()
    if spec.shift:
        target = _shifted(target, spec.ignore_index)
        token_weight = None if token_weight is None else _shifted(token_weight, 0)
    target = target.reshape(-1).contiguous()
    if token_weight is not None:
        token_weight = token_weight.reshape(-1).contiguous()
        target = target.masked_fill(token_weight == 0, spec.ignore_index)
    kept, broken = _kept(target, spec)
    if kept is not None:
        target = target.index_select(0, kept)
        token_weight = None if token_weight is None else token_weight.index_select(0, kept)
    target_weight = _target_weight(target, class_weight, spec.group)
    return Tokens(
        x, target, token_weight, kept, broken, class_weight, target_weight, shape, spec.shift,
        copied,
    )  # fmt: skip


def _may_count(target: Tensor) -> bool:
    """Whether values can be counted for free: a GPU would have to be waited for.

    Fake tensors have none: they do as on a GPU.
    """
    return target.device.type == "cpu" and not isinstance(target, FakeTensor)


def _kept(target: Tensor, spec: Spec) -> tuple[Tensor | None, Tensor | None]:
    """Which tokens to work on (None: all of them), and whether `max_valid` was too small."""
    may_count = _may_count(target)
    if spec.max_valid is None and not may_count:
        return None, None
    valid = target != spec.ignore_index
    if may_count or spec.max_valid == -1:
        count = int(valid.sum())
        if spec.max_valid is not None and 0 <= spec.max_valid < count:
            raise RuntimeError(
                f"linear_cross_entropy: max_valid is {spec.max_valid}; expected at least {count}, "
                "the number of tokens that are not ignored"
            )
        return (None if count == len(target) else valid.nonzero().squeeze(1)), None
    # Valid tokens first, in order; no host sync. Ignored ones may fill the rest.
    order = valid.logical_not().to(torch.uint8).argsort(stable=True)
    return order[: spec.max_valid], valid.sum() > int(spec.max_valid or 0)


def denominator(tokens: Tokens, spec: Spec) -> Tensor:
    """What the mean divides by; 0-dimensional, on the device."""
    dtype = arithmetic(tokens.x.dtype)
    if tokens.probabilities:
        if tokens.token_weight is not None:
            return tokens.token_weight.sum()
        return torch.full((), tokens.count, dtype=dtype, device=tokens.x.device)
    valid = tokens.target != spec.ignore_index
    each = valid.to(dtype) if tokens.target_weight is None else tokens.target_weight
    if tokens.token_weight is not None:
        each = each * tokens.token_weight
    return torch.where(valid, each, 0).sum()


def _target_weight(target: Tensor, class_weight: Tensor | None, group: str) -> Tensor | None:
    """The class weight of each token's target; anything for targets that are no class."""
    if class_weight is None:
        return None
    first, _ = ranks.place_of(group, len(class_weight))
    local = target - first
    here = (local >= 0) & (local < len(class_weight))
    each = class_weight[torch.where(here, local, 0)] if len(class_weight) else here.to(class_weight)
    return ranks.add_up(group, torch.where(here, each, 0))


def scale_of(tokens: Tokens, spec: Spec) -> Tensor:
    """What the gradient of a reduced loss with respect to a token's is; 0 where a mean has none."""
    if spec.reduction != "mean":
        return torch.ones((), dtype=arithmetic(tokens.x.dtype), device=tokens.x.device)
    total = denominator(tokens, spec)
    return torch.where(total == 0, 0, total.reciprocal())


def upstream_of(
    tokens: Tokens,
    spec: Spec,
    loss: Tensor | None,
    nll: Tensor | None = None,
    lse: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Tensor:
    """Rows of upstream gradient for the row kernel: target, spread, lse, entropy, square.

    Args: gradients with respect to each token's reduced loss, nll, lse and entropy: 0-dimensional
    or (n,).
    """
    zero = torch.zeros((), dtype=arithmetic(tokens.x.dtype), device=tokens.x.device)
    loss = zero if loss is None else loss
    if tokens.token_weight is not None:
        loss = loss * tokens.token_weight
    target: Tensor | None = None
    spread: Tensor | None = None
    if tokens.probabilities:
        spread = loss if nll is None else loss + nll
    else:
        target = loss if tokens.target_weight is None else loss * tokens.target_weight
        if spec.label_smoothing:
            target, spread = target * (1 - spec.label_smoothing), loss
        target = target if nll is None else target + nll
    square = 2 * spec.z_loss * loss if spec.z_loss else None
    rows = [target, spread, lse, entropy, square]
    while len(rows) > 1 and rows[-1] is None:  # the kernel takes missing rows as zeros
        rows.pop()
    filled = [zero if row is None else row for row in rows]
    wide = next((len(row) for row in filled if row.dim()), 1)
    return torch.stack([row.expand(wide) for row in filled])


@dataclass
class Outputs:
    """Per-token results (n,), from the finished state of the rows."""

    nll: Tensor
    lse: Tensor
    loss: Tensor  # times the token's weight, not reduced

    @staticmethod
    def of(tokens: Tokens, spec: Spec, state: Tensor) -> Outputs:
        """Loss, nll and log-sum-exp. Ignored rows have a state that makes all of them 0."""
        shift, total, _, dot, mass, logit = state.unbind(0)
        log_sum = total.log()
        # A row with an infinite logit has a sum of nan, but its log-sum-exp is infinite.
        lse = torch.where(shift == float("inf"), shift, shift + log_sum)
        if tokens.probabilities:
            loss = nll = mass * log_sum - dot
        else:
            loss = nll = log_sum + (shift - logit)
            if tokens.target_weight is not None:
                loss = loss * tokens.target_weight
            if spec.label_smoothing:
                loss = loss * (1 - spec.label_smoothing) + (mass * log_sum - dot)
        if spec.z_loss:
            loss = loss + spec.z_loss * lse.square()
        if tokens.token_weight is not None:
            loss = torch.where(tokens.token_weight == 0, 0, loss * tokens.token_weight)
        if tokens.broken is not None:
            loss = torch.where(tokens.broken, float("nan"), loss)
        return Outputs(nll, lse, loss)

    @staticmethod
    def entropy_of(state: Tensor) -> Tensor:
        """Entropy of each row's softmax, in nats."""
        _, total, slope, *_ = state.unbind(0)
        return total.log() - slope / total


def reduce(loss: Tensor, tokens: Tokens, spec: Spec) -> Tensor:
    """The loss that is returned."""
    if spec.reduction == "none":
        return tokens.spread(loss)
    if spec.reduction == "sum":
        return loss.sum()
    return loss.sum() / denominator(tokens, spec)
