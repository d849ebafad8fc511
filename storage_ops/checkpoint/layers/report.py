"""Reports which layers of a model are checkpointed, and the expected memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from storage_ops._op_arguments import tensors_in
from storage_ops._subclass import check_module
from storage_ops.checkpoint.discard import scope
from storage_ops.checkpoint.layers import wrapper
from storage_ops.checkpoint.layers.config_policy import class_of
from storage_ops.checkpoint.saved.guard import by_storage, with_bytes
from storage_ops.checkpoint.state.execution import disable_checkpointing
from storage_ops.checkpoint.state.left_behind import run_on_fakes
from storage_ops.checkpoint.state.unchanged import places_of, replaced, unchanged
from storage_ops.foundation.eager import force_eager
from storage_ops.foundation.op_names import Op
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.quantities import Tabular, readable

if TYPE_CHECKING:
    from storage_ops.tables import Grid


@dataclass(frozen=True)
class LayerCount:
    """Layers of one class with the same kind of checkpoint.

    Attributes:
        class_name: the class of the layers.
        mode: "full", "selective" or "output_discard".
        checkpointed: how many layers are checkpointed.
        total: how many modules of this class the model has.
    """

    class_name: str
    mode: str
    checkpointed: int
    total: int


@dataclass(frozen=True)
class CheckpointReport(Tabular):
    """The checkpointed layers of a model. Prints as a table.

    Attributes:
        layers: one entry per class and mode.
        kept_bytes: bytes that the forward keeps for the backward, including its output. None
            without inputs.
        plain_bytes: the same without any checkpoint.
        kept_classes: classes of outputs that would be discarded but are kept, because the storage
            of the tensors that they wrap is unknown.
    """

    layers: tuple[LayerCount, ...]
    kept_bytes: int | None = None
    plain_bytes: int | None = None
    kept_classes: tuple[str, ...] = ()

    def __rich__(self) -> Grid:
        from storage_ops.tables import Grid

        notes = []
        if self.kept_bytes is not None and self.plain_bytes is not None:
            notes.append(
                f"kept for backward: {readable(self.kept_bytes)} instead of "
                f"{readable(self.plain_bytes)}"
            )
        if self.kept_classes:
            notes.append(f"outputs that are kept: {', '.join(self.kept_classes)}")
        return Grid(
            "Activation checkpoints",
            ("class", "mode", "checkpointed"),
            [(x.class_name, x.mode, f"{x.checkpointed} of {x.total}") for x in self.layers],
            "; ".join(notes),
            words=("class", "mode"),
        )


def checkpoint_report(model: nn.Module, *args: object, **kwargs: object) -> CheckpointReport:
    """Return the checkpointed layers of a model and, with inputs, the expected memory.

    With inputs the forward runs twice on fake tensors, with and without checkpoints. Nothing is
    computed or allocated. A model that reads values, or that FSDP2 has sharded, cannot run this
    way.

    Args:
        model: a model after `apply_activation_checkpoint`.
        args, kwargs: inputs of the model, or none; only their shapes and types matter.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> cfg = storage_ops.ActivationCheckpointConfig(["Linear"], every_k=2)
        >>> model = storage_ops.apply_activation_checkpoint(model, cfg)
        >>> storage_ops.checkpoint_report(model).layers
        (LayerCount(class_name='Linear', mode='full', checkpointed=2, total=4),)
    """
    check_module(model)
    totals = Counter(class_of(module) for module in model.modules())
    counts: Counter[tuple[type, str]] = Counter()
    for module in model.modules():
        checkpointing = wrapper.checkpointing_of(module)
        if checkpointing is not None:
            counts[class_of(module), checkpointing.mode] += 1
    layers = tuple(
        LayerCount(cls.__name__, mode, n, totals[cls]) for (cls, mode), n in counts.items()
    )
    if not (args or kwargs):
        return CheckpointReport(layers)
    kept, classes = _kept_bytes(model, args, kwargs)
    with disable_checkpointing():
        return CheckpointReport(layers, kept, _kept_bytes(model, args, kwargs)[0], classes)


class _Storages(TorchDispatchMode):
    """Records the live storages that ops have created."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, op: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        self._note((args, kwargs), is_new=False)
        out = op(*args, **(kwargs or {}))
        self._note(out, is_new=True)
        return out

    def _note(self, value: object, is_new: bool) -> None:
        for key, t in by_storage(tensors_in(value)).items():
            if key not in self._known:
                self._remember(key, with_bytes(t).untyped_storage(), is_new)

    def _remember(self, key: int, storage: torch.UntypedStorage, is_new: bool) -> None:
        self._known[key] = storage.nbytes() if is_new else 0
        self._alive[key] = weakref.ref(storage, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        del self._known[key], self._alive[key]

    def nbytes(self, without: set[int]) -> int:
        return sum(n for key, n in self._known.items() if key not in without)


def _kept_bytes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, tuple[str, ...]]:
    """Return the bytes that live between forward and backward, by a run on fake tensors.

    Also return the classes of outputs that would be discarded if their storages were known.
    """

    def run(fake: FakeTensorMode) -> tuple[int, tuple[str, ...]]:
        def imitate(t: Tensor) -> Tensor:
            copy = fake.from_tensor(t.detach(), static_shapes=True)
            return copy.requires_grad_(t.requires_grad)

        places = places_of(model)
        copies = {t: imitate(t) for t in dict.fromkeys(t for *_, t in places)}
        places = [(where, name, copies[t]) for where, name, t in places]
        arguments, named = tree_map_only(Tensor, imitate, (args, kwargs))
        with scope.pretend() as pretended, torch.enable_grad(), _Storages() as storages:
            with force_eager(), unchanged(model, args, kwargs), replaced(places):
                outputs = model(*arguments, **named)
            nbytes: int = storages.nbytes(without=pretended.storages)
        del outputs
        return nbytes, tuple(sorted(pretended.kept_classes))

    return run_on_fakes(model.modules(), run)
