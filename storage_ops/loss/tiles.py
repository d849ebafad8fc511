"""The loops of linear cross-entropy over tiles of logits: tokens by classes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from storage_ops.loss import plan_memory, ranks
from storage_ops.loss.gradients import Gradients
from storage_ops.loss.planner import Plan
from storage_ops.loss.task import Buffer, Task, casts, new_tile, slices, tile_of
from storage_ops.loss.tokens import EXPONENTIALS, GRADIENT, SLOPE, UPDATE
from storage_ops.matmul import products

_OPS = torch.ops.storage_ops


def _rows_kernel(
    task: Task,
    tile: Tensor,
    rows: slice,
    columns: slice,
    state: Tensor,
    upstream: Tensor | None,
    argmax: Tensor | None,
    phases: int,
) -> None:
    tokens, spec = task.tokens, task.spec
    target = tokens.target[rows]
    if tokens.probabilities:
        target = target[:, columns]
        if casts(tokens):
            target = target.new_empty(target.shape, dtype=state.dtype).copy_(target)
    if upstream is not None and upstream.shape[1] > 1:
        upstream = upstream[:, rows]
    _OPS._cross_entropy_rows(
        tile,
        target,
        None if task.bias is None else task.bias[columns],
        None if tokens.class_weight is None else tokens.class_weight[columns],
        upstream,
        state[:, rows],
        None if argmax is None else argmax[rows],
        task.first_class + columns.start,
        task.vocabulary,
        spec.ignore_index,
        spec.softcap,
        spec.logit_scale,
        spec.label_smoothing,
        phases,
    )


# Called with the rows and columns of a tile, what was multiplied, and their product.
Visit = Callable[[slice, slice, Tensor, Tensor, Tensor], None]


def _each_tile(task: Task, plan: Plan, visit: Visit, classes: slice | None = None) -> None:
    """Form every tile of the logits of these classes once, slice by slice, in one buffer."""
    buffer, classes = Buffer(task.tokens.x, plan), classes or slice(0, len(task.weight))
    for columns in slices(classes.stop, plan.columns, classes.start):
        w = task.weight[columns]
        for rows in slices(task.tokens.count, plan.rows):
            x = task.tokens.gather(rows)
            tile = buffer.form(x, w)
            visit(rows, columns, x, w, tile)
            del x, tile  # before the next rows are gathered


def sweep(
    task: Task,
    plan: Plan,
    state: Tensor,
    phases: int,
    *,
    classes: slice | None = None,
    upstream: Tensor | None = None,
    argmax: Tensor | None = None,
    gradients: Gradients | None = None,
    to_weight: bool = True,
) -> None:
    """Hand every tile of the logits of these classes to the row kernel and to the gradients.

    `to_weight`: to those of weight and bias too, not to the input's alone.
    """
    merges = task.spec.group and phases & UPDATE and phases & GRADIENT

    def visit(rows: slice, columns: slice, x: Tensor, w: Tensor, tile: Tensor) -> None:
        if merges:
            _rows_kernel(task, tile, rows, columns, state, None, argmax, UPDATE)
            _merge(task, state, argmax, rows)
            _rows_kernel(task, tile, rows, columns, state, upstream, None, GRADIENT)
        else:
            _rows_kernel(task, tile, rows, columns, state, upstream, argmax, phases)
        if gradients is not None:
            gradients.add_to_input(rows, x, w, tile, columns.start != plan.lent)
            if to_weight:
                gradients.add_to_weight(rows, columns, x, tile)
                if rows.stop == task.tokens.count:
                    gradients.end_slice(columns)

    _each_tile(task, plan, visit, classes)


def sweep_lent(
    task: Task, plan: Plan, state: Tensor, upstream: Tensor, gradients: Gradients
) -> None:
    """Gradients of the classes that lend memory, when those of all others are there.

    They complete the sums of the input's gradient, in their own gradient's memory. Then they are
    formed once more for that.
    """
    sweep_them = functools.partial(
        sweep, task, plan, state, GRADIENT, classes=slice(0, plan.lent), upstream=upstream,
        gradients=gradients,
    )  # fmt: skip
    sweep_them(to_weight=False)
    gradients.finish_input()  # from here on, nothing is added to it
    sweep_them()


def sweep_waiting(
    task: Task,
    plan: Plan,
    state: Tensor,
    upstream: Tensor,
    argmax: Tensor | None,
    gradients: Gradients,
    blocks: list[int],
) -> None:
    """Statistics and then gradients of all tokens, whose logits wait meanwhile.

    Those of a block of classes wait in the rows of the weight's gradient that the next block's is
    written to; the last's have memory of their own. The blocks come after the classes that lend.
    """
    rows, start, p = slice(0, task.tokens.count), plan.lent, task.problem
    x = task.tokens.gather(rows)
    tiles = []
    for width, following in zip(blocks, [*blocks[1:], 0], strict=True):
        stop = start + width
        memory = gradients.memory(slice(stop, stop + following)) if following else new_tile(x, plan)
        tiles.append((start, tile_of(memory, len(x), width)))
        start = stop
    # Products take scratch memory for a part at a time; the native row kernel takes none.
    at_once = plan.widest if p.plain or p.cast_bytes else max(blocks)

    def sweep_rows(start: int, tile: Tensor, upstream: Tensor | None, phases: int) -> None:
        largest = argmax if phases & UPDATE else None
        for columns, part in _parts(start, tile, at_once):
            _rows_kernel(task, part, rows, columns, state, upstream, largest, phases)

    for start, tile in tiles:
        for columns, part in _parts(start, tile, plan.widest):
            products.logits(x, task.weight[columns], part, plan.threads)
        sweep_rows(start, tile, None, UPDATE)
    _merge(task, state, argmax, rows)
    for start, tile in tiles:
        sweep_rows(start, tile, upstream, GRADIENT)
        for columns, part in _parts(start, tile, plan.widest):
            again = columns.start > plan.lent
            gradients.add(rows, columns, x, task.weight[columns], part, again)


def _parts(start: int, tile: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Classes, from `start` on, and columns of a tile, up to so many at a time."""
    for part in slices(tile.shape[1], size):
        yield slice(start + part.start, start + part.stop), tile[:, part]


def sweep_keeping(
    task: Task,
    plan: Plan,
    state: Tensor,
    upstream: Tensor,
    argmax: Tensor | None,
    gradients: Gradients,
) -> None:
    """Statistics and gradients of some rows after the other, with room for a part of the classes.

    The logits of the last `plan.columns` classes are kept until their statistics are known. Those
    of the others, as few as the plan could make them, are formed a second time, or wait in the
    gradient of their weight, which is written after them. Classes that lend are left out.
    """
    buffer, vocab = Buffer(task.tokens.x, plan), len(task.weight)
    kept = slice(vocab - plan.columns, vocab)
    others = slices(kept.start, plan.columns, plan.lent)
    for rows in slices(task.tokens.count, plan.rows):
        x = task.tokens.gather(rows)
        for columns in (*others, kept):
            w, first = task.weight[columns], rows.start
            parked = None if columns is kept else gradients.parking(columns)
            if parked is not None:
                products.logits(x[: len(parked)], w, parked, plan.threads)
                top = slice(0, first := len(parked))
                _rows_kernel(task, parked, top, columns, state, None, argmax, UPDATE)
            if first < rows.stop:
                tile = buffer.form(x[first - rows.start :], w)
                rest = slice(first, rows.stop)
                _rows_kernel(task, tile, rest, columns, state, None, argmax, UPDATE)
        _merge(task, state, argmax, rows)
        for columns in (kept, *others):
            w = task.weight[columns]
            if columns is not kept:
                tile = buffer.form(x, w, gradients.parking(columns))
            _rows_kernel(task, tile, rows, columns, state, upstream, None, GRADIENT)
            gradients.add(rows, columns, x, w, tile, columns is not kept)
        del x, tile  # before the next rows are gathered


def _merge(task: Task, state: Tensor, argmax: Tensor | None, rows: slice) -> None:
    """Merge the state of some rows with those of the other ranks, if there are any."""
    if not task.spec.group:
        return
    target = task.tokens.target[rows]
    ignored = target == task.spec.ignore_index
    if task.tokens.probabilities:
        ignored = torch.zeros(len(target), dtype=torch.bool, device=target.device)
    part = None if argmax is None else argmax[rows]
    ranks.merge_state(task.spec.group, state[:, rows], part, ignored, task.vocabulary)


def running_rescale(
    task: Task, plan: Plan, state: Tensor, upstream: Tensor, argmax: Tensor | None
) -> list[Tensor]:
    """Statistics and input gradient in one pass over slices of a frozen weight.

    The input gradient of a row is sum_j exp(z_j - lse) c_j w_j less the part of its target. The sum
    is kept relative to the running maximum and rescaled when that grows, as online softmax does.
    """
    gradients = Gradients(task, plan)
    total, tokens = gradients.input, task.tokens
    assert total is not None

    def visit(rows: slice, columns: slice, x: Tensor, w: Tensor, tile: Tensor) -> None:
        before = state[0, rows].clone()
        _rows_kernel(task, tile, rows, columns, state, None, argmax, UPDATE | EXPONENTIALS)
        if columns.start:
            place = rows if tokens.kept is None else tokens.kept[rows]
            # A row of -inf only so far has a sum of zeros, whatever its factor.
            factor = (before - state[0, rows]).exp_().nan_to_num_(0.0, 0.0)
            total[place] = total[place].mul_(factor.unsqueeze(1).to(total.dtype))
        gradients.add(rows, columns, x, w, tile, columns.start > 0)

    _each_tile(task, plan, visit)
    _finish_rescaled(task, state, upstream, total)
    return gradients.finish()


def _finish_rescaled(task: Task, state: Tensor, upstream: Tensor, total: Tensor) -> None:
    """Turn sums of exponentials into the gradient of the input."""
    tokens, spec = task.tokens, task.spec
    wide = state.dtype
    shift, sums, _, _, mass, logit = state.unbind(0)
    rows = [upstream[k] if k < len(upstream) else torch.zeros_like(shift) for k in range(5)]
    target, spread, lse, _, square = (row.expand(len(shift)) for row in rows)
    valid = tokens.target != spec.ignore_index
    factor = target + spread * mass + lse + square * (shift + sums.log())
    factor = torch.where(valid, factor / sums, 0)
    cap = logit / spec.softcap if spec.softcap else torch.zeros_like(logit)
    hit = torch.where(valid, target * spec.logit_scale * (1 - cap * cap), 0)
    smooth = None
    if spec.label_smoothing:
        each = tokens.class_weight
        each = total.new_ones(len(task.weight), dtype=wide) if each is None else each
        smooth = total.new_zeros(1, total.shape[1], dtype=wide)
        for part in slices(len(task.weight), plan_memory.PIECE):
            smooth.addmm_(each[part].unsqueeze(0), task.weight[part].to(wide))
        smooth *= spec.logit_scale * spec.label_smoothing / task.vocabulary
    classes = tokens.target.clamp(0, max(len(task.weight) - 1, 0))
    for part in slices(tokens.count, plan_memory.PIECE):
        place = part if tokens.kept is None else tokens.kept[part]
        value = total[place].to(wide).mul_(factor[part].unsqueeze(1))
        value -= task.weight[classes[part]].to(wide).mul_(hit[part].unsqueeze(1))
        if smooth is not None:
            value.addcmul_(torch.where(valid[part], spread[part], 0).unsqueeze(1), -smooth)
        total[place] = value.to(total.dtype)


def statistics(task: Task, plan: Plan, state: Tensor, argmax: Tensor | None, entropy: bool) -> None:
    """The state of every row, and the class of its largest logit."""
    sweep(task, plan, state, UPDATE | (SLOPE if entropy else 0), argmax=argmax)
    _merge(task, state, argmax, slice(0, task.tokens.count))


def gradients_of(task: Task, plan: Plan, state: Tensor, upstream: Tensor) -> list[Tensor]:
    """Gradients from the finished state of the rows, in a second pass over the logits."""
    sums, others = Gradients(task, plan), slice(plan.lent, len(task.weight))
    sweep(task, plan, state, GRADIENT, classes=others, upstream=upstream, gradients=sums)
    if plan.lent:
        sweep_lent(task, plan, state, upstream, sums)
    return sums.finish()


def loss_and_gradients(
    task: Task, plan: Plan, state: Tensor, upstream: Tensor, argmax: Tensor | None
) -> list[Tensor]:
    """State of the rows and gradients together, the way the plan says."""
    if plan.strategy == plan_memory.RUNNING_RESCALE:
        return running_rescale(task, plan, state, upstream, argmax)
    if plan.strategy == plan_memory.VOCAB_SLICED:
        statistics(task, plan, state, argmax, entropy=False)
        return gradients_of(task, plan, state, upstream)
    sums = Gradients(task, plan)
    others = plan_memory.without_lent(task.problem, plan.lent)
    blocks = plan_memory.waiting(others, plan.strategy, plan.rows, plan.columns)
    if plan.lent:
        sweep(task, plan, state, UPDATE, classes=slice(0, plan.lent), argmax=argmax)
    if blocks:
        sweep_waiting(task, plan, state, upstream, argmax, sums, blocks)
    elif plan.num_slices > 1:
        sweep_keeping(task, plan, state, upstream, argmax, sums)
    else:
        phases = UPDATE | GRADIENT
        sweep(task, plan, state, phases, upstream=upstream, argmax=argmax, gradients=sums)
    if plan.lent:
        sweep_lent(task, plan, state, upstream, sums)
    return sums.finish()


def target_gradient(
    task: Task, plan: Plan, state: Tensor, upstream: Tensor, target: Tensor
) -> Tensor:
    """The gradient of the loss with respect to targets that are probabilities.

    d loss_i / d q_ij = (1 - smoothing) C_j (lse_i - z_ij) times the upstream gradient.
    """
    tokens, spec = task.tokens, task.spec
    result = torch.zeros_like(target, memory_format=torch.contiguous_format)
    flat = result.view(-1, len(task.weight))[int(spec.shift) :]
    spread = upstream[1] if len(upstream) > 1 else upstream.new_zeros(1)
    factor = (spread * (1 - spec.label_smoothing)).expand(tokens.count).unsqueeze(1)
    lse = (state[0] + state[1].log()).unsqueeze(1)

    def visit(rows: slice, columns: slice, x: Tensor, w: Tensor, tile: Tensor) -> None:
        z = flat[rows, columns].to(state.dtype).copy_(tile)
        z = z if task.bias is None else z.add_(task.bias[columns])
        z.mul_(spec.logit_scale)
        if spec.softcap:
            z.div_(spec.softcap).tanh_().mul_(spec.softcap)
        z.neg_().add_(lse[rows])
        if tokens.class_weight is not None:
            z.mul_(tokens.class_weight[columns])
        flat[rows, columns] = z.mul_(factor[rows])

    _each_tile(task, plan, visit)
    return result
