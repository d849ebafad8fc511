"""The layers of a model that share decisions: which modules, and which of them are alike."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import types
from collections.abc import Hashable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from storage_ops.checkpoint.config_policy import class_of, qualified_name, uncompiled
from storage_ops.fitting.heads import heads_in, heads_of_loss, own_options
from storage_ops.loss.api import LinearCrossEntropyLoss
from storage_ops.memory.alike import Unlike, comparable

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Where a layer is in a model, and where a model of transformers was loaded from.
_PLACE = re.compile(r"(idx|index)$|^(layer|block)_?(id|num|number|no)$|^name_or_path$")
# What a configuration says of data and files: a first forward and trainers set some of it.
_OF_DATA = re.compile(
    r"^problem_type$|_token_id$|^(id2label|label2id|architectures|transformers_version)$"
)
# What DeepSpeed sets on every module of a model of which each rank has a part (ZeRO-3).
_OF_DEEPSPEED = re.compile(r"^(ds_\w+|applied_pre_backward\w*|(pre|post)_bwd_fn|all_parameters)$")
_OF_TORCH = vars(nn.Module()).keys() - {"training"}
_CHANGING = (list, set, MutableMapping)  # such as what a module notes while it is trained


@dataclass(frozen=True)
class Unit:
    """A layer.

    Attributes:
        name: as in `named_modules()`.
        module: itself.
        print: the same for layers that are alike: classes, sizes and settings of all in them.
    """

    name: str
    module: nn.Module
    print: str

    @property
    def class_name(self) -> str:
        """The name of its class."""
        return class_of(self.module).__name__


def units_of(model: nn.Module, loss: Any = None) -> list[Unit]:
    """The outermost modules in lists and sequences that have modules in them, in their order.

    A module beside such lists that has modules in it, and no list or head of a loss, is one as
    well, and so is a head, also one that `loss` refers to. A module that stands in several places
    is none, nor is one whose forward was replaced on the instance. Of a module that torch.compile
    wrapped, the layer is the one within.
    """
    model = uncompiled(model)
    places: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        places[id(module)] = places.get(id(module), 0) + 1
    below = [("", model)] if isinstance(model, LinearCrossEntropyLoss) else _units(model, "")
    found = [(name, m) for name, m in below if places[id(m)] == 1]
    found += heads_of_loss(loss, model).items()
    return [Unit(name, m, fingerprint(m)) for name, m in found if "forward" not in vars(m)]


def _units(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        child = uncompiled(child)
        below = f"{name}.{child_name}" if name else child_name
        if not any(True for _ in child.children()):
            continue
        within_list = isinstance(module, _CONTAINERS) and not _has_layers(child)
        has_list = any(isinstance(inner, _CONTAINERS) for inner in child.modules())
        above = bool(heads_in(child)) and not isinstance(child, LinearCrossEntropyLoss)
        if within_list or not (has_list or above):
            yield qualified_name(below), child
        else:
            yield from _units(child, below)


def _has_layers(child: nn.Module) -> bool:
    """Whether what stands in a list is one more list, and no layer: a row of single modules is."""
    if not isinstance(child, nn.Sequential):
        return isinstance(child, _CONTAINERS)
    return any(True for inner in child for _ in inner.children())


def fingerprint(module: nn.Module, whole: bool = False) -> str:
    """What two modules have in common that do the same work on the same inputs.

    Numbers by which layers know their place, such as `layer_idx`, do not count, and neither does
    what a configuration says of data and files, nor what torch.compile puts around a module. Of
    objects that are neither numbers nor collections nor functions, the class counts.

    Args:
        module: the module.
        whole: attributes that begin with an underscore count as well, and collections that can
            change. Without them it is what a model keeps while it is trained, and in a file.
    """
    text = []
    for name, inner in module.named_modules():
        if uncompiled(inner) is not inner:
            continue
        inner_name = qualified_name(name)
        settings = {
            key: setting
            for key, value in vars(inner).items()
            if (whole or not key.startswith("_"))
            and not (key in _OF_TORCH or _PLACE.search(key) or _OF_DEEPSPEED.match(key))
            and (setting := _setting(value, whole)) is not None
        }
        if isinstance(inner, LinearCrossEntropyLoss):
            settings["options"] = repr(own_options(inner))
        tensors = [
            (key, tuple(getattr(t, "ds_shape", t.shape)), str(t.dtype), t.requires_grad)
            for group in (inner._parameters, inner._buffers)
            for key, t in group.items()
            if t is not None
        ]
        kind: Any = class_of(inner)
        text.append(repr((inner_name, kind.__module__, kind.__qualname__, settings, tensors)))
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def places_of(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules in a layer that know its number in the model, each with its attribute."""
    return [
        (module, key)
        for module in layer.modules()
        for key, value in vars(module).items()
        if type(value) is int and _PLACE.search(key)
    ]


def _setting(value: Any, whole: bool) -> str | None:
    """The same text for attributes that do the same, in every process; None if it does not count.

    A device does not count, so that a plan made on the meta device is one for a GPU.
    """
    if isinstance(value, torch.device) or (isinstance(value, _CHANGING) and not whole):
        return None
    if dataclasses.is_dataclass(value):  # such as a configuration of transformers
        names = [f.name for f in dataclasses.fields(value) if not _OF_DATA.search(f.name)]
        value = type(value), [(name, getattr(value, name)) for name in names]
    try:
        return repr(comparable(value, opaque=_name))
    except Unlike:
        return type(value).__qualname__


def _name(value: Any, depth: int) -> Hashable:
    """What a function or an object is called, and what a function was made with."""
    kind = type(value).__qualname__
    if isinstance(value, Tensor):
        return kind, tuple(value.shape), str(value.dtype)
    value = getattr(value, "__func__", value)  # of a bound method
    names: tuple[Hashable, ...] = tuple(
        str(getattr(value, key, "")) for key in ("__module__", "__qualname__", "__name__")
    )
    if isinstance(value, types.FunctionType):
        code = value.__code__
        names += (comparable((_enclosed(value), value.__defaults__), depth + 1, _name),)
        if value.__name__ == "<lambda>":  # several of a line have one name
            constants = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
            names += (code.co_code.hex(), code.co_names, repr(constants))
    return kind, *names


def _enclosed(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            found.append(cell.cell_contents)
    return found
