"""The tokens of a call as rows: flattened, shifted, without those that are ignored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from storage_ops.loss.call import Call, arithmetic
from storage_ops.loss.engine.ranks import Ranks, traced


@dataclass
class Tokens:
    """Tokens as rows: flattened, shifted, and without the ignored ones where that is possible.

    Attributes:
        x: (N, D), all rows of the input.
        target: (n,) int64 or (N, V) probabilities.
        token_weight: (n,) in the arithmetic dtype, or None.
        kept: (n,) the rows of x of the n tokens, or None for all rows.
        broken: whether more tokens are valid than `max_valid`, as a bool on the device, or None.
        class_weight: (V,) in the arithmetic dtype, or None.
        target_weight: (n,) the weight of each token's target, or None.
        shape: the shape of a per-token output, before flattening.
        ignore_index: the target of tokens that are ignored.
        sharded: the dimension of `shape` of which each rank has a part, and the number of ranks.
            Rows are then ordered by rank.
        copied_bytes: bytes of copies of the input. Ranks have the same number.
    """

    x: Tensor
    target: Tensor
    token_weight: Tensor | None
    kept: Tensor | None
    broken: Tensor | None
    class_weight: Tensor | None
    target_weight: Tensor | None
    shape: torch.Size
    shift: int
    copied_bytes: int
    ignore_index: int
    sharded: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        """The number of tokens to process."""
        return self.target.shape[0]

    @property
    def probabilities(self) -> bool:
        """Return True if targets are distributions over the classes."""
        return self.target.dim() == 2

    def casts(self, by_strides: bool = True) -> bool:
        """Return True if a tile's part of the distributions is copied for the row kernel.

        Without `by_strides`, only the dtype decides.
        """
        q = self.target
        fits = q.dtype == arithmetic(self.x.dtype) and (q.stride(-1) == 1 or not by_strides)
        return self.probabilities and not fits

    @property
    def masked(self) -> bool:
        """Return True for distributions whose weight may be 0. Their input is not read then."""
        return self.probabilities and self.token_weight is not None

    def gather(self, rows: slice) -> Tensor:
        """Return the input rows of a chunk of tokens. Copied rows are 0 for ignored tokens.

        An ignored token's gradient is 0, but 0 times a nan of its input is nan.
        """
        if self.masked:
            assert self.token_weight is not None
            weightless = (self.token_weight[rows] == 0).unsqueeze(1)
            return self.x[rows].masked_fill(weightless, 0)
        if self.kept is None:
            return self.x[rows]
        x = self.x.index_select(0, self.kept[rows])
        if self.broken is None:  # ignored tokens were counted, so this chunk has none
            return x
        return x.masked_fill_((self.target[rows] == self.ignore_index).unsqueeze(1), 0)

    def spread(self, values: Tensor) -> Tensor:
        """Return per-token values in the user's shape, with 0 (-1 for indices) if ignored."""
        total, fill = self.shape.numel(), 0 if values.is_floating_point() else -1
        inner = values.shape[1:]
        values = self._without_weightless(values, fill)
        if self.kept is not None:
            values = values.new_full((total, *inner), fill).index_copy_(0, self.kept, values)
        elif len(values) < total:
            values = _padded(values, total - len(values), len(inner))
        if self.sharded is not None:
            dim, ranks = self.sharded
            sizes = [n // ranks if d == dim else n for d, n in enumerate(self.shape)]
            values = values.view((ranks, *sizes, *inner)).movedim(0, dim).flatten(dim, dim + 1)
        values = values.view((*self.shape, *inner))
        if self.shift:
            left = max(self.shape[-1] - self.shift, 0)
            values = values.narrow(len(self.shape) - 1, 0, left).contiguous()
        return values

    def spread_state(self, state: Tensor) -> Tensor:
        """Return the state with one column for every token, as the backward needs it."""
        total = self.shape.numel()
        if self.kept is None:
            rest = total - self.count
            return torch.nn.functional.pad(state, (0, rest)) if rest else state
        return state.new_zeros(len(state), total).index_copy_(1, self.kept, state)

    def collect_state(self, state: Tensor) -> Tensor:
        """Return the state from the result of `spread_state`."""
        return state[:, : self.count] if self.kept is None else state.index_select(1, self.kept)

    def collect(self, values: Tensor, rest: int = 0) -> Tensor:
        """Return upstream gradients without the elements that `spread` adds.

        `rest`: dimensions after the tokens'.
        """
        if self.shift:
            values = _padded(values, self.shape[-1] - values.shape[-1 - rest], rest)
        values = _rows_of(values, self.sharded, rest)
        values = values[: self.count] if self.kept is None else values.index_select(0, self.kept)
        return self._without_weightless(values, 0)

    def _without_weightless(self, values: Tensor, fill: int) -> Tensor:
        """Return values with `fill` where a token with a distribution has weight 0.

        With class indices, such a token already has an ignored target.
        """
        if not self.probabilities or self.token_weight is None:
            return values
        weightless = self.token_weight == 0
        return values.masked_fill(weightless.view(-1, *[1] * (values.dim() - 1)), fill)


def _padded(values: Tensor, more: int, rest: int) -> Tensor:
    """Return values with `more` zeros at the end of the token dimension, before the last `rest`."""
    return torch.nn.functional.pad(values, (0, 0) * rest + (0, more))


def _rows_of(values: Tensor, sharded: tuple[int, int] | None, rest: int = 0) -> Tensor:
    """Return per-token values as rows, ordered by rank if a dimension is sharded.

    `rest`: dimensions after the tokens'.
    """
    if sharded is not None:
        dim, ranks = sharded
        values = values.unflatten(dim, (ranks, values.shape[dim] // ranks)).movedim(dim, 0)
    sizes = values.shape[values.dim() - rest :]
    return values.reshape(values.numel() // max(sizes.numel(), 1), *sizes).contiguous()


def _sharded_dim(input: Sequence[Any], whole: Sequence[Any]) -> int:
    """Return the dimension in which the input has a part of the tokens, else the first."""
    return next((d for d, (n, m) in enumerate(zip(input, whole, strict=True)) if n != m), 0)


def _shifted(values: Tensor, by: int, last: float) -> Tensor:
    """Return values[..., by:], with `last` in the places that become free."""
    result = torch.full_like(values, last, memory_format=torch.contiguous_format)
    rest = values[..., by:]
    result[..., : rest.shape[-1]] = rest
    return result


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors share their storage."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def tokens_of(call: Call, ranks: Ranks, first: int, classes: int) -> Tokens:
    """Flatten the arguments. Leave ignored tokens out on a CPU, or if `max_valid` allows it.

    `first`, `classes`: the slice of the vocabulary on this rank.
    """
    input, target = call.input, call.target
    token_weight, class_weight = call.token_weight, call.class_weight
    dtype = arithmetic(input.dtype)
    probabilities = target.is_floating_point()
    shape, sharded = input.shape[:-1], None
    if call.input_grad == "reduce_scatter":
        shape = target.shape
        sharded = dim, _ = _sharded_dim(input.shape[:-1], shape), ranks.count
        if shape[dim] != input.shape[dim] * ranks.count:
            raise ValueError(
                f"linear_cross_entropy: `target` has shape {tuple(shape)} and `input` "
                f"{tuple(input.shape)}. Expected {ranks.count} times as many tokens in `target` "
                f"with input_grad='reduce_scatter' on {ranks.count} ranks."
            )
        input = ranks.gather(input)
    total = shape.numel()
    x = input.reshape(total, input.shape[-1])
    # Strides of the input may differ between ranks, which must count the same bytes.
    copied = x.nbytes if sharded or not (call.group or same_storage(x, call.input)) else 0
    # The gradient of gathered tokens is scratch memory too, except for this rank's part.
    copied += x.nbytes - call.input.nbytes
    if token_weight is not None:
        token_weight = token_weight.to(dtype)
    if class_weight is not None:
        class_weight = class_weight[:classes].to(dtype).contiguous()
    if probabilities:
        flat = target.reshape(total, target.shape[-1])
        flat = flat[:, :classes]
        if call.shift:
            # Row i has the target of row i + shift. The last rows of each sequence have none.
            weight = torch.ones_like(target[..., 0], dtype=dtype)
            weight = weight if token_weight is None else token_weight
            token_weight, flat = _shifted(weight, call.shift, 0), flat[call.shift :]
        if token_weight is not None:
            token_weight = token_weight.reshape(-1)[: len(flat)].contiguous()
        return Tokens(
            x, flat, token_weight, None, None, class_weight, None, shape, call.shift, copied,
            call.ignore_index,
        )  # fmt: skip
    target = target.long()
    if call.shift:
        target = _shifted(target, call.shift, call.ignore_index)
        if token_weight is not None:
            token_weight = _shifted(token_weight, call.shift, 0)
    target = _rows_of(target, sharded)
    if token_weight is not None:
        token_weight = _rows_of(token_weight, sharded)
        target = target.masked_fill(token_weight == 0, call.ignore_index)
    kept, broken = _kept(target, call)
    if kept is not None:
        target = target.index_select(0, kept)
        token_weight = None if token_weight is None else token_weight.index_select(0, kept)
    target_weight = _target_weight(target, class_weight, ranks, first)
    return Tokens(
        x, target, token_weight, kept, broken, class_weight, target_weight, shape, call.shift,
        copied, call.ignore_index, sharded,
    )  # fmt: skip


def may_count(target: Tensor) -> bool:
    """Return True if counting values needs no wait for a GPU.

    Fake and traced tensors have no values, so they count as on a GPU. The exception is a simulated
    CPU. Its mode has `reads`, which says which values are known.
    """
    if isinstance(target, FakeTensor):
        reads = getattr(target.fake_mode, "reads", None)
        return reads is not None and bool(reads(target))
    return target.device.type == "cpu" and not traced()


def _kept(target: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Return the tokens to process (None for all), and whether `max_valid` was too small."""
    counts = may_count(target)
    if call.max_valid is None and not counts:
        return None, None
    valid = target != call.ignore_index
    if counts or call.max_valid == -1:
        count = int(valid.count_nonzero())  # sum() would convert each element to an integer first
        if call.max_valid is not None and 0 <= call.max_valid < count:
            raise RuntimeError(
                f"linear_cross_entropy or linear_kl_div: `max_valid` is {call.max_valid}. Expected "
                f"at least {count}, the number of tokens that are not ignored."
            )
        return (None if count == len(target) else valid.nonzero().squeeze(1)), None
    # Put valid tokens first, in order, without a host sync. Ignored tokens may fill the rest.
    order = valid.logical_not().to(torch.uint8).argsort(stable=True)
    return order[: call.max_valid], valid.sum() > int(call.max_valid or 0)


def _target_weight(
    target: Tensor, class_weight: Tensor | None, ranks: Ranks, first: int
) -> Tensor | None:
    """Return the class weight of each token's target. For ignored targets it is arbitrary."""
    if class_weight is None:
        return None
    local = target - first
    in_slice = (local >= 0) & (local < len(class_weight))
    weights = (
        class_weight[torch.where(in_slice, local, 0)]
        if len(class_weight)
        else in_slice.to(class_weight)
    )
    return ranks.add_up(torch.where(in_slice, weights, 0))
