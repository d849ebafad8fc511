"""Turns the rules of a config into one policy function for a model."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from storage_ops._subclass import is_parametrization
from storage_ops.checkpoint.layers.config import ActivationCheckpointConfig
from storage_ops.checkpoint.selective.policies import (
    Policy,
    difference,
    everything,
    offload,
    save,
    save_mm_shapes,
    union,
)


def policy_of(cfg: ActivationCheckpointConfig, model: nn.Module) -> Policy | None:
    """Return the policy of a config, or None if it has no rules.

    Raises:
        ValueError: a pattern of linear layers matches none.
    """
    if cfg.effective_mode != "selective":
        return None
    saved = _parts(cfg.ops_to_save, cfg.mm_shapes_to_save, model, "mm_shapes_to_save")
    saved += map(offload, _parts(cfg.ops_to_offload, None, model, "ops_to_offload"))
    saved += cfg.policies()
    recomputed = _parts(
        cfg.ops_to_recompute, cfg.mm_shapes_to_recompute, model, "mm_shapes_to_recompute"
    )
    policy = union(*saved) if saved else everything
    return difference(policy, union(*recomputed)) if recomputed else policy


def _parts(
    ops: Iterable[object] | None, patterns: Collection[str] | None, model: nn.Module, field: str
) -> list[Policy]:
    parts: list[Policy] = []
    if ops:
        with warnings.catch_warnings():
            # The config has already warned of ops that policies rarely see.
            warnings.simplefilter("ignore")
            parts.append(save(*ops))
    if patterns:
        parts.append(save_mm_shapes(_shapes(patterns, model, field)))
    return parts


def _shapes(patterns: Collection[str], model: nn.Module, field: str) -> list[tuple[int, ...]]:
    """Return the pairs (in_features, out_features) of the linear layers whose names match."""
    layers = {
        qualified_name(name): module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    }
    shapes: list[tuple[int, ...]] = []
    for pattern in patterns:
        matching = [module for name, module in layers.items() if fnmatchcase(name, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, layers, n=3, cutoff=0.3)
            hint = f" Did you mean {', '.join(near)}?" if near else ""
            raise ValueError(
                f"`{field}` contains {pattern!r}, which matches the name of no linear layer.{hint}"
            )
        shapes += [(module.in_features, module.out_features) for module in matching]
    return shapes


def qualified_name(name: str) -> str:
    """Return the name of a module without the prefix that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside a wrapper of torch.compile, or the module itself."""
    parts: Any = module._modules  # `_modules` of a scripted module has no get()
    inner: nn.Module = parts["_orig_mod"] if "_orig_mod" in parts else module  # noqa: SIM401
    return inner


def is_compiled(module: nn.Module) -> bool:
    """Return True if torch.compile wrapped a module, or `compile()` of it was called."""
    return uncompiled(module) is not module or module._compiled_call_impl is not None


def class_of(module: nn.Module) -> type:
    """Return the class of a module below those of FSDP2, parametrize and this package."""
    cls: Any = type(module)
    while True:
        if "_original" in vars(cls):
            cls = cls._original
        elif cls.__bases__[0].__name__ == "FSDPModule" or is_parametrization(cls):
            cls = cls.__bases__[-1]
        else:
            return cls  # type: ignore[no-any-return]
