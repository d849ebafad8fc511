"""Linear cross-entropy with a slice of the vocabulary on every rank.

Each rank computes the logits of its own classes. The ranks exchange a few numbers per token, the
state of the rows, and at the end the gradient of the input, to which every slice contributes.

By default a call is one op that contains its collectives. So code that caches or recomputes ops
never sees tiles that are overwritten. In a trace of make_fx or trace_step and under CommDebugMode
the same code runs without the op around it, *in pieces*. Then its products, the row kernel and
functional collectives are recorded. Each collective begins before the work that overlaps it. In
graphs of torch.compile a call stays one op.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from storage_ops.foundation import regions
from storage_ops.loss.call import Call, tensors_of, with_tensors

_distributed: Any = dist
if dist.is_available():
    from torch.distributed import distributed_c10d as _distributed

# Slice sizes of a group's ranks by the size of this rank's slice, and calls that all ranks are
# known to agree on. Comparing costs a collective and, on a GPU, a wait for the device.
_sizes: WeakKeyDictionary[Any, dict[int, list[int]]] = WeakKeyDictionary()
_agreed: WeakKeyDictionary[Any, set[tuple[int, ...]]] = WeakKeyDictionary()

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_COMPARED = (
    "The number of tokens", "The hidden size", "Dtypes and options, or what needs gradients",
    "The targets", "The token weights", "The selected classes", "The divisor",
)  # fmt: skip

_REFUSED = -1  # replaces a rank's number of classes

_MODES = torch._C._TorchDispatchModeKey
_LOOKING = {"ProxyTorchDispatchMode", "CommDebugMode"}
_HARMLESS = {"FakeTensorMode", "Lift"}


def traced() -> bool:
    """Return True if ops are recorded into a graph, so that no decision may depend on values."""
    return torch._C._get_dispatch_mode(_MODES.PROXY) is not None


def in_pieces(call: Call) -> bool:
    """Return True if a call runs as several ops instead of one."""
    if not call.group or call.accumulate_into is not None or _in_region():
        return False
    modes = {type(mode).__name__ for mode in _get_current_dispatch_mode_stack()}
    sizes = (n for t in tensors_of(call) if t is not None for n in t.shape)
    fixed = all(type(n) is int for n in sizes)
    return bool(modes & _LOOKING) and modes <= _LOOKING | _HARMLESS and fixed


def _in_region() -> bool:
    """Return True inside a region of a traced step, where no tensor may be overwritten."""
    return traced() and regions.inside()


def run(op: Callable[..., Any], kernel: Callable[..., Any], call: Call, *args: Any) -> Any:
    """Return the results of an op, by calling the op or its kernel."""
    return kernel(*args) if in_pieces(call) else op(*args)


def is_group(value: Any) -> bool:
    """Return True for a process group, or an object that represents one by its name."""
    # Dynamo of torch 2.10 knows the class of a group, but not its attributes.
    is_torchs = dist.is_available() and isinstance(value, dist.ProcessGroup)
    return is_torchs or hasattr(value, "group_name")


def name_of(process_group: Any) -> str:
    """Return the name by which the op's kernels find a group; "" for no group."""
    return "" if process_group is None else str(process_group.group_name)


class Ranks:
    """The ranks that share the vocabulary. In this class, one process has all classes.

    `Several` is for the ranks of a group.
    """

    several, rank, count = False, 0, 1
    agree: Tensor | None = None  # in a graph, a zero that exists after calls have been compared

    def sizes(self, call: Call, compare: bool) -> list[int]:
        """Return how many classes each rank has.

        With `compare`, raise on every rank if calls differ.
        """
        return [len(call.weight)]

    def add_up(self, t: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, in place."""
        return t

    def gather(self, t: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension."""
        return t.unsqueeze(0)

    def reduce(self, t: Tensor, rows: slice, scatter: bool) -> list[Any]:
        """Sum rows of (N, D) over the ranks, in place.

        With `scatter`, each row is summed only on the rank that owns it. Returns handles to wait
        for. Until then, do not touch the rows or their memory.
        """
        return []

    def own(self, t: Tensor) -> Tensor:
        """Return this rank's rows of a reduced tensor."""
        return t

    def merge(
        self, state: Tensor, argmax: Tensor | None, ignored: Tensor, call: Call, vocabulary: int
    ) -> Iterator[None]:
        """Merge the state of rows over the ranks, in place, by the formulas of row_math.h.

        A generator that yields while communication is in progress.
        """
        yield from ()


class Several(Ranks):
    """The ranks of a process group, each with the next slice of the vocabulary."""

    several = True

    def __init__(self, name: str):
        self._group = _distributed._resolve_process_group(name)
        self.rank, self.count = dist.get_rank(self._group), dist.get_world_size(self._group)

    def sizes(self, call: Call, compare: bool) -> list[int]:
        """See `Ranks`.

        Without a comparison, ranks could disagree about slices and the plan, or score different
        targets. On a GPU a call is compared with other ranks only if it has new shapes or options,
        or with `check_ranks`.
        """
        classes, x = len(call.weight), call.input
        known = _sizes.setdefault(self._group, {})
        signature = (classes, x.shape[:-1].numel(), x.shape[-1], _options_of(call))
        assumed = known.get(classes) or [classes] * self.count
        agreed = _agreed.setdefault(self._group, set())
        if not compare or not _compares(x, signature, agreed, call.check_ranks):
            return assumed
        mine = torch.tensor(signature, device=x.device)
        # If targets are distributions, each rank has the part for its own classes.
        indices = None if call.target.is_floating_point() else call.target
        checked = (indices, call.token_weight, call.selected_ids, call.divisor)
        mine = torch.cat((mine, torch.stack([_checksum(t, x.device) for t in checked])))
        gathered = self.gather(mine)
        if traced():
            arguments = assumed, self._group.group_name, [*signature], call.check_ranks
            self.agree = torch.ops.storage_ops._check_ranks(gathered, *arguments)
        elif not isinstance(gathered, FakeTensor):
            assumed = known[classes] = _compared(gathered)
            agreed.add(signature)
        return assumed

    def add_up(self, t: Tensor) -> Tensor:
        """See `Ranks`."""
        return t.copy_(_wait(self._begin(t, "sum")))

    def gather(self, t: Tensor) -> Tensor:
        """See `Ranks`."""
        gather, name = torch.ops._c10d_functional.all_gather_into_tensor, self._group.group_name
        return _wait(gather(t.reshape(-1), self.count, name)).view(self.count, *t.shape)

    def _begin(self, t: Tensor, op: str) -> Tensor:
        """Begin a reduction over the ranks. Return its future result."""
        begun: Tensor = torch.ops._c10d_functional.all_reduce(t, op, self._group.group_name)
        return begun

    def reduce(self, t: Tensor, rows: slice, scatter: bool) -> list[Any]:
        """See `Ranks`."""
        if traced():  # functional collectives are not in place; `own` scatters
            return [] if scatter else [_Copied(t[rows], self._begin(t[rows], "sum"))]
        if not scatter:
            return [dist.all_reduce(t[rows], group=self._group, async_op=True)]
        works, size = [], len(t) // self.count
        begin = rows.start
        while begin < rows.stop:
            rank = begin // size
            end = min((rank + 1) * size, rows.stop)
            to = dist.get_global_rank(self._group, rank)
            works.append(dist.reduce(t[begin:end], to, group=self._group, async_op=True))
            begin = end
        return works

    def own(self, t: Tensor) -> Tensor:
        """See `Ranks`."""
        if traced():
            scatter = torch.ops._c10d_functional.reduce_scatter_tensor
            return _wait(scatter(t, "sum", self.count, self._group.group_name))
        size = len(t) // self.count
        return t.narrow(0, self.rank * size, size)

    def merge(
        self, state: Tensor, argmax: Tensor | None, ignored: Tensor, call: Call, vocabulary: int
    ) -> Iterator[None]:
        """See `Ranks`."""
        shift, total, slope, dot, mass, _ = state.unbind(0)
        largest = torch.where(total == 0, -torch.inf, shift)
        mine = _ordered(largest)
        sent = self._begin(mine, "max")
        yield
        order = _wait(sent)
        merged = _unordered(order, largest.dtype)
        classes = None
        if argmax is not None:
            classes = self._begin(argmax.masked_fill(order != mine, vocabulary), "min")
        new = torch.where(merged == -torch.inf, 0, merged)
        by = torch.where(total == 0, 0, shift - new)
        factor = by.exp()
        # Avoids infinities if the distance is large.
        moved = slope + torch.where(total == 0, 0, total * by)
        slope.copy_(torch.where(factor == 0, 0, factor * moved))
        dot.add_(torch.where(mass == 0, 0, mass * (shift - new)))
        total.mul_(factor)
        used = _rows_used(call)
        sent = self._begin(state[used], "sum")
        yield
        if argmax is not None and classes is not None:
            least = _wait(classes)
            argmax.copy_(least.masked_fill(least == vocabulary, 0).masked_fill_(ignored, -1))
        state[used] = _wait(sent)
        state[0] = new
        state.masked_fill_(ignored, 0)[1].masked_fill_(ignored, 1)


class _Copied:
    """A pending sum that is copied over its operand when it is complete."""

    def __init__(self, place: Tensor, begun: Tensor) -> None:
        self._place, self._begun = place, begun

    def wait(self) -> None:
        self._place.copy_(_wait(self._begun))


def _wait(t: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(t)
    return waited


def _compares(
    t: Tensor, like: tuple[int, ...], agreed: set[tuple[int, ...]], every_time: bool
) -> bool:
    """Return True if a call must be compared with the calls of other ranks.

    On a CPU every call is compared. On a GPU only the first of equal calls is, unless `every_time`
    is true.
    """
    # A CUDA graph capture cannot read values. Its warm-up has compared the calls.
    capturing = t.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (capturing or (t.is_cuda and like in agreed and not every_time))


def _compared(every: Tensor) -> list[int]:
    """Return how many classes each rank has, from the sizes and options that all ranks sent."""
    rows = every.tolist()
    refused = [k for k, row in enumerate(rows) if row[0] == _REFUSED]
    if refused:
        raise ValueError(
            f"Rank {refused[0]} of `process_group` has refused its call. "
            "Expected a correct call on every rank. Read the error of that rank."
        )
    for index, name in enumerate(_COMPARED, 1):
        others = [k for k, row in enumerate(rows) if row[index] != rows[0][index]]
        if others:
            values = f": {rows[0][index]} and {rows[others[0]][index]}" if index < 3 else ""
            raise ValueError(
                f"{name} on ranks 0 and {others[0]} of `process_group` "
                f"differ{values}. Expected the same tokens and options on every rank, each with "
                "its slice of the vocabulary. If the sequence is sharded, gather it first."
            )
    return [int(row[0]) for row in rows]


def tell_of_refusal(process_group: Any, t: Any) -> None:
    """Tell ranks that are about to compare their calls that this rank has raised an error.

    This does not wait. On a GPU ranks do not compare every call, and may not be listening.
    """
    looked_at = torch.compiler.is_compiling() or traced() or isinstance(t, FakeTensor)
    if not is_group(process_group) or looked_at or t.device.type != "cpu":
        return
    # The group may be gone, or have no backend for a CPU. Then the original error matters more.
    with contextlib.suppress(Exception):
        group = _distributed._resolve_process_group(name_of(process_group))
        said = torch.full((1 + len(_COMPARED),), _REFUSED)
        gathered = said.new_empty(len(said) * dist.get_world_size(group))
        dist.all_gather_into_tensor(gathered, said, group=group, async_op=True)


def check(
    every: Tensor, assumed: list[int], name: str, like: list[int], every_time: bool
) -> Tensor:
    """Compare the calls of all ranks in a graph. Return a zero that later ops depend on.

    Raises:
        ValueError: calls differ, or slices have other sizes than in the trace.
    """
    agreed: set[tuple[int, ...]] = set()
    if every.is_cuda:
        agreed = _agreed.setdefault(_distributed._resolve_process_group(name), agreed)
    if _compares(every, tuple(like), agreed, every_time):
        sizes = _compared(every)
        if sizes != assumed:
            raise ValueError(
                f"The ranks of `process_group` have {sizes} classes, and the graph was traced "
                f"for {assumed}. Call the loss outside of a trace first, so that ranks learn the "
                "sizes of each other's slices."
            )
        agreed.add(tuple(like))
    return every.new_zeros(())


def _rows_used(call: Call) -> list[int]:
    """Return the rows of the state, except the maximum, that a call reads. Only these are sent."""
    by_index = not call.target.is_floating_point()
    spread = not by_index or call.label_smoothing != 0
    logit = by_index and not call.adds_losses
    return [1, *[2] * call.wants[2], *[3, 4] * spread, *[5] * logit]


def _ordered(t: Tensor) -> Tensor:
    """Return integers in the order of floating-point numbers, with nan above infinity.

    A maximum of floating-point numbers over ranks may drop a nan.
    """
    # Make every nan positive, with the same bits.
    bits = t.masked_fill(t.isnan(), torch.nan).view(_BITS[t.dtype])
    return _turned(bits)


def _unordered(order: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers from the integers that `_ordered` returned."""
    return _turned(order).view(dtype)


def _turned(bits: Tensor) -> Tensor:
    """Reverse the order of negative integers, because the bits of negative floats are reversed."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def ranks_of(name: str) -> Ranks:
    """Return the ranks of a group by its name. The name "" means this process alone."""
    return Several(name) if name else Ranks()


def _options_of(call: Call) -> int:
    """Return a number for dtypes and options, the same in every process."""
    rest = with_tensors(call)._replace(group="", check_ranks=False)
    kinds = [None if t is None else (t.dtype, t.dim()) for t in tensors_of(call)]
    values = [tuple(value) if isinstance(value, list) else value for value in rest]
    return zlib.crc32(repr((kinds, values)).encode())


def _checksum(t: Tensor | None, device: torch.device) -> Tensor:
    """Return a number that depends on the values and their order."""
    if t is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    values = t.reshape(-1)
    values = values.float().view(torch.int32) if t.is_floating_point() else values
    place = torch.arange(len(values), device=device).mul_(2654435761).bitwise_or_(1)
    return (values.long() * place).sum()
