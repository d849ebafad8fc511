"""Find the layers of a model that share decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from storage_ops.checkpoint.layers.config_policy import class_of, qualified_name, uncompiled
from storage_ops.fitting.fingerprint import aspects, fingerprint
from storage_ops.fitting.heads import LOSS_NAME, CompiledLoss, heads_in, heads_of_loss
from storage_ops.loss.module import LinearCrossEntropyLoss
from storage_ops.simulate.compiled import backend_of

_ATTRIBUTE = "storage_ops_loss"  # an attribute of a compiled loss's backend: its CompiledLoss
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Unit:
    """A layer.

    Attributes:
        name: its name, as in `named_modules()`.
        module: the layer.
        print: the fingerprint by which a saved plan knows it.
    """

    name: str
    module: nn.Module
    print: str

    @property
    def class_name(self) -> str:
        """Return the name of the layer's class."""
        return class_of(self.module).__name__


def units_of(model: nn.Module, loss: object = None) -> list[Unit]:
    """Return the outermost modules with submodules in lists and sequences, in their order.

    In a list whose members all differ, a member is a stage, not a layer, if it has a list of
    modules of one class. Its layers are in that list. Swin, ConvNeXt and ResNet have such stages.

    A module beside such lists is a layer, too, if it has submodules, but no list and no head of a
    loss. So is a head, also one that `loss` refers to. A module in several places is not a layer,
    nor is one whose forward was replaced on the instance. For a module that torch.compile wrapped,
    the layer is the inner module.
    """
    model = uncompiled(model)
    places: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        places[id(module)] = places.get(id(module), 0) + 1
    below = [("", model)] if isinstance(model, LinearCrossEntropyLoss) else _units(model, "")
    units = [(name, m) for name, m in below if places[id(m)] == 1]
    units += heads_of_loss(loss, model).items()
    return [Unit(name, m, fingerprint(m)) for name, m in units if "forward" not in vars(m)]


def _units(
    module: nn.Module, name: str, may_be_stages: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Return the layers below a module. `may_be_stages`: no list of layers is above it."""
    is_list = isinstance(module, _CONTAINERS)
    may_be_stages = may_be_stages and not (is_list and _are_alike(module))
    for child_name, child in module.named_children():
        child = uncompiled(child)
        below = f"{name}.{child_name}" if name else child_name
        if not any(True for _ in child.children()):
            continue
        is_stage = is_list and may_be_stages and any(map(_is_row, child.modules()))
        within_list = is_list and not (is_stage or _has_layers(child))
        has_list = any(isinstance(inner, _CONTAINERS) for inner in child.modules())
        above = bool(heads_in(child)) and not isinstance(child, LinearCrossEntropyLoss)
        if within_list or not (has_list or above):
            yield qualified_name(below), child
        else:
            yield from _units(child, below, may_be_stages and not is_stage)


def _are_alike(members: nn.Module) -> bool:
    """Return True if a list has one member, or several with equal submodules and sizes."""
    each = [uncompiled(child) for child in members.children()]
    kinds = [aspects(child) for child in each if any(True for _ in child.children())]
    return len(each) == 1 or len({(k["modules"], k["sizes"]) for k in kinds}) < len(kinds)


def _is_row(module: nn.Module) -> bool:
    """Return True for a list of several modules of one class that have submodules."""
    members = [uncompiled(child) for child in module.children()]
    return (
        isinstance(module, _CONTAINERS)
        and len(members) > 1
        and len({class_of(member) for member in members}) == 1
        and all(any(True for _ in member.children()) for member in members)
    )


def _has_layers(child: nn.Module) -> bool:
    """Return True if a list's member is another list of layers.

    A row of single modules is a layer.
    """
    if not isinstance(child, nn.Sequential):
        return isinstance(child, _CONTAINERS)
    return any(True for inner in child for _ in inner.children())


def compiled_loss(loss: Any) -> Unit | None:
    """Return the unit of a loss, or None if the backend does not compile it.

    Every call with the same loss returns the same module.
    """
    backend = backend_of(loss)
    if backend is None:
        return None
    module = vars(backend).setdefault(
        _ATTRIBUTE, CompiledLoss(backend, loss._torchdynamo_orig_callable)
    )
    return Unit(LOSS_NAME, module, "compiled")
