"""Log-probabilities of a few classes of every token: selected classes, and the most probable.

Logits of these classes are read from each tile. log p_k = z_k - lse has the gradient [j == k] - p_j
with respect to logit j. So its upstream gradient is added to the gradient of the logit itself, and
subtracted from the upstream gradient of the row's lse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from storage_ops.loss.engine.head import Head
from storage_ops.loss.engine.tokens import may_count
from storage_ops.loss.planning.cost import GROUP, in_groups, plain_rows, top_elements, top_rows
from storage_ops.loss.planning.devices import on_gpu
from storage_ops.loss.planning.schedule import Step, slices, within
from storage_ops.loss.reference import logits_of, row_gradient, slope_of


class Picked:
    """The selected and the most probable classes of n tokens, during a call of the loss.

    Attributes:
        ids, logits: (n, K), the selected classes and their logits. The logit of an id that is not a
            class is 0.
        top_ids, top: (n, k), the classes with the largest logits so far, and these logits in order.
        upstream: (n, K), the upstream gradient of each class in `ids`, where every class occurs
            once. None before `differentiate`.
    """

    def __init__(self, head: Head, state: Tensor, bias: Tensor | None):
        self._tokens, self._call, self._state = head.tokens, head.call, state
        self._bias, self._ranks, self._weights = bias, head.ranks, head.tokens.class_weight
        self._first, self._vocabulary = head.first_class, head.vocabulary
        count, k = head.tokens.count, head.call.top_k
        ids = head.call.selected_ids
        if ids is None:
            self.ids = state.new_empty(count, 0, dtype=torch.int64)
        else:
            self.ids = head.tokens.collect(ids.long(), 1)
        self.logits = state.new_zeros(self.ids.shape)
        self.top = state.new_full((count, k), -torch.inf)
        self.top_ids = state.new_full((count, k), head.vocabulary, dtype=torch.int64)
        self.upstream: Tensor | None = None

    def check(self) -> None:
        """Raise an error for a class out of range, if the check does not wait for the device."""
        k, size = self._call.top_k, self._vocabulary
        if k > size:
            raise ValueError(
                f"linear_cross_entropy: `top_k` is {k}. Expected at most {size}, the number of "
                "classes."
            )
        if not (may_count(self._tokens.target) and may_count(self.ids)):
            return
        wrong = self.ids[self._wrong()]
        if len(wrong):
            raise RuntimeError(
                f"linear_cross_entropy: `selected_ids` has {int(wrong[0])}, which is out of range. "
                f"Expected ignore_index ({self._call.ignore_index}) or a class index from 0 to "
                f"{size - 1}."
            )

    def _outside(self) -> Tensor:
        return (self.ids < 0) | (self.ids >= self._vocabulary)

    def _no_class(self) -> Tensor:
        """Return a mask of ids that stand for no class; ignore_index may also be a class."""
        return self._outside() | (self.ids == self._call.ignore_index)

    def _wrong(self) -> Tensor:
        """Return a mask of ids that are not classes, although their token is not ignored."""
        wrong = self._outside() & (self.ids != self._call.ignore_index)
        return wrong if (valid := self._valid()) is None else wrong & valid

    def _valid(self) -> Tensor | None:
        """Return a mask, as a column, of the tokens that are not ignored. None if all are counted.

        Ignored tokens may fill up the tokens to max_valid.
        """
        if self._tokens.probabilities:
            return None
        return (self._tokens.target != self._call.ignore_index).unsqueeze(1)

    def read(self, step: Step, tile: Tensor) -> None:
        """Read the logits of a tile of products, before the row kernel overwrites it."""
        if self.ids.shape[1]:
            for part in _pieces(step, plain_rows(len(tile), self.ids.shape[1])):
                rows = within(part, step.rows)
                column, in_tile = self._columns(step, part)
                logits = self._logits(step, tile[rows].gather(1, column), column)
                self.logits[part] = torch.where(in_tile, logits, self.logits[part])
        if k := min(self.top.shape[1], tile.shape[1]):
            for part in _pieces(step, top_rows(len(tile), tile.shape[1], k, on_gpu(tile))):
                value, column = self._largest(step, tile[within(part, step.rows)], k)
                column += self._first + step.classes.start
                self._take(part, [self.top[part], value], [self.top_ids[part], column])

    def _largest(self, step: Step, products: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest logits of each row, nan as inf, and their columns, in any order.

        The first of equal logits are taken. The largest are in the k groups of columns with the
        largest maximum, and in the first of groups with an equal maximum.
        """
        columns = products.shape[1]
        if not in_groups(columns, k):
            value, column = _first_largest(self._ordered(step, products), k)
            return value.to(self._state.dtype), column
        groups = _first_largest(self._maxima(step, products), k)[1].sort(1).values
        column = torch.arange(GROUP, device=groups.device) + groups.unsqueeze(2) * GROUP
        column = column.flatten(1)
        outside = column >= columns
        column.clamp_(max=columns - 1)
        z = self._ordered(step, products.gather(1, column), column)
        value, place = _first_largest(z.masked_fill(outside, -torch.inf), k)
        return value.to(self._state.dtype), column.gather(1, place)

    def _is_product(self) -> bool:
        """Return True if logits are the products themselves, which may have 16 bits."""
        return self._bias is None and not self._call.softcap and self._call.logit_scale == 1

    def _ordered(self, step: Step, products: Tensor, column: Tensor | None = None) -> Tensor:
        """Return logits to compare, in the dtype of the products if that is exact."""
        return products if self._is_product() else self._logits(step, products, column)

    def _maxima(self, step: Step, products: Tensor) -> Tensor:
        """Return the largest logit of each group of columns."""
        call, (rows, columns) = self._call, products.shape
        rises = self._bias is None and not call.softcap and call.logit_scale > 0
        gpu = on_gpu(products)
        if rises and (gpu or products.element_size() > 2):  # a CPU reduces wide dtypes fast
            return self._ordered(step, _of_groups(products))
        size = max(1, top_elements(gpu) // columns)
        maxima = torch.cat([_of_groups(self._logits(step, products[part]))
                            for part in slices(rows, size)])  # fmt: skip
        return maxima.to(products.dtype) if self._is_product() else maxima

    def merge(self, rows: slice) -> None:
        """Merge the ranks' results for some rows."""
        if self.ids.shape[1]:
            self.logits[rows] = self._ranks.add_up(self.logits[rows].contiguous())
        if self.top.shape[1]:
            parts = self.top[rows].contiguous(), self.top_ids[rows].contiguous()
            self._take(rows, *(self._ranks.gather(part).unbind(0) for part in parts))

    def _take(self, rows: slice, values: Sequence[Tensor], ids: Sequence[Tensor]) -> None:
        """Keep the largest logits. Among equal logits, keep those of the lowest classes."""
        top_values, classes = torch.cat(list(values), 1), torch.cat(list(ids), 1)
        order = classes.argsort(1)
        top_values, classes = top_values.gather(1, order), classes.gather(1, order)
        order = top_values.sort(dim=1, descending=True, stable=True).indices[:, : self.top.shape[1]]
        self.top[rows], self.top_ids[rows] = top_values.gather(1, order), classes.gather(1, order)

    def log_probabilities(self) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of selected and most probable classes, and ids of the latter.

        The log-probabilities are (n, K + k), the ids (n, k). For ignored tokens they are 0 and -1.
        A selected ignore_index also has 0.
        """
        shift, total, *_ = self._state.unbind(0)
        picked_logits = self.logits
        if picked_logits.shape[1]:
            picked_logits = picked_logits - shift.unsqueeze(1) - total.log().unsqueeze(1)
            picked_logits = picked_logits.masked_fill(self._no_class(), 0).masked_fill(
                self._wrong(), torch.nan
            )
        top, ids = self.top - shift.unsqueeze(1) - total.log().unsqueeze(1), self.top_ids
        both = torch.cat((picked_logits, top), 1) if top.shape[1] else picked_logits
        if (valid := self._valid()) is not None:
            both, ids = torch.where(valid, both, 0), torch.where(valid, ids, -1)
        return both, ids

    def differentiate(self, upstream: Tensor) -> Tensor:
        """Set `upstream` from the gradients of `ids`. Return the upstream gradient of lse, (n,).

        An id that stands for no class is negative here, because `ids` also has the most probable
        classes. Duplicate classes are merged, so that the gradient of a class is rounded once.
        """
        order = self.ids.argsort(1)
        ids, classes = self.ids.gather(1, order), upstream.gather(1, order)
        classes = classes.masked_fill((ids < 0) | (ids >= self._vocabulary), 0)
        del order
        place = torch.ones_like(ids)
        place[:, 0] = 0
        place[:, 1:] = ids[:, 1:] != ids[:, :-1]
        place = place.cumsum_(1)
        self.upstream = torch.zeros_like(classes).scatter_add_(1, place, classes)
        self.ids = torch.full_like(ids, -1).scatter_(1, place, ids)
        return -classes.sum(1)

    def products(self, step: Step, tile: Tensor) -> Tensor | None:
        """Return the products at these classes, before the row kernel overwrites them."""
        if self.upstream is None:
            return None
        return torch.cat([
            tile[within(part, step.rows)].gather(1, self._columns(step, part)[0])
            for part in _pieces(step, plain_rows(len(tile), self.ids.shape[1]))
        ])  # fmt: skip

    def write(self, step: Step, tile: Tensor, products: Tensor, upstream: Tensor) -> None:
        """Overwrite a tile's gradient at these classes by its sum, which is rounded once."""
        assert self.upstream is not None
        for part in _pieces(step, plain_rows(len(tile), self.ids.shape[1])):
            rows, call = within(part, step.rows), self._call
            column, in_tile = self._columns(step, part)
            z = self._logits(step, products[rows], column)
            own = upstream if upstream.shape[1] == 1 else upstream[:, part]
            value = row_gradient(z, self._share(step, part, column), self._state[:, part], own)
            value += self.upstream[part]
            if not self._tokens.probabilities:
                target = self._tokens.target[part].unsqueeze(1)
                to_target = own[0].expand(len(z)).unsqueeze(1)
                value -= torch.where(self.ids[part] == target, to_target, 0)
                in_tile = in_tile & (target != call.ignore_index)
            value *= slope_of(z, call.softcap, call.logit_scale)
            piece = tile[rows]
            value = torch.where(in_tile, value.to(tile.dtype), piece.gather(1, column))
            # A class outside of the tile repeats a write of its row, or writes the existing value.
            some = in_tile.to(torch.uint8).argmax(1, keepdim=True)
            column = torch.where(in_tile, column, column.gather(1, some))
            row_numbers = torch.arange(len(z), device=z.device).unsqueeze(1)
            # A 16-bit scatter_ would copy the whole tile to float32.
            piece[row_numbers, column] = torch.where(in_tile, value, value.gather(1, some))

    def _columns(self, step: Step, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the columns of some rows' classes in a tile, and whether they are in the tile."""
        column = self.ids[rows] - (self._first + step.classes.start)
        width = step.classes.stop - step.classes.start
        in_tile = (column >= 0) & (column < width)
        # If there is padding, ids that are not classes may lie inside the tile.
        return column.clamp_(0, width - 1), in_tile

    def _logits(self, step: Step, products: Tensor, column: Tensor | None = None) -> Tensor:
        """Return the logits of a step's classes, or of one column of each row."""
        z, bias = products.to(self._state.dtype), None
        if self._bias is not None:
            bias = self._bias[step.classes].to(z.dtype)
            bias = bias if column is None else bias[column]
        return logits_of(z, bias, self._call.softcap, self._call.logit_scale)

    def _share(self, step: Step, rows: slice, column: Tensor) -> Tensor | None:
        """Return the share of each class in a smoothed target."""
        tokens, smoothing = self._tokens, self._call.label_smoothing
        if not (tokens.probabilities or smoothing):
            return None
        share: Tensor | float = smoothing / self._vocabulary
        if tokens.probabilities:
            q = tokens.target[rows].gather(1, column + step.classes.start)
            share = q.to(self._state.dtype) * (1 - smoothing) + share
        weights = self._state.new_ones(()) if self._weights is None else (
            self._weights[step.classes][column]
        )  # fmt: skip
        return (weights * share).expand(column.shape)


def _of_groups(z: Tensor) -> Tensor:
    """Return the largest element of each group of columns. The last group may be smaller."""
    whole = z.shape[1] - z.shape[1] % GROUP
    group_max, last = z[:, :whole].unflatten(1, (-1, GROUP)).amax(2), z[:, whole:]
    return torch.cat((group_max, last.amax(1, keepdim=True)), 1) if last.shape[1] else group_max


def _first_largest(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest elements of each row and their columns; the first of equal elements.

    They are in any order. torch.topk does not document which of several equal elements it returns,
    so elements are ranked by their value and their position. For 16-bit elements, both fit into one
    number. Otherwise a first topk finds the smallest of the k values, which is well defined.
    """
    z, columns = z.nan_to_num(torch.inf, torch.inf, -torch.inf), z.shape[1]
    position = torch.arange(columns - 1, -1, -1, dtype=torch.int32, device=z.device)
    if z.element_size() == 2 and columns <= 1 << 16:
        bits = z.add_(0).view(torch.int16)  # -0 becomes 0, because both are equal
        bits = bits ^ ((bits >> 15) & 0x7FFF)  # in the order of the elements
        keys = bits.to(torch.int32).mul_(1 << 16).add_(position)
        keys = keys.topk(k, sorted=False).values
        column = columns - 1 - (keys & 0xFFFF).long()
        return z.gather(1, column), column
    smallest = z.topk(k).values[:, -1:]
    rank = position + 1
    rank = torch.where(z > smallest, rank + columns, torch.where(z == smallest, rank, 0))
    column = rank.topk(k, sorted=False).indices
    return z.gather(1, column), column


def _pieces(step: Step, size: int) -> list[slice]:
    return slices(step.rows.stop, size, step.rows.start)
