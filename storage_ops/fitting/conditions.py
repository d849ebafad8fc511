"""The conditions of training that a plan of `fit` depends on, besides its model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from storage_ops.checkpoint.layers.config_policy import uncompiled
from storage_ops.fitting.entries import checked, count
from storage_ops.foundation.autocast import autocast_dtypes
from storage_ops.foundation.ops import Args, Kwargs

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Difference:
    """One condition that differs.

    Attributes:
        before: its value for the plan.
        now: its value in training.
        may_be_larger: whether a step may take more memory because of it.
        remedy: how to call `fit` for a plan for this training.
    """

    before: str
    now: str
    may_be_larger: bool
    remedy: str


@dataclass(frozen=True)
class Conditions:
    """The batch, autocast and gradient accumulation of a training step.

    Attributes:
        shapes: shapes of the batch's tensors with more than one element, by the argument of the
            model's forward that contains them.
        autocast: the dtype of `torch.autocast`, such as "bfloat16", or "" if it is off.
        accumulate: whether gradients of earlier batches exist.
        optimizer: whether the state of an optimizer is counted; `differences` does not compare it.
    """

    shapes: Shapes
    autocast: str
    accumulate: bool
    optimizer: bool

    @classmethod
    def of(
        cls, model: nn.Module, args: Args, kwargs: Kwargs, accumulate: bool, optimizer: bool
    ) -> Conditions:
        """Return the conditions of a call of the model under the autocast that is on here."""
        return cls(dict(_shapes_in(model, args, kwargs)), autocast_now(), accumulate, optimizer)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Conditions:
        """Return conditions from the result of `as_dict`.

        Another value raises a TypeError, ValueError or KeyError.
        """
        shapes = {
            name: tuple(count(size, name) for size in checked(shape, name, list))
            for name, shape in values["shapes"].items()
        }
        flags = (checked(values[name], name, bool) for name in ("accumulate", "optimizer"))
        return cls(shapes, checked(values["autocast"], "autocast", str), *flags)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    def differences(self, now: Conditions) -> list[Difference]:
        """Compare with the conditions of a training step."""
        differences = [*self._differences_of_batches(now.shapes)]
        if self.autocast != now.autocast:
            remedy = f"inside autocast to {now.autocast}" if now.autocast else "without autocast"
            # Wider activations take more memory. Copies of parameters in a narrower dtype may do
            # so, too.
            differences.append(Difference(_of_autocast(self), _of_autocast(now), True, remedy))
        if self.accumulate != now.accumulate:
            accumulation = "gradient accumulation"
            both = (f"no {accumulation}", accumulation)
            before, after = both if now.accumulate else both[::-1]
            remedy = f"with accumulate={now.accumulate}"
            differences.append(Difference(before, after, now.accumulate, remedy))
        return differences

    def _differences_of_batches(self, shapes: Shapes) -> Iterator[Difference]:
        changed = [
            name for name in {**self.shapes, **shapes} if self.shapes.get(name) != shapes.get(name)
        ]
        if not changed:
            return
        before, now = (
            ", ".join(f"{name} {of[name]}" if name in of else f"no {name}" for name in changed)
            for of in (self.shapes, shapes)
        )
        known = [name for name in changed if name in self.shapes and name in shapes]
        grown = any(
            len(shapes[name]) != len(self.shapes[name])
            or any(map(int.__gt__, shapes[name], self.shapes[name]))
            for name in known
        )
        added = any(name not in self.shapes for name in changed)
        yield Difference(before, now, grown or added, "with a batch of the training")


def autocast_now() -> str:
    """Return the dtype of `torch.autocast` on the device where it is on, or "" if it is off."""
    on = autocast_dtypes()
    return str(on[-1][1]).removeprefix("torch.") if on else ""  # a GPU comes last


def _of_autocast(conditions: Conditions) -> str:
    return f"autocast to {conditions.autocast}" if conditions.autocast else "no autocast"


def named_arguments(model: nn.Module, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a call by the names that the forward of the model has for them."""
    try:
        names = list(inspect.signature(uncompiled(model).forward).parameters)
    except (TypeError, ValueError):  # a function in C or TorchScript
        names = []
    names += [f"argument {index}" for index in range(len(names), len(args))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _shapes_in(
    model: nn.Module, args: Args, kwargs: Kwargs
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors in the arguments of a model."""
    for name, value in named_arguments(model, args, kwargs).items():
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.numel() > 1]
        for index, t in enumerate(tensors):
            yield (name if len(tensors) == 1 else f"{name}[{index}]"), tuple(t.shape)
