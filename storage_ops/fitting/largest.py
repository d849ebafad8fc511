"""Find the largest batch, or the cheapest GPU, with which a training step fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from storage_ops.fitting.actions import ActionName
from storage_ops.fitting.plan import FitPlan
from storage_ops.fitting.search import Search, checked
from storage_ops.loss.planning.devices import BY_PRICE, GPUS
from storage_ops.measure.calls import ONE_AT_A_TIME
from storage_ops.progress import say, showing
from storage_ops.quantities import Tabular, metric, parse_bytes, readable

if TYPE_CHECKING:
    from storage_ops.tables import Grid

SizeT = TypeVar("SizeT", int, str)
_GROWTH = 16  # a guess is at most this many times the largest number that is known to fit
_ENDLESS = 1 << 28  # no device has memory for so many samples: the memory does not grow with them
_SLACK = 0.98  # the peak on one GPU is at least this share of that on another: workspaces differ


@dataclass(frozen=True)
class Found(Generic[SizeT]):
    """A size with which a step fits.

    Attributes:
        size: the argument of `make_batch`, or the name of a GPU.
        plan: the fastest plan that fits.
        items: tokens in the batch, or samples if its first tensor does not have integers.
        item: "token" or "sample".
    """

    size: SizeT
    plan: FitPlan
    items: int
    item: str

    @property
    def seconds(self) -> float:
        """Predicted time of a step with the plan, without the optimizer."""
        return self.plan.step_seconds + self.plan.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "size": self.size,
            "peak_bytes": self.plan.peak_bytes,
            "budget_bytes": self.plan.budget,
            "seconds": self.seconds,
            f"{self.item}s": self.items,
            "plan": self.plan.as_dict(),
        }


@dataclass(frozen=True)
class Largest(Tabular, Generic[SizeT]):
    """The answer of `find_largest`; prints as a table.

    Attributes:
        kept: the largest size with which a step without recomputation fits, and its step. None if
            no size fits.
        planned: the largest size for which `fit` has a plan, and the plan. None if no size fits.
        limit: the budget, and the largest size if there is one, in words.
        least_bytes: the lowest peak in bytes of the smallest size, if no size fits; otherwise 0.
        axis: header of the column of sizes.
    """

    kept: Found[SizeT] | None
    planned: Found[SizeT] | None
    limit: str
    least_bytes: int
    axis: str = "largest"

    @property
    def found(self) -> SizeT | None:
        """Return the size of `planned`, or None if no size fits."""
        return None if self.planned is None else self.planned.size

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        rows = {"kept": self.kept, "planned": self.planned}
        return {
            "found": self.found,
            "least_bytes": self.least_bytes,
            **{name: row and row.as_dict() for name, row in rows.items()},
        }

    def __rich__(self) -> Grid:
        from storage_ops.tables import Grid

        rows = {"keep all": self.kept, "with a plan": self.planned}
        item = self.planned.item if self.planned else "token"
        title = f"Fits into {self.limit}"
        if not self.planned:
            least = readable(self.least_bytes, up=True)
            title = f"Nothing fits into {self.limit}; the smallest step takes {least}"
        return Grid(
            title,
            ("activations", self.axis, "peak", "step", f"per {item}", "plan"),
            [_cells(name, row) for name, row in rows.items()],
            words=("activations", "plan"),
            optional=("step", "plan"),
        )


def _cells(name: str, found: Found[Any] | None) -> tuple[str, ...]:
    if found is None:
        return (name, "none", "", "", "", "")
    layers: Counter[str] = Counter()
    for row in found.plan.rows:
        layers[row.action] += len(row.names)
    return (
        name,
        str(found.size),
        readable(found.plan.peak_bytes, up=True),
        metric(found.seconds, "s"),
        metric(found.seconds / found.items, "s"),
        ", ".join(f"{count} x {action}" for action, count in layers.items()),
    )


def find_largest(
    model: nn.Module,
    make_batch: Callable[[int], object],
    budget: int | float | str,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: type[Optimizer] | Optimizer | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[ActionName] | None = None,
    accumulate: bool = False,
    assume: float | Mapping[str, float] | None = None,
    most: int | None = None,
) -> Largest[int]:
    """Find the largest batch, or the longest sequence, with which a training step fits.

    The search simulates steps of `make_batch(1)`, `make_batch(2)` and others. It ends at a number
    that fits if the next number does not fit. There are two searches: for steps without
    recomputation, and for steps with a plan of `fit`. The peak must not fall when the number grows.

    Args:
        model: as in `storage_ops.fit`.
        make_batch: a function that takes a number and returns a batch, preferably on the meta
            device. The number can count samples, tokens in a sequence, or another size.
        budget, loss, optimizer, device, actions, accumulate, assume: as in `storage_ops.fit`.
        most: the largest number to try, such as a model's number of positions. None: no limit.

    Raises:
        TypeError, ValueError: an argument is wrong, or the peak does not grow with the number.
        RuntimeError: as in `storage_ops.fit`.

    Example:
        >>> with torch.device("meta"):
        ...     layers = [torch.nn.TransformerEncoderLayer(64, 4, batch_first=True) for _ in "1234"]
        ...     model = torch.nn.Sequential(*layers)
        >>> def make_batch(n):
        ...     return torch.empty(n, 128, 64, device="meta")
        >>> largest = storage_ops.find_largest(model, make_batch, "100MiB")
        >>> largest.found > largest.kept.size
        True
    """
    limit = parse_bytes(budget, "`budget`")
    if not callable(make_batch):
        raise TypeError(
            f"`make_batch` is a {type(make_batch).__name__}. Expected a function that takes a "
            "number and returns a batch."
        )
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ValueError(f"`most` is {most!r}. Expected a whole number, 1 or more, or None.")
    last = _ENDLESS if most is None else most

    def search_of(number: int, actions: Sequence[ActionName] | None) -> Search:
        batch = make_batch(number)
        return Search(model, batch, loss, optimizer, device, actions, accumulate, assume)

    def largest(actions: Sequence[ActionName] | None, last: int) -> tuple[Found[int] | None, int]:
        tried = _for_smallest(actions)

        def peak(number: int) -> int:
            say(f"a step of size {number}")
            return search_of(number, tried).smallest()

        number, least = _bisected(peak, limit, last)
        if not number:
            return None, least
        if number == _ENDLESS:
            raise ValueError(
                f"`make_batch`({number}) takes no more memory than smaller numbers. Expected a "
                "batch that grows with the number."
            )
        plan = search_of(number, actions).plan(limit)
        return Found(number, plan, *_items_in(make_batch(number))), 0

    with ONE_AT_A_TIME, showing("find_largest"):
        planned, least = largest(actions, last)
        kept = largest((), planned.size)[0] if planned else None
    where = readable(limit) if most is None else f"{readable(limit)}, among sizes up to {most}"
    return Largest(kept, planned, where, least)


def find_gpu(
    model: nn.Module,
    batch: object,
    loss: Callable[[Any], Tensor] | None,
    optimizer: type[Optimizer] | Optimizer | None,
    actions: Sequence[ActionName] | None,
    accumulate: bool,
) -> Largest[str]:
    """Find the first GPU of `BY_PRICE` with which a training step fits; arguments as in `fit`."""

    def cheapest(actions: Sequence[ActionName] | None) -> tuple[Found[str] | None, int]:
        least = 0
        for name in BY_PRICE:
            budget = GPUS[name].usable
            if budget < _SLACK * least:
                continue
            say(f"a step on {name}")
            search = Search(model, batch, loss, optimizer, name, actions, accumulate)
            least = search.smallest()
            if least <= budget:
                return Found(name, search.plan(budget), *_items_in(batch)), 0
        return None, least

    with ONE_AT_A_TIME, showing("fit"):
        planned, least = cheapest(actions)
        kept = cheapest(())[0] if planned else None
    return Largest(kept, planned, "one GPU", least, "cheapest")


def _bisected(peak: Callable[[int], int], limit: int, last: int) -> tuple[int, int]:
    """Return the largest number whose peak is within the limit, and the peak of 1.

    Peaks are almost linear in the number, so guesses are interpolated. Every third guess halves the
    interval, which bounds the number of guesses.
    """
    first = peak(1)
    if first > limit:
        return 0, first
    known = {0: 0, 1: first}  # the peak of 0 is not known: the value keeps the first guess small
    low, high, tried = 1, last + 1, 0
    while high - low > 1:
        tried += 1
        before = high if high in known else max(n for n in known if n < low)
        slope = (known[before] - known[low]) / (before - low)
        guess = low + int((limit - known[low]) / slope) if slope > 0 else last
        if high not in known:
            guess = min(guess, low * _GROWTH)
        elif tried % 3 == 0:
            guess = (low + high) // 2
        guess = max(low + 1, min(guess, high - 1))
        known[guess] = peak(guess)
        if known[guess] <= limit:
            low = guess
        else:
            high = guess
    return low, first


def _for_smallest(actions: Sequence[ActionName] | None) -> Sequence[ActionName]:
    """Return the actions that the plan with the smallest peak can have.

    It never has "selective", which saves more than "full" and takes longest to simulate.
    """
    allowed = checked(actions)
    if "full" not in allowed:
        return allowed
    return [name for name in allowed if name != "selective"]


def _items_in(batch: object) -> tuple[int, str]:
    """Return the number of items in a batch, and whether an item is a "token" or a "sample"."""
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.ndim]
    if not tensors:
        return 1, "sample"
    first = tensors[0]
    if first.is_floating_point() or first.ndim < 2:
        return first.shape[0], "sample"
    return first.numel(), "token"
