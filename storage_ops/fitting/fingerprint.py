"""Fingerprints of models and layers: equal if they do the same work on the same inputs."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import types
from collections.abc import Hashable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from storage_ops.checkpoint.layers.config_policy import class_of, qualified_name, uncompiled
from storage_ops.fitting.heads import own_options
from storage_ops.foundation.functions import cells_of
from storage_ops.loss.module import LinearCrossEntropyLoss
from storage_ops.simulate.module_kinds import Comparison, NotComparable

# What a configuration says that decides over nothing here: of data and files, which a first forward
# and trainers set; the dtype, which the parameters have; a cache, which no region keeps.
_OF_NO_USE = re.compile(
    r"^(problem_type|id2label|label2id|architectures|transformers_version|use_cache)$|_token_id$"
    r"|^(torch_)?dtype$"
)
# What DeepSpeed sets on every module of a model of which each rank has a part (ZeRO-3).
_OF_DEEPSPEED = re.compile(r"^(ds_\w+|applied_pre_backward\w*|(pre|post)_bwd_fn|all_parameters)$")
MODE = "train or eval"  # the aspect that model.train() changes
_OF_TORCH = {*vars(nn.Module()), "name_or_path"}  # and where a model was loaded from
_CHANGING = (list, set, MutableMapping)  # such as what a module notes while it is trained


def aspects(module: nn.Module) -> dict[str, str]:
    """Return a fingerprint of each aspect in which models can differ, by its name in errors.

    Wrappers of torch.compile around a module do not count. Neither do buffers that are in no state
    dict: a forward may register them, and their dtype depends on how a model is loaded.
    """
    fingerprints: dict[str, list[Any]] = {
        key: [] for key in ("modules", "sizes", "dtypes", MODE, "requires_grad")
    }
    for name, inner in _modules(module):
        kind: Any = class_of(inner)
        fingerprints["modules"].append((name, kind.__module__, kind.__qualname__))
        fingerprints[MODE].append(inner.training)
        for key, t in {**inner._parameters, **inner._buffers}.items():
            if t is not None and key not in inner._non_persistent_buffers_set:
                fingerprints["sizes"].append((key, tuple(getattr(t, "ds_shape", t.shape))))
                fingerprints["requires_grad"].append(t.requires_grad)
                fingerprints["dtypes"].append(str(t.dtype))
    return {key: hashed(value) for key, value in fingerprints.items()}


def fingerprint(module: nn.Module) -> str:
    """Return one fingerprint of all aspects and of the attributes of modules that matter.

    A model keeps the fingerprint during training, and in a file. So some things do not count:
    attributes with a leading underscore, collections that can change, and entries of a
    configuration about data and files. Only the class counts for objects other than numbers,
    collections and functions.
    """
    settings = [(name, _settings(inner)) for name, inner in _modules(module)]
    return hashed((aspects(module), settings))


def hashed(value: object) -> str:
    """Return a short text for a value with a `repr`."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, inner in module.named_modules():
        if uncompiled(inner) is inner:
            yield qualified_name(name), inner


def _settings(module: nn.Module) -> dict[str, str]:
    settings = {
        key: setting
        for key, value in vars(module).items()
        if not (key.startswith("_") or key in _OF_TORCH or _OF_DEEPSPEED.match(key))
        and (setting := _setting(value)) is not None
    }
    if getattr(vars(module).get("config"), "_attn_implementation", None) == "eager":
        settings["attention"] = "eager"  # keeps the weights of all tokens, as no other one does
    if isinstance(module, LinearCrossEntropyLoss):
        settings["options"] = repr(own_options(module))
    return settings


def _setting(value: object) -> str | None:
    """Return a text that is equal for attributes with the same effect, in every process.

    None: the attribute does not count. A device does not count, so that a plan from the meta device
    is valid for a GPU.
    """
    if isinstance(value, (torch.device, *_CHANGING)):
        return None
    try:
        return repr(_Named().of(_useful(value)))
    except NotComparable:
        return type(value).__qualname__


def _useful(value: object) -> object:
    """Return the entries of a transformers configuration, and of those in it, that matter."""
    if not dataclasses.is_dataclass(value):
        return value
    names = [f.name for f in dataclasses.fields(value) if not _OF_NO_USE.search(f.name)]
    return type(value), [(name, _useful(getattr(value, name))) for name in names]


class _Named(Comparison):
    """Compares functions and objects by their names, so that files can contain the result."""

    def opaque(self, value: object, depth: int) -> Hashable:
        kind = type(value).__qualname__
        if isinstance(value, Tensor):
            return kind, tuple(value.shape), str(value.dtype)
        value = getattr(value, "__func__", value)  # of a bound method
        names: tuple[Hashable, ...] = tuple(
            str(getattr(value, key, "")) for key in ("__module__", "__qualname__", "__name__")
        )
        if isinstance(value, types.FunctionType):
            code = value.__code__
            names += (self.of((_enclosed(value), value.__defaults__), depth + 1),)
            if value.__name__ == "<lambda>":  # several of a line have one name
                constants = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
                names += (code.co_code.hex(), code.co_names, repr(constants))
        return kind, *names


def _enclosed(function: types.FunctionType) -> list[object]:
    return [value for _, _, value in cells_of(function)]
